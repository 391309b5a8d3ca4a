"""Bytes and text of keys, tickets and signed statements: CBOR in one form only, and base32.

What is signed must have exactly one byte form. Encoding is deterministic CBOR (RFC 8949 section
4.2). Decoding reads the few types that statements are made of, straight from bounded input; every
decoder that uses it re-encodes what it read and compares, so a second spelling of the same
statement is refused.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence

import cbor2

__all__ = [
    "CborItem",
    "base32_decode",
    "base32_encode",
    "cbor_decode",
    "cbor_encode",
    "check_time",
]

CborItem = int | float | bytes | str | None | Sequence["CborItem"]
"""What a statement may hold. Maps, tags and big numbers are not needed, and could do harm."""

# A statement is a list of fields, one of which may be a list of lists.
_MAX_DEPTH = 4

_LATEST_TIME = 1e11

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(8)
_NULL = 22
_FLOATS = {25: ">e", 26: ">f", 27: ">d"}
_ARGUMENT_BYTES = {24: 1, 25: 2, 26: 4, 27: 8}


def cbor_encode(value: CborItem) -> bytes:
    """Encode ``value`` as deterministic CBOR (RFC 8949 section 4.2.1)."""
    return cbor2.dumps(value, canonical=True)


def cbor_decode(data: bytes, *, max_bytes: int) -> CborItem:
    """Decode one CBOR item that fills ``data`` exactly.

    Raises:
        ValueError: more than ``max_bytes``, cut short, followed by more bytes, nested too deep, or
            holding a type that statements don't have. The text says which.
    """
    if len(data) > max_bytes:
        raise ValueError(f"it has {len(data)} bytes, more than the limit of {max_bytes}")
    value, end = _item(data, 0, _MAX_DEPTH)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes follow its end")
    return value


def base32_encode(data: bytes) -> str:
    """Write ``data`` in lower-case base32 without padding (RFC 4648 section 6)."""
    return base64.b32encode(data).decode("ascii").rstrip("=").lower()


def base32_decode(text: str) -> bytes:
    """Read the whole bytes in unpadded base32 ``text``; the bits of an incomplete one are dropped.

    Raises:
        ValueError: a character outside ``a-z2-7``, in either case; the text names it.
    """
    for position, character in enumerate(text, 1):
        if character not in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ234567":
            raise ValueError(f"character {position}, {character!r}, is not of the base32 alphabet")
    whole_bytes = len(text) * 5 // 8
    whole = text[: -(-whole_bytes * 8 // 5)]
    return base64.b32decode(whole + "=" * (-len(whole) % 8), casefold=True)


def check_time(seconds: float) -> float:
    """Return Unix time ``seconds`` if it is a time within the next three thousand years.

    Raises:
        ValueError: it is not a number, infinite, negative or beyond.
    """
    # A NaN would make every comparison with a deadline false.
    if not (math.isfinite(seconds) and 0 <= seconds <= _LATEST_TIME):
        raise ValueError("one of its times is impossible")
    return seconds


def _item(data: bytes, at: int, depth: int) -> tuple[CborItem, int]:
    kind, short = divmod(_slice(data, at, 1)[0], 32)
    at += 1
    width = _ARGUMENT_BYTES.get(short, 0)
    if short > 27:
        raise ValueError("it has an item of indefinite length")
    raw = _slice(data, at, width)
    at += width
    argument = int.from_bytes(raw, "big") if width else short
    if kind == _UNSIGNED:
        return argument, at
    if kind == _NEGATIVE:
        return -1 - argument, at
    if kind == _BYTES:
        return _slice(data, at, argument), at + argument
    if kind == _TEXT:
        return _slice(data, at, argument).decode("utf-8"), at + argument
    if kind == _ARRAY:
        return _array(data, at, argument, depth)
    if kind == _SIMPLE and short in _FLOATS:
        value: float = struct.unpack(_FLOATS[short], raw)[0]
        return value, at
    if kind == _SIMPLE and short == _NULL:
        return None, at
    raise ValueError("it holds a type that has no place in it")


def _array(data: bytes, at: int, count: int, depth: int) -> tuple[CborItem, int]:
    if depth == 0:
        raise ValueError("it is nested too deep")
    # Every item takes a byte at least, so a larger count is a lie, found before the work is done.
    if count > len(data) - at:
        raise ValueError("it is cut short")
    items: list[CborItem] = []
    for _ in range(count):
        item, at = _item(data, at, depth - 1)
        items.append(item)
    return items, at


def _slice(data: bytes, at: int, length: int) -> bytes:
    if length > len(data) - at:
        raise ValueError("it is cut short")
    return data[at : at + length]
