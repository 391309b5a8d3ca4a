"""Ranges of offsets, found by bisection: a peer chooses how many there are, and how they lie."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

__all__ = ["Ranges"]


class Ranges:
    """Disjoint ranges in order; those that touch are one.

    Stands for `aioquic.quic.rangeset.RangeSet`, which searches from the first.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def first(self) -> range:
        """The first range."""
        return range(self._starts[0], self._stops[0])

    def add(self, start: int, stop: int) -> None:
        """Add ``[start, stop)``, which is not empty."""
        low = bisect_left(self._stops, start)
        high = bisect_right(self._starts, stop)
        if low < high:
            start = min(start, self._starts[low])
            stop = max(stop, self._stops[high - 1])
        self._starts[low:high] = [start]
        self._stops[low:high] = [stop]

    def shift(self) -> range:
        """Remove and return the first range."""
        return range(self._starts.pop(0), self._stops.pop(0))

    def cut(self, stop: int) -> None:
        """Remove what lies before `stop` of the first range."""
        if stop < self._stops[0]:
            self._starts[0] = stop
        else:
            self.shift()

    def clear(self) -> None:
        """Remove all."""
        self._starts.clear()
        self._stops.clear()
