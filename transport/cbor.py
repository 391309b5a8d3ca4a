"""Deterministic CBOR for everything on the wire (RFC 8949 section 4.2.1), bounded both ways.

The values are JSON's plus byte strings: None, bool, int in 64 bits, float, bytes, str, list, and
dict with string keys. No tags, no big numbers, no indefinite lengths, no references: nothing that
makes a decoder do more work than the bytes it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import cbor2

from transport.errors import ProtocolError

__all__ = ["CborValue", "decode", "encode"]

CborValue: TypeAlias = (
    bool | int | float | bytes | str | list["CborValue"] | dict[str, "CborValue"] | None
)

MAX_DEPTH = 16
"""Deepest nesting accepted: protocol messages need three or four levels."""

_PLAIN = (bool, bytes, str)
"""What has one encoding, whoever makes it."""

_FLAT = frozenset((type(None), bool, bytes, str))
"""The types of what has no parts, and one encoding: looked at by the list, and not one by one."""

_INT_MIN, _INT_MAX = -(1 << 64), (1 << 64) - 1


def encode(value: CborValue, *, max_size: int) -> bytes:
    """Return the one deterministic encoding of `value`.

    Raises:
        ProtocolError: a type that does not travel, or more than `max_size` bytes.
    """
    is_plain = _check(value, MAX_DEPTH)
    try:
        data = _dumps(value, is_plain)
    except UnicodeEncodeError as error:
        raise ProtocolError(
            "encoding of a message", why=f"a text is not Unicode ({error})"
        ) from error
    if len(data) > max_size:
        raise ProtocolError(
            "encoding of a message", why=f"{len(data)} bytes, and at most {max_size} may be sent"
        )
    return data


def decode(data: bytes, *, max_size: int) -> CborValue:
    """Return the value of which `data` is the deterministic encoding.

    Every other encoding of it is refused: whoever compares, hashes or signs messages may take the
    bytes for the value. The values take at most some 100 times the memory of `data`.

    Raises:
        ProtocolError: malformed, not deterministic, nested too deeply, a type that does not travel,
            trailing bytes, or more than `max_size` bytes.
    """
    if len(data) > max_size:
        raise ProtocolError(
            "decoding of a message", why=f"{len(data)} bytes, and at most {max_size} are accepted"
        )
    try:
        value = cbor2.loads(
            data,
            semantic_decoders=_NO_TAGS,
            max_depth=MAX_DEPTH,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            strict_hashable_types=True,
        )
    except (cbor2.CBORDecodeError, ValueError, OverflowError, MemoryError) as error:
        raise ProtocolError("decoding of a message", why=f"not valid CBOR ({error})") from error
    only = _dumps(value, _check(value, MAX_DEPTH))
    if only != data:
        is_longer = data.startswith(only)
        why = "bytes follow the value" if is_longer else "not deterministic CBOR"
        raise ProtocolError("decoding of a message", why=why)
    return value  # type: ignore[no-any-return]


def _dumps(value: object, is_plain: bool) -> bytes:
    # Sorting and shortening take cbor2 seven times as long as all the rest.
    return cbor2.dumps(value) if is_plain else cbor2.dumps(value, canonical=True)


def _check(value: object, depth: int) -> bool:
    """Raise if `value` can't travel; return whether its encoding is deterministic by itself.

    It is if there are no floats to be shortened, and no keys to be put in another order: shorter
    ones first, then bytewise, which is told here of ASCII alone.
    """
    if depth < 0:
        raise ProtocolError("a message", why=f"nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, _PLAIN):
        return True
    if isinstance(value, float):
        return False
    if isinstance(value, int):
        if not _INT_MIN <= value <= _INT_MAX:
            raise ProtocolError("a message", why="an integer does not fit in 64 bits")
        return True
    is_plain = True
    if type(value) is list:
        if depth > 0 and _FLAT.issuperset(map(type, value)):
            return True
        for item in value:
            is_plain &= _check(item, depth - 1)
    elif type(value) is dict:
        last = (-1, "")
        for key, item in value.items():
            if not isinstance(key, str):
                raise ProtocolError("a message", why=f"a map key is {type(key).__name__}, not text")
            is_plain &= key.isascii() and last < (len(key), key)
            last = (len(key), key)
            if depth == 0 or type(item) not in _FLAT:
                is_plain &= _check(item, depth - 1)
    else:
        raise ProtocolError("a message", why=f"values of type {type(value).__name__} don't travel")
    return is_plain


class _NoTags(dict[int, Callable[..., Any]]):
    """Answers for every tag with a decoder that refuses it, the built-in ones included."""

    def __missing__(self, tag: int) -> Callable[..., Any]:
        return self._refuse

    @staticmethod
    def _refuse(*_: object) -> object:
        raise ValueError("tags are not accepted")


_NO_TAGS = _NoTags()
