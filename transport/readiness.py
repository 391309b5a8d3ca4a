"""When a socket can be read, and when a time has come, by the event loop's own means where it can.

asyncio's loops, uvloop too, keep a reader registered and call a function straight from the loop. By
anyio alone each wait registers anew and wakes a task, and each deadline is a scope that cancels
one: a third of what a small message costs outside the protocol. The loop is taken from anyio's
token, so that nothing here imports one or depends on which it is; trio, which has tasks alone, and
loops without readers (Windows' proactor) are served by tasks.

What is called from the loop behaves like what a task does: it has the context variables of the task
that asked for it, what it raises is raised in that task, and once that task goes on, for whatever
reason, it is not called any more.
"""

from __future__ import annotations

import contextvars
import math
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol, cast

import anyio
import anyio.lowlevel

__all__ = ["Alarm", "CallbackLoop", "Later", "LoopFuture", "callback_loop", "serve_readable"]


async def serve_readable(sock: socket.socket | int, turn: Callable[[], bool]) -> None:
    """Call `turn` whenever `sock`, or a descriptor, can be read, until cancelled.

    A `turn` that returns True is followed by another, whether or not the socket can be read; in
    between, others run. What it raises is raised here.
    """
    loop = callback_loop()
    if loop is not None:
        reader = _Reader(loop, turn)
        try:
            reader.call.context.run(loop.add_reader, sock, reader.readable)
        except NotImplementedError:
            pass
        else:
            try:
                await reader.call.wait()
            finally:
                reader.call.stop()
                loop.remove_reader(sock)
    while True:
        await anyio.wait_readable(sock)
        while turn():
            await anyio.lowlevel.checkpoint()


class Alarm:
    """Calls a function when a time has come that may be moved earlier.

    Only earlier: the function finds out itself that it was called too soon, and sets the alarm
    again. Deadlines that are put off with every packet would cost more than they are worth.

    Args:
        ring: what to call. It may set the alarm.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._at = math.inf
        self._loop: CallbackLoop | None = None
        self._call: _Call | None = None
        self._handle: _Handle | None = None
        self._scope: anyio.CancelScope | None = None

    def set(self, at: float) -> None:
        """Ring at `at`, of `time.monotonic`, or before."""
        if at < self._at:
            self._at = at
            if self._call is not None:
                self._arm(self._call)
            elif self._scope is not None:
                self._scope.deadline = self._loop_time()

    async def run(self) -> None:
        """Be there to ring, until cancelled. What the function raises is raised here."""
        self._loop = callback_loop()
        if self._loop is None:
            await self._run_in_task()
        else:
            call = self._call = _Call(self._ring_now)
            try:
                self._arm(call)
                await call.wait()
            finally:
                call.stop()
                self._call = None
                if self._handle is not None:
                    self._handle.cancel()

    async def _run_in_task(self) -> None:
        while True:
            with anyio.CancelScope(deadline=self._loop_time()) as self._scope:
                await anyio.sleep_forever()
            self._scope = None
            self._ring_now()

    def _ring_now(self) -> None:
        self._at = math.inf
        self._ring()

    def _arm(self, call: _Call) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._at < math.inf:
            assert self._loop is not None
            self._handle = self._loop.call_at(self._loop_time(), call, context=call.context)

    def _loop_time(self) -> float:
        """When to ring, by the event loop's clock, which may count otherwise."""
        if self._at == math.inf:
            return math.inf
        now = anyio.current_time() if self._loop is None else self._loop.time()
        return now + (self._at - time.monotonic())


class Later:
    """Calls a function after the tasks that are ready to run now.

    Args:
        function: what to call.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._loop: CallbackLoop | None = None
        self._call: _Call | None = None
        self._wanted: anyio.Event | None = None
        self._is_set = False

    def set(self) -> None:
        """Have the function called, once for all times that this is called before.

        While nobody runs `run`, at once.
        """
        if self._call is None and self._wanted is None:
            self._function()
        elif not self._is_set:
            self._is_set = True
            if self._wanted is not None:
                self._wanted.set()
            elif self._loop is not None and self._call is not None:
                self._loop.call_soon(self._call, context=self._call.context)

    async def run(self) -> None:
        """Be there to call, until cancelled. What the function raises is raised here."""
        self._loop = callback_loop()
        try:
            if self._loop is None:
                await self._run_in_task()
            else:
                self._call = _Call(self._call_now)
                await self._call.wait()
        finally:
            if self._call is not None:
                self._call.stop()
            self._call = self._wanted = None
            self._is_set = False

    async def _run_in_task(self) -> None:
        self._wanted = anyio.Event()
        while True:
            await self._wanted.wait()
            # Those who were woken at the same time run in any order; this one after them.
            await anyio.lowlevel.checkpoint()
            self._wanted = anyio.Event()
            self._call_now()

    def _call_now(self) -> None:
        self._is_set = False
        self._function()


class _Call:
    """A function that the loop calls, and that fails in the task which waits for it."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.context = _context()
        self._function = function
        self._error: Exception | None = None
        self._has_failed = anyio.Event()
        self._is_over = False

    def __call__(self) -> None:
        if self._is_over:
            return
        try:
            self._function()
        except Exception as error:
            self.stop()
            self._error = error
            self._has_failed.set()

    def stop(self) -> None:
        """Do nothing any more when called."""
        self._is_over = True

    async def wait(self) -> NoReturn:
        """Wait for the function to fail, and raise that."""
        await self._has_failed.wait()
        assert self._error is not None
        raise self._error


class _Reader:
    """Takes turns when a socket can be read, and as long as a turn says that there is more."""

    def __init__(self, loop: CallbackLoop, turn: Callable[[], bool]) -> None:
        self.call = _Call(self._take_turn)
        self._loop = loop
        self._turn = turn
        self._goes_on = False

    def readable(self) -> None:
        """The loop found something to read: as it does all the while that turns go on."""
        if not self._goes_on:
            self.call()

    def _take_turn(self) -> None:
        self._goes_on = False
        if self._turn():
            self._goes_on = True
            self._loop.call_soon(self.call, context=self.call.context)


def callback_loop() -> CallbackLoop | None:
    """Return the running event loop if it is one that calls functions, as asyncio's do."""
    loop = anyio.lowlevel.current_token().native_token
    return cast("CallbackLoop", loop) if hasattr(loop, "add_reader") else None


def _context() -> contextvars.Context:
    """Return a copy of the context variables, for functions that the loop calls.

    Where no task runs, sniffio, and anyio by it, knows the event loop by a variable alone.
    """
    context = contextvars.copy_context()
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None:
        context.run(sniffio.current_async_library_cvar.set, "asyncio")
    return context


class _Handle(Protocol):
    def cancel(self) -> None: ...


class LoopFuture(Awaitable[None], Protocol):
    """What is used of an event loop's future."""

    def done(self) -> bool:
        """Whether it was set, or who waits for it was cancelled."""

    def set_result(self, result: None, /) -> None:
        """Wake who waits."""


class CallbackLoop(Protocol):
    """What is used of an event loop of asyncio's kind, under its names there."""

    def add_reader(self, fd: Any, callback: Callable[[], object], /) -> object:
        """Call `callback` whenever `fd` can be read."""

    def remove_reader(self, fd: Any, /) -> object:
        """Call it no more."""

    def call_soon(
        self, callback: Callable[[], object], /, *, context: contextvars.Context
    ) -> _Handle:
        """Call `callback` in the next turn."""

    def call_at(
        self, when: float, callback: Callable[[], object], /, *, context: contextvars.Context
    ) -> _Handle:
        """Call `callback` when `time` says `when`."""

    def create_future(self) -> LoopFuture:
        """Return what one can wait for."""

    def time(self) -> float:
        """Return the time by the loop's clock."""
