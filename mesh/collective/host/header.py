"""What a rank shows before the bytes of an operation: what it called, and how much it has.

::

    u64 sequence, u32 length, u32 zero, `length` bytes of text    zeros up to `CALL_BYTES`
    u64 rounds                                                     that this rank needs
    u64 nbytes                                                     for each place, in order

The text is name, dtype, number of elements and detail of the `Signature`, with U+001F between.
"""

from __future__ import annotations

import functools
import struct

from mesh.collective.exchange import Signature

__all__ = ["CALL_BYTES", "decode_call", "decode_rest", "encode", "header_bytes"]

CALL_BYTES = 448
"""Room for sequence and text."""

_CALL = struct.Struct("<QII")
_BETWEEN = "\x1f"
_LONGEST = CALL_BYTES - _CALL.size


def header_bytes(size: int) -> int:
    """Return how long a header is in a group of `size` ranks."""
    return CALL_BYTES + 8 * (1 + size)


@functools.lru_cache(maxsize=1024)
def encode(signature: Signature, rounds: int, sizes: tuple[int, ...]) -> bytes:
    """Return a header but for the sequence number, which goes before it."""
    text = _text(signature)
    head = _CALL.pack(0, len(text), 0)[8:] + text
    return head.ljust(CALL_BYTES - 8, b"\0") + _rest(len(sizes)).pack(rounds, *sizes)


def decode_call(data: bytes) -> tuple[Signature, int]:
    """Return what another rank called, and as which operation.

    Args:
        data: `CALL_BYTES` of its header.

    Raises:
        ValueError: it is no call.
    """
    sequence, length, zero = _CALL.unpack_from(data)
    if zero or length > _LONGEST:
        raise ValueError("its header is malformed")
    text = data[_CALL.size : _CALL.size + length].decode()  # UnicodeDecodeError is a ValueError
    name, dtype, numel, detail = text.split(_BETWEEN)
    if not all(field.isprintable() for field in (name, dtype, detail)):
        raise ValueError("its header is malformed")
    return Signature(name, dtype, int(numel) if numel else None, detail), sequence


def decode_rest(data: bytes | memoryview) -> tuple[int, ...]:
    """Return rounds and sizes, of what follows `CALL_BYTES`. Any bytes are some."""
    return _rest(len(data) // 8 - 1).unpack(data)


@functools.cache
def _rest(size: int) -> struct.Struct:
    return struct.Struct(f"<Q{size}Q")


def _text(one: Signature) -> bytes:
    numel = "" if one.numel is None else str(one.numel)
    return _BETWEEN.join((one.name, one.dtype, numel, one.detail)).encode()[:_LONGEST]
