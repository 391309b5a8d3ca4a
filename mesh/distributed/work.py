"""What a collective call returns: a Work, and the future behind it.

Rules learned the hard way, all of them about torch's C++ side:

* ``Future.set_exception`` stores the exception as a *value*, and a Reducer that reads it crashes.
  The future handed out is ``base.then(callback)`` with a callback that raises: a real error.
* ``wait()`` must not return before that future is complete: C++ reads its value right after.
* Callbacks of a future run on the thread that completes it, and may wait for a second collective
  of the same group. So futures are never completed on the group's operation thread; a waiter that
  finds its operation over completes the future itself.

Most works are only waited for, if that: there is no future, and nothing to wait on, until somebody
asks for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from mesh.collective import CollectiveTimeout
from mesh.distributed.streams import Turn

__all__ = ["MeshWork"]

GRACE_SECONDS = 5.0
"""How far beyond its deadline an operation may end before a waiter stops believing that it will."""


class MeshWork(Work):
    """One operation of a process group, from its issue to its end.

    Args:
        what: the operation, for messages.
        result: what ``result()`` and the future give: the caller's tensors.
        deadline: when the operation ends by itself at the latest, on ``time.monotonic``'s clock.
        turns: its places among the streams of devices that its tensors are on.

    Attributes:
        what: as given.
        deadline: as given.
        turns: as given.
        source: for a receive that is over, the rank it is from; else -1.
        began: when it was issued.
    """

    source = -1
    _ended: float | None = None
    _error: BaseException | None = None
    _is_over = False
    _latch: threading.Lock | None = None
    _claim: threading.Lock | None = None
    _base: torch.futures.Future[Any] | None = None
    _future: torch.futures.Future[Any] | None = None

    def __init__(self, what: str, result: Any, deadline: float, turns: Sequence[Turn] = ()) -> None:
        super().__init__()
        self.what = what
        self.deadline = deadline
        self.turns = turns
        self.began = time.monotonic()
        self._result = result
        self._lock = threading.Lock()

    # What C++ and torch.distributed call.

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end of the operation; results are in the tensors then.

        Args:
            timeout: for this wait only; zero or less waits as long as the operation may take.

        Raises:
            CollectiveError: the operation failed, or did not end in time.
        """
        if not self._is_over:
            self._await_end(timeout.total_seconds())
        with self._lock:  # one that is just being made is there
            future = self._future
        if future is not None:
            self.complete()
            with contextlib.suppress(Exception):  # raised below, as itself
                future.wait()
        if self._error is not None:
            raise self._error
        for turn in self.turns:
            turn.follow()
        return True

    def _await_end(self, seconds: float) -> None:
        now = time.monotonic()
        end = self.deadline + GRACE_SECONDS
        if seconds > 0:
            end = min(end, now + seconds)
        with self._lock:
            if self._is_over:
                return
            if self._latch is None:
                self._latch = threading.Lock()
                self._latch.acquire()
        if not self._latch.acquire(timeout=min(max(end - now, 0.0), threading.TIMEOUT_MAX)):
            raise CollectiveTimeout(
                f"wait for {self.what}",
                after=time.monotonic() - self.began,
                why="timed out while the operation goes on",
            )
        self._latch.release()  # the next waiter's turn

    def synchronize(self) -> None:
        """Wait as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation is over, and its future complete."""
        with self._lock:
            future = self._future
        return self._is_over if future is None else future.done()

    def is_success(self) -> bool:
        """Return whether the operation is over and did not fail."""
        return self._is_over and self._error is None

    def exception(self) -> BaseException | None:
        """Return what the operation failed with, or None."""
        return self._error

    def result(self) -> Any:
        """Return the caller's tensors."""
        return self._result

    def source_rank(self) -> int:
        """Return the rank that a receive was from, or -1."""
        return self.source

    def _source_rank(self) -> int:
        return self.source

    def block_current_stream(self) -> None:
        """Wait as `wait` does."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the caller's tensors, or of the error."""
        with self._lock:
            if self._future is None:
                self._claim = threading.Lock()
                self._base = _future_of([turn.device for turn in self.turns])
                self._future = self._base.then(self._outcome)
            future, is_over = self._future, self._is_over
        if is_over:
            self.complete()
        return future

    def _get_duration(self) -> float:
        """Return the milliseconds from issue to end, so far if it is not over."""
        return 1000 * ((self._ended or time.monotonic()) - self.began)

    # What the engine calls.

    def end(
        self, error: BaseException | None, submit: Callable[[Callable[[], None]], None]
    ) -> None:
        """Mark the operation as over, and have its future completed by way of `submit`."""
        with self._lock:
            self._error = error
            self._ended = time.monotonic()
            self._is_over = True
            if self._latch is not None:
                self._latch.release()
        if self._future is not None:
            submit(self.complete)

    def complete(self) -> None:
        """Complete the future, unless another thread already does."""
        if self._claim is not None and self._claim.acquire(blocking=False):
            assert self._base is not None
            for turn in self.turns:  # the future's value is ready by this thread's streams
                turn.follow()
            self._base.set_result(None)

    def _outcome(self, base: torch.futures.Future[Any]) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


def _future_of(devices: list[torch.device]) -> torch.futures.Future[Any]:
    return torch.futures.Future(devices=devices)  # type: ignore[arg-type]  # as it documents
