"""When a peer that gives streams up may open others: the answer to rapid resets.

To open a stream and to abort it at once costs a peer a few bytes, and us the making and the ending
of all that belongs to one, about a tenth of a millisecond. The limit on streams that are open at
the same time says nothing about that: such a peer never has more than a few (CVE-2023-44487). But
it opens none without credit, and when to give that is the receiver's choice (RFC 9000 section 4.6).
"""

from __future__ import annotations

__all__ = ["ABORTS_PER_SECOND", "ABORT_BURST", "AbortedStreams"]

ABORTS_PER_SECOND = 1000
"""Streams given up that are replaced in a second, in the long run: a tenth of a processor."""

ABORT_BURST = 256
"""... and as many at once beyond that: twice the streams that are open at the same time by default,
so that a program that cancels all it has asked for goes on without a wait."""

GRANT = 32
"""What waits for its credit gets it by so many, or all at once: each time costs a datagram."""


class AbortedStreams:
    """The streams of a connection that its peer gave up and that are not replaced yet.

    A bucket that holds `ABORT_BURST` streams and fills at `ABORTS_PER_SECOND`.
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._bucket = float(ABORT_BURST)
        self._filled_at = 0.0

    def add(self) -> None:
        """Note that a stream is over that the peer gave up."""
        self._waiting += 1

    def replaced(self, now: float) -> int:
        """Return how many further streams the peer may open from `now` on, in their place."""
        if not self._waiting:
            return 0
        gained = (now - self._filled_at) * ABORTS_PER_SECOND
        self._bucket = min(self._bucket + gained, float(ABORT_BURST))
        self._filled_at = now
        if self._bucket < self._worth_it:
            return 0
        count = min(self._waiting, int(self._bucket))
        self._waiting -= count
        self._bucket -= count
        return count

    @property
    def due(self) -> float | None:
        """When to ask again; None if nothing waits."""
        if not self._waiting:
            return None
        return self._filled_at + (self._worth_it - self._bucket) / ABORTS_PER_SECOND

    @property
    def _worth_it(self) -> int:
        return min(self._waiting, GRANT)
