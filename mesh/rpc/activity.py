"""What a node has under way in remote calls: its own, and those that it answers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator

__all__ = ["Activity"]


class Activity:
    """Counts what begins and ends. Safe for many threads.

    Attributes:
        begun: calls that this node has made so far, and streams that it has begun to read.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._open = 0
        self._streams: Counter[str] = Counter()
        self._quiet = threading.Condition()

    def begin(self, stream: str = "") -> None:
        """Count a call of this node's, or a stream that it reads, until `end`."""
        with self._quiet:
            self.begun += 1
            self._add(stream)

    def end(self, stream: str = "") -> None:
        """Count no longer what has begun."""
        with self._quiet:
            self._open -= 1
            if stream:
                self._streams -= Counter((stream,))
            if not self._open:
                self._quiet.notify_all()

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Count a call of this node's for the block."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    @contextlib.contextmanager
    def answering(self, stream: str = "") -> Iterator[None]:
        """Count a call of a peer's, or a stream that it reads here, for the block."""
        with self._quiet:
            self._add(stream)
        try:
            yield
        finally:
            self.end(stream)

    def until_quiet(self, end: float) -> bool:
        """Wait until nothing is under way; return whether that was before `end` (monotonic)."""
        with self._quiet:
            left = min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX)
            return self._quiet.wait_for(lambda: not self._open, left)

    def described(self) -> list[str]:
        """Return what is under way, for people."""
        with self._quiet:
            streams, calls = sorted(self._streams), self._open - self._streams.total()
        return [f"{calls} calls of this worker's own"] * bool(calls) + streams

    def _add(self, stream: str) -> None:
        self._open += 1
        if stream:
            self._streams[stream] += 1
