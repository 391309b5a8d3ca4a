"""How long to wait before the next try.

Jittered, so that many who lost the same peer do not all come back at one moment, again and again.
"""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """Pauses that double from `first` to `longest` seconds, each jittered into its upper half.

    Args:
        first: the longest that the first pause can be.
        longest: the longest that any can be.
        uniform: draws between two bounds.
    """

    def __init__(
        self,
        first: float,
        longest: float,
        *,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._first = self._next = first
        self._longest = longest
        self._uniform = uniform

    def pause(self) -> float:
        """Return the seconds to wait now, after one more failure."""
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return self._uniform(pause / 2, pause)

    def reset(self) -> None:
        """Begin with `first` again, after a success."""
        self._next = self._first
