"""Packets of a transfer opened straight into the memory that waits for their data.

While a transfer goes on undisturbed, the next packets are known but for their data: their numbers
follow, and each is full of the stream's next bytes. Decrypted so that these bytes lie where they
belong, a packet leaves the header of its frame in front of them, in the place of the bytes before.
From the last packet to the first, the data of each covers what its successor left there.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cryptography.exceptions import InvalidTag

from transport.protocol.batch.sealing import (
    FIXED_BIT,
    PACKET_NUMBER_SIZE,
    SPIN_BIT,
    TAG_SIZE,
    Keys,
    unmask,
)

__all__ = [
    "FULL_FRAME",
    "VARINT_4",
    "VARINT_8",
    "WITH_OFFSET",
    "Expected",
    "data_room",
    "land_packets",
]

FULL_FRAME = struct.Struct("!BIQ")
"""A STREAM frame that fills its packet: type, stream id in 4 bytes, offset in 8."""
VARINT_4 = 0x80000000
VARINT_8 = 0xC000000000000000
WITH_OFFSET = 0x0C
"""The type of a STREAM frame that has an offset, and neither a length nor a FIN."""


LEAST = 4
"""With fewer packets left there is nothing to win."""


class Expected(NamedTuple):
    """What comes next if nothing comes in between."""

    number: int
    """The next packet's number."""
    stream_id: int
    offset: int
    """Where in the stream its data begins."""
    target: memoryview
    """The memory for that data, and `FULL_FRAME`.size bytes in front of it, which are kept."""


def land_packets(
    keys: Keys, data: memoryview, segment: int, destination: bytes, expected: Expected
) -> range:
    """Open those packets of a batch that are as expected, into the target.

    Args:
        keys: the receiving keys now in use.
        data: a batch: one packet in every `segment` bytes.
        destination: the connection id they must be addressed to.
        expected: what the first one is, if nothing came in between, and so on.

    Returns:
        Which of them have landed. There is no gap among them. Where others would have landed,
        anything may lie now.
    """
    body_at = 1 + len(destination) + PACKET_NUMBER_SIZE
    length = segment - body_at - TAG_SIZE
    room = data_room(segment, destination)
    count = min(len(data) // segment, (len(expected.target) - FULL_FRAME.size) // max(room, 1))
    if room <= 0 or count < LEAST:
        return range(0)
    numbers = [
        (number & 0xFFFF).to_bytes(PACKET_NUMBER_SIZE, "big")
        for number in range(expected.number, expected.number + count)
    ]
    first_byte = _common_header(
        keys, data, range(0, count * segment, segment), destination, numbers
    )
    if first_byte is None:
        return range(0)
    prefix = first_byte + destination
    decrypt, iv, number = keys.aead.decrypt_into, keys.iv, expected.number
    target, unpack = expected.target, FULL_FRAME.unpack_from
    stream_id, offset = expected.stream_id | VARINT_4, expected.offset | VARINT_8
    before = bytes(target[: FULL_FRAME.size])
    first, stop = 0, count
    for at in range(count - 1, -1, -1):
        body, place = at * segment + body_at, at * room
        protected = data[body : body + length + TAG_SIZE]
        nonce = (iv ^ number + at).to_bytes(12, "big")
        try:
            decrypt(nonce, protected, prefix + numbers[at], target[place : place + length])
            kind, found_id, begin = unpack(target, place)
        except InvalidTag:
            kind = found_id = begin = 0
        if begin != offset + place or found_id != stream_id or kind != WITH_OFFSET:
            if at < count - 1:
                first = at + 1
                break
            stop = at  # the last of a transfer is another, and says nothing of those before it
    target[: FULL_FRAME.size] = before
    return range(first, stop)


def data_room(segment: int, destination: bytes) -> int:
    """How many bytes of a stream fill a packet of `segment` bytes."""
    header = 1 + len(destination) + PACKET_NUMBER_SIZE
    return segment - header - TAG_SIZE - FULL_FRAME.size


def _common_header(
    keys: Keys, data: memoryview, starts: range, destination: bytes, numbers: list[bytes]
) -> bytes | None:
    """Return the first byte that all packets have, if their headers differ in `numbers` alone."""
    number_at = 1 + len(destination)
    firsts, highs, lows = unmask(keys, data, starts, number_at).columns
    together = b"".join(numbers)
    if (
        firsts[0] & ~SPIN_BIT != FIXED_BIT | keys.phase << 2 | PACKET_NUMBER_SIZE - 1
        or firsts != firsts[:1] * len(starts)
        or together[0::2] != highs
        or together[1::2] != lows
        or any(data[at + 1 : at + number_at] != destination for at in starts)
    ):
        return None
    return firsts[:1]
