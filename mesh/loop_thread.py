"""The event loop, in a thread of its own, in which the node of a program of threads lives."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Generic, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from mesh import node as async_node
from mesh.errors import NodeError

__all__ = ["EXIT_SECONDS", "LoopThread"]

EXIT_SECONDS = 2.0
"""How long an interpreter that ends waits for peers to be told, over all nodes left open."""

_Result = TypeVar("_Result")

_log = logging.getLogger("quicmesh.mesh")


class LoopThread:
    """An event loop in a thread, which holds one node open.

    It is a daemon thread: the interpreter joins all others before it runs exit handlers, and one
    that waits for its node to be closed would never end.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._portal: BlockingPortal | None = None
        self._thread: threading.Thread | None = None
        self._leave: anyio.Event | None = None
        self._held: Future[None] | None = None

    def open(self, node: async_node.Node) -> None:
        """Open a node, and hold it open until `close`. Raises what opening it does."""
        with self._lock:
            if self._thread is not None:
                raise NodeError(
                    "opening of a node", why="it was opened before", fix="Make a new one."
                )
            started: Future[BlockingPortal] = Future()
            self._thread = threading.Thread(
                target=anyio.run,
                args=(_serve, started),
                kwargs={"backend": self._backend},
                name=f"mesh-{node.node_id.short}",
                daemon=True,
            )
            self._thread.start()
            portal = self._portal = started.result()
            opened: Future[anyio.Event] = Future()
            self._held = portal.start_task_soon(_hold, node, opened)
            _open_loops.add(self)
        try:
            self._held.add_done_callback(lambda held: _pass_failure(held, opened))
            self._leave = opened.result()
        except BaseException:
            self._held.cancel()
            with contextlib.suppress(BaseException):
                self.close(None)
            raise

    @property
    def portal(self) -> BlockingPortal:
        """The way into the loop. Raises `NodeError` if the node is not open, or a parent's."""
        if os.getpid() != self._process:
            raise NodeError(
                "use of a node",
                why=f"it belongs to process {self._process}, from which this one was forked",
                fix="Open a node of its own in each process, or start processes with 'spawn'.",
            )
        if self._portal is None:
            raise NodeError("use of a node", why="it is not open", fix="Open it: with node: ...")
        return self._portal

    def run(self, function: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run a coroutine function in the loop and return its result; Ctrl+C cancels it."""
        portal = self.portal
        if self._thread is threading.current_thread():
            raise NodeError(
                "use of a node",
                why="a blocking call in the node's own event loop would wait for itself",
                fix="Use the async node there: node.node",
            )
        call = _Call(function)
        try:
            return _begin(portal, call.make).result()
        except CancelledError:
            raise NodeError("use of a node", why="it was closed meanwhile") from None
        except KeyboardInterrupt:
            call.abandon(portal)
            raise

    def close(self, timeout: float | None) -> None:
        """Close the node within `timeout` seconds, and end the thread. May be repeated."""
        if os.getpid() != self._process:
            return  # a forked child has not this thread
        with self._lock:
            portal, thread, held = self._portal, self._thread, self._held
            self._portal = None
            _open_loops.discard(self)
            if portal is None or thread is None or held is None:
                return
            if self._leave is not None:
                _tell(portal, _set, self._leave)
            end = None if timeout is None else time.monotonic() + timeout
            try:
                held.result(timeout)
            except (FutureTimeout, CancelledError):
                held.cancel()
            finally:
                _tell(portal, portal.stop, True)
                thread.join(None if end is None else max(0.0, end - time.monotonic()))


class _Call(Generic[_Result]):
    """One call into the loop, which can be abandoned at any moment of it.

    An interrupt may come before the portal has handed over its future, so that this can't be left
    to the future.
    """

    def __init__(self, function: Callable[[], Awaitable[_Result]]) -> None:
        self._function = function
        self._scope: anyio.CancelScope | None = None
        self._abandoned = False

    async def make(self) -> _Result:
        with anyio.CancelScope() as scope:
            self._scope = scope
            if self._abandoned:
                scope.cancel()
            return await self._function()
        raise CancelledError

    def abandon(self, portal: BlockingPortal) -> None:
        self._abandoned = True
        if self._scope is not None:
            _tell(portal, _cancel, self._scope)


def _begin(portal: BlockingPortal, function: Callable[[], Awaitable[_Result]]) -> Future[_Result]:
    try:
        return portal.start_task_soon(function)
    except RuntimeError:
        raise NodeError(
            "use of a node", why="its event loop has ended", fix="Make a new one."
        ) from None


def _tell(portal: BlockingPortal, function: Callable[..., Awaitable[None]], about: object) -> None:
    """Have something done in the loop, unless that is over, and all that ran there with it."""
    with contextlib.suppress(RuntimeError):
        portal.start_task_soon(function, about)


async def _cancel(scope: anyio.CancelScope) -> None:
    scope.cancel()


async def _serve(started: Future[BlockingPortal]) -> None:
    async with BlockingPortal() as portal:
        started.set_result(portal)
        await portal.sleep_until_stopped()


async def _hold(node: async_node.Node, opened: Future[anyio.Event]) -> None:
    async with node:
        leave = anyio.Event()
        opened.set_result(leave)
        await leave.wait()


async def _set(event: anyio.Event) -> None:
    event.set()


def _pass_failure(held: Future[None], opened: Future[anyio.Event]) -> None:
    """Let who waits for the node to open see that it did not."""
    if not opened.done():
        opened.set_exception(
            CancelledError() if held.cancelled() else held.exception() or CancelledError()
        )


_open_loops: weakref.WeakSet[LoopThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for loop in list(_open_loops):
        try:
            loop.close(max(0.0, deadline - time.monotonic()))
        except Exception:
            _log.exception("a node that was left open failed to close")
