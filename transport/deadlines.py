"""Deadlines of many waits at once, under one alarm.

A cancel scope for each wait costs more than most waits take. Nearly all end long before their
deadline, and so nothing is done here but to note it; the alarm stands at the earliest that was
noted, and who it finds late is woken.
"""

from __future__ import annotations

import math
import time
from numbers import Real

import anyio

from transport.errors import TransportError
from transport.readiness import Alarm, CallbackLoop, callback_loop

__all__ = ["Deadlines", "Wait", "seconds_of"]


def seconds_of(timeout: float) -> float:
    """Return a timeout that somebody gives, if it is one: infinity is, for as long as it takes.

    Raises:
        TransportError: it is negative, not a number, or of another type.
    """
    given: object = timeout
    if isinstance(given, Real) and timeout >= 0:
        return timeout
    raise TransportError(
        "a timeout",
        why=f"it is {timeout!r}, not a number of seconds from 0 on",
        fix="Give seconds, as in timeout=5.0, or leave it out for the default.",
    )


class Deadlines:
    """Ends the waits whose time has come. Times are of `time.monotonic`."""

    def __init__(self) -> None:
        self._alarm = Alarm(self._ring)
        self._waits: dict[Wait, float] = {}
        self._loop: CallbackLoop | None = None
        self._knows_loop = False

    async def run(self) -> None:
        """Watch over the waits, until cancelled."""
        await self._alarm.run()

    def begin(self, deadline: float) -> Wait:
        """Return a wait that ends at `deadline` at the latest, for one task, to be waited for."""
        if not self._knows_loop:
            self._loop, self._knows_loop = callback_loop(), True
        return Wait(self, deadline, self._loop)

    def _ring(self) -> None:
        now = time.monotonic()
        earliest = math.inf
        late: list[Wait] = []
        for wait, deadline in self._waits.items():
            if deadline <= now:
                late.append(wait)
            else:
                earliest = min(earliest, deadline)
        for wait in late:
            del self._waits[wait]
            wait.end()
        self._alarm.set(earliest)


class Wait:
    """One task's wait for one thing.

    Where the event loop has futures, it is one: an `anyio.Event` is made for many who wait, and
    costs twice as much.
    """

    __slots__ = ("_book", "_deadline", "_event", "_future", "is_woken")

    def __init__(self, book: Deadlines, deadline: float, loop: CallbackLoop | None) -> None:
        self._book = book
        self._deadline = deadline
        self._future = None if loop is None else loop.create_future()
        self._event = anyio.Event() if loop is None else None
        self.is_woken = False
        """Whether it was woken, and did not end for want of time."""

    async def over(self) -> bool:
        """Wait until `wake` is called; return whether it was, before the deadline."""
        self._book._waits[self] = self._deadline
        self._book._alarm.set(self._deadline)
        try:
            if self._future is not None:
                await self._future
            elif self._event is not None:
                await self._event.wait()
        finally:
            self._book._waits.pop(self, None)
        return self.is_woken

    def wake(self) -> None:
        """What was waited for has come."""
        self.is_woken = True
        self.end()

    def end(self) -> None:
        """Have `over` return."""
        if self._event is not None:
            self._event.set()
        elif self._future is not None and not self._future.done():
            self._future.set_result(None)
