"""Messages: each survives the wire, and nothing but a message gets through its decoder."""

from __future__ import annotations

import pytest
import torch

from auth import NodeId
from tensor_bridge import QuotaExceeded, describe
from tensor_bridge.codec import Quantization, TensorMeta, encode_meta
from tensor_bridge.wire import (
    FetchOpen,
    Listed,
    Listing,
    MapCall,
    Minted,
    Moved,
    ObjectCall,
    PutAccepted,
    PutOpen,
    ReadAccepted,
    ReadOpen,
    Stored,
    decode_fetch_answer,
    encode_fetch_failure,
)
from tensor_bridge.wire_blocks import Found, KeepCall
from tests.tensor_bridge.tensors import quiet
from transport import CborValue, ProtocolError
from transport.cbor import encode
from transport.frames import MAX_FRAME


def test_an_offset_beyond_the_tensor_is_refused() -> None:
    assert PutAccepted.decode({"offset": 10}, 10).offset == 10
    with pytest.raises(ProtocolError, match="from 0 to 10"):
        PutAccepted.decode({"offset": 11}, 10)


@pytest.mark.parametrize(
    "address",
    [
        ["192.0.2.1"],
        ["192.0.2.1", 0],
        ["192.0.2.1", 65536],
        ["192.0.2.1", True],
        ["x" * 65, 1],
        "ab",
        [1, 2],
    ],
)
def test_addresses_that_nobody_can_dial_are_refused(address: CborValue) -> None:
    good = Minted(b"t", describe(torch.ones(2)), (("192.0.2.1", 4433),)).encode()
    assert Minted.decode(good).addresses == (("192.0.2.1", 4433),)
    with pytest.raises(ProtocolError, match="host and a port"):
        Minted.decode(good | {"addresses": [address]})


@pytest.mark.parametrize("object_id", ["AB" * 16, "zz" * 16, "ab" * 15, "ab" * 17, "é" * 32])
def test_ids_are_32_hexadecimal_digits(object_id: str) -> None:
    assert ObjectCall.decode({"object": "ab" * 16}) == ObjectCall("ab" * 16)
    with pytest.raises(ProtocolError, match="'object'"):
        ObjectCall.decode({"object": object_id})


def test_a_read_is_by_id_or_by_token() -> None:
    for both in ({"offset": 0}, {"offset": 0, "token": b"t", "object": "ab" * 16}):
        with pytest.raises(ProtocolError, match="either"):
            ReadOpen.decode(both)


def test_no_message_shows_its_token() -> None:
    secret, meta = b"0123456789abcdef", describe(torch.ones(2))
    messages = (
        ReadOpen(token=secret),
        Minted(secret, meta, ()),
        FetchOpen("ab" * 16, NodeId(b"\x01" * 32), (), secret, meta),
    )
    for message in messages:
        assert secret in encode(message.encode(), max_size=MAX_FRAME)
        assert secret.decode() not in repr(message)


def test_the_answers_of_a_fetch() -> None:
    stored = Stored("ab" * 16, 7)
    assert decode_fetch_answer(Moved(3).encode(), peer="b") == Moved(3)
    assert decode_fetch_answer(stored.encode(), peer="b") == stored
    source = NodeId(b"\x01" * 32)
    message = encode_fetch_failure(QuotaExceeded("read", why="full"), source)
    failure = decode_fetch_answer(message, peer="b")
    assert isinstance(failure, QuotaExceeded)
    assert str(failure) == f"read with the source {source.short} with b: full"


def test_the_largest_page_fits_a_frame() -> None:
    scales = torch.ones(1024, dtype=torch.float64)
    with quiet():
        largest = torch.quantize_per_channel(scales.float(), scales, scales.long(), 0, torch.qint8)
    entry = Listed("ab" * 16, (1 << 64) - 1, describe(largest), "n" * 128)
    encode(Listing((entry,) * 32, more=True).encode(), max_size=MAX_FRAME)


def test_the_frequent_messages_are_written_in_order() -> None:
    quantization = Quantization((1.0, 2.0), (0, 0), axis=0)
    meta = TensorMeta(torch.qint8, (2, 3), (1, 0), requires_grad=True, quantization=quantization)
    id_, lanes = "ab" * 16, ("shared-memory",)
    messages = (
        encode_meta(meta),
        PutOpen(id_, meta, "n", lanes).encode(),
        PutAccepted(1, "quic").encode(),
        ReadOpen(id_, b"t", 1, 2, lanes).encode(),
        ReadAccepted(meta, 1, "quic").encode(),
        KeepCall(id_, meta, 1, 2, "n").encode(),
        Found(meta, 1).encode(),
        MapCall(id_, 1 << 62).encode(),
        Listed(id_, 1, meta, "n").encode(),
        Listing((), more=False).encode(),
    )
    for message in messages:
        assert list(message) == sorted(message, key=lambda name: (len(name), name))
