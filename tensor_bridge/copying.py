"""Large copies: in turns of the event loop, outside the GIL, by two threads where two can run.

One thread moves 64 MiB between memory that was touched before in 12 ms, two in 6. The second is
there for one copy alone, and copies only while the first does: between two turns nobody touches
the memory, so that whoever is cancelled there may let go of it.
"""

from __future__ import annotations

import _thread
import ctypes
import os
from collections.abc import Callable, Iterator

import anyio.lowlevel

from tensor_bridge.errors import TensorChanged
from tensor_bridge.huge_pages import HUGE_PAGE, collapse

__all__ = ["TURN_BYTES", "copy_in_turns", "copy_now"]

TURN_BYTES = 16 << 20
"""Bytes copied before others on the event loop have their turn: one to two milliseconds. What runs
in between takes a fifth of one, for the copy has left nothing else in the caches."""

FRESH_TURN_BYTES = 4 * HUGE_PAGE
"""The same for memory that is touched for the first time, which takes two to five times as long."""

PIECE, LEAST_PIECE = 4 << 20, 1 << 18
"""Bytes that one thread copies before it takes the next piece: a quarter of what is left of a turn,
within these bounds, so that both end together."""

SHARED_FROM = 4 << 20
"""Bytes from which on a second thread is worth its start."""


async def copy_in_turns(
    target: memoryview,
    source: memoryview,
    moved: Callable[[int], object],
    *,
    is_intact: Callable[[], bool] = lambda: True,
    fresh: int = 0,
) -> None:
    """Copy `source` to `target`, which is as long; both writable.

    Args:
        moved: told of the bytes of each turn.
        is_intact: asked before each turn whether `source` is still there.
        fresh: how much memory of a descriptor, that nobody has touched yet, `target` is the
            beginning of.

    Raises:
        TensorChanged: it is not.
        Exception: what `moved` has raised.
    """
    turn = FRESH_TURN_BYTES if fresh else TURN_BYTES
    with _Copy(target, source, fresh) as copy:
        for start in range(0, len(source), turn):
            if not is_intact():
                raise TensorChanged("reading of a tensor", why="its storage was resized meanwhile")
            end = min(start + turn, len(source))
            copy.run(start, end)
            moved(end - start)
            await anyio.lowlevel.checkpoint()


def copy_now(target: memoryview, source: memoryview, *, fresh: int = 0) -> None:
    """Copy `source` to `target`, which is as long, at once; arguments as `copy_in_turns`."""
    with _Copy(target, source, fresh) as copy:
        copy.run(0, len(source))


class _Copy:
    """One copy, and the thread that helps with it."""

    def __init__(self, target: memoryview, source: memoryview, fresh: int) -> None:
        if len(target) != len(source):
            raise ValueError("the two are not of one length")
        self._held = [(ctypes.c_ubyte * len(each)).from_buffer(each) for each in (target, source)]
        self._target, self._source = map(ctypes.addressof, self._held)
        self._pieces: Iterator[tuple[int, int]] = iter(())
        self._lock = _thread.allocate_lock()
        self._begin, self._ended = _thread.allocate_lock(), _thread.allocate_lock()
        self._is_over = False
        self._fresh = fresh
        self._is_helped = len(source) >= SHARED_FROM and len(os.sched_getaffinity(0)) > 1

    def __enter__(self) -> _Copy:
        if self._is_helped:
            self._begin.acquire()
            self._ended.acquire()
            try:
                # Not threading.Thread: to see it start and end takes as long as to copy megabytes.
                _thread.start_new_thread(self._help, ())
            except RuntimeError:  # the system has no more of them, or the interpreter ends
                self._is_helped = False
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_helped:
            self._is_over = True
            self._begin.release()
        self._held.clear()

    def run(self, start: int, end: int) -> None:
        """Copy the bytes from `start` to `end`."""
        self._pieces = self._cut(start, end)
        if not self._is_helped:
            self._take_pieces()
            return
        self._begin.release()
        try:
            self._take_pieces()
        finally:
            self._ended.acquire()

    def _cut(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        while start < end:
            most = HUGE_PAGE if self._fresh else max(LEAST_PIECE, (end - start) // 4)
            size = min(PIECE, most, end - start)
            yield start, size
            start += size

    def _help(self) -> None:
        while True:
            self._begin.acquire()
            if self._is_over:
                return
            try:
                self._take_pieces()
            finally:
                self._ended.release()

    def _take_pieces(self) -> None:
        while True:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            at, size = piece
            if at + HUGE_PAGE <= self._fresh and not collapse(self._target + at):
                self._fresh = 0
            ctypes.memmove(self._target + at, self._source + at, size)  # without the GIL
