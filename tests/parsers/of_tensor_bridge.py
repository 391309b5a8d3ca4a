"""The parsers of `tensor_bridge`: descriptions of tensors, and every message of its services."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from auth import MeshError, NodeId
from tensor_bridge import (
    DTYPES,
    Quantization,
    TensorMeta,
    UnsupportedTensor,
    decode_meta,
    encode_meta,
)
from tensor_bridge.lanes.shared.host import FACTS
from tensor_bridge.lanes.shared.meeting import (
    LaneAsked,
    LaneOffered,
    LaneRefused,
    decode_answer,
)
from tensor_bridge.lanes.shared.protocol import (
    MAX_SLOT_BYTES,
    BlockMessage,
    FilledMessage,
    ForgottenMessage,
    GivenMessage,
    PoolMessage,
    ReturnedMessage,
    decode_message,
)
from tensor_bridge.serve_create import FILLS, CreateCall
from tensor_bridge.wire import (
    FIRST_MOVE,
    FetchOpen,
    Lent,
    ListCall,
    Listed,
    Listing,
    MapCall,
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
from tensor_bridge.wire_blocks import FIRST_GIFT, Found, GiveCall, KeepCall, UndoCall
from tests.parsers.of_auth import node_ids
from tests.parsers.of_transport import encoded, errors, same_error
from tests.parsers.parser import Parser, texts
from transport import ProtocolError

__all__ = ["PARSERS", "metas"]

NBYTES = 1 << 40
SOURCE = NodeId(b"\x01" * 32)


@st.composite
def metas(draw: st.DrawFn) -> TensorMeta:
    """Every description that a tensor may have."""
    name = draw(st.sampled_from(sorted(DTYPES)))
    dtype = DTYPES[name]
    shape = tuple(draw(st.lists(st.integers(0, 1 << 12), max_size=4)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    grad = draw(st.booleans()) and (dtype.is_floating_point or dtype.is_complex)
    quantization = None
    if name in ("qint8", "quint8", "qint32"):
        axes = [dim for dim, size in enumerate(shape) if size <= 1024]
        axis = draw(st.sampled_from([None, *axes]))
        count = 1 if axis is None else shape[axis]
        scale, zero = draw(st.floats(allow_nan=False)), draw(st.integers(-(1 << 63), (1 << 63) - 1))
        quantization = Quantization((scale,) * count, (zero,) * count, axis)
    return TensorMeta(dtype, shape, order, grad, quantization)


_ids = st.binary(min_size=16, max_size=16).map(bytes.hex)
_names = st.none() | texts.filter(bool)
_tokens = st.binary(min_size=1, max_size=256)
_sizes = st.integers(0, (1 << 63) - 1)
_versions = st.integers(0, (1 << 64) - 1)
_addresses = st.lists(
    st.tuples(st.ip_addresses().map(str), st.integers(1, 65535)), max_size=16
).map(tuple)
_lanes = st.lists(texts.filter(bool), max_size=8).map(tuple)
_lane = st.none() | texts.filter(bool)
_marks = st.tuples(*(st.binary(min_size=32, max_size=32) for _ in FACTS))
_nonces = st.binary(min_size=16, max_size=16)
_slots, _slot_bytes = st.integers(0, 65535), st.integers(1, MAX_SLOT_BYTES)
_listed = st.builds(Listed, _ids, _versions, metas(), _names)

_MESSAGES: dict[Any, st.SearchStrategy[Any]] = {
    PutOpen: st.builds(PutOpen, _ids, metas(), _names, _lanes),
    ReadOpen: st.builds(ReadOpen, _ids, st.none(), _sizes, st.none() | _versions, _lanes)
    | st.builds(ReadOpen, st.none(), _tokens, _sizes, st.none() | _versions, _lanes),
    FetchOpen: st.builds(FetchOpen, _ids, node_ids, _addresses, _tokens, metas(), _names),
    ReadAccepted: st.builds(ReadAccepted, metas(), _versions, _lane),
    Sent: st.builds(Sent, _versions),
    Lent: st.builds(Lent, _nonces),
    Received: st.builds(Received, _sizes),
    Moved: st.builds(Moved, _sizes),
    Stored: st.builds(Stored, _ids, _versions),
    MintCall: st.builds(MintCall, _ids, node_ids),
    Minted: st.builds(Minted, _tokens, metas(), _addresses),
    ObjectCall: st.builds(ObjectCall, _ids),
    MapCall: st.builds(MapCall, _ids, st.integers(FIRST_MOVE, (1 << 64) - 1)),
    KeepCall: st.builds(KeepCall, _ids, metas(), _slots, _versions, _names),
    GiveCall: st.builds(GiveCall, _ids, metas(), st.integers(FIRST_GIFT, (1 << 64) - 1), _names),
    UndoCall: st.builds(UndoCall, _ids),
    Found: st.builds(Found, metas(), _versions),
    ListCall: st.builds(ListCall, st.none() | _ids),
    Listed: _listed,
    Listing: st.builds(
        Listing, st.lists(_listed, min_size=1, max_size=3).map(tuple), st.booleans()
    ),
    CreateCall: st.builds(
        CreateCall, _ids, st.sampled_from(sorted(FILLS)), metas(), _sizes, _names
    ),
    LaneAsked: st.builds(LaneAsked, _nonces, _marks),
}


def _parser(
    kind: Any,
    values: st.SearchStrategy[Any],
    read: Callable[[Any], Any] | None = None,
) -> Parser:
    return Parser(
        name=f"tensor_bridge.{kind.__name__}",
        covers=(f"{kind.__module__}.{kind.__qualname__}.decode",),
        form="message",
        values=values,
        write=lambda message: message.encode(),
        read=read or kind.decode,
        refuses=(ProtocolError, UnsupportedTensor),
        # Quantization may hold a NaN, which is no equal of itself.
        same=lambda one, other: encoded(one.encode()) == encoded(other.encode()),
    )


PARSERS = [
    Parser(
        name="tensor_bridge.meta",
        covers=("tensor_bridge.codec.decode_meta",),
        form="message",
        values=metas(),
        write=encode_meta,
        read=decode_meta,
        refuses=(ProtocolError, UnsupportedTensor),
        same=lambda one, other: encoded(encode_meta(one)) == encoded(encode_meta(other)),
    ),
    *(_parser(kind, values) for kind, values in _MESSAGES.items()),
    _parser(
        PutAccepted,
        st.builds(PutAccepted, st.integers(0, NBYTES), _lane),
        lambda value: PutAccepted.decode(value, NBYTES),
    ),
    Parser(
        name="tensor_bridge.lane_answer",
        covers=("tensor_bridge.lanes.shared.meeting.decode_answer",),
        form="message",
        values=st.builds(LaneOffered, _nonces, st.binary(min_size=32, max_size=32), _marks)
        | st.builds(LaneRefused, texts.filter(bool), st.booleans()),
        write=lambda answer: answer.encode(),
        read=decode_answer,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="tensor_bridge.lane_message",
        covers=("tensor_bridge.lanes.shared.protocol.decode_message",),
        form="bytes",
        values=st.builds(PoolMessage, _slot_bytes)
        | st.builds(FilledMessage, _slots, _slot_bytes, _versions)
        | st.builds(GivenMessage, _slots)
        | st.builds(BlockMessage, _slots)
        | st.builds(ReturnedMessage, _versions)
        | st.builds(ForgottenMessage, _slots),
        write=lambda message: message.encode(),
        read=decode_message,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="tensor_bridge.fetch_answer",
        covers=("tensor_bridge.wire.decode_fetch_answer",),
        form="message",
        values=_MESSAGES[Moved] | _MESSAGES[Stored] | errors(),
        write=lambda answer: (
            encode_fetch_failure(answer, SOURCE)
            if isinstance(answer, MeshError)
            else answer.encode()
        ),
        read=lambda value: decode_fetch_answer(value, peer="them"),
        refuses=(ProtocolError,),
        same=lambda one, other: (
            same_error(_retold(one), _retold(other))
            if isinstance(one, MeshError)
            else bool(one == other)
        ),
        is_canonical=False,  # a newer peer's error may say more
    ),
]


def _retold(error: Any) -> MeshError:
    """Return the error with the source named once: each telling names it again."""
    assert isinstance(error, MeshError)
    error.what = error.what.replace(f" with the source {SOURCE.short}", "")
    return error
