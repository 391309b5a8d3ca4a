"""Messages: each survives the wire, and nothing but a message gets through its decoder."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auth import NodeId
from tensor_bridge import QuotaExceeded, UnsupportedTensor, describe
from tensor_bridge.wire import (
    FetchOpen,
    ListCall,
    Listed,
    Listing,
    MintCall,
    Minted,
    Moved,
    ObjectCall,
    PutAccepted,
    PutOpen,
    ReadAccepted,
    ReadOpen,
    Received,
    Sent,
    Stored,
    decode_fetch_answer,
    encode_fetch_failure,
)
from tests.tensor_bridge.tensors import quiet
from tests.tensor_bridge.test_codec import metas, values
from transport import CborValue, ProtocolError
from transport.cbor import decode, encode
from transport.frames import MAX_FRAME

ids = st.binary(min_size=16, max_size=16).map(bytes.hex)
names = st.none() | st.text(min_size=1, max_size=128)
nodes = st.binary(min_size=32, max_size=32).map(NodeId)
tokens = st.binary(min_size=1, max_size=256)
sizes = st.integers(0, (1 << 63) - 1)
versions = st.integers(0, (1 << 64) - 1)
addresses = st.lists(
    st.tuples(st.sampled_from(["192.0.2.1", "2001:db8::1"]), st.integers(1, 65535)), max_size=16
).map(tuple)
listed = st.builds(Listed, ids, versions, metas(), names)

messages = st.one_of(
    st.builds(PutOpen, ids, metas(), names),
    st.builds(ReadOpen, ids, st.none(), sizes, st.none() | versions),
    st.builds(ReadOpen, st.none(), tokens, sizes, st.none() | versions),
    st.builds(FetchOpen, ids, nodes, addresses, tokens, metas(), names),
    st.builds(ReadAccepted, metas(), versions),
    st.builds(Sent, versions),
    st.builds(Received, sizes),
    st.builds(Moved, sizes),
    st.builds(Stored, ids, versions),
    st.builds(MintCall, ids, nodes),
    st.builds(Minted, tokens, metas(), addresses),
    st.builds(ObjectCall, ids),
    st.builds(ListCall, st.none() | ids),
    listed,
    st.builds(Listing, st.lists(listed, min_size=1, max_size=3).map(tuple), st.booleans()),
)

DECODERS: list[Callable[[CborValue], object]] = [
    PutOpen.decode,
    ReadOpen.decode,
    FetchOpen.decode,
    ReadAccepted.decode,
    Sent.decode,
    Received.decode,
    Moved.decode,
    Stored.decode,
    MintCall.decode,
    Minted.decode,
    ObjectCall.decode,
    Listed.decode,
    Listing.decode,
    lambda value: PutAccepted.decode(value, 10),
]


@given(messages)
@settings(max_examples=300, deadline=None)
def test_every_message_survives_the_wire(message: object) -> None:
    data = encode(message.encode(), max_size=MAX_FRAME)  # type: ignore[attr-defined]
    decoded = type(message).decode(decode(data, max_size=MAX_FRAME))  # type: ignore[attr-defined]
    assert decoded == message


@given(messages, st.data())
@settings(max_examples=300, deadline=None)
def test_a_message_with_one_field_changed_is_refused_or_another_message(
    message: object, data: st.DataObject
) -> None:
    value = dict(message.encode())  # type: ignore[attr-defined]
    name = data.draw(st.sampled_from([*value, "more"]))
    if data.draw(st.booleans()):
        value[name] = data.draw(values)
    else:
        value.pop(name, None)
    try:
        decoded = type(message).decode(value)  # type: ignore[attr-defined]
    except (ProtocolError, UnsupportedTensor):
        return
    assert type(message).decode(decoded.encode()) == decoded  # type: ignore[attr-defined]


@given(values)
@settings(max_examples=300, deadline=None)
def test_no_decoder_takes_anything_else(value: CborValue) -> None:
    for decoder in DECODERS:
        with pytest.raises(ProtocolError):
            decoder(value)


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
