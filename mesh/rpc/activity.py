"""What a node has under way in remote calls: its own, and those that it answers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

__all__ = ["Activity"]


class Activity:
    """Counts what begins and ends. Safe for many threads.

    Attributes:
        begun: calls that this node has made so far.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._open = 0
        self._quiet = threading.Condition()

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Count a call of this node's for the block."""
        with self._quiet:
            self.begun += 1
        with self.answering():
            yield

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a call of a peer's for the block."""
        with self._quiet:
            self._open += 1
        try:
            yield
        finally:
            with self._quiet:
                self._open -= 1
                if not self._open:
                    self._quiet.notify_all()

    def until_quiet(self, end: float) -> bool:
        """Wait until nothing is under way; return whether that was before `end` (monotonic)."""
        with self._quiet:
            left = min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX)
            return self._quiet.wait_for(lambda: not self._open, left)
