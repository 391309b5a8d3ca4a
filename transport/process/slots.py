"""Shared memory between a program and its endpoint process: slots for bytes on their way.

One piece of anonymous memory, inherited by the process, sealed against resizing. The program fills
and empties slots by system calls (which let other threads run meanwhile) and says in records what
is where; the process has all of it mapped, and seals packets from it and opens them into it. Pages
that were never used take no memory; used ones are used again, the latest first.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import Final

if sys.platform == "linux":
    import fcntl

__all__ = ["SLOT_BYTES", "STREAM_SLOTS", "Slots", "map_slots"]

SLOT_BYTES: Final = 2 << 20
"""Copied in a third of a millisecond."""

SLOT_COUNT = 32
"""In all; where there are no more, bytes take the way of small ones."""

STREAM_SLOTS = 4
"""Those of one stream: what is on its way while the program has other things to do."""


class Slots:
    """The program's side: which slots are free, and what is written to and read from them.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("quicmesh", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, SLOT_COUNT * SLOT_BYTES)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._free = list(range(SLOT_COUNT))

    @property
    def free(self) -> int:
        """How many slots nobody has."""
        return len(self._free)

    def take(self) -> int | None:
        """Return a slot that is the caller's until it is given back; None if there is none."""
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        """Take a slot back."""
        self._free.append(slot)

    def fill(self, slot: int, data: memoryview) -> None:
        """Copy `data`, at most a slot of it, to the beginning of `slot`."""
        done = 0
        while done < len(data):
            done += os.pwrite(self.descriptor, data[done:], slot * SLOT_BYTES + done)

    def empty(self, slot: int, at: int, target: memoryview) -> None:
        """Fill `target` with what lies in `slot` from `at` on."""
        done = 0
        while done < len(target):
            done += os.preadv(self.descriptor, [target[done:]], slot * SLOT_BYTES + at + done)

    def close(self) -> None:
        """Let go of the memory. May be repeated."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def map_slots(descriptor: int) -> memoryview:
    """Map all slots, in the process that inherits `descriptor`; it stays the caller's."""
    return memoryview(mmap.mmap(descriptor, SLOT_COUNT * SLOT_BYTES))
