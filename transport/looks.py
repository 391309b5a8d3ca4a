"""How often a bulk transfer is looked at: as suits its speed."""

from __future__ import annotations

import time

__all__ = ["LookStep"]

LEAST_STEP, GREATEST_STEP = 1 << 18, 1 << 22
"""How much of a bulk transfer moves between two looks at it, in bytes: less when it is slow, so
that a deadline can be kept to, more when it is fast, as a look costs as much as a batch."""

LOOK_SECONDS = 0.005
"""What should pass between two looks."""


class LookStep:
    """Suits the distance between two looks at a transfer to its speed.

    Args:
        seconds: what should pass between two looks.
        greatest: bytes that may move between them.
    """

    def __init__(self, *, seconds: float = LOOK_SECONDS, greatest: int = GREATEST_STEP) -> None:
        self._seconds = seconds
        self._greatest = greatest
        self._size = LEAST_STEP
        self._at = time.monotonic()

    def after(self, done: int, total: int) -> int:
        """Return how many bytes should have moved at the next look, when `done` have."""
        return min((done // self._size + 1) * self._size, total)

    def looked(self) -> None:
        """A look was taken."""
        now = time.monotonic()
        if now - self._at < self._seconds:
            self._size = min(2 * self._size, self._greatest)
        else:
            self._size = max(self._size // 2, LEAST_STEP)
        self._at = now
