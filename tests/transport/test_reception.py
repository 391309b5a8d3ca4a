"""Streams of peers are begun in turns, and what was taken back is not begun at all."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

from tests.transport.nodes import eventually, pair
from transport import Connection, Incoming, Stream
from transport.codes import AppCode
from transport.frames import request_frame
from transport.protocol.turns import ADVANCE, Turns
from transport.reception import BEGUN_PER_TURN, MAX_TAKEN_BACK, Metered, Reception

pytestmark = pytest.mark.anyio


class FakeStream:
    def __init__(self) -> None:
        self.core = SimpleNamespace(remote_reset=None, remote_stop=None)
        self.ended_with: object = None

    def reset(self, code: object) -> None:
        self.ended_with = code


class FakeConnection:
    max_streams = 10

    def __init__(self) -> None:
        self.core = object()
        self.aborted = False

    def abort(self, code: AppCode, reason: str) -> None:
        self.aborted = True


class Crowd(Turns):
    """Makes those wait whom a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: set[object] = set()

    def delay(self, owner: Any, now: float) -> float:
        return 0.005 if owner in self.waits else 0.0


class Hall:
    """A reception and what it has begun."""

    def __init__(self) -> None:
        self.turns = Crowd()
        self.begun: list[tuple[object, object]] = []
        self.reception = Reception(self._serve, self.turns)

    async def _serve(self, connection: object, stream: object) -> None:
        self.begun.append((connection, stream))

    def receive(self, connection: object, stream: object, tasks: anyio.abc.TaskGroup) -> None:
        self.reception.receive(cast(Connection, connection), cast(Stream, stream), tasks)


async def test_many_at_once_begin_a_few_in_each_turn_of_the_loop_and_in_order() -> None:
    hall, connection = Hall(), FakeConnection()
    connection.max_streams = 1000
    streams = [FakeStream() for _ in range(50)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hall.reception.run)
        for stream in streams:
            hall.receive(connection, stream, tasks)
        before = 0
        with anyio.fail_after(5):
            while len(hall.begun) < len(streams):
                await anyio.lowlevel.checkpoint()
                # A turn of either loop may run each of two tasks before or after this one.
                assert len(hall.begun) - before <= 2 * BEGUN_PER_TURN
                before = len(hall.begun)
        tasks.cancel_scope.cancel()
    # Trio runs tasks that begin together in any order.
    order = [streams.index(cast(FakeStream, stream)) for _, stream in hall.begun]
    assert all(abs(at - place) < 2 * BEGUN_PER_TURN for place, at in enumerate(order))


async def test_connections_take_turns() -> None:
    hall, greedy, modest = Hall(), FakeConnection(), FakeConnection()
    greedy.max_streams = 1000
    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            hall.receive(greedy, FakeStream(), tasks)
        for _ in range(3):
            hall.receive(modest, FakeStream(), tasks)
        tasks.start_soon(hall.reception.run)
        with anyio.fail_after(5):
            while sum(connection is modest for connection, _ in hall.begun) < 3:
                await anyio.lowlevel.checkpoint()
        assert len(hall.begun) < 20
        tasks.cancel_scope.cancel()


async def test_who_must_wait_does_not_hold_up_the_others() -> None:
    hall, waits, goes = Hall(), FakeConnection(), FakeConnection()
    hall.turns.waits.add(waits.core)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hall.reception.run)
        hall.receive(waits, FakeStream(), tasks)
        for _ in range(5):
            hall.receive(goes, FakeStream(), tasks)
        await eventually(lambda: len(hall.begun) == 5)
        assert all(connection is goes for connection, _ in hall.begun)
        hall.turns.waits.clear()
        await eventually(lambda: len(hall.begun) == 6)
        tasks.cancel_scope.cancel()


async def test_what_was_taken_back_is_not_begun() -> None:
    hall, connection = Hall(), FakeConnection()
    hall.turns.waits.add(connection.core)
    at_once, meanwhile = FakeStream(), FakeStream()
    at_once.core.remote_reset = 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hall.reception.run)
        hall.receive(connection, at_once, tasks)
        hall.receive(connection, meanwhile, tasks)
        meanwhile.core.remote_reset = 1
        hall.turns.waits.clear()
        await eventually(lambda: meanwhile.ended_with is not None)
        tasks.cancel_scope.cancel()
    assert at_once.ended_with is AppCode.CANCELLED
    assert not hall.begun


@pytest.mark.parametrize(("code", "begins"), [(AppCode.CANCELLED, 0), (AppCode.NO_ERROR, 1)])
async def test_a_call_given_up_is_not_begun_and_what_wants_no_answer_is(
    code: AppCode, begins: int
) -> None:
    hall, connection, stream = Hall(), FakeConnection(), FakeStream()
    stream.core.remote_stop = code
    async with anyio.create_task_group() as tasks:
        hall.receive(connection, stream, tasks)
    assert len(hall.begun) == begins


async def test_what_waits_is_bounded() -> None:
    hall, connection = Hall(), FakeConnection()
    hall.turns.waits.add(connection.core)
    async with anyio.create_task_group() as tasks:
        for _ in range(MAX_TAKEN_BACK * connection.max_streams):
            hall.receive(connection, FakeStream(), tasks)
        assert not connection.aborted
        hall.receive(connection, FakeStream(), tasks)
    assert connection.aborted


async def test_what_waits_on_a_connection_that_ends_is_refused() -> None:
    hall, connection, stream = Hall(), FakeConnection(), FakeStream()
    hall.turns.waits.add(connection.core)
    async with anyio.create_task_group() as tasks:
        hall.receive(connection, stream, tasks)
        hall.reception.forget(cast(Connection, connection))
    assert stream.ended_with is AppCode.LEFT
    assert not hall.begun


async def test_a_call_taken_back_before_it_was_looked_at_runs_no_handler() -> None:
    called = 0

    async def handler(request: Incoming) -> None:
        nonlocal called
        called += 1

    async with pair() as (_, listener, connection):
        listener.register_call("count", handler, scope="x")
        stream = await connection.open_raw_stream()
        # The reset leaves in the same datagram as the request: nobody has pumped in between.
        connection.core.write(stream.core, request_frame("count", None), fin=False)
        stream.reset(AppCode.CANCELLED)
        assert await connection.call("echo", 1) == 1
        assert not called
        await connection.call("count")
        assert called == 1


async def test_a_call_given_up_while_it_waits_runs_no_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = 0

    async def handler(request: Incoming) -> None:
        nonlocal called
        called += 1

    async with pair() as (_, listener, connection):
        listener.register_call("count", handler, scope="x")
        monkeypatch.setattr(listener._turns, "delay", lambda *_: 0.005)
        with anyio.move_on_after(0.05):
            await connection.call("count")
        waiting = listener._reception._waiting
        assert sum(map(len, waiting.values())) == 1
        await eventually(lambda: all(s.core.remote_stop for w in waiting.values() for s, _ in w))
        monkeypatch.undo()
        await eventually(lambda: not waiting)
        assert await connection.call("echo", 1) == 1
        assert not called


async def test_handlers_that_outlive_their_connection_leave_no_account() -> None:
    async def lingers(request: Incoming) -> None:
        await request.connection.wait_closed()
        end = anyio.current_time() + 0.03
        while anyio.current_time() < end:
            pass

    async with pair() as (_, listener, connection):
        listener.register_service("lingers", lingers, scope="x")
        await connection.open_stream("lingers")
        await eventually(lambda: listener._services._running)
        connection.abort()
        await eventually(lambda: not listener._services._running)
        assert not listener._turns._left


async def test_many_calls_at_once_are_all_answered() -> None:
    async with pair(max_streams=100) as (_, _, connection):
        answers: list[object] = []

        async def call(number: int) -> None:
            answers.append(await connection.call("echo", number))

        async with anyio.create_task_group() as tasks:
            for number in range(300):
                tasks.start_soon(call, number)
        assert sorted(answers) == list(range(300))  # type: ignore[type-var]


class TestMetered:
    async def run(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[Any, float]:
        charged: list[float] = []
        try:
            value = await Metered(function(), charged.append)
        except ValueError as error:
            value = error
        return value, sum(charged)

    async def test_the_value_and_the_error_come_through(self) -> None:
        async def value() -> int:
            await anyio.lowlevel.checkpoint()
            return 7

        async def error() -> int:
            await anyio.lowlevel.checkpoint()
            raise ValueError("text")

        assert (await self.run(value))[0] == 7
        assert str((await self.run(error))[0]) == "text"

    async def test_time_that_it_runs_is_charged_and_time_that_it_waits_is_not(self) -> None:
        async def waits() -> None:
            await anyio.sleep(0.05)

        async def works() -> None:
            for _ in range(2):
                end = anyio.current_time() + 0.02
                while anyio.current_time() < end:
                    pass
                await anyio.lowlevel.checkpoint()

        assert (await self.run(waits))[1] < 0.02
        assert (await self.run(works))[1] >= 0.04 - 2 * ADVANCE

    async def test_it_is_cancelled_like_what_it_awaits(self) -> None:
        ended = False

        async def waits() -> None:
            nonlocal ended
            try:
                await anyio.sleep_forever()
            finally:
                ended = True

        with anyio.move_on_after(0.01) as scope:
            await Metered(waits(), lambda _: None)
        assert scope.cancelled_caught
        assert ended
