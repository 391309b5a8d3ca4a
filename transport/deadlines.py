"""Deadlines of many waits at once, under one alarm.

A cancel scope for each wait costs more than most waits take. Nearly all end long before their
deadline, and so nothing is done here but to note it; the alarm stands at the earliest that was
noted, and who it finds late is woken.
"""

from __future__ import annotations

import math
import time

import anyio

from transport.readiness import Alarm

__all__ = ["Deadlines"]


class Deadlines:
    """Ends the waits whose time has come. Times are of `time.monotonic`."""

    def __init__(self) -> None:
        self._alarm = Alarm(self._ring)
        self._waits: dict[anyio.Event, float] = {}

    async def run(self) -> None:
        """Watch over the waits, until cancelled."""
        await self._alarm.run()

    async def wait(self, event: anyio.Event, deadline: float) -> None:
        """Wait for `event`, which nobody else waits for here; it is set at `deadline` anyway."""
        self._waits[event] = deadline
        self._alarm.set(deadline)
        try:
            await event.wait()
        finally:
            self._waits.pop(event, None)

    def _ring(self) -> None:
        now = time.monotonic()
        earliest = math.inf
        late: list[anyio.Event] = []
        for event, deadline in self._waits.items():
            if deadline <= now:
                late.append(event)
            else:
                earliest = min(earliest, deadline)
        for event in late:
            del self._waits[event]
            event.set()
        self._alarm.set(earliest)
