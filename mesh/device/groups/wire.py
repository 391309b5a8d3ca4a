"""What client, nodes and executors say to each other about a group of devices.

A client opens a stream of the service ``device.group`` to each member's node, which stands for the
membership: when it ends, the session leaves the group. `Join` is its value, and `Prepared` the
answer; once all nodes have answered, each is sent `Connect`, and says `Formed` when it is, and
later `Broken` if it breaks. The node of a lower member opens one stream of ``device.pair`` to that
of each higher one, with `Pairing` as its value; bytes of executors follow.

Between a node and its executor go frames ``u32 length, CBOR``, on a socket beside that of the
operations: `Form`, with a socket for each other member beside it, and `Leave` there; `Formed` and
`Broken` back.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Self

from auth import MeshError, NodeId, SocketAddress
from tensor_bridge.fields import Fields
from transport import CborValue, cbor
from transport.codes import decode_error, encode_error

__all__ = [
    "GROUP_SERVICE",
    "LENGTH",
    "MAX_ADDRESSES",
    "MAX_FRAME",
    "MAX_MEMBERS",
    "MAX_RANKS",
    "PAIR_SERVICE",
    "Broken",
    "Connect",
    "Form",
    "Formed",
    "Join",
    "Leave",
    "Member",
    "Pairing",
    "Prepared",
    "decode_news",
    "decode_order",
    "frame",
]

GROUP_SERVICE = "device.group"
"""The service on whose streams a client has a session be in a group."""

PAIR_SERVICE = "device.pair"
"""The service on whose streams the nodes of two members carry what their executors exchange."""

GROUP_BYTES = 16
"""Length of the random number that a client gives a group."""

TOKEN_BYTES = 32
"""Length of the secret that a client hands to both nodes of a pair."""

MAX_MEMBERS = 64
"""Sessions in a group. Each costs each other one two sockets, two threads and a stream."""

MAX_RANKS = 1024
"""Devices in a group."""

MAX_ADDRESSES = 16
MAX_HOST = 64
MAX_NUMBER = (1 << 63) - 1

MAX_FRAME = 1 << 18
"""Bytes of a frame between a node and its executor."""

MAX_SECONDS = 86400.0
"""Longest that an operation of a group may take."""

LENGTH = struct.Struct("<I")


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """A session in a group, as another one is told of it.

    Attributes:
        node: whose session it is.
        ranks: of its devices.
        token: what the two nodes show each other; empty for the one that is told.
    """

    node: NodeId
    ranks: tuple[int, ...]
    token: bytes = dataclasses.field(default=b"", repr=False)

    def encode(self) -> CborValue:
        """Return the description as it travels."""
        return {"node": self.node.raw, "ranks": list(self.ranks), "token": self.token}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the description in `value`."""
        fields = Fields(value, "member of a group of devices")
        node = NodeId(fields.data("node", shortest=32, longest=32))
        ranks = fields.integers("ranks", longest=MAX_RANKS, high=MAX_RANKS - 1)
        token = fields.data("token", longest=TOKEN_BYTES)
        fields.finish()
        return cls(node, ranks, token)


@dataclasses.dataclass(frozen=True, slots=True)
class Join:
    """A client wants one of its sessions to be in a group.

    Attributes:
        session: which.
        group: the group, among all there are.
        number: the same for the session's operations.
        index: which of `members` the session is.
        members: all of them.
        timeout: seconds for an operation.
    """

    session: bytes
    group: bytes
    number: int
    index: int
    members: tuple[Member, ...]
    timeout: float

    def encode(self) -> CborValue:
        """Return the request as it travels."""
        return {
            "session": self.session,
            "group": self.group,
            "number": self.number,
            "index": self.index,
            "members": [member.encode() for member in self.members],
            "timeout": self.timeout,
        }

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the request in `value`."""
        fields = Fields(value, "joining of a group of devices")
        joined = cls(
            session=fields.data("session", shortest=16, longest=16),
            group=fields.data("group", shortest=GROUP_BYTES, longest=GROUP_BYTES),
            number=fields.integer("number", high=MAX_NUMBER),
            index=fields.integer("index", high=MAX_MEMBERS - 1),
            members=tuple(map(Member.decode, fields.items("members", MAX_MEMBERS))),
            timeout=_seconds(fields),
        )
        fields.finish()
        joined._check(fields)
        return joined

    def _check(self, fields: Fields) -> None:
        if self.index >= len(self.members):
            raise fields.wrong("it is none of the members")
        _check_ranks(fields, [member.ranks for member in self.members])
        if len({member.node for member in self.members}) != len(self.members):
            raise fields.wrong("a node comes twice")
        for index, member in enumerate(self.members):
            if len(member.token) != (0 if index == self.index else TOKEN_BYTES):
                raise fields.wrong("a token is of another length")


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A node expects the others of a group, and says where it is itself."""

    addresses: tuple[SocketAddress, ...]

    def encode(self) -> CborValue:
        """Return the answer as it travels."""
        return {"addresses": _address_values(self.addresses)}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the answer in `value`."""
        fields = Fields(value, "answer to the joining of a group of devices")
        prepared = cls(_addresses(fields, fields.items("addresses", MAX_ADDRESSES)))
        fields.finish()
        return prepared


@dataclasses.dataclass(frozen=True, slots=True)
class Connect:
    """All nodes of a group expect each other, and that is where they are."""

    addresses: tuple[tuple[SocketAddress, ...], ...]

    def encode(self) -> CborValue:
        """Return the message as it travels."""
        return {"connect": [_address_values(each) for each in self.addresses]}

    @classmethod
    def decode(cls, value: CborValue, members: int) -> Self:
        """Return the message in `value`, for so many members."""
        fields = Fields(value, "order to connect a group of devices")
        found = []
        for each in fields.items("connect", MAX_MEMBERS):
            if not isinstance(each, list) or len(each) > MAX_ADDRESSES:
                raise fields.wrong("the addresses of a member are malformed")
            found.append(_addresses(fields, each))
        fields.finish()
        if len(found) != members:
            raise fields.wrong(f"it tells of {len(found)} members, and there are {members}")
        return cls(tuple(found))


@dataclasses.dataclass(frozen=True, slots=True)
class Pairing:
    """A node opens the way between its member of a group and another one."""

    group: bytes
    index: int
    token: bytes = dataclasses.field(repr=False)

    def encode(self) -> CborValue:
        """Return the request as it travels."""
        return {"group": self.group, "index": self.index, "token": self.token}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the request in `value`."""
        fields = Fields(value, "pairing for a group of devices")
        pairing = cls(
            fields.data("group", shortest=GROUP_BYTES, longest=GROUP_BYTES),
            fields.integer("index", high=MAX_MEMBERS - 1),
            fields.data("token", shortest=TOKEN_BYTES, longest=TOKEN_BYTES),
        )
        fields.finish()
        return pairing


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """What an executor is told of a group; a socket for each other member comes beside it.

    Attributes:
        number: of the group in its session.
        group: as in `Join`.
        index: which member this one is.
        nodes: of all members.
        ranks: of each member's devices.
        timeout: as in `Join`.
        shared: whether it may share memory.
    """

    number: int
    group: bytes
    index: int
    nodes: tuple[NodeId, ...]
    ranks: tuple[tuple[int, ...], ...]
    timeout: float
    shared: bool

    def encode(self) -> CborValue:
        """Return the order as it travels."""
        return {
            "form": self.number,
            "group": self.group,
            "index": self.index,
            "nodes": [node.raw for node in self.nodes],
            "ranks": [list(ranks) for ranks in self.ranks],
            "timeout": self.timeout,
            "shared": self.shared,
        }

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the order in `value`."""
        fields = Fields(value, "order to form a group")
        nodes = []
        for raw in fields.items("nodes", MAX_MEMBERS):
            if not isinstance(raw, bytes) or len(raw) != 32:
                raise fields.wrong("a node is malformed")
            nodes.append(NodeId(raw))
        ranks = tuple(
            Fields({"ranks": each}, "order to form a group").integers(
                "ranks", longest=MAX_RANKS, high=MAX_RANKS - 1
            )
            for each in fields.items("ranks", MAX_MEMBERS)
        )
        order = cls(
            number=fields.integer("form", high=MAX_NUMBER),
            group=fields.data("group", shortest=GROUP_BYTES, longest=GROUP_BYTES),
            index=fields.integer("index", high=MAX_MEMBERS - 1),
            nodes=tuple(nodes),
            ranks=ranks,
            timeout=_seconds(fields),
            shared=fields.flag("shared"),
        )
        fields.finish()
        _check_ranks(fields, ranks)
        if len(nodes) != len(ranks) or order.index >= len(ranks):
            raise fields.wrong("its members are not such")
        return order


@dataclasses.dataclass(frozen=True, slots=True)
class Leave:
    """An executor is to leave a group."""

    number: int

    def encode(self) -> CborValue:
        """Return the order as it travels."""
        return {"leave": self.number}


@dataclasses.dataclass(frozen=True, slots=True)
class Formed:
    """A group is formed, as one member sees it.

    Attributes:
        number: of the group in its session.
        shared: whether it shares memory with another member.
    """

    number: int
    shared: bool

    def encode(self) -> CborValue:
        """Return the news as they travel."""
        return {"formed": self.number, "shared": self.shared}


@dataclasses.dataclass(frozen=True, slots=True)
class Broken:
    """A group is broken, or could not be formed.

    Attributes:
        number: of the group in its session.
        error: why.
        members: who is at fault.
    """

    number: int
    error: MeshError
    members: tuple[int, ...] = ()

    def encode(self) -> CborValue:
        """Return the news as they travel."""
        return {
            "broken": self.number,
            "error": encode_error(self.error),
            "members": list(self.members),
        }


def decode_order(value: CborValue) -> Form | Leave:
    """Return what a node orders its executor.

    Raises:
        ProtocolError: it is no order.
    """
    if isinstance(value, dict) and "leave" in value:
        fields = Fields(value, "order to leave a group")
        leave = Leave(fields.integer("leave", high=MAX_NUMBER))
        fields.finish()
        return leave
    return Form.decode(value)


def decode_news(value: CborValue, peer: object) -> Formed | Broken:
    """Return what an executor tells its node, or that tells a client; errors are of `peer`.

    Raises:
        ProtocolError: it is no such news.
    """
    fields = Fields(value, "news of a group of devices")
    news: Formed | Broken
    if fields.has("formed"):
        news = Formed(fields.integer("formed", high=MAX_NUMBER), fields.flag("shared"))
    else:
        news = Broken(
            fields.integer("broken", high=MAX_NUMBER),
            decode_error(fields.value("error"), peer=peer),
            fields.integers("members", longest=MAX_MEMBERS, high=MAX_MEMBERS - 1),
        )
    fields.finish()
    return news


def frame(value: CborValue) -> bytes:
    """Return a frame between a node and its executor."""
    body = cbor.encode(value, max_size=MAX_FRAME)
    return LENGTH.pack(len(body)) + body


def _address_values(addresses: tuple[SocketAddress, ...]) -> list[CborValue]:
    return [[host, port] for host, port in addresses[:MAX_ADDRESSES]]


def _addresses(fields: Fields, values: list[CborValue]) -> tuple[SocketAddress, ...]:
    addresses: list[SocketAddress] = []
    for value in values:
        match value:
            case [str(host), int(port)] if (
                len(host) <= MAX_HOST and 0 < port < 1 << 16 and not isinstance(port, bool)
            ):
                addresses.append((host, port))
            case _:
                raise fields.wrong("an address must be a host and a port")
    return tuple(addresses)


def _seconds(fields: Fields) -> float:
    value = fields.value("timeout")
    if not isinstance(value, float) or not 0 < value <= MAX_SECONDS or math.isnan(value):
        raise fields.wrong(f"'timeout' must be a number of seconds up to {MAX_SECONDS:g}")
    return value


def _check_ranks(
    fields: Fields, ranks: list[tuple[int, ...]] | tuple[tuple[int, ...], ...]
) -> None:
    """Raise unless each rank, from 0 on, is of one member, and each member has one."""
    flat = sorted(rank for each in ranks for rank in each)
    if not flat or flat != list(range(len(flat))) or not all(ranks):
        raise fields.wrong("its ranks are not such")
