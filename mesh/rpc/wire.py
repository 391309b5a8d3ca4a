"""What is said about a call, apart from the content of its large tensors. Pure: no I/O.

==============  ==========================================================================
``rpc.call``    a call: `Request` in, `Answer` out
``rpc.part``    a stream: one large tensor of either, `PartOpen` in, `PartAccepted` out
``rpc.refs``    a call: `RefNotes` in, the references unknown to their owner out
``rpc.stream``  a stream: a generator's `Request`, then `Wanted` in, an `Answer` for each item out
==============  ==========================================================================

A request or an answer is a list: its head, its items, and the content of its small tensors, each as
bytes, and then a map of what it has for itself, if it has any such thing. Programs make the same
call again and again: then head and items are the same bytes, and to know them saves reading them.

A message whose large tensors travel apart has a `key`, under which they do. Those of a request are
sent while it waits for them; those of an answer are fetched. A stream of items ends with the
stream; an `Answer` that is an error is its last.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Self

from auth import IdentityError, NodeId
from mesh.rpc.encoding.heads import (
    Shapes,
    answer_head,
    read_answer_head,
    read_items,
    read_request_head,
    request_head,
)
from mesh.rpc.encoding.pickled import has_pickle
from mesh.rpc.encoding.values import MAX_TENSORS
from mesh.rpc.links import Link
from mesh.rpc.names.targets import ID_BYTES, Target
from tensor_bridge import TensorMeta
from tensor_bridge.fields import Fields
from tensor_bridge.wire import MAX_LANE, MAX_VERSION, lanes_of
from tensor_bridge.wire_blocks import MAX_BLOCK
from transport import CborValue, ProtocolError, cbor
from transport.frames import MAX_FRAME

__all__ = [
    "CALL_SERVICE",
    "PART_SERVICE",
    "REFS_SERVICE",
    "SCOPE",
    "STREAM_SERVICE",
    "Answer",
    "Beside",
    "Fork",
    "PartAccepted",
    "PartOpen",
    "RefNotes",
    "Request",
    "Share",
    "Wanted",
]

CALL_SERVICE, PART_SERVICE, REFS_SERVICE = "rpc.call", "rpc.part", "rpc.refs"
STREAM_SERVICE = "rpc.stream"

SCOPE = "rpc:call"
"""What a peer needs to call anything here."""

MAX_NOTES = 1024
"""Most entries of each kind in one `RefNotes`."""

MAX_WANTED = 1 << 62
"""Most items of one stream."""


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """The tensors of a message: what each is, and the content of those that are small.

    Attributes:
        metas: one for each.
        inline: the bytes of each, None where they travel apart.
        devices: of a request, the reader's device that each is to be put on; of an answer, the
            writer's that it was on; None for the CPU. See `mesh.rpc.tensors.placement`.
    """

    metas: tuple[TensorMeta, ...] = ()
    inline: tuple[bytes | None, ...] = ()
    devices: tuple[str | None, ...] = ()

    @property
    def apart(self) -> tuple[int, ...]:
        """The numbers of those whose bytes travel apart."""
        return tuple(number for number, data in enumerate(self.inline) if data is None)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(meta.nbytes for meta in self.metas)

    @property
    def content(self) -> bytes:
        """The bytes of those that are small, one after another."""
        return b"".join(data for data in self.inline if data is not None)

    @property
    def shapes(self) -> Shapes:
        """What of them is the same from message to message."""
        is_inline = tuple(data is not None for data in self.inline)
        return tuple(zip(self.metas, is_inline, self.devices, strict=True))

    @classmethod
    def of(cls, shapes: Shapes, content: bytes) -> Self:
        """Put tensors together again.

        Raises:
            ProtocolError: it is content of another length than they have.
        """
        inline: list[bytes | None] = []
        start = 0
        for meta, is_inline, _ in shapes:
            end = start + meta.nbytes
            inline.append(content[start:end] if is_inline else None)
            start = end if is_inline else start
        if start != len(content):
            raise ProtocolError(
                "reading of a call", why="its tensors have content of another length than they say"
            )
        return cls(tuple(each[0] for each in shapes), tuple(inline), tuple(e[2] for e in shapes))


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A call.

    Attributes:
        target: what is called.
        items: the positional arguments as a tuple, then the others as a dict; before them the
            function, if that is pickled.
        beside: their tensors.
        seconds: how long it may take; 0 for as long as it likes.
        create: the reference that the result is to become, and the caller's fork of it.
        key: what its large tensors travel under; empty if there are none.
        link: the autograd context that it was sent in, if any.
        lent: which of its large tensors lie in shared memory of the writer's, and come on no
            stream: by their numbers, the block and the name of its lending.
    """

    target: Target
    items: list[CborValue]
    beside: Beside
    seconds: float
    create: Fork | None = None
    key: bytes = b""
    link: Link | None = None
    lent: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def encode(self) -> list[CborValue]:
        """Return the message as it travels."""
        head = request_head(self.target, self.seconds, self.beside.shapes)
        own: dict[str, CborValue] = {"key": self.key} if self.key else {}
        if self.create is not None:
            own["create"] = self.create.encode()
        if self.lent:
            own["lent"] = [[number, *block] for number, block in self.lent.items()]
        return _parts(head, self.items, self.beside, own, self.link)

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        head, items, content, fields = _taken_apart(value, "call")
        target, seconds, shapes = read_request_head(head)
        beside = Beside.of(shapes, content)
        create = Fork.decode(fields.value("create")) if fields.has("create") else None
        key, link = _key(fields, beside), _link(fields)
        lent = _lent(fields, beside) if fields.has("lent") else {}
        fields.finish()
        return cls(target, read_items(items), beside, seconds, create, key, link, lent)

    @property
    def on_streams(self) -> tuple[int, ...]:
        """The numbers of its large tensors that come on streams."""
        return tuple(number for number in self.beside.apart if number not in self.lent)

    @property
    def has_pickle(self) -> bool:
        """Whether a part of it is a pickle."""
        return self.target.kind == "pickled" or has_pickle(self.items)

    @property
    def limit(self) -> float:
        """The time limit in seconds, infinite if there is none."""
        return self.seconds or math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """How a call ended.

    Attributes:
        items: the result.
        beside: its tensors.
        key: what its large tensors can be fetched under; empty if there are none.
        error: what the function raised, as `encode_exception` writes it; then there is no result.
        link: the autograd context that its tensors are recorded in, if any.
    """

    items: list[CborValue] = dataclasses.field(default_factory=list)
    beside: Beside = Beside()
    key: bytes = b""
    error: CborValue = None
    link: Link | None = None

    def encode(self) -> CborValue:
        """Return the message as it travels."""
        if self.error is not None:
            return {"error": self.error}
        own: dict[str, CborValue] = {"key": self.key} if self.key else {}
        return _parts(answer_head(self.beside.shapes), self.items, self.beside, own, self.link)

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        if isinstance(value, dict):
            fields = Fields(value, "answer of a call")
            failed = cls(error=fields.value("error"))
            fields.finish()
            return failed
        head, items, content, fields = _taken_apart(value, "answer of a call")
        beside = Beside.of(read_answer_head(head), content)
        answer = cls(read_items(items), beside, _key(fields, beside), link=_link(fields))
        fields.finish()
        return answer


@dataclasses.dataclass(frozen=True, slots=True)
class PartOpen:
    """One large tensor of a message is to travel.

    Attributes:
        key: the message's.
        number: which of its tensors.
        is_fetched: whether the opener gets it, and does not send it.
        lanes: the ways that it may take, by name.
    """

    key: bytes
    number: int
    is_fetched: bool
    lanes: tuple[str, ...]

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        value: dict[str, CborValue] = {
            "key": self.key,
            "part": self.number,
            "is_fetched": self.is_fetched,
        }
        if self.lanes:
            value["lanes"] = list(self.lanes)
        return value

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "part of a call")
        message = cls(
            fields.data("key", shortest=ID_BYTES, longest=ID_BYTES),
            fields.integer("part", high=MAX_TENSORS - 1),
            fields.flag("is_fetched"),
            lanes_of(fields),
        )
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class PartAccepted:
    """The tensor is expected, or there, and takes this lane; None for the stream itself."""

    lane: str | None

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"chosen": self.lane}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "answer about a part")
        lane = fields.value("chosen")
        fields.finish()
        if lane is not None and not (isinstance(lane, str) and 0 < len(lane) <= MAX_LANE):
            raise fields.wrong(f"'chosen' must be a name of 1 to {MAX_LANE} characters")
        return cls(lane)


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """How many items of a stream its reader has asked for so far, in all."""

    count: int

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"wanted": self.count}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "items that are wanted")
        message = cls(fields.integer("wanted", high=MAX_WANTED))
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class Fork:
    """One holder's share of a reference."""

    ref: bytes
    fork: bytes

    def encode(self) -> list[CborValue]:
        """Return it as it travels."""
        return [self.ref, self.fork]

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the share in `value`."""
        match value:
            case [bytes(ref), bytes(fork)] if len(ref) == len(fork) == ID_BYTES:
                return cls(ref, fork)
        raise Fields({}, "share of a reference").wrong("it is two ids")


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """A holder gives a share of its own to another node."""

    ref: bytes
    fork: bytes
    holder: NodeId

    def encode(self) -> list[CborValue]:
        """Return it as it travels."""
        return [self.ref, self.fork, self.holder.raw]

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the share in `value`."""
        match value:
            case [ref, fork, bytes(holder)]:
                found = Fork.decode([ref, fork])
                try:
                    return cls(found.ref, found.fork, NodeId(holder))
                except (IdentityError, ValueError) as error:
                    raise Fields({}, "share of a reference").wrong(str(error)) from error
        raise Fields({}, "share of a reference").wrong("it is two ids and a node")


@dataclasses.dataclass(frozen=True, slots=True)
class RefNotes:
    """What a holder tells an owner of what it has there; saying it twice does no harm.

    Attributes:
        shared: given to others, who will confirm.
        confirmed: have come here.
        dropped: nobody here has them any more.
        left: keys of answers whose tensors nobody here fetches any more.
    """

    shared: tuple[Share, ...] = ()
    confirmed: tuple[Fork, ...] = ()
    dropped: tuple[Fork, ...] = ()
    left: tuple[bytes, ...] = ()

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {
            "shared": [each.encode() for each in self.shared],
            "confirmed": [each.encode() for each in self.confirmed],
            "dropped": [each.encode() for each in self.dropped],
            "left": list(self.left),
        }

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "notes about references")
        shared = tuple(map(Share.decode, fields.items("shared", MAX_NOTES)))
        confirmed = tuple(map(Fork.decode, fields.items("confirmed", MAX_NOTES)))
        dropped = tuple(map(Fork.decode, fields.items("dropped", MAX_NOTES)))
        keys = fields.items("left", MAX_NOTES)
        fields.finish()
        left = tuple(key for key in keys if isinstance(key, bytes) and len(key) == ID_BYTES)
        if len(left) != len(keys):
            raise fields.wrong("'left' must be keys")
        return cls(shared, confirmed, dropped, left)


# -- the parts of a request or an answer


def _parts(
    head: bytes,
    items: list[CborValue],
    beside: Beside,
    own: dict[str, CborValue],
    link: Link | None,
) -> list[CborValue]:
    if link is not None:
        own["autograd"] = link.encode()
    written: list[CborValue] = [head, cbor.encode(items, max_size=MAX_FRAME), beside.content]
    return [*written, own] if own else written


def _taken_apart(value: CborValue, what: str) -> tuple[bytes, bytes, bytes, Fields]:
    match value:
        case [bytes(head), bytes(items), bytes(content)]:
            return head, items, content, Fields({}, what)
        case [bytes(head), bytes(items), bytes(content), dict(own)] if own:
            return head, items, content, Fields(own, what)
    raise Fields({}, what).wrong("it is a head, items, content, and what it has for itself")


def _link(fields: Fields) -> Link | None:
    return Link.decode(fields.value("autograd")) if fields.has("autograd") else None


def _lent(fields: Fields, beside: Beside) -> dict[int, tuple[int, int]]:
    """Take which tensors lie in shared memory; they are some of those that travel apart."""
    lent: dict[int, tuple[int, int]] = {}
    apart = set(beside.apart)
    for item in fields.items("lent", MAX_TENSORS):
        match item:
            case [int(number), int(block), int(lend)] if (
                number in apart and 0 <= block <= MAX_BLOCK and 0 <= lend <= MAX_VERSION
            ):
                apart.discard(number)
                lent[number] = block, lend
            case _:
                raise fields.wrong("'lent' must say of tensors that travel apart where they lie")
    return lent


def _key(fields: Fields, beside: Beside) -> bytes:
    """Take the key of a message, which it has if some of its tensors travel apart."""
    if fields.has("key") != bool(beside.apart):
        raise fields.wrong("'key' goes with tensors that travel apart, and only with them")
    return fields.data("key", shortest=ID_BYTES, longest=ID_BYTES) if beside.apart else b""
