"""What the event loop calls behaves like a task: its failures, its variables, its end."""

from __future__ import annotations

import contextvars
import math
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from transport.readiness import Alarm, Later, serve_readable

pytestmark = pytest.mark.anyio

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    here.setblocking(False)
    with here, there:
        yield here, there


@pytest.fixture(params=["the loop's own", "anyio's"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On asyncio each test runs with the loop's own means, and without."""
    if request.param == "anyio's":
        monkeypatch.setattr("transport.readiness.callback_loop", lambda: None)
    return str(request.param)


@pytest.mark.usefixtures("means")
class TestReading:
    async def test_each_datagram_is_read_when_it_comes(
        self, sockets: tuple[socket.socket, socket.socket]
    ) -> None:
        here, there = sockets
        read: list[bytes] = []
        came = anyio.Event()

        def turn() -> bool:
            nonlocal came
            read.append(here.recv(10))
            came.set()
            return False

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve_readable, here, turn)
            for data in (b"1", b"2", b"3"):
                came = anyio.Event()
                there.send(data)
                with anyio.fail_after(3):
                    await came.wait()
            tasks.cancel_scope.cancel()
        assert read == [b"1", b"2", b"3"]

    async def test_turns_go_on_while_there_is_more_and_others_run_between(
        self, sockets: tuple[socket.socket, socket.socket]
    ) -> None:
        here, there = sockets
        turns = others = 0
        between: list[int] = []
        done = anyio.Event()

        def turn() -> bool:
            nonlocal turns
            if not turns:
                here.recv(10)  # from now on the socket has nothing, and only the turn knows of more
            turns += 1
            between.append(others)
            if turns == 5:
                done.set()
            return turns < 5

        async def other() -> None:
            nonlocal others
            while True:
                await anyio.lowlevel.checkpoint()
                others += 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve_readable, here, turn)
            tasks.start_soon(other)
            there.send(b"x")
            with anyio.fail_after(3):
                await done.wait()
            await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        assert turns == 5
        assert between[4] - between[0] >= 3, "others ran in between"

    async def test_a_socket_that_stays_readable_gives_one_turn_at_a_time(
        self, sockets: tuple[socket.socket, socket.socket]
    ) -> None:
        here, there = sockets
        turns = 0
        begun = anyio.Event()

        def turn() -> bool:
            nonlocal turns
            turns += 1
            begun.set()
            return True  # and what waits in the socket is left there

        async with anyio.create_task_group() as tasks:
            there.send(b"x")
            tasks.start_soon(serve_readable, here, turn)
            with anyio.fail_after(3):
                await begun.wait()
            before = turns
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            taken = turns - before
            tasks.cancel_scope.cancel()
        assert 90 < taken < 110

    async def test_what_it_raises_is_raised_by_who_waits(
        self, sockets: tuple[socket.socket, socket.socket]
    ) -> None:
        here, there = sockets
        turns = 0

        def turn() -> bool:
            nonlocal turns
            turns += 1
            raise LookupError("inside")

        there.send(b"x")
        with anyio.fail_after(3), pytest.raises(LookupError, match="inside"):
            await serve_readable(here, turn)
        await anyio.sleep(0.01)
        assert turns == 1, "it is not called again, although the socket can be read"

    async def test_nothing_is_called_after_the_end(
        self, sockets: tuple[socket.socket, socket.socket]
    ) -> None:
        here, there = sockets
        turns = 0
        scope = anyio.CancelScope()

        def turn() -> bool:
            nonlocal turns
            turns += 1
            scope.cancel()
            return True

        with anyio.fail_after(3), scope:
            there.send(b"x")
            await serve_readable(here, turn)
        at_end = turns
        await anyio.sleep(0.01)
        # The loop may have had one more ready before the task got to know that it was cancelled.
        assert at_end <= 2
        assert turns == at_end

    async def test_the_socket_can_be_served_again(
        self, sockets: tuple[socket.socket, socket.socket]
    ) -> None:
        here, there = sockets
        for _ in range(2):
            there.send(b"x")
            with anyio.fail_after(3), anyio.CancelScope() as scope:
                await serve_readable(here, _canceller(here, scope))
            assert scope.cancelled_caught
        there.send(b"y")
        with anyio.fail_after(3):  # nor is it registered any more, in anyone's way
            await anyio.wait_readable(here)

    async def test_it_runs_with_the_variables_of_who_waits(
        self, sockets: tuple[socket.socket, socket.socket]
    ) -> None:
        here, there = sockets
        seen: list[Any] = []

        with anyio.fail_after(3), anyio.CancelScope() as scope:

            def turn() -> bool:
                here.recv(10)
                seen.extend([variable.get(), anyio.current_time(), type(anyio.Event())])
                scope.cancel()
                return False

            variable.set("of the task")
            there.send(b"x")
            await serve_readable(here, turn)
        assert seen[0] == "of the task"
        assert seen[2] is type(anyio.Event())


@pytest.mark.usefixtures("means")
class TestAlarm:
    async def test_it_rings_at_the_earliest_of_the_times_it_was_given(self) -> None:
        rung: list[float] = []
        done = anyio.Event()

        def ring() -> None:
            rung.append(time.monotonic())
            done.set()

        alarm = Alarm(ring)
        began = time.monotonic()
        alarm.set(began + 60)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(alarm.run)
            await anyio.lowlevel.checkpoint()
            alarm.set(began + 0.03)
            alarm.set(began + 30)
            with anyio.fail_after(3):
                await done.wait()
            tasks.cancel_scope.cancel()
        assert len(rung) == 1
        assert 0.028 < rung[0] - began < 2

    async def test_it_may_be_set_from_within_and_before(self) -> None:
        rings = 0
        done = anyio.Event()

        def ring() -> None:
            nonlocal rings
            rings += 1
            if rings == 3:
                done.set()
            else:
                alarm.set(time.monotonic() + 0.002)

        alarm = Alarm(ring)
        alarm.set(-math.inf)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(alarm.run)
            with anyio.fail_after(3):
                await done.wait()
            tasks.cancel_scope.cancel()
        assert rings == 3

    async def test_what_it_raises_is_raised_by_who_waits(self) -> None:
        def ring() -> None:
            raise LookupError("inside")

        alarm = Alarm(ring)
        alarm.set(time.monotonic())
        with anyio.fail_after(3), pytest.raises(LookupError, match="inside"):
            await alarm.run()

    async def test_it_does_not_ring_after_the_end(self) -> None:
        rung: list[None] = []
        alarm = Alarm(lambda: rung.append(None))
        alarm.set(time.monotonic() + 0.02)
        with anyio.move_on_after(0.005):
            await alarm.run()
        await anyio.sleep(0.03)
        assert not rung


@pytest.mark.usefixtures("means")
class TestLater:
    async def test_who_is_ready_goes_first_and_it_is_called_once(self) -> None:
        seen: list[str] = []
        later = Later(lambda: seen.append("later"))

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            seen.append("task")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(later.run)
            await anyio.sleep(0.005)
            for _ in range(5):
                event = anyio.Event()
                tasks.start_soon(wait, event)
                await anyio.sleep(0.001)
                event.set()
                later.set()
                later.set()
                await anyio.sleep(0.005)
            tasks.cancel_scope.cancel()
        assert seen == ["task", "later"] * 5

    async def test_it_may_be_set_from_within(self) -> None:
        calls = 0
        done = anyio.Event()

        def again() -> None:
            nonlocal calls
            calls += 1
            (later if calls < 3 else done).set()

        later = Later(again)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(later.run)
            await anyio.sleep(0.001)
            later.set()
            with anyio.fail_after(3):
                await done.wait()
            tasks.cancel_scope.cancel()
        assert calls == 3

    async def test_without_anyone_to_wait_it_is_called_at_once(self) -> None:
        seen: list[None] = []
        later = Later(lambda: seen.append(None))
        later.set()
        assert len(seen) == 1
        with anyio.move_on_after(0.001):
            await later.run()
        later.set()
        assert len(seen) == 2

    async def test_what_it_raises_is_raised_by_who_waits(self) -> None:
        def fail() -> None:
            raise LookupError("inside")

        later = Later(fail)

        async def set_it() -> None:
            await anyio.sleep(0.001)
            later.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(set_it)
            with anyio.fail_after(3), pytest.raises(LookupError, match="inside"):
                await later.run()


def _canceller(sock: socket.socket, scope: anyio.CancelScope) -> Callable[[], bool]:
    def turn() -> bool:
        sock.recv(10)
        scope.cancel()
        return False

    return turn
