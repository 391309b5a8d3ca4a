"""Who wants to open a stream while the peer allows none waits in a queue.

Each further stream wakes one of those who wait, and not all of them to have all but one wait again:
a thousand calls at once would otherwise cost a thousand times a thousand looks.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

__all__ = ["Slots"]


class Slots:
    """The queue for the stream slots of one connection.

    Args:
        is_free: whether one more stream may be opened now, or nobody needs to wait any more.
    """

    def __init__(self, is_free: Callable[[], bool]) -> None:
        self._is_free = is_free
        self._queue: dict[object, anyio.Event] = {}
        self._given_at = 0.0

    def take(self) -> bool:
        """Whether who comes now may open a stream at once: nobody has come before."""
        return not self._queue and self._is_free()

    def give(self) -> None:
        """Note that there are slots again, or that there is nothing to wait for any more."""
        if self._queue:
            self._given_at = anyio.current_time()
            self._wake_next()

    async def wait(self, limit: float, patience: float) -> bool:
        """Wait for a slot, which is to be used before anything else is awaited.

        Args:
            limit: seconds for all of it.
            patience: seconds that may pass without a slot for anybody.

        Returns:
            Whether there is one.
        """
        began, me = anyio.current_time(), object()
        self._queue[me] = anyio.Event()

        def end() -> float:
            return min(began + limit, max(began, self._given_at) + patience)

        try:
            while not self._queue[me].is_set() or not self._is_free():
                if self._queue[me].is_set():
                    self._queue[me] = anyio.Event()  # in the same place
                elif end() <= anyio.current_time():
                    return False
                with anyio.CancelScope(deadline=end()):
                    await self._queue[me].wait()
            return True
        finally:
            del self._queue[me]
            # It runs once this one has used its slot, or has left it to others.
            self._wake_next()

    def _wake_next(self) -> None:
        for event in self._queue.values():
            event.set()
            break
