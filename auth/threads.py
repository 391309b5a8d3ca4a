"""Worker threads for functions that may hang: never more than a few, however often one is asked.

Event loops count a thread that was abandoned as free again, and so a function that hangs would take
another thread with every question. Here a place is given back by the thread itself.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

__all__ = ["MAX_THREADS", "run_in_thread"]

MAX_THREADS = 8
"""Threads of this process for such functions. Those that hang use these up and nothing else."""

POLL_SECONDS = 0.02
"""How often a function looks for a place that has come free."""

_T = TypeVar("_T")

_places = threading.BoundedSemaphore(MAX_THREADS)


async def run_in_thread(function: Callable[[], _T]) -> _T:
    """Run `function` in a thread and return its result; when cancelled, leave it behind there.

    Waits as long as `MAX_THREADS` of them run.
    """
    while not _places.acquire(blocking=False):  # noqa: ASYNC110 - a thread of any loop frees it
        await anyio.sleep(POLL_SECONDS)
    place = _Place()
    try:
        return await anyio.to_thread.run_sync(
            lambda: place.occupy(function),
            abandon_on_cancel=True,
            limiter=anyio.CapacityLimiter(math.inf),
        )
    finally:
        place.leave()


class _Place:
    """One acquired place, given back once: by its thread, or by who finds that none has begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False

    def occupy(self, function: Callable[[], _T]) -> _T:
        if not self._take():
            raise RuntimeError("nobody waits for this any more")
        try:
            return function()
        finally:
            _places.release()

    def leave(self) -> None:
        if self._take():
            _places.release()

    def _take(self) -> bool:
        with self._lock:
            first, self._taken = not self._taken, True
            return first
