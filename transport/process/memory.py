"""Shared memory between a program and its endpoint process, for bytes on their way.

One piece of anonymous memory, inherited by the process, sealed against resizing. The program cuts
pieces out of it, fills and empties them, and says in records what is where; the process seals
packets from them and opens packets into them. Pages that were never used take no memory; the first
piece that fits is taken, so that pages are used again, and those of a while ago go back.

What goes out is copied with the interpreter's lock held: a piece takes a third of a millisecond,
while a thread that lets go of the lock beside one which computes gets it back after five and more.
What has come in may be many times that, and there is memory for what comes meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys

from transport.errors import ProtocolError

if sys.platform == "linux":
    import fcntl

__all__ = ["SharedMemory", "map_memory"]

TOTAL_BYTES = 256 << 20
"""In all. Where there is no more, bytes take the way of small ones."""

UNLOCKED_BYTES = 1 << 20
"""From this size on, what has come in is copied without the interpreter's lock."""

GRAIN = 1 << 16
"""Pieces begin at multiples of this."""


class SharedMemory:
    """The program's side: which pieces are free, and what is written to and read from them.

    Raises:
        OSError: the system has no such memory.
        AttributeError: the interpreter was built where there was none.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("quicmesh", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, TOTAL_BYTES)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _seals())
            self._map = mmap.mmap(self.descriptor, TOTAL_BYTES)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._view = memoryview(self._map)
        self._free = [(0, TOTAL_BYTES)]
        self._used = 0

    @property
    def free(self) -> int:
        """How many bytes nobody has."""
        return sum(size for _, size in self._free)

    def take(self, size: int) -> int | None:
        """Return where a piece of `size` bytes begins that is the caller's now; None: no room."""
        size = _rounded(size)
        for index, (at, room) in enumerate(self._free):
            if room >= size:
                if room == size:
                    del self._free[index]
                else:
                    self._free[index] = at + size, room - size
                self._used = max(self._used, at + size)
                return at
        return None

    def give(self, at: int, size: int) -> None:
        """Take a piece back."""
        free = sorted([*self._free, (at, _rounded(size))])
        joined: list[tuple[int, int]] = []
        for start, length in free:
            if joined and sum(joined[-1]) == start:
                joined[-1] = joined[-1][0], joined[-1][1] + length
            else:
                joined.append((start, length))
        self._free = joined

    def fill(self, at: int, data: memoryview) -> None:
        """Copy `data` to `at`."""
        self._view[at : at + len(data)] = data

    def empty(self, at: int, target: memoryview) -> None:
        """Fill `target` with what lies at `at`."""
        source = self._view[at : at + len(target)]
        if len(source) < UNLOCKED_BYTES:
            target[:] = source
        else:
            ctypes.memmove(_address(target), _address(source), len(source))

    def trim(self) -> None:
        """Give pages back to the system that no piece has."""
        for at, size in self._free:
            used = min(at + size, self._used) - at
            if used > 0:
                with contextlib.suppress(OSError, ValueError):
                    self._map.madvise(mmap.MADV_REMOVE, at, used)
        self._used = 0 if self._free == [(0, TOTAL_BYTES)] else self._used

    def close(self) -> None:
        """Let go of the memory. May be repeated."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            with contextlib.suppress(BufferError):  # a forked child may find it amid a copy
                self._view.release()
                self._map.close()


def map_memory(descriptor: int) -> memoryview:
    """Map all of it, in the process that is given `descriptor`, which stays the caller's.

    Raises:
        ProtocolError: it is of another size, or may be made so.
        OSError: it is no such memory.
    """
    size = os.fstat(descriptor).st_size
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    if size != TOTAL_BYTES or seals & _seals() != _seals():
        raise ProtocolError("the endpoint process", why=f"shared memory of {size} bytes")
    return memoryview(mmap.mmap(descriptor, size))


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _rounded(size: int) -> int:
    return -(-size // GRAIN) * GRAIN
