"""Frames inside a stream: a length and a CBOR value; and the two frames every stream begins with.

Towards the listener a stream begins with a `request_frame`: the service's name and a value for it.
Towards the opener it begins with a reply frame: ``ok`` with a value, or ``err`` with an error that
keeps its class. Both are at most `MAX_FRAME` bytes, and a length beyond the limit in force is
refused before anything is allocated. A peer may accept less, and says so in its hello: nothing
longer is sent to it.
"""

from __future__ import annotations

import struct

from auth import MeshError
from transport.cbor import CborValue, decode, encode
from transport.codes import decode_error, encode_error
from transport.errors import ProtocolError

__all__ = [
    "LENGTH",
    "MAX_FRAME",
    "MIN_FRAME",
    "error_reply",
    "frame",
    "ok_reply",
    "parse_reply",
    "parse_request",
    "request_frame",
    "take_reply",
]

LENGTH = struct.Struct(">I")
"""The length that precedes a value, in bytes, big-endian."""

MAX_FRAME = 1 << 20
"""Longest value in a frame. Bulk goes beside frames, not into them."""

MIN_FRAME = 1 << 14
"""Everybody accepts values of this length, so that every error can be told."""

MAX_SERVICE_NAME = 128


def frame(body: bytes) -> bytes:
    """Return `body` with its length before it."""
    return LENGTH.pack(len(body)) + body


def request_frame(service: str, value: CborValue, *, max_size: int = MAX_FRAME) -> bytes:
    """Return the frame that opens a stream to `service`, its value at most `max_size` bytes."""
    return frame(encode({"s": service, "v": value}, max_size=max_size))


def parse_request(body: bytes) -> tuple[str, CborValue]:
    """Return the service's name and the value for it."""
    value = decode(body, max_size=MAX_FRAME)
    if not isinstance(value, dict):
        raise ProtocolError("the first frame of a stream", why="it is not a map")
    service = value.get("s")
    if not isinstance(service, str) or not 0 < len(service) <= MAX_SERVICE_NAME:
        raise ProtocolError("the first frame of a stream", why="it names no service")
    return service, value.get("v")


def ok_reply(value: CborValue, *, max_size: int = MAX_FRAME) -> bytes:
    """Return the reply frame of a service that takes the stream, or the result of a call."""
    return frame(encode({"ok": value}, max_size=max_size))


def error_reply(error: BaseException) -> bytes:
    """Return the reply frame of a service that refuses the stream or has failed."""
    return frame(encode({"err": encode_error(error)}, max_size=MIN_FRAME))


def take_reply(body: bytes, *, peer: object) -> CborValue:
    """Return the value of a reply, or raise the error in it."""
    reply = parse_reply(body, peer=peer)
    if isinstance(reply, MeshError):
        raise reply
    return reply


def parse_reply(body: bytes, *, peer: object) -> CborValue | MeshError:
    """Return the value of a reply, or the error in it; the caller raises that."""
    value = decode(body, max_size=MAX_FRAME)
    if isinstance(value, dict):
        if "err" in value:
            return decode_error(value["err"], peer=peer)
        if "ok" in value:
            return value["ok"]
    raise ProtocolError("a reply", peer=peer, why="it is neither a result nor an error")
