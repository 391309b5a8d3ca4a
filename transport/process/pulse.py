"""Whether the other one of a program and its endpoint process goes on. Clockless.

A process that is killed leaves a descriptor that tells of it. One that is stopped, frozen with its
container, or stuck in its event loop does not: it falls silent. Silence alone would give up a
program that computes, or one that is swapped in; one that takes no time of a processor either does
neither.
"""

from __future__ import annotations

import time

__all__ = ["LOOKS", "Pulse", "processor_time"]

LOOKS = 6
"""How often within the bound to look, and to say something."""

LATE_SHARE = 1 / 3
"""By how much of the bound a look may be late. Later, it was this process that did not go on."""


class Pulse:
    """Told the time with every call.

    Args:
        bound: seconds without a word, and without work, after which the other is lost.
        now: the time.
    """

    def __init__(self, bound: float, now: float) -> None:
        self._bound = bound
        self._lost_at = now + bound
        self._looked_at = now
        self._worked: float | None = None

    def heard(self, now: float) -> None:
        """The other has said something."""
        self._lost_at = now + self._bound

    def is_lost(self, now: float, worked: float | None) -> bool:
        """Return whether the other is to be given up at `now`.

        Args:
            now: the time; to be asked several times within the bound.
            worked: processor time that the other has taken, as `processor_time` tells it.
        """
        if worked is not None and worked != self._worked:
            self._worked = worked
            self._lost_at = now + self._bound
        grace = self._bound * LATE_SHARE
        if now - self._looked_at > grace:
            # What the other has said meanwhile still waits to be heard.
            self._lost_at = max(self._lost_at, now + grace)
        self._looked_at = now
        return now >= self._lost_at


def processor_time(process: int) -> float | None:
    """Return the seconds of a processor that all threads of a process have taken, None if unknown.

    The clock is that of ``clock_getcpuclockid(3)``, whose number Linux makes of the process id.
    """
    try:
        return time.clock_gettime((~process << 3) | 2)
    except OSError:
        return None
