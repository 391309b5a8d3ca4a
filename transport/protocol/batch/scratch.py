"""Memory that is used again from batch to batch, for as long as there is much to do."""

from __future__ import annotations

__all__ = ["Scratch"]

KEPT_FROM = 1 << 14
"""From this size on memory is worth keeping: new pages cost more than what is done with them."""


class Scratch:
    """One buffer, kept while large ones are asked for: an idle connection holds none."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: bytearray | None = None

    def get(self, size: int) -> bytearray:
        """Return a buffer of at least `size` bytes, with anything in it, until the next call."""
        if size < KEPT_FROM:
            self._kept = None
            return bytearray(size)
        if self._kept is None or len(self._kept) < size:
            self._kept = bytearray(size)
        return self._kept
