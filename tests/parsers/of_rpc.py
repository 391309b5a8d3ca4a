"""The parsers of `mesh.rpc`: its messages, the values in them, and what was raised."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from auth import MeshError
from mesh.rpc.encoding.exceptions import decode_exception, encode_exception
from mesh.rpc.encoding.heads import (
    answer_head,
    read_answer_head,
    read_items,
    read_request_head,
    request_head,
)
from mesh.rpc.encoding.patterns import request_pattern, write_request
from mesh.rpc.encoding.values import Packer, Unpacker
from mesh.rpc.errors import NotExposed
from mesh.rpc.names.exposed import Exposures
from mesh.rpc.names.targets import Target
from mesh.rpc.names.types import TypeTable
from mesh.rpc.refs.listing import Listing
from mesh.rpc.refs.owned import RefRow
from mesh.rpc.wire import (
    Answer,
    Beside,
    Fork,
    PartAccepted,
    PartOpen,
    RefNotes,
    Request,
    Share,
    Wanted,
)
from tensor_bridge import TensorMeta, UnsupportedTensor
from tests.parsers.of_auth import node_ids
from tests.parsers.of_tensor_bridge import metas
from tests.parsers.parser import Parser, texts
from transport import CborValue, ProtocolError, cbor

__all__ = ["PARSERS"]

_names = st.text("abc._", min_size=1, max_size=20)
_ids = st.binary(min_size=16, max_size=16)
_forks = st.builds(Fork, _ids, _ids)
_targets = st.one_of(
    st.builds(Target, st.sampled_from(["function", "operator"]), _names),
    st.builds(Target, st.just("method"), _names, _ids),
    st.builds(Target, st.just("fetch"), st.just(""), _ids),
)


@st.composite
def _besides(draw: st.DrawFn) -> Beside:
    what: list[TensorMeta] = draw(st.lists(metas(), max_size=3))
    inline = [
        bytes(meta.nbytes) if meta.nbytes < 4096 and draw(st.booleans()) else None for meta in what
    ]
    devices = tuple(draw(st.none() | st.just("cuda:1")) for _ in what)
    return Beside(tuple(what), tuple(inline), devices)


@st.composite
def _requests(draw: st.DrawFn) -> Request:
    beside = draw(_besides())
    return Request(
        draw(_targets),
        draw(st.lists(st.none() | texts | st.integers(0, 9), max_size=4)),
        beside,
        draw(st.floats(0, 1e9)),
        draw(st.none() | _forks),
        draw(_ids) if beside.apart else b"",
        lent={
            number: (draw(st.integers(0, 9)), draw(st.integers(0, 99)))
            for number in beside.apart
            if draw(st.booleans())
        },
    )


@st.composite
def _answers(draw: st.DrawFn) -> Answer:
    if draw(st.booleans()):
        return Answer(error={"type": draw(_names)})
    beside = draw(_besides())
    return Answer([1, draw(texts)], beside, draw(_ids) if beside.apart else b"")


_shapes = st.lists(
    st.tuples(metas(), st.booleans(), st.none() | st.just("cuda:1")), max_size=3
).map(tuple)

_plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 9),
    st.floats(allow_nan=False),
    st.text("ab", max_size=4),
)
_small = st.lists(st.integers(-9, 9), max_size=4).map(
    lambda each: torch.tensor(each, dtype=torch.int16)
)


def _write_pattern(values: list[Any]) -> Any:
    return write_request("a.b", tuple(values), {}, 5.0)


def _read_pattern(value: Any) -> list[Any]:
    match value:
        case [bytes(head), bytes(items), bytes(content)]:
            pattern = request_pattern(head, items)
            if pattern is not None and not pattern.names:
                return pattern.read(content)
    raise ProtocolError("a short request", why="it has no pattern")


def _same_values(one: list[Any], other: list[Any]) -> bool:
    return all(
        torch.equal(mine, its) if isinstance(mine, torch.Tensor) else mine == its
        for mine, its in zip(one, other, strict=True)
    )


_notes = st.builds(
    RefNotes,
    st.lists(st.builds(Share, _ids, _ids, node_ids), max_size=3).map(tuple),
    st.lists(_forks, max_size=3).map(tuple),
    st.lists(_forks, max_size=3).map(tuple),
    st.lists(_ids, max_size=3).map(tuple),
)

_rows = st.builds(
    RefRow,
    st.text("0123456789abcdef", min_size=32, max_size=32),
    _names,
    st.lists(node_ids, max_size=3).map(tuple),
    st.integers(0, 1 << 40),
    st.floats(0, 1e9),
)

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 80), 1 << 80),
    st.floats(allow_nan=False),
    texts,
    st.binary(max_size=8),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([2, 3])]),
)
_hashable = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=3).map(tuple))
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_hashable, inner, max_size=3),
        st.sets(_hashable, max_size=3),
    ),
    max_leaves=12,
)


class _NoRefs:
    """Messages without references; those have tests of their own."""

    def pack(self, ref: Any) -> None:
        return None

    def unpack(self, item: Any) -> Any:
        raise ProtocolError("a reference", why="there are none here")


def _write_value(value: Any) -> list[Any]:
    packer = Packer(TypeTable(), _NoRefs())
    packer.pack(value, "value")
    return packer.packed.items


def _read_value(items: Any) -> Any:
    if not isinstance(items, list):
        raise ProtocolError("a value", why="it is no list")
    unpacker = Unpacker(items, [], TypeTable(), _NoRefs(), Exposures())
    value = unpacker.unpack()
    unpacker.finish()
    return value


def _same_value(one: Any, other: Any) -> bool:
    return type(one) is type(other) and repr(one) == repr(other)


_exceptions = st.one_of(
    st.builds(ValueError, texts),
    st.builds(KeyError, texts),
    st.builds(MeshError, st.just("a call"), why=st.text("abc .", min_size=1, max_size=20)),
    st.builds(ZeroDivisionError),
)


def _write_exception(error: Exception) -> dict[str, CborValue]:
    value = encode_exception(error) | {"traceback": ""}
    # With the peer that it came from, which is told anew at each end.
    return value | {"message": ""} if isinstance(error, MeshError) else value


def _same_exception(one: Exception, other: Exception) -> bool:
    return (type(one) is type(other) and one.args == other.args) or str(one) in str(other)


PARSERS = [
    Parser(
        name="rpc.request",
        covers=("mesh.rpc.wire.Request.decode", "mesh.rpc.names.targets.Target.decode"),
        form="message",
        values=_requests(),
        write=Request.encode,
        read=Request.decode,
        refuses=(ProtocolError, UnsupportedTensor),
    ),
    Parser(
        name="rpc.answer",
        covers=("mesh.rpc.wire.Answer.decode",),
        form="message",
        values=_answers(),
        write=Answer.encode,
        read=Answer.decode,
        refuses=(ProtocolError, UnsupportedTensor),
    ),
    Parser(
        name="rpc.request_head",
        covers=("mesh.rpc.encoding.heads.read_request_head",),
        form="bytes",
        values=st.tuples(_targets, st.floats(0, 1e9), _shapes),
        write=lambda value: request_head(*value),
        read=read_request_head,
        refuses=(ProtocolError, UnsupportedTensor),
    ),
    Parser(
        name="rpc.answer_head",
        covers=("mesh.rpc.encoding.heads.read_answer_head",),
        form="bytes",
        values=_shapes,
        write=answer_head,
        read=read_answer_head,
        refuses=(ProtocolError, UnsupportedTensor),
    ),
    Parser(
        name="rpc.items",
        covers=("mesh.rpc.encoding.heads.read_items",),
        form="bytes",
        values=st.lists(st.none() | texts | st.integers(0, 9), max_size=4),
        write=lambda items: cbor.encode(items, max_size=1 << 20),
        read=read_items,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="rpc.pattern",
        covers=("mesh.rpc.encoding.patterns.Pattern.read",),
        form="message",
        values=st.lists(_plain | _small, max_size=4),
        write=_write_pattern,
        read=_read_pattern,
        refuses=(ProtocolError, UnsupportedTensor),
        same=_same_values,
        is_canonical=False,  # what calls something else holds the same values
    ),
    Parser(
        name="rpc.part_open",
        covers=("mesh.rpc.wire.PartOpen.decode",),
        form="message",
        values=st.builds(
            PartOpen,
            _ids,
            st.integers(0, 4095),
            st.booleans(),
            st.lists(_names, max_size=4).map(tuple),
        ),
        write=PartOpen.encode,
        read=PartOpen.decode,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="rpc.part_accepted",
        covers=("mesh.rpc.wire.PartAccepted.decode",),
        form="message",
        values=st.builds(PartAccepted, st.none() | _names),
        write=PartAccepted.encode,
        read=PartAccepted.decode,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="rpc.notes",
        covers=(
            "mesh.rpc.wire.RefNotes.decode",
            "mesh.rpc.wire.Fork.decode",
            "mesh.rpc.wire.Share.decode",
        ),
        form="message",
        values=_notes,
        write=RefNotes.encode,
        read=RefNotes.decode,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="rpc.wanted",
        covers=("mesh.rpc.wire.Wanted.decode",),
        form="message",
        values=st.builds(Wanted, st.integers(0, 1 << 62)),
        write=Wanted.encode,
        read=Wanted.decode,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="rpc.listing",
        covers=("mesh.rpc.refs.listing.Listing.decode",),
        form="message",
        values=st.builds(Listing, st.lists(_rows, max_size=3).map(tuple), st.integers(0, 9)),
        write=Listing.encode,
        read=lambda value: Listing.decode(value)[0],
        refuses=(ProtocolError,),
        is_canonical=False,  # who holds it more often than are named is a number alone
    ),
    Parser(
        name="rpc.value",
        covers=(
            "mesh.rpc.encoding.values.Unpacker.unpack",
            "mesh.rpc.encoding.values.Unpacker.unpack_all",
        ),
        form="message",
        values=_values,
        write=_write_value,
        read=_read_value,
        refuses=(ProtocolError, NotExposed, UnsupportedTensor),
        same=_same_value,
        is_canonical=False,  # a set has no order
    ),
    Parser(
        name="rpc.exception",
        covers=("mesh.rpc.encoding.exceptions.decode_exception",),
        form="message",
        values=_exceptions,
        write=_write_exception,
        read=lambda value: decode_exception(value, peer="a peer", what="a call"),
        refuses=(ProtocolError,),
        same=_same_exception,
        is_canonical=False,  # an unknown class comes as a RemoteException
    ),
]
