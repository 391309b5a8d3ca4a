"""Threads for functions that block: a few at a time, fairly among peers, without a deadlock.

At most so many functions run at once. One that waits for another call lets another run meanwhile:
calls that call back, however deep, do not wait for each other's threads. Peers have their turns
one after another, however many calls each has waiting.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar, cast

import anyio
import anyio.to_thread
import torch

from auth import NodeId
from transport import LimitExceeded

__all__ = ["Workers", "aside", "contained", "is_handler", "may_block"]

_Result = TypeVar("_Result")

MAX_THREADS = 2048
"""Most threads, those that wait included: what a hostile caller can make us start. Each takes some
50 KiB while it waits."""


class Workers:
    """Runs functions in threads. Used in one event loop, but for `waiting`.

    Args:
        limit: how many run at a time.
        call_soon: runs a function in the loop, from any thread.
    """

    def __init__(self, limit: int, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self.limit = limit
        self._free = limit
        self._call_soon = call_soon
        self._busy = 0
        self._unlimited = anyio.CapacityLimiter(math.inf)
        self._queues: OrderedDict[NodeId, deque[anyio.Event]] = OrderedDict()

    async def run(self, peer: NodeId, function: Callable[[], _Result]) -> _Result:
        """Return what `function` does in a thread of its own.

        Who is cancelled does not wait for its end; until then it counts among those that run.

        Args:
            peer: whose turn it takes.
            function: what to run.

        Raises:
            LimitExceeded: there are too many threads already.
        """
        if self._busy >= MAX_THREADS:
            raise LimitExceeded(
                "running of a function",
                why=f"{MAX_THREADS} of them run or wait already",
                fix="Call again later, or make the function async: those need no thread.",
            )
        await self._turn(peer)
        self._busy += 1
        turn = _Claim()

        def work() -> _Result | None:
            if not turn.begin():
                return None
            _here.workers = self
            try:
                # Whatever else has run in this thread, and whatever this leaves switched off.
                with torch.enable_grad():
                    return contained(function)
            finally:
                _here.workers = None
                if turn.ended():
                    self._call_soon(self._ended)

        try:
            result = await anyio.to_thread.run_sync(
                work, limiter=self._unlimited, abandon_on_cancel=True
            )
        finally:
            if turn.left():
                self._ended()
        return cast("_Result", result)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Let another function run while this thread, one of these, waits in the block."""
        self._call_soon(self._give_back)
        try:
            yield
        finally:
            self._call_soon(self._take_back)

    async def _turn(self, peer: NodeId) -> None:
        if self._free > 0 and not self._queues:
            self._free -= 1
            return
        turn = anyio.Event()
        queue = self._queues.setdefault(peer, deque())
        queue.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self._give_back()
            else:
                queue.remove(turn)
                if not queue:
                    del self._queues[peer]
            raise

    def _ended(self) -> None:
        self._busy -= 1
        self._give_back()

    def _give_back(self) -> None:
        self._free += 1
        while self._free > 0 and self._queues:
            peer, queue = self._queues.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._queues[peer] = queue  # behind all others
            self._free -= 1
            turn.set()

    def _take_back(self) -> None:
        # For a moment one more may run than should: who goes on is not held up.
        self._free -= 1


class _Claim:
    """Whether a thread runs a function, and whether its caller still waits: who is last, counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_running = False
        self._is_left = False

    def begin(self) -> bool:
        """The thread: whether to run at all."""
        with self._lock:
            self._is_running = not self._is_left
            return self._is_running

    def ended(self) -> bool:
        """The thread, after it has run: whether nobody waits for it any more."""
        with self._lock:
            self._is_running = False
            return self._is_left

    def left(self) -> bool:
        """The caller, as it goes on: whether nothing runs any more."""
        with self._lock:
            self._is_left = True
            return not self._is_running


async def aside(function: Callable[[], _Result]) -> _Result:
    """Return what `function` does in a thread that does not count among workers.

    For what is short, but not the library's own, such as how a program's class is pickled. Who is
    cancelled does not wait for its end.
    """
    limiter = anyio.CapacityLimiter(1)
    return await anyio.to_thread.run_sync(
        lambda: contained(function), limiter=limiter, abandon_on_cancel=True
    )


def contained(function: Callable[[], _Result]) -> _Result:
    """Return what `function` does in this thread, which is not the loop's.

    Raises:
        RuntimeError: it raised what is no ``Exception``, such as ``SystemExit``, and would end the
            loop that waits for it.
        Exception: what it raised.
    """
    try:
        return function()
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"the function raised {type(error).__name__}: {error}") from error


class _Here(threading.local):
    workers: Workers | None = None


_here = _Here()


def is_handler() -> bool:
    """Return whether this thread runs a function that a peer has called."""
    return _here.workers is not None


def may_block() -> AbstractContextManager[None]:
    """Say that this thread waits for a peer in the block, whoever's thread it is."""
    workers = _here.workers
    return _nothing if workers is None else workers.waiting()


_nothing = contextlib.nullcontext()
