"""When the next packets may leave: in batches, as an event loop's timer can't time single ones."""

from __future__ import annotations

import math
from typing import Protocol

__all__ = ["BatchPacer", "PacedController"]

TIMER_SECONDS = 0.001
"""What a timer of an event loop is good for."""

BURST_SECONDS = 0.004
"""How much may leave at once, as time at the rate: a loop that was late makes up for it."""

BURST_PACKETS = 10
"""... and at least this many packets (RFC 9002 section 7.7)."""

UNPACED_ROUND_TRIP = 0.002
"""Within a host or a rack acknowledgements come faster than any timer: they are the clock."""

WINDOW_PACING_GAIN = 1.25
"""For controllers that know no rate, only a window (RFC 9002 section 7.7)."""


class PacedController(Protocol):
    """What the pacer asks of a congestion controller that knows a rate."""

    @property
    def pacing_rate(self) -> float:
        """Bytes per second."""


class BatchPacer:
    """Stands for `aioquic.quic.recovery.QuicPacketPacer`: a bucket of bytes, filled at the rate.

    Args:
        controller: asked for its rate if it knows one.
        max_datagram_size: of the path now, in bytes; assigned anew when the path's changes.
    """

    def __init__(self, controller: object, *, max_datagram_size: int) -> None:
        self._max_datagram_size = max_datagram_size
        self._controller = controller
        self._rate = math.inf
        self._bucket = 0.0
        self._filled_at = 0.0

    def packets(self, now: float) -> int:
        """How many full packets may leave now."""
        if self._rate == math.inf:
            return 1 << 16
        self._fill(now)
        return int(self._bucket // self._max_datagram_size)

    def next_send_time(self, now: float) -> float | None:
        """When to ask again; None if a packet may leave now. As upstream."""
        if self._rate == math.inf:
            return None
        self._fill(now)
        missing = self._max_datagram_size - self._bucket
        if missing <= 0:
            return None
        return now + max(missing / self._rate, TIMER_SECONDS)

    def took(self, size: int, now: float) -> None:
        """`size` bytes leave at `now`."""
        if self._rate != math.inf:
            self._fill(now)
            self._bucket -= size

    def update_after_send(self, now: float) -> None:
        """A packet of upstream's leaves, which counts as a full one.

        It may be an acknowledgement, which is sent whether or not pacing lets it (RFC 9002 section
        7.7): however many there are, what comes after them waits for no more than one.
        """
        self.took(self._max_datagram_size, now)
        self._bucket = max(self._bucket, -float(self._max_datagram_size))

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        """Ask the controller for the rate, or derive it. As upstream."""
        if getattr(self._controller, "shortest", smoothed_rtt) < UNPACED_ROUND_TRIP:
            self._rate = math.inf
            return
        rate = getattr(self._controller, "pacing_rate", None)
        self._rate = rate or WINDOW_PACING_GAIN * congestion_window / smoothed_rtt

    def _fill(self, now: float) -> None:
        deepest = max(BURST_PACKETS * self._max_datagram_size, BURST_SECONDS * self._rate)
        gained = max(0.0, now - self._filled_at) * self._rate
        self._bucket = min(self._bucket + gained, deepest)
        self._filled_at = max(now, self._filled_at)
