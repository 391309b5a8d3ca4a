"""Begins to serve the streams that peers open, each in its peer's turn."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeAlias

import anyio
import anyio.abc
import anyio.lowlevel

from transport.codes import AppCode
from transport.connection import Connection
from transport.protocol.turns import ADVANCE, Turns
from transport.stream import Stream

__all__ = ["Metered", "Reception"]

LONGEST_SLEEP = 0.02
"""A peer whose turn is far off is looked at again after this time: others may be idle by then."""

BEGUN_PER_TURN = 2
TURN_SECONDS = 0.001
"""Handlers that begin in one turn of the loop, or in the time that one takes: a hundred that come
at once would keep everybody else waiting for fifty times as long."""

MAX_TAKEN_BACK = 2
"""Waiting streams of a connection, in multiples of its limit, that it may have reset meanwhile."""


class Reception:
    """Begins to serve the streams that peers open, each in its peer's turn.

    Args:
        serve: serves one stream.
        turns: asked for the turns, told of the time taken.
    """

    def __init__(
        self, serve: Callable[[Connection, Stream], Coroutine[Any, Any, None]], turns: Turns
    ) -> None:
        self._serve = serve
        self._turns = turns
        self._waiting: dict[Connection, _Waiting] = {}
        self._some_wait = anyio.Event()
        self._turn_began = -math.inf
        self._begun = 0

    def receive(self, connection: Connection, stream: Stream, tasks: anyio.abc.TaskGroup) -> None:
        """Serve `stream` in a task of `tasks`, now or when it is its turn."""
        if _is_taken_back(stream):
            stream.reset(AppCode.CANCELLED)
            return
        waiting = self._waiting.get(connection)
        if waiting is None:
            now = time.monotonic()
            if now - self._turn_began > TURN_SECONDS:
                self._turn_began, self._begun = now, 0
            if self._begun < BEGUN_PER_TURN and not self._turns.delay(connection.core, now):
                self._begin(connection, stream, tasks)
                return
            waiting = self._waiting[connection] = deque()
            self._some_wait.set()
        waiting.append((stream, tasks))
        if len(waiting) > MAX_TAKEN_BACK * connection.max_streams:
            connection.abort(AppCode.LIMIT, "too many streams opened and reset")

    def forget(self, connection: Connection) -> None:
        """Serve nobody on `connection` any more; refuse what waits."""
        self._turns.forget(connection.core)
        for stream, _ in self._waiting.pop(connection, ()):
            stream.reset(AppCode.LEFT)

    async def run(self) -> None:
        """Begin what waits as its turn comes, until cancelled."""
        while True:
            await self._some_wait.wait()
            self._some_wait = anyio.Event()
            while self._waiting:
                wait = min(LONGEST_SLEEP, self._take_turns())
                await (anyio.sleep(wait) if wait else anyio.lowlevel.checkpoint())

    def _take_turns(self) -> float:
        """Begin what may begin in one turn; return how long until there is more."""
        self._turn_began, self._begun = time.monotonic(), 0
        soonest = math.inf
        for connection in list(self._waiting):
            if self._begun == BEGUN_PER_TURN:
                return 0.0
            soonest = min(soonest, self._take_turn(connection, self._waiting.pop(connection)))
        return soonest

    def _take_turn(self, connection: Connection, waiting: _Waiting) -> float:
        """Begin one stream of a connection if it may; it comes last then, for the next turn."""
        while waiting and _is_taken_back(waiting[0][0]):
            waiting.popleft()[0].reset(AppCode.CANCELLED)
        if not waiting:
            return 0.0
        delay = self._turns.delay(connection.core, self._turn_began)
        if not delay:
            self._begin(connection, *waiting.popleft())
        if waiting:
            self._waiting[connection] = waiting
        return delay

    def _begin(self, connection: Connection, stream: Stream, tasks: anyio.abc.TaskGroup) -> None:
        self._begun += 1
        self._turns.serve(connection.core, ADVANCE, time.monotonic())
        tasks.start_soon(self._run, connection, stream)

    async def _run(self, connection: Connection, stream: Stream) -> None:
        def charge(seconds: float) -> None:
            if connection.closed is None:
                self._turns.serve(connection.core, seconds, time.monotonic())

        await Metered(self._serve(connection, stream), charge)


_Waiting: TypeAlias = deque[tuple[Stream, anyio.abc.TaskGroup]]


class Metered:
    """Awaits a coroutine, and charges the time that it runs.

    Args:
        coroutine: what to await.
        charge: called with seconds after each step that takes the total beyond `ADVANCE`.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], charge: Callable[[float], object]
    ) -> None:
        self._coroutine = coroutine
        self._charge = charge

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[Any], Any] = self._coroutine.send
        argument: Any = None
        paid = ADVANCE
        while True:
            began = time.perf_counter()
            try:
                wanted = step(argument)
            except StopIteration as end:
                return end.value
            finally:
                paid -= time.perf_counter() - began
                if paid < 0:
                    self._charge(-paid)
                    paid = 0.0
            try:
                argument = yield wanted
            except BaseException as error:
                step, argument = self._coroutine.throw, error
            else:
                step = self._coroutine.send


def _is_taken_back(stream: Stream) -> bool:
    """Whether the peer wants nothing of a stream any more that nobody has looked at yet.

    Whoever gives up a call has mostly sent all of its request, and only says that it will not read.
    With `AppCode.NO_ERROR` that is said by those who never wanted an answer.
    """
    core = stream.core
    return core.remote_reset is not None or core.remote_stop not in (None, AppCode.NO_ERROR)
