"""Threads that torch programs need: one runs operations in order, some complete futures.

All are daemons, start on first use, and end when told: an interpreter that exits waits for none of
them, and none of them may be left when it finalizes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Completer", "OpThread"]

MAX_COMPLETERS = 64
"""Each may be held by a callback that waits for another collective; one nested level per bucket of
a model is usual, and waiters complete what they wait for themselves."""

IDLE_SECONDS = 5.0
"""How long a completer without work stays."""


class OpThread:
    """Runs what it is given, in order, on one thread, or on a caller's while nothing is queued."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._queue: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._drainers = 0
        self._busy = False
        self._closed = False

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` after all before it. It must not raise.

        Raises:
            RuntimeError: the thread was closed.
        """
        with self._condition:
            if self._closed:
                raise RuntimeError("the operation thread is closed")
            self._queue.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def claim(self) -> bool:
        """Return whether nothing is queued or running; then the caller runs a task, and `release`s.

        What is submitted meanwhile comes after that task.
        """
        with self._lock:
            if self._closed or self._busy or self._queue:
                return False
            self._busy = True
            return True

    def release(self) -> None:
        """Go on after a claim."""
        with self._lock:
            self._busy = False
            if self._queue or self._closed or self._drainers:
                self._condition.notify_all()

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is queued or running; return whether that came within `timeout`."""
        with self._condition:
            self._drainers += 1
            try:
                return self._condition.wait_for(self._is_idle, timeout)
            finally:
                self._drainers -= 1

    def close(self, timeout: float) -> bool:
        """End after what is queued; return whether the thread was gone within `timeout`."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return thread is None
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(self._has_news)
                if not self._queue:
                    return
                task = self._queue.popleft()
                self._busy = True
            try:
                task()
            finally:
                del task  # and the tensors that it holds
                self.release()

    def _is_idle(self) -> bool:
        return not self._queue and not self._busy

    def _has_news(self) -> bool:
        return not self._busy and (bool(self._queue) or self._closed)


class Completer:
    """Runs short tasks on as many threads as are needed for none to wait behind one that blocks."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` soon, on this thread if the completer is closed. It must not raise."""
        with self._condition:
            if not self._closed:
                self._queue.append(task)
                if self._idle < len(self._queue) and len(self._threads) < MAX_COMPLETERS:
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._threads.add(thread)
                    thread.start()
                self._condition.notify()
                return
        task()

    def close(self, timeout: float) -> bool:
        """End all threads after what is queued; return whether all were gone within `timeout`."""
        end = time.monotonic() + timeout
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        with self._condition:
            return not self._threads

    def _run(self) -> None:
        while (task := self._next()) is not None:
            task()
            del task
        with self._condition:
            self._threads.discard(threading.current_thread())

    def _next(self) -> Callable[[], None] | None:
        with self._condition:
            self._idle += 1
            try:
                self._condition.wait_for(lambda: self._queue or self._closed, IDLE_SECONDS)
                return self._queue.popleft() if self._queue else None
            finally:
                self._idle -= 1
