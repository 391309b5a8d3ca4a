"""What two ends say on the Unix socket between them, and what it does to the slots. No I/O.

Each direction of a lane has a pool of memory that its sender made, cut into slots. The sender fills
a free slot and says so; the receiver copies the bytes out and gives the slot back. Each packet of
the socket is one message:

    pool     the sender's memory, as a descriptor beside it, is cut into slots of `slot_bytes`
    filled   slot `slot` holds the next `length` bytes of move `move`
    given    slot `slot` is free again
    rings    a descriptor of those that calls go by (see `calls`), in order
    sealed   the memory, as a descriptor beside it, holds all bytes of move `move`
    block    the memory, as a descriptor beside it, is block `slot` of the sender's (see `blocks`)
    returned what was lent as `move` is the other end's again
    forgot   block `slot` is not used any more

A move is called by the id of the QUIC stream that it was agreed on. Whatever comes from the other
end is checked here before anything is done with it; what an honest end would not say raises
``transport.ProtocolError``, which ends the lane.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import deque

from transport import ProtocolError

__all__ = [
    "MAX_BLOCKS",
    "MAX_MESSAGE",
    "MAX_SLOTS",
    "MAX_SLOT_BYTES",
    "Arrivals",
    "BlockMessage",
    "FilledMessage",
    "ForgottenMessage",
    "GivenMessage",
    "IncomingSlots",
    "Message",
    "OutgoingSlots",
    "PoolMessage",
    "ReturnedMessage",
    "RingsMessage",
    "SealedMessage",
    "decode_message",
]

MAX_SLOT_BYTES = 1 << 21
"""Largest slot. One is copied in one turn of the event loop: about 0.3 ms."""

MAX_SLOTS = 16
"""Most slots of a pool that a peer may have us map."""

MAX_BLOCKS = 64
"""Most blocks of one end, lent or free."""

_FORM = struct.Struct(">BBHIQ")
MAX_MESSAGE = _FORM.size
"""Bytes of a message."""

_POOL, _FILLED, _GIVEN, _SEALED, _RINGS, _BLOCK, _RETURNED, _FORGOT = range(1, 9)


@dataclasses.dataclass(frozen=True, slots=True)
class PoolMessage:
    """The descriptor beside this is the sender's pool."""

    slot_bytes: int

    def encode(self) -> bytes:
        """Return the message as it travels."""
        return _FORM.pack(_POOL, 0, 0, self.slot_bytes, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class FilledMessage:
    """A slot holds the next bytes of a move."""

    slot: int
    length: int
    move: int

    def encode(self) -> bytes:
        """Return the message as it travels."""
        return _FORM.pack(_FILLED, 0, self.slot, self.length, self.move)


@dataclasses.dataclass(frozen=True, slots=True)
class GivenMessage:
    """A slot is free again."""

    slot: int

    def encode(self) -> bytes:
        """Return the message as it travels."""
        return _FORM.pack(_GIVEN, 0, self.slot, 0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class SealedMessage:
    """The descriptor beside this is of memory that holds all of a move's bytes."""

    move: int

    def encode(self) -> bytes:
        """Return the message as it travels."""
        return _FORM.pack(_SEALED, 0, 0, 0, self.move)


@dataclasses.dataclass(frozen=True, slots=True)
class RingsMessage:
    """The descriptor beside this is the `part`-th of the rings that calls go by."""

    part: int

    def encode(self) -> bytes:
        """Return the message as it travels."""
        return _FORM.pack(_RINGS, 0, self.part, 0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockMessage:
    """The descriptor beside this is a block of the sender's."""

    number: int

    def encode(self) -> bytes:
        """Return the message as it travels."""
        return _FORM.pack(_BLOCK, 0, self.number, 0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class ReturnedMessage:
    """A block that was lent is its owner's again."""

    lend: int

    def encode(self) -> bytes:
        """Return the message as it travels."""
        return _FORM.pack(_RETURNED, 0, 0, 0, self.lend)


@dataclasses.dataclass(frozen=True, slots=True)
class ForgottenMessage:
    """A block of the sender's is not used any more."""

    number: int

    def encode(self) -> bytes:
        """Return the message as it travels."""
        return _FORM.pack(_FORGOT, 0, self.number, 0, 0)


Message = (
    PoolMessage
    | FilledMessage
    | GivenMessage
    | SealedMessage
    | RingsMessage
    | BlockMessage
    | ReturnedMessage
    | ForgottenMessage
)


def decode_message(data: bytes) -> Message:
    """Return the message that a packet is.

    Raises:
        ProtocolError: it is none.
    """
    if len(data) != MAX_MESSAGE:
        raise _broken(f"a message of {len(data)} bytes")
    kind, reserved, slot, length, move = _FORM.unpack(data)
    match (kind, reserved, slot, length, move):
        case (1, 0, 0, size, 0) if 0 < size <= MAX_SLOT_BYTES:
            return PoolMessage(size)
        case (2, 0, _, size, _) if 0 < size <= MAX_SLOT_BYTES:
            return FilledMessage(slot, length, move)
        case (3, 0, _, 0, 0):
            return GivenMessage(slot)
        case (4, 0, 0, 0, _):
            return SealedMessage(move)
        case (5, 0, _, 0, 0):
            return RingsMessage(slot)
        case (6, 0, _, 0, 0):
            return BlockMessage(slot)
        case (7, 0, 0, 0, _):
            return ReturnedMessage(move)
        case (8, 0, _, 0, 0):
            return ForgottenMessage(slot)
    raise _broken("a message of no known kind or with a field out of bounds")


class OutgoingSlots:
    """The slots of the pool made here: free, taken to be filled, or lent to the other end.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._taken: set[int] = set()
        self._lent: set[int] = set()

    @property
    def free(self) -> int:
        """How many are free."""
        return len(self._free)

    @property
    def lent(self) -> int:
        """How many the other end has."""
        return len(self._lent)

    def take(self) -> int:
        """Take a free slot, to fill it: the one that was given last, whose memory is warm."""
        slot = self._free.pop()
        self._taken.add(slot)
        return slot

    def put_back(self, slot: int) -> None:
        """Put back a slot that was taken and will not be lent."""
        self._taken.remove(slot)
        self._free.append(slot)

    def lend(self, slot: int) -> None:
        """Give a slot that was taken to the other end."""
        self._taken.remove(slot)
        self._lent.add(slot)

    def given(self, slot: int) -> None:
        """Take back a slot that the other end gives.

        Raises:
            ProtocolError: it does not have it.
        """
        if slot not in self._lent:
            raise _broken("a slot is given back that was not lent")
        self._lent.remove(slot)
        self._free.append(slot)


class IncomingSlots:
    """The slots of the other end's pool that are here now.

    Args:
        count: how many the pool has.
        slot_bytes: the size of each.
    """

    def __init__(self, count: int, slot_bytes: int) -> None:
        self._count = count
        self._slot_bytes = slot_bytes
        self._here: set[int] = set()

    @property
    def here(self) -> int:
        """How many are here."""
        return len(self._here)

    def arrived(self, message: FilledMessage) -> None:
        """Take a slot.

        Raises:
            ProtocolError: there is no such slot, it is here already, or it is not that large.
        """
        if message.slot >= self._count:
            raise _broken(f"slot {message.slot} of a pool of {self._count}")
        if message.length > self._slot_bytes:
            raise _broken(f"{message.length} bytes in a slot of {self._slot_bytes}")
        if message.slot in self._here:
            raise _broken("a slot is lent twice")
        self._here.add(message.slot)

    def given(self, slot: int) -> None:
        """Count a slot as the other end's again: it has been told so, or soon will be."""
        self._here.remove(slot)


class Arrivals:
    """What has come of one move and was not yet copied out of its slots, in order."""

    def __init__(self) -> None:
        self._waiting: deque[FilledMessage] = deque()
        self._due: int | None = None
        self._nbytes = 0

    def open(self, nbytes: int) -> None:
        """Set how many bytes the move still has, now that there is a place for them.

        Raises:
            ProtocolError: more have come.
        """
        self._due = nbytes
        self._check()

    def add(self, message: FilledMessage) -> None:
        """Take what has come.

        Raises:
            ProtocolError: it is more than the move has.
        """
        self._waiting.append(message)
        self._nbytes += message.length
        self._check()

    def next(self) -> FilledMessage | None:
        """Take the next that is to be copied out; None if nothing more has come."""
        return self._waiting.popleft() if self._waiting else None

    def _check(self) -> None:
        if self._due is not None and self._nbytes > self._due:
            raise _broken("more bytes than the move has")


def _broken(why: str) -> ProtocolError:
    return ProtocolError("shared memory", why=why)
