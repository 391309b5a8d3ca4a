"""The messages of the tensor services, as small classes with strict decoders.

Every stream begins with the header of its class and answers with another; bytes of a tensor follow
raw, their number agreed on before. Every decoder raises ``transport.ProtocolError`` for what is not
exactly its message, before anything is allocated by it. Encoders write fields in the order that
they travel in, shorter names first: to have them sorted takes three times as long as the rest.

    put     PutOpen ->, <- PutAccepted, bytes from its offset ->, Sent ->, <- Stored
    read    ReadOpen ->, <- ReadAccepted, <- bytes from the offset asked for, <- Sent, Received ->
            in both, the opener offers lanes for the bytes, and the other side may choose one
    fetch   FetchOpen ->, <- Moved again and again, <- Stored or the error
    calls   mint: MintCall, Minted; info and delete: ObjectCall, Listed; list: ListCall, Listing;
            map: MapCall, Listed, and the memory by the lane, or nothing
"""

from __future__ import annotations

import dataclasses
import re
from typing import Self

from auth import MeshError, NodeId, SocketAddress
from tensor_bridge.codec import TensorMeta, decode_meta, encode_meta
from tensor_bridge.fields import MAX_BYTES, Fields
from tensor_bridge.store import OBJECT_ID_CHARACTERS, StoredTensor
from transport import CborValue, decode_error, encode_error

__all__ = [
    "FetchOpen",
    "ListCall",
    "Listed",
    "Listing",
    "FIRST_MOVE",
    "Lent",
    "MapCall",
    "MintCall",
    "Minted",
    "Moved",
    "ObjectCall",
    "PutAccepted",
    "PutOpen",
    "ReadAccepted",
    "ReadOpen",
    "Received",
    "Sent",
    "Stored",
    "decode_fetch_answer",
    "take_id",
    "encode_fetch_failure",
    "lanes_of",
    "name_of",
]

MAX_NAME = 128
"""Longest name of a tensor, in characters."""

MAX_TOKEN = 256
"""Longest encoded capability token, in bytes."""

LENT_KEY_BYTES = 16

MAX_ADDRESSES = 16
"""Most addresses of a source, as many as a ticket carries."""

MAX_HOST = 64
"""Longest host of an address: an IPv6 literal with its zone."""

PAGE = 32
"""Most objects in one answer to a listing, so that it fits a frame whatever they are."""

MAX_VERSION = (1 << 64) - 1

FIRST_MOVE = 1 << 62
"""Smallest number of a move that no stream agreed on: ids of QUIC streams are below."""

MAX_LANES, MAX_LANE = 8, 32
"""Most lanes of an offer, and characters of the name of one."""

_HEX_ID = re.compile(rf"[0-9a-f]{{{OBJECT_ID_CHARACTERS}}}", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class PutOpen:
    """A tensor for the peer to keep. `upload` names this put, so that it can be taken up again.

    `lanes` are ways for its bytes beside the stream.
    """

    upload: str
    meta: TensorMeta
    name: str | None = None
    lanes: tuple[str, ...] = ()

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        value: dict[str, CborValue] = {"meta": encode_meta(self.meta)}
        if self.name is not None:
            value["name"] = self.name
        if self.lanes:
            value["lanes"] = list(self.lanes)
        return value | {"upload": self.upload}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "put")
        message = cls(
            take_id(fields, "upload"),
            decode_meta(fields.value("meta")),
            name_of(fields),
            lanes_of(fields),
        )
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class ReadOpen:
    """An object to read, by its id (its owner) or by a token (whoever the token was minted for).

    `version` is what an earlier, broken read was of: bytes of two versions are never joined.
    `lanes` are ways for the bytes beside the stream.
    """

    object_id: str | None = None
    token: bytes | None = dataclasses.field(default=None, repr=False)
    offset: int = 0
    version: int | None = None
    lanes: tuple[str, ...] = ()

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        value: dict[str, CborValue] = {}
        if self.lanes:
            value["lanes"] = list(self.lanes)
        if self.token is not None:
            value["token"] = self.token
        if self.object_id is not None:
            value["object"] = self.object_id
        value["offset"] = self.offset
        if self.version is not None:
            value["version"] = self.version
        return value

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "read")
        if fields.has("object") == fields.has("token"):
            raise fields.wrong("it takes either 'object' or 'token'")
        message = cls(
            object_id=take_id(fields, "object") if fields.has("object") else None,
            token=_token(fields) if fields.has("token") else None,
            offset=fields.integer("offset"),
            version=_version(fields) if fields.has("version") else None,
            lanes=lanes_of(fields),
        )
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class FetchOpen:
    """An order to get a tensor from `source`, with a token minted for the peer that is ordered."""

    upload: str
    source: NodeId
    addresses: tuple[SocketAddress, ...]
    token: bytes = dataclasses.field(repr=False)
    meta: TensorMeta
    name: str | None = None

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        value: dict[str, CborValue] = {
            "upload": self.upload,
            "source": self.source.raw,
            "addresses": _encode_addresses(self.addresses),
            "token": self.token,
            "meta": encode_meta(self.meta),
        }
        return value if self.name is None else value | {"name": self.name}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "fetch")
        message = cls(
            upload=take_id(fields, "upload"),
            source=_node(fields, "source"),
            addresses=_addresses(fields),
            token=_token(fields),
            meta=decode_meta(fields.value("meta")),
            name=name_of(fields),
        )
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class PutAccepted:
    """There is room; the bytes are to go on from `offset`, by `lane` if that is not the stream."""

    offset: int
    lane: str | None = None

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        value: dict[str, CborValue] = {} if self.lane is None else {"lane": self.lane}
        return value | {"offset": self.offset}

    @classmethod
    def decode(cls, value: CborValue, nbytes: int) -> Self:
        """Return the message in `value`, about a tensor of `nbytes` bytes."""
        fields = Fields(value, "put acceptance")
        message = cls(fields.integer("offset", high=nbytes), _lane(fields))
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class ReadAccepted:
    """What will be sent, from the offset asked for: the tensor and its version.

    By `lane`, if that is not the stream.
    """

    meta: TensorMeta
    version: int
    lane: str | None = None

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        value: dict[str, CborValue] = {} if self.lane is None else {"lane": self.lane}
        return value | {"meta": encode_meta(self.meta), "version": self.version}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "read acceptance")
        message = cls(decode_meta(fields.value("meta")), _version(fields), _lane(fields))
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """Every byte was sent; `version` is what the tensor's is after the last of them.

    If that is not what it was before the first, bytes of two versions may have been mixed.
    """

    version: int

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"sent": self.version}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        return cls(_only_integer(value, "sent", high=MAX_VERSION))


@dataclasses.dataclass(frozen=True, slots=True)
class Lent:
    """The bytes lie, for a receiver in the same process, where it finds them by `key`."""

    key: bytes = dataclasses.field(repr=False)

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"lent": self.key}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "'lent' message")
        message = cls(fields.data("lent", shortest=LENT_KEY_BYTES, longest=LENT_KEY_BYTES))
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """The receiver's acknowledgement, on which a token is spent."""

    nbytes: int

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"received": self.nbytes}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        return cls(_only_integer(value, "received"))


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """How many bytes of an ordered fetch, or of what was lent, have arrived.

    Sent of the former also to find out who has left.
    """

    nbytes: int

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"moved": self.nbytes}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        return cls(_only_integer(value, "moved"))


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """The tensor has arrived and is an object of its own."""

    object_id: str
    version: int

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"object": self.object_id, "version": self.version}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "stored object")
        message = cls(take_id(fields, "object"), _version(fields))
        fields.finish()
        return message

    @classmethod
    def of(cls, stored: StoredTensor) -> Self:
        """Return the message about `stored`."""
        return cls(stored.object_id, stored.version)


@dataclasses.dataclass(frozen=True, slots=True)
class MintCall:
    """A wish for a token that lets `audience` read `object_id` once."""

    object_id: str
    audience: NodeId

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"object": self.object_id, "audience": self.audience.raw}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "mint")
        message = cls(take_id(fields, "object"), _node(fields, "audience"))
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class Minted:
    """The token, what it stands for, and where its audience can dial the minter."""

    token: bytes = dataclasses.field(repr=False)
    meta: TensorMeta
    addresses: tuple[SocketAddress, ...]

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {
            "token": self.token,
            "meta": encode_meta(self.meta),
            "addresses": _encode_addresses(self.addresses),
        }

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "token")
        message = cls(_token(fields), decode_meta(fields.value("meta")), _addresses(fields))
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectCall:
    """The object that a call for information or deletion is about."""

    object_id: str

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"object": self.object_id}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "object call")
        message = cls(take_id(fields, "object"))
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class MapCall:
    """An object of the caller's whose memory is to be handed over as `move`, if it can be.

    `move` is no QUIC stream's id: those are smaller.
    """

    object_id: str
    move: int

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"move": self.move, "object": self.object_id}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "map call")
        move = fields.integer("move", high=MAX_VERSION)
        message = cls(take_id(fields, "object"), move)
        fields.finish()
        if move < FIRST_MOVE:
            raise fields.wrong(f"'move' must be at least {FIRST_MOVE}")
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class ListCall:
    """The objects of the caller that come after the object `after`, in order of their ids."""

    after: str | None = None

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {} if self.after is None else {"after": self.after}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "list call")
        message = cls(take_id(fields, "after") if fields.has("after") else None)
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class Listed:
    """One object as its owner sees it."""

    object_id: str
    version: int
    meta: TensorMeta
    name: str | None

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        value: dict[str, CborValue] = {"meta": encode_meta(self.meta)}
        if self.name is not None:
            value["name"] = self.name
        return value | {"object": self.object_id, "version": self.version}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "listed object")
        message = cls(
            object_id=take_id(fields, "object"),
            version=_version(fields),
            meta=decode_meta(fields.value("meta")),
            name=name_of(fields),
        )
        fields.finish()
        return message

    @classmethod
    def of(cls, stored: StoredTensor) -> Self:
        """Return the message about `stored`."""
        return cls(stored.object_id, stored.version, stored.meta, stored.name)


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """One page of a listing; `more` when another follows."""

    objects: tuple[Listed, ...]
    more: bool

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"more": self.more, "objects": [each.encode() for each in self.objects]}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "listing")
        objects = tuple(map(Listed.decode, fields.items("objects", PAGE)))
        message = cls(objects, fields.flag("more"))
        if message.more and not objects:
            raise fields.wrong("a page before the last is empty")
        fields.finish()
        return message


def decode_fetch_answer(value: CborValue, *, peer: object) -> Moved | Stored | MeshError:
    """Return the message of an ordered fetch that `value` holds, or the error that ended it."""
    if isinstance(value, dict):
        if "moved" in value:
            return Moved.decode(value)
        if "failed" in value:
            return decode_error(value["failed"], peer=peer)
    return Stored.decode(value)


def encode_fetch_failure(error: MeshError, source: NodeId) -> dict[str, CborValue]:
    """Return the message that ends an ordered fetch by what went wrong with `source`."""
    what = f"{error.what} with the source {source.short}"
    return {"failed": encode_error(error) | {"what": what}}


def take_id(fields: Fields, name: str) -> str:
    """Take the id `name`, of an object or of an upload."""
    text = fields.text(name, longest=OBJECT_ID_CHARACTERS)
    if _HEX_ID.fullmatch(text) is None:
        raise fields.wrong(f"{name!r} must be {OBJECT_ID_CHARACTERS} hexadecimal digits")
    return text


def lanes_of(fields: Fields) -> tuple[str, ...]:
    """Take the lanes that a message offers, by name; none where it does not say.

    Raises:
        ProtocolError: they are no names, or too many.
    """
    if not fields.has("lanes"):
        return ()
    items = fields.items("lanes", MAX_LANES)
    lanes = tuple(item for item in items if isinstance(item, str) and 0 < len(item) <= MAX_LANE)
    if not items or len(lanes) != len(items):
        raise fields.wrong(f"'lanes' must be names of 1 to {MAX_LANE} characters")
    return lanes


def _lane(fields: Fields) -> str | None:
    """Take the lane that was chosen, by name; None for the stream itself.

    Raises:
        ProtocolError: it is no name.
    """
    return fields.text("lane", longest=MAX_LANE) if fields.has("lane") else None


def name_of(fields: Fields) -> str | None:
    """Take the name of a tensor, None where there is none."""
    return fields.text("name", longest=MAX_NAME) if fields.has("name") else None


def _node(fields: Fields, name: str) -> NodeId:
    return NodeId(fields.data(name, shortest=32, longest=32))


def _token(fields: Fields) -> bytes:
    return fields.data("token", shortest=1, longest=MAX_TOKEN)


def _version(fields: Fields) -> int:
    return fields.integer("version", high=MAX_VERSION)


def _addresses(fields: Fields) -> tuple[SocketAddress, ...]:
    addresses: list[SocketAddress] = []
    for item in fields.items("addresses", MAX_ADDRESSES):
        match item:
            case [str(host), int(port)] if _can_be_dialled(host, port):
                addresses.append((host, port))
            case _:
                raise fields.wrong("an address must be a host and a port")
    return tuple(addresses)


def _can_be_dialled(host: str, port: int) -> bool:
    return len(host) <= MAX_HOST and 0 < port < 1 << 16 and not isinstance(port, bool)


def _encode_addresses(addresses: tuple[SocketAddress, ...]) -> list[CborValue]:
    return [[host, port] for host, port in addresses[:MAX_ADDRESSES]]


def _only_integer(value: CborValue, name: str, high: int = MAX_BYTES) -> int:
    fields = Fields(value, f"{name!r} message")
    number = fields.integer(name, high=high)
    fields.finish()
    return number
