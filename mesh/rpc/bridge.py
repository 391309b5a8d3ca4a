"""The way between a node's event loop and threads of any kind, both ways."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from mesh.rpc.errors import RpcError
from mesh.rpc.links import like_this_thread
from mesh.rpc.workers import may_block

__all__ = ["Bridge", "ended"]

_Result = TypeVar("_Result")


class Bridge:
    """Lets threads wait for the loop, and the loop for threads; while it is `open`."""

    def __init__(self) -> None:
        self._portal: BlockingPortal | None = None
        self._thread = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Be there for the block, in this loop."""
        self._thread = threading.get_ident()
        async with BlockingPortal() as self._portal:
            try:
                yield
            finally:
                self._portal = None

    @property
    def is_here(self) -> bool:
        """Whether the caller's thread is the loop's own."""
        return threading.get_ident() == self._thread

    @property
    def is_open(self) -> bool:
        """Whether anybody can be waited for."""
        return self._portal is not None

    def block_on(self, function: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Run a coroutine in the loop and return its result, to a thread.

        Raises:
            RpcError: the bridge is over, or this is the loop's own thread.
        """
        return self.wait(self.start(function))

    def start(self, function: Callable[[], Coroutine[Any, Any, _Result]]) -> Future[_Result]:
        """Start a coroutine in the loop and return what a thread may `wait` for.

        Raises:
            RpcError: as `block_on`.
        """
        if self.is_here:
            raise RpcError(
                "waiting for a peer",
                why="a blocking call in the node's own event loop would wait for itself",
                fix="Use the coroutine there: await ref.fetch(), await agent.call().",
            )
        portal = self._portal
        if portal is None:
            raise ended()
        try:
            with like_this_thread():
                return portal.start_task_soon(function)
        except RuntimeError:  # it is over by now
            raise ended() from None

    def wait(self, future: Future[_Result]) -> _Result:
        """Return a future's result, to a thread; those of handlers let others run meanwhile."""
        try:
            if future.done():
                return future.result()
            with may_block():
                return future.result()
        except CancelledError:
            raise ended() from None

    def call_soon(self, function: Callable[[], None]) -> None:
        """Have a function run in the loop, from any thread; at once, if it is that one's."""
        portal = self._portal
        if self.is_here:
            function()
        elif portal is not None:
            with contextlib.suppress(RuntimeError):  # it is over by now
                portal.start_task_soon(_run, function)

    async def until_done(self, future: Future[_Result]) -> _Result:
        """Return the result of a future that any thread may complete, as a coroutine."""
        if not future.done():
            done = anyio.Event()
            future.add_done_callback(lambda _: self.call_soon(done.set))
            await done.wait()
        try:
            return future.result()
        except CancelledError:
            raise ended() from None


async def _run(function: Callable[[], None]) -> None:
    function()


def ended() -> RpcError:
    """Return the error for what is waited for where nothing goes on."""
    return RpcError(
        "a remote call",
        why="the agent has been shut down, and with it the references that this node had: Cannot "
        "call to_here() on it after deletion",
        fix="Wait for what is under way before rpc.shutdown(), or before the node is closed.",
    )
