"""A ring of messages in shared memory: one process writes, one reads, neither believes the other.

Memory of two processes has a line of words for each counter and flag, and a ring each way:

    line 0, 1    bytes written so far, by the first process and by the second
    line 2, 3    bytes taken so far, by the first and by the second
    line 4, 5    whether the first, or the second, sleeps (see `doorbell`)
    then         the ring that the first writes, and the ring that the second writes

A message is a head, which says how long it is, its number in order, what it is and to which call it
belongs, and a body; it lies in the ring as in a pipe, over the end and on at the beginning. Where
this process has written and read up to, it remembers itself: what the other stores there can garble
what that one reads, or end the ring. What is read is copied out once, then checked, then parsed.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct

from tensor_bridge.lanes.shared.doorbell import LINE_WORDS, Bell
from transport import ProtocolError

__all__ = ["FIRST", "MAX_BODY", "MEMORY_BYTES", "SECOND", "Inbox", "Message", "Outbox", "flag_of"]

MAX_BODY = 1 << 16
"""Longest body of a message, in bytes."""

RING_BYTES = 1 << 18
"""Of each direction: some of the longest messages."""

START = mmap.PAGESIZE
MEMORY_BYTES = START + 2 * RING_BYTES

FIRST, SECOND = 0, 1
"""Who made the memory, and who was given it."""

_HEAD = struct.Struct("<IIIQ")
"""Length of the body, number, kind, call."""

_MAX_NUMBER = 1 << 32


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        kind: what it is; small numbers, for the user of the ring to give a meaning.
        call: what it belongs to.
        body: at most `MAX_BODY` bytes.
    """

    kind: int
    call: int
    body: bytes = b""


def flag_of(side: int) -> int:
    """Return the index of the word that says whether a side sleeps."""
    return (4 + side) * LINE_WORDS


class Outbox:
    """The ring that this process writes.

    Args:
        memory: `MEMORY_BYTES` that both have.
        side: `FIRST` or `SECOND`, which this process is.
        wakes: the eventfd on which the other sleeps.
    """

    def __init__(self, memory: memoryview, side: int, wakes: int) -> None:
        words = memory[:START].cast("Q")
        start = START + side * RING_BYTES
        self._ring = memory[start : start + RING_BYTES]
        self._words = words
        self._taken_at = (2 + 1 - side) * LINE_WORDS
        self._bell = Bell(words, side * LINE_WORDS, [(flag_of(1 - side), wakes)])
        self._written = 0
        self._number = 0

    def put(self, message: Message) -> bool:
        """Write a message and wake the reader; return whether there was room for it.

        Raises:
            ProtocolError: the other end counts as taken what was never written.
        """
        length = _HEAD.size + len(message.body)
        taken = self._words[self._taken_at]
        if not 0 <= self._written - taken <= RING_BYTES:
            raise ProtocolError("shared memory", why="messages are taken that were not written")
        if self._written + length - taken > RING_BYTES:
            return False
        head = _HEAD.pack(len(message.body), self._number, message.kind, message.call)
        self._copy_in(head + message.body)
        self._written += length
        self._number = (self._number + 1) % _MAX_NUMBER
        self._bell.ring(self._written)
        return True

    def close(self) -> None:
        """Let go of the memory."""
        self._ring.release()
        self._words.release()

    def _copy_in(self, data: bytes) -> None:
        at = self._written % RING_BYTES
        part = min(len(data), RING_BYTES - at)
        self._ring[at : at + part] = data[:part]
        if part < len(data):
            self._ring[: len(data) - part] = data[part:]


class Inbox:
    """The ring that the other process writes.

    Args:
        memory, side: as of `Outbox`, for this process.
    """

    def __init__(self, memory: memoryview, side: int) -> None:
        start = START + (1 - side) * RING_BYTES
        self._ring = memory[start : start + RING_BYTES]
        self._words = memory[:START].cast("Q")
        self._written_at = (1 - side) * LINE_WORDS
        self._taken_at = (2 + side) * LINE_WORDS
        self._taken = 0
        self._number = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come that was not taken."""
        return self._words[self._written_at] == self._taken

    def take(self) -> Message | None:
        """Take the next message, None if there is none.

        Raises:
            ProtocolError: what lies there is none.
        """
        there = self._words[self._written_at] - self._taken
        if there == 0:
            return None
        if not _HEAD.size <= there <= RING_BYTES:
            raise ProtocolError("shared memory", why="a ring with part of a message in it")
        length, number, kind, call = _HEAD.unpack(self._copy_out(0, _HEAD.size))
        if length > MAX_BODY or _HEAD.size + length > there:
            raise ProtocolError("shared memory", why=f"a message of {length} bytes")
        if number != self._number:
            raise ProtocolError("shared memory", why="a message out of order")
        body = self._copy_out(_HEAD.size, length)
        self._taken += _HEAD.size + length
        self._number = (number + 1) % _MAX_NUMBER
        self._words[self._taken_at] = self._taken
        return Message(kind, call, body)

    def close(self) -> None:
        """Let go of the memory."""
        self._ring.release()
        self._words.release()

    def _copy_out(self, offset: int, length: int) -> bytes:
        at = (self._taken + offset) % RING_BYTES
        part = min(length, RING_BYTES - at)
        data = bytes(self._ring[at : at + part])
        return data if part == length else data + bytes(self._ring[: length - part])
