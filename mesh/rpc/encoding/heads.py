"""The head and the items of a message, as bytes: what is the same from call to call. Pure: no I/O.

Whoever makes the same call again writes the same head, and often the same items. What was written
or read of them lately is kept, and not worked out again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from mesh.rpc.encoding.values import MAX_ITEMS, MAX_TENSORS
from mesh.rpc.names.targets import Target
from tensor_bridge import TensorMeta, decode_meta, encode_meta
from tensor_bridge.fields import Fields
from transport import CborValue, ProtocolError, cbor
from transport.frames import MAX_FRAME

__all__ = [
    "Shapes",
    "answer_head",
    "kept",
    "read_answer_head",
    "read_items",
    "read_request_head",
    "request_head",
]

MAX_DEVICE = 32
MAX_SECONDS = 1e9

SHORT = 512
KEPT = 1024
"""Heads, items and descriptions of tensors up to that many bytes are kept, so many of each."""

Shapes: TypeAlias = tuple[tuple[TensorMeta, bool, str | None], ...]
"""Of each tensor of a message: what it is, whether its content is in it, and its device."""

_Read = TypeVar("_Read")


def kept(read: Callable[[bytes], _Read]) -> Callable[[bytes], _Read]:
    """Return a function that keeps what it has read of short bytes; nobody may change it."""
    known = functools.lru_cache(KEPT)(read)
    return functools.wraps(read)(lambda data: (known if len(data) <= SHORT else read)(data))


@kept
def read_items(data: bytes) -> list[CborValue]:
    """Return the items of a message. Raises `ProtocolError`."""
    items = cbor.decode(data, max_size=MAX_FRAME)
    if not isinstance(items, list) or len(items) > MAX_ITEMS:
        raise ProtocolError("reading of a call", why=f"its items are no list of {MAX_ITEMS}")
    return items


@functools.lru_cache(KEPT)
def request_head(target: Target, seconds: float, shapes: Shapes) -> bytes:
    """Return what a request says of its target, its time limit and its tensors."""
    whole = int(seconds)
    # In the order of deterministic CBOR: nobody has to sort it then.
    value: dict[str, CborValue] = {
        "target": target.encode(),
        "seconds": whole if whole == seconds else seconds,
        "tensors": _shapes_encoded(shapes),
    }
    return cbor.encode(value, max_size=MAX_FRAME)


@kept
def read_request_head(data: bytes) -> tuple[Target, float, Shapes]:
    """Return what `request_head` says. Raises `ProtocolError`, and `UnsupportedTensor`."""
    fields = Fields(cbor.decode(data, max_size=MAX_FRAME), "call")
    target = Target.decode(fields.value("target"))
    seconds = fields.value("seconds")
    if type(seconds) not in (int, float) or not 0 <= seconds <= MAX_SECONDS:  # type: ignore[operator]
        raise fields.wrong("'seconds' is no time limit")
    shapes = _shapes(fields.value("tensors"))
    fields.finish()
    return target, float(seconds), shapes  # type: ignore[arg-type]


@functools.lru_cache(KEPT)
def answer_head(shapes: Shapes) -> bytes:
    """Return what an answer says of its tensors."""
    return cbor.encode(_shapes_encoded(shapes), max_size=MAX_FRAME)


@kept
def read_answer_head(data: bytes) -> Shapes:
    """Return what `answer_head` says. Raises as `read_request_head`."""
    return _shapes(cbor.decode(data, max_size=MAX_FRAME))


def _shapes_encoded(shapes: Shapes) -> list[CborValue]:
    return [
        [_meta_bytes(meta), is_inline, *([] if device is None else [device])]
        for meta, is_inline, device in shapes
    ]


def _shapes(value: CborValue) -> Shapes:
    if not isinstance(value, list) or len(value) > MAX_TENSORS:
        raise _tensors_wrong(f"they are no list of {MAX_TENSORS}")
    shapes: list[tuple[TensorMeta, bool, str | None]] = []
    for item in value:
        match item:
            case [bytes(meta), bool(is_inline)]:
                shapes.append((_meta(meta), is_inline, None))
            case [bytes(meta), bool(is_inline), str(device)] if 0 < len(device) <= MAX_DEVICE:
                shapes.append((_meta(meta), is_inline, device))
            case _:
                raise _tensors_wrong("each is a description, where it is, and a device")
    return tuple(shapes)


def _tensors_wrong(why: str) -> ProtocolError:
    return ProtocolError("reading of the tensors of a call", why=why)


@functools.lru_cache(KEPT)
def _meta_bytes(meta: TensorMeta) -> bytes:
    return cbor.encode(encode_meta(meta), max_size=MAX_FRAME)


@kept
def _meta(data: bytes) -> TensorMeta:
    return decode_meta(cbor.decode(data, max_size=MAX_FRAME))
