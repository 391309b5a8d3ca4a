"""The limit on a move that makes no progress, the same on every lane."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from tensor_bridge.memory import CHUNK_BYTES
from transport import DeadlineExceeded

__all__ = ["Stalls"]

EXACTNESS = 64
"""The time for a chunk is kept to within one part of so many: to set a timer takes longer than to
copy a page, and there are thousands of chunks in a second."""


class Stalls:
    """Cancels its scope when `CHUNK_BYTES` of a move take too long.

    So a peer can't hold memory or a token by sending a byte now and then: below 9 kB/s by default,
    a move fails. To be made where the scope is entered, at once.

    Args:
        seconds: how long they may take.
        moved: told of all progress as well.
    """

    def __init__(self, seconds: float, moved: Callable[[int], object]) -> None:
        self._since = anyio.current_time()
        self.scope = anyio.CancelScope(deadline=self._since + seconds)
        self._seconds = seconds
        self._moved = moved
        self._missing = CHUNK_BYTES

    def progressed(self, count: int) -> None:
        """Count bytes that have moved."""
        self._missing -= count
        if self._missing <= 0:
            self._missing = CHUNK_BYTES
            now = anyio.current_time()
            if now - self._since > self._seconds / EXACTNESS:
                self._since = now
                self.scope.deadline = now + self._seconds
        self._moved(count)

    def error(self, peer: object, stage: str) -> DeadlineExceeded:
        """Return what to raise when the scope was cancelled by its deadline."""
        return DeadlineExceeded(
            "move of a tensor",
            peer=peer,
            stage=stage,
            after=self._seconds,
            why=f"no progress of {CHUNK_BYTES} bytes",
            fix="Give it more time, or look whether the peer and the way to it are overloaded.",
        )
