"""Shares out an endpoint's time, so that one peer's requests do not crowd out what others do.

A peer may open streams as fast as its credit comes back, and each takes a handler's time: half a
millisecond of it and more, while a batch of somebody's bulk data takes a quarter of that. First
come, first served would give nearly all of the time to who asks most. So the time that each peer's
handlers take is measured, and while the endpoint has more to do than it can, and others are busy
too, requests begin no faster than their part of it allows. The ones that wait take up their peer's
stream credit, which is the back-pressure that stops it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

__all__ = ["ADVANCE", "Turns"]

HANDLERS_SHARE = 0.2
"""The part of an endpoint's time that requests of those who ask most have together while it is
full. What it takes to read their datagrams comes on top."""

BURST_SECONDS = 0.02
"""What the handlers of one peer may take at once."""

ADVANCE = 0.0005
"""What a request is taken to cost until it is known, in seconds, and at least."""

WINDOW_SECONDS = 0.02
"""How often it is looked at who is busy and whether the endpoint is full."""

BUSY_SECONDS = 0.0003
"""Spent on a connection in one window, this makes it a busy one: a batch, or a small call."""


class Turns:
    """The account of who took an endpoint's time. Times in seconds, of any monotonic clock."""

    def __init__(self) -> None:
        self._left: dict[Hashable, tuple[float, float]] = {}
        self._spent: dict[Hashable, float] = {}
        self._busy: dict[Hashable, float] = {}
        self._looks = self._looks_left_some = 0
        self._is_full = False
        self._began = -math.inf

    def spend(self, owner: Hashable, seconds: float) -> None:
        """Take note of time spent on datagrams of `owner`."""
        self._spent[owner] = self._spent.get(owner, 0.0) + seconds

    def looked(self, now: float, *, more: bool) -> None:
        """Datagrams were taken from the socket for one turn of the loop, and `more` were left."""
        self._looks += 1
        self._looks_left_some += more
        if now - self._began > WINDOW_SECONDS:
            self._is_full = 2 * self._looks_left_some > self._looks
            self._looks = self._looks_left_some = 0
            self._busy, self._spent = self._spent, {}
            self._began = now
            self._settle(now)

    def serve(self, owner: Hashable, seconds: float, now: float) -> None:
        """Take note of time that a handler of `owner` takes or will take."""
        self._left[owner] = (self._gained(owner, now) - seconds, now)

    def delay(self, owner: Hashable, now: float) -> float:
        """Return how long the next request of `owner` has to wait; 0 if it may begin."""
        if not self._is_crowded(owner, now):
            self._left.pop(owner, None)
            return 0.0
        left = self._gained(owner, now)
        return 0.0 if left > 0 else -left / self._rate() + 0.001

    def forget(self, owner: Hashable) -> None:
        """`owner` is gone."""
        self._left.pop(owner, None)

    def _is_crowded(self, owner: Hashable, now: float) -> bool:
        """Whether there is too much to do, for others than `owner` too."""
        if not self._is_full or now - self._began > 2 * WINDOW_SECONDS:
            return False
        return any(
            seconds >= BUSY_SECONDS for other, seconds in self._busy.items() if other is not owner
        )

    def _gained(self, owner: Hashable, now: float) -> float:
        left, at = self._left.get(owner, (BURST_SECONDS, now))
        return min(BURST_SECONDS, left + (now - at) * self._rate())

    def _settle(self, now: float) -> None:
        """Bring all accounts up to date; forget those who owe nothing."""
        for owner in list(self._left):
            left = self._gained(owner, now)
            if left < BURST_SECONDS:
                self._left[owner] = (left, now)
            else:
                del self._left[owner]

    def _rate(self) -> float:
        return HANDLERS_SHARE / max(1, sum(left < 0 for left, _ in self._left.values()))
