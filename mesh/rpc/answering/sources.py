"""Generators that peers read from: each has its item taken, and is closed, where it runs.

An async generator runs in the event loop, in the task that serves its reader. Any other runs in the
threads for functions that block, an item at a time, so that one that nobody reads from holds none.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import anyio

from auth import NodeId
from mesh.rpc.errors import RpcError
from mesh.rpc.workers import Workers
from transport import LimitExceeded

__all__ = ["Source", "is_generator", "source_of"]

CLOSE_SECONDS = 5.0
"""How long a generator may take to clean up after itself."""

_log = logging.getLogger("quicmesh.rpc")


class Source(Protocol):
    """Where items come from, for one task."""

    async def next(self) -> Any:
        """Return the next item.

        Raises:
            StopAsyncIteration: there are no more.
            Exception: what the generator raised.
        """

    async def close(self) -> None:
        """Close the generator, whose clean-up runs now, or when its thread is done with it."""


def is_generator(function: Callable[..., Any]) -> bool:
    """Return whether a function makes a generator, of either kind, when it is called."""
    plain = inspect.unwrap(function)
    return inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)


def source_of(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    workers: Workers,
    peer: NodeId,
) -> Source:
    """Return where the items of a generator function's generator come from.

    Args:
        function: what is called with `args` and `kwargs`.
        workers: the threads for one that blocks.
        peer: whose turn it takes there.

    Raises:
        RpcError: it makes none.
        Exception: as it does for arguments that are not its own.
    """
    made: Any = function(*args, **kwargs) if is_generator(function) else None
    if isinstance(made, AsyncGenerator):
        return _InLoop(made)
    if isinstance(made, Generator):
        return _InThreads(made, workers, peer)
    raise RpcError(
        f"reading from {getattr(function, '__qualname__', function)!r:.80}",
        why="it is no generator function, and gives one result",
        fix="Call it; or let it yield its items.",
    )


class _InLoop:
    """An async generator."""

    def __init__(self, generator: AsyncGenerator[Any, None]) -> None:
        self._generator = generator

    async def next(self) -> Any:
        try:
            return await self._generator.__anext__()
        except SystemExit as error:  # which would end this loop
            raise RuntimeError("the generator raised SystemExit") from error

    async def close(self) -> None:
        with anyio.move_on_after(CLOSE_SECONDS, shield=True) as scope:
            try:
                await self._generator.aclose()
            except (Exception, SystemExit):
                _log.warning("a generator failed as it was closed", exc_info=True)
        if scope.cancelled_caught:
            _log.warning("a generator took longer than %s s to close", CLOSE_SECONDS)


class _InThreads:
    """Any other generator. If it runs when its reader leaves, it is closed as soon as it yields."""

    def __init__(
        self, generator: Generator[Any, None, None], workers: Workers, peer: NodeId
    ) -> None:
        self._generator = generator
        self._workers = workers
        self._peer = peer
        self._lock = threading.Lock()
        self._is_running = False
        self._is_over = False

    async def next(self) -> Any:
        value = await self._workers.run(self._peer, self._advance)
        if value is _END:
            raise StopAsyncIteration
        return value

    async def close(self) -> None:
        with self._lock:
            self._is_over = True
            if self._is_running:
                return  # whose thread will
        if inspect.getgeneratorstate(self._generator) != inspect.GEN_SUSPENDED:
            self._generator.close()  # which has nothing to clean up
            return
        with anyio.move_on_after(CLOSE_SECONDS, shield=True):
            try:
                await self._workers.run(self._peer, self._close)
            except LimitExceeded:
                # No thread is to be had: it goes with its last reference, in this one.
                _log.warning("no thread was left to close a generator in")

    def _advance(self) -> Any:
        with self._lock:
            if self._is_over:
                return _END
            self._is_running = True
        try:
            return next(self._generator, _END)
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(f"the generator raised {type(error).__name__}") from error
        finally:
            if self._stop_running():
                self._close()

    def _stop_running(self) -> bool:
        """Return whether it was closed meanwhile."""
        with self._lock:
            self._is_running = False
            return self._is_over

    def _close(self) -> None:
        try:
            self._generator.close()
        except Exception:
            _log.warning("a generator failed as it was closed", exc_info=True)


_END = object()
