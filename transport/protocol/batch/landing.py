"""Packets of a transfer opened straight into the memory that waits for their data.

While a transfer goes on undisturbed, the next packets are known but for their data: their numbers
follow, and each is full of the stream's next bytes. Decrypted so that these bytes lie where they
belong, a packet leaves the header of its frame in front of them, in the place of the bytes before.
From the last packet to the first, the data of each covers what its successor left there.
"""

from __future__ import annotations

from typing import NamedTuple

from cryptography.exceptions import InvalidTag

from transport.protocol.batch.frames import FULL_FRAME, FULL_FRAME_TYPE, VARINT_4, VARINT_8
from transport.protocol.batch.sealing import (
    FIXED_BIT,
    PACKET_NUMBER_SIZE,
    SPIN_BIT,
    TAG_SIZE,
    Keys,
    unmask,
)

__all__ = ["LEAST", "Expected", "data_room", "land_packets"]

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
    prefix = _prefix(keys, data, destination, expected.number)
    if prefix is None:
        return range(0)
    decrypt, iv, number = keys.aead.decrypt_into, keys.iv, expected.number
    target, unpack = expected.target, FULL_FRAME.unpack_from
    stream_id, offset = expected.stream_id | VARINT_4, expected.offset | VARINT_8
    before = bytes(target[: FULL_FRAME.size])
    first, stop = 0, count
    for at in range(count - 1, -1, -1):
        body, place = at * segment + body_at, at * room
        protected = data[body : body + length + TAG_SIZE]
        header = prefix + (number + at & 0xFFFF).to_bytes(PACKET_NUMBER_SIZE, "big")
        nonce = (iv ^ number + at).to_bytes(12, "big")
        try:
            decrypt(nonce, protected, header, target[place : place + length])
            kind, found_id, begin = unpack(target, place)
        except InvalidTag:
            kind = found_id = begin = 0
        if begin != offset + place or found_id != stream_id or kind != FULL_FRAME_TYPE:
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


def _prefix(keys: Keys, data: memoryview, destination: bytes, number: int) -> bytes | None:
    """Return what stands before the packet numbers if the first packet has `number`, else None.

    Of the others no header is looked at: each is authenticated with its packet, and a packet whose
    header is not the expected one does not open.
    """
    number_at = 1 + len(destination)
    first, high, low = (
        column[0]
        for column in unmask(keys, data, range(0, len(data), len(data)), number_at).columns
    )
    is_expected = (
        first & ~SPIN_BIT == FIXED_BIT | keys.phase << 2 | PACKET_NUMBER_SIZE - 1
        and high << 8 | low == number & 0xFFFF
        and data[1:number_at] == destination
    )
    return bytes((first,)) + destination if is_expected else None
