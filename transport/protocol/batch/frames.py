"""STREAM frames as batches have them: what bulk packets are full of (RFC 9000 section 19.8)."""

from __future__ import annotations

import struct

__all__ = [
    "FULL_FRAME",
    "FULL_FRAME_TYPE",
    "STREAM",
    "VARINT_4",
    "VARINT_8",
    "WITH_FIN",
    "WITH_LENGTH",
    "WITH_OFFSET",
]

STREAM = 0x08
"""The type of a STREAM frame; the bits below are or-ed to it."""
WITH_OFFSET, WITH_LENGTH, WITH_FIN = 0x04, 0x02, 0x01

FULL_FRAME = struct.Struct("!BIQ")
"""The head of a frame that fills its packet: type, stream id in 4 bytes, offset in 8."""
FULL_FRAME_TYPE = STREAM | WITH_OFFSET
"""Its type, but for `WITH_FIN`: without a length, as it goes on to the packet's end."""

VARINT_4 = 0x80000000
VARINT_8 = 0xC000000000000000
"""Or-ed to a number, the marks of its encoding in 4 and in 8 bytes (RFC 9000 section 16)."""
