"""The parsers of distributed autograd: its messages, and its part of calls."""

from __future__ import annotations

from hypothesis import strategies as st

from mesh.autograd.wire import (
    Claimed,
    ClaimOrder,
    Failure,
    Marked,
    MarkOrder,
    SettleOrder,
    StartOrder,
)
from mesh.rpc.links import ContextId, Link
from tests.parsers.of_auth import node_ids
from tests.parsers.parser import Parser
from transport import ProtocolError

__all__ = ["PARSERS"]

_numbers = st.integers(0, (1 << 63) - 1)
_contexts = st.builds(ContextId, node_ids, _numbers)
_wanted = st.dictionaries(
    _numbers, st.frozensets(st.integers(0, 4095), min_size=1, max_size=3), max_size=4
)

PARSERS = [
    Parser(
        name="autograd.link",
        covers=(
            "mesh.rpc.links.Link.decode",
            "mesh.rpc.links.ContextId.decode",
            "mesh.rpc.links.decode_wanted",
        ),
        form="message",
        values=st.builds(Link, _contexts)
        | st.builds(
            Link,
            _contexts,
            st.integers(1, 1 << 40),
            st.integers(1, 1 << 62),
            st.none() | st.lists(_wanted, max_size=3).map(tuple),
        ),
        write=Link.encode,
        read=Link.decode,
        refuses=(ProtocolError,),
        is_canonical=False,  # the tensors of a message have no order
    ),
    Parser(
        name="autograd.mark",
        covers=("mesh.autograd.wire.MarkOrder.decode",),
        form="message",
        values=st.builds(
            MarkOrder,
            _contexts,
            _contexts,
            st.none() | _wanted,
            st.lists(_numbers, max_size=3).map(tuple),
        ),
        write=MarkOrder.encode,
        read=MarkOrder.decode,
        refuses=(ProtocolError,),
        is_canonical=False,  # the tensors of a message have no order
    ),
    Parser(
        name="autograd.marked",
        covers=("mesh.autograd.wire.Marked.decode",),
        form="message",
        values=st.builds(Marked, st.booleans(), _wanted, st.integers(0, 1 << 20)),
        write=Marked.encode,
        read=Marked.decode,
        refuses=(ProtocolError,),
        is_canonical=False,  # as that
    ),
    Parser(
        name="autograd.claim",
        covers=("mesh.autograd.wire.ClaimOrder.decode",),
        form="message",
        values=st.builds(ClaimOrder, _contexts, _contexts, _numbers, _numbers, st.booleans()),
        write=ClaimOrder.encode,
        read=ClaimOrder.decode,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="autograd.claimed",
        covers=("mesh.autograd.wire.Claimed.decode",),
        form="message",
        values=st.builds(Claimed, st.booleans()),
        write=Claimed.encode,
        read=Claimed.decode,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="autograd.start",
        covers=("mesh.autograd.wire.StartOrder.decode",),
        form="message",
        values=st.builds(
            StartOrder,
            _contexts,
            _contexts,
            _numbers,
            st.booleans(),
            st.floats(0, 1e6),
            st.booleans(),
        ),
        write=StartOrder.encode,
        read=StartOrder.decode,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="autograd.settle",
        covers=("mesh.autograd.wire.SettleOrder.decode",),
        form="message",
        values=st.builds(SettleOrder, _contexts, _contexts, _numbers, st.booleans()),
        write=SettleOrder.encode,
        read=SettleOrder.decode,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="autograd.failure",
        covers=("mesh.autograd.wire.Failure.decode",),
        form="message",
        values=st.builds(Failure, node_ids, st.none() | _numbers, st.just({"type": "E"})),
        write=Failure.encode,
        read=Failure.decode,
        refuses=(ProtocolError,),
    ),
]
