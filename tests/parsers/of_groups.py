"""The parsers of `mesh.device.groups`: what client, nodes and executors say about a group."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from auth import NodeId
from mesh.device.groups import wire
from tests.parsers.of_transport import errors, same_error
from tests.parsers.parser import Parser
from transport import ProtocolError

__all__ = ["PARSERS"]

MEMBERS = 3

_nonces = st.binary(min_size=16, max_size=16)
_tokens = st.binary(min_size=32, max_size=32)
_numbers = st.integers(0, wire.MAX_NUMBER)
_seconds = st.floats(0.001, 1000.0)
_places = st.lists(st.tuples(st.ip_addresses().map(str), st.integers(1, 65535)), max_size=3).map(
    tuple
)
_NODES = tuple(NodeId(bytes([each]) * 32) for each in range(MEMBERS))
_ranks = st.permutations(range(5)).flatmap(
    lambda order: st.sampled_from(
        [
            (tuple(order[:1]), tuple(order[1:3]), tuple(order[3:])),
            (tuple(order[:2]), tuple(order[2:4]), tuple(order[4:])),
        ]
    )
)


@st.composite
def _joins(draw: Any) -> wire.Join:
    index = draw(st.integers(0, MEMBERS - 1))
    members = tuple(
        wire.Member(_NODES[each], ranks, b"" if each == index else draw(_tokens))
        for each, ranks in enumerate(draw(_ranks))
    )
    return wire.Join(draw(_nonces), draw(_nonces), draw(_numbers), index, members, draw(_seconds))


_forms = st.builds(
    lambda number, group, index, ranks, timeout, shared: wire.Form(
        number, group, index, _NODES, ranks, timeout, shared
    ),
    *(_numbers, _nonces, st.integers(0, MEMBERS - 1), _ranks, _seconds, st.booleans()),
)
_orders = _forms | st.builds(wire.Leave, _numbers)
_news = st.builds(wire.Formed, _numbers, st.booleans()) | st.builds(
    wire.Broken, _numbers, errors(), st.lists(st.integers(0, 9), max_size=3).map(tuple)
)


def _same_news(one: wire.Formed | wire.Broken, other: wire.Formed | wire.Broken) -> bool:
    if isinstance(one, wire.Broken) and isinstance(other, wire.Broken):
        same = same_error(one.error, other.error)
        return same and (one.number, one.members) == (other.number, other.members)
    return one == other


PARSERS = [
    Parser(
        name="mesh.group_join",
        covers=("mesh.device.groups.wire.Join.decode", "mesh.device.groups.wire.Member.decode"),
        form="message",
        values=_joins(),
        write=lambda join: join.encode(),
        read=wire.Join.decode,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="mesh.group_prepared",
        covers=("mesh.device.groups.wire.Prepared.decode",),
        form="message",
        values=st.builds(wire.Prepared, _places),
        write=lambda prepared: prepared.encode(),
        read=wire.Prepared.decode,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="mesh.group_connect",
        covers=("mesh.device.groups.wire.Connect.decode",),
        form="message",
        values=st.builds(wire.Connect, st.tuples(_places, _places)),
        write=lambda connect: connect.encode(),
        read=lambda value: wire.Connect.decode(value, 2),
        refuses=(ProtocolError,),
    ),
    Parser(
        name="mesh.group_pairing",
        covers=("mesh.device.groups.wire.Pairing.decode",),
        form="message",
        values=st.builds(wire.Pairing, _nonces, st.integers(0, wire.MAX_MEMBERS - 1), _tokens),
        write=lambda pairing: pairing.encode(),
        read=wire.Pairing.decode,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="mesh.group_order",
        covers=("mesh.device.groups.wire.Form.decode", "mesh.device.groups.wire.decode_order"),
        form="message",
        values=_orders,
        write=lambda order: order.encode(),
        read=wire.decode_order,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="mesh.group_news",
        covers=("mesh.device.groups.wire.decode_news",),
        form="message",
        values=_news,
        write=lambda news: news.encode(),
        read=lambda value: wire.decode_news(value, None),
        refuses=(ProtocolError,),
        same=_same_news,
        is_canonical=False,  # whatever the error is, it is some error
    ),
]
