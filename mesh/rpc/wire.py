"""What is said about a call, apart from the content of its large tensors. Pure: no I/O.

==============  ==========================================================================
``rpc.call``    a call: `Request` in, `Answer` out
``rpc.part``    a stream: one large tensor of either, `PartOpen` in, `PartAccepted` out
``rpc.refs``    a call: `RefNotes` in, the references unknown to their owner out
``rpc.stream``  a stream: a generator's `Request`, then `Wanted` in, an `Answer` for each item out
==============  ==========================================================================

A message whose large tensors travel apart has a `key`, under which they do. Those of a request are
sent while it waits for them; those of an answer are fetched. A stream of items ends with the
stream; an `Answer` that is an error is its last.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Self

from auth import IdentityError, NodeId
from mesh.rpc.links import Link
from mesh.rpc.pickled import has_pickle
from mesh.rpc.values import MAX_ITEMS, MAX_TENSORS
from tensor_bridge import TensorMeta, decode_meta, encode_meta
from tensor_bridge.fields import Fields
from tensor_bridge.wire import MAX_LANE, lanes_of
from transport import CborValue, cbor
from transport.frames import MAX_FRAME

__all__ = [
    "CALL_SERVICE",
    "ID_BYTES",
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
    "Target",
    "Wanted",
]

CALL_SERVICE, PART_SERVICE, REFS_SERVICE = "rpc.call", "rpc.part", "rpc.refs"
STREAM_SERVICE = "rpc.stream"

SCOPE = "rpc:call"
"""What a peer needs to call anything here."""

ID_BYTES = 16
"""Of references, of forks of them, and of messages with large tensors."""

MAX_NAME = 256
MAX_DEVICE = 32
MAX_NOTES = 1024
"""Most entries of each kind in one `RefNotes`."""

MAX_SECONDS = 1e9

SHORT_META = 128
KEPT_METAS = 1024
"""Descriptions of tensors up to that many bytes are kept, so many: programs send the same again and
again, and to read one costs more than all the rest of a short message."""

MAX_WANTED = 1 << 62
"""Most items of one stream."""


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """The tensors of a message: what each is, and the content of those that are small.

    Attributes:
        metas: one for each.
        inline: the bytes of each, None where they travel apart.
        devices: of a request, the reader's device that each is to be put on; of an answer, the
            writer's that it was on; None for the CPU. See `mesh.rpc.placement`.
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

    def encode(self) -> list[CborValue]:
        """Return them as they travel."""
        found: list[CborValue] = []
        for meta, data, device in zip(self.metas, self.inline, self.devices, strict=True):
            end: list[CborValue] = [] if device is None else [device]
            found.append([_meta_bytes(meta), data, *end])
        return found

    @classmethod
    def decode(cls, fields: Fields, name: str) -> Self:
        """Take them out of `fields`."""
        metas: list[TensorMeta] = []
        inline: list[bytes | None] = []
        devices: list[str | None] = []
        for item in fields.items(name, MAX_TENSORS):
            match item:
                case [bytes(meta), bytes() | None as data, *end] if len(end) <= 1:
                    metas.append(_meta_of(meta) if len(meta) <= SHORT_META else _read_meta(meta))
                    devices.append(_device(fields, end[0]) if end else None)
                    if data is not None and len(data) != metas[-1].nbytes:
                        raise fields.wrong("a tensor of another length than it should have")
                    inline.append(data)
                case _:
                    raise fields.wrong("a tensor is a description, its bytes, and a device")
        return cls(tuple(metas), tuple(inline), tuple(devices))


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What is to be called.

    Attributes:
        kind: ``"function"``, ``"operator"``, ``"method"``, ``"fetch"``, ``"pickled"``, or, of
            distributed autograd, ``"gradients"`` or ``"backward"``.
        name: of the function, operator or method; empty for the others.
        key: the reference of a method, a fetch or a backward.
    """

    kind: str
    name: str = ""
    key: bytes = b""

    def encode(self) -> dict[str, CborValue]:
        """Return it as it travels."""
        # In the order of deterministic CBOR, here and below: nobody has to sort it then.
        value: dict[str, CborValue] = {"key": self.key} if self.key else {}
        value["kind"] = self.kind
        if self.name:
            value["name"] = self.name
        return value

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the target in `value`."""
        fields = Fields(value, "target of a call")
        kind = fields.text("kind", longest=16)
        if kind not in _KINDS:
            raise fields.wrong(f"{kind!r} is no kind of target")
        has_name, has_key = _KINDS[kind]
        name = fields.text("name", longest=MAX_NAME) if has_name else ""
        key = fields.data("key", shortest=ID_BYTES, longest=ID_BYTES) if has_key else b""
        fields.finish()
        return cls(kind, name, key)

    def __str__(self) -> str:
        if self.kind == "fetch":
            return "fetch of a reference"
        if self.kind == "pickled":
            return "call of a pickled function"
        if self.kind == "gradients":
            return "sending of gradients"
        if self.kind == "backward":
            return "backward from a reference"
        return f"call of {self.kind} {self.name!r}"


_KINDS = {
    "function": (True, False),
    "operator": (True, False),
    "method": (True, True),
    "fetch": (False, True),
    "pickled": (False, False),
    "gradients": (False, False),
    "backward": (False, True),
}


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
    """

    target: Target
    items: list[CborValue]
    beside: Beside
    seconds: float
    create: Fork | None = None
    key: bytes = b""
    link: Link | None = None

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        value: dict[str, CborValue] = {"key": self.key} if self.key else {}
        value["items"] = self.items
        if self.create is not None:
            value["create"] = self.create.encode()
        value["target"] = self.target.encode()
        whole = int(self.seconds)
        value["seconds"] = whole if whole == self.seconds else self.seconds
        value["tensors"] = self.beside.encode()
        if self.link is not None:
            value["autograd"] = self.link.encode()
        return value

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "call")
        target = Target.decode(fields.value("target"))
        items = fields.items("items", MAX_ITEMS)
        beside = Beside.decode(fields, "tensors")
        seconds = fields.value("seconds")
        if type(seconds) not in (int, float) or not 0 <= seconds <= MAX_SECONDS:  # type: ignore[operator]
            raise fields.wrong("'seconds' is no time limit")
        create = Fork.decode(fields.value("create")) if fields.has("create") else None
        key = _key(fields, beside)
        link = _link(fields)
        fields.finish()
        return cls(target, items, beside, float(seconds), create, key, link)  # type: ignore[arg-type]

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

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        if self.error is not None:
            return {"error": self.error}
        value: dict[str, CborValue] = {"key": self.key} if self.key else {}
        value["items"] = self.items
        value["tensors"] = self.beside.encode()
        if self.link is not None:
            value["autograd"] = self.link.encode()
        return value

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "answer of a call")
        if fields.has("error"):
            answer = cls(error=fields.value("error"))
        else:
            items = fields.items("items", MAX_ITEMS)
            beside = Beside.decode(fields, "tensors")
            answer = cls(items, beside, _key(fields, beside), link=_link(fields))
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


def _link(fields: Fields) -> Link | None:
    return Link.decode(fields.value("autograd")) if fields.has("autograd") else None


def _device(fields: Fields, value: CborValue) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_DEVICE:
        raise fields.wrong(f"a device is a name of 1 to {MAX_DEVICE} characters")
    return value


@functools.lru_cache(KEPT_METAS)
def _meta_bytes(meta: TensorMeta) -> bytes:
    return cbor.encode(encode_meta(meta), max_size=MAX_FRAME)


def _read_meta(data: bytes) -> TensorMeta:
    return decode_meta(cbor.decode(data, max_size=MAX_FRAME))


_meta_of = functools.lru_cache(KEPT_METAS)(_read_meta)


def _key(fields: Fields, beside: Beside) -> bytes:
    """Take the key of a message, which it has if some of its tensors travel apart."""
    if fields.has("key") != bool(beside.apart):
        raise fields.wrong("'key' goes with tensors that travel apart, and only with them")
    return fields.data("key", shortest=ID_BYTES, longest=ID_BYTES) if beside.apart else b""
