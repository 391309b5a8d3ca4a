"""Tells a silent peer from a quiet one, far below QUIC's idle timeout."""

from __future__ import annotations

import enum

__all__ = ["Liveness", "Verdict"]

QUIET_SHARE = 1 / 3
"""How much of the bound a peer may be quiet before it is asked whether it is there."""

REPEAT_SHARE = 1 / 12
"""... and after how much more it is asked again: eight times in all, so that a live peer on a link
that loses every tenth packet is taken for lost once in years, not once a day."""

SUSPECT_SECONDS = 0.3
"""How long a peer may take to answer after its host reported the port closed; more on a path that
is slower than that."""


class Verdict(enum.Enum):
    """What to do now."""

    WAIT = enum.auto()
    PROBE = enum.auto()
    LOST = enum.auto()


class Liveness:
    """Clockless: told the time with every call.

    Args:
        bound: seconds of silence after which the peer is lost.
        now: when the peer was last heard.
    """

    def __init__(self, bound: float, now: float) -> None:
        self._bound = bound
        self._quiet = bound * QUIET_SHARE
        self._repeat = bound * REPEAT_SHARE
        self._heard_at = now
        self._next_at = now + self._quiet
        self._lost_at = now + bound
        self.is_suspect = False
        """Whether somebody says that the peer is gone, and it was not heard since."""

    @property
    def deadline(self) -> float:
        """When `check` wants to be called next."""
        return min(self._next_at, self._lost_at)

    def silence(self, now: float) -> float:
        """Seconds since the peer was last heard."""
        return now - self._heard_at

    def heard(self, now: float) -> None:
        """An authentic packet arrived."""
        self._heard_at = now
        self._next_at = now + self._quiet
        self._lost_at = now + self._bound
        self.is_suspect = False

    def suspect(self, now: float, answer_time: float) -> None:
        """A hint, forgeable like any ICMP, says the peer is gone: ask it, and decide soon.

        `answer_time` is what the path needs to carry an answer, in seconds.
        """
        self.is_suspect = True
        self._next_at = min(self._next_at, now)
        self._lost_at = min(self._lost_at, now + max(SUSPECT_SECONDS, answer_time))

    def check(self, now: float) -> Verdict:
        """Return what to do at `now`."""
        late = now - self.deadline
        if late > self._quiet:
            # We did not run ourselves (stopped, swapped out, a blocked loop): the silence may be
            # ours. Give what waits in the socket, and the peer, as long as a quiet peer has.
            self._lost_at = max(self._lost_at, now + self._quiet)
            self._next_at = now
        if now >= self._lost_at:
            return Verdict.LOST
        if now >= self._next_at:
            self._next_at = now + self._repeat
            return Verdict.PROBE
        return Verdict.WAIT
