"""Every operation, cancelled at each of its awaits, on both loops, leaves nothing behind."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from auth import MeshError
from tests.transport.nodes import at, endpoint, eventually, is_idle
from transport import Connection, Endpoint, Incoming
from transport.cbor import CborValue

pytestmark = pytest.mark.anyio

MOST_STEPS = 200
"""An operation that awaits more often than this would never end a test."""


class CancelledAt:
    """Awaits a coroutine, and cancels a scope as the coroutine comes to await for the nth time."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, object], step: int, scope: anyio.CancelScope
    ) -> None:
        self._coroutine = coroutine
        self._step = step
        self._scope = scope
        self.reached = False

    def __await__(self) -> Generator[Any, Any, None]:
        iterator = self._coroutine.__await__()
        count = 0
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                message = iterator.send(value) if error is None else iterator.throw(error)
            except StopIteration:
                return
            count += 1
            if count == self._step:
                self.reached = True
                self._scope.cancel()
            value = error = None
            try:
                value = yield message
            except BaseException as raised:
                error = raised


async def at_each_await(
    operation: Callable[[], Coroutine[Any, Any, object]], check: Callable[[], Awaitable[None]]
) -> int:
    """Run `operation` again and again, cancelled one await later each time, with `check` after."""
    for step in range(1, MOST_STEPS):
        with anyio.CancelScope() as scope:
            run = CancelledAt(operation(), step, scope)
            try:
                await run
            except MeshError:
                assert not run.reached, "cancellation was turned into an error"
        await check()
        if not run.reached:
            return step - 1
    raise AssertionError("the operation never came to its end")


class World:
    """A dialer and a listener with one of each kind of handler."""

    def __init__(self, dialer: Endpoint, listener: Endpoint) -> None:
        self.dialer = dialer
        self.listener = listener
        self.connection: Connection | None = None
        self.tasks = 0

    @property
    def open(self) -> Connection:
        assert self.connection is not None
        return self.connection

    async def connect(self) -> None:
        self.connection = await self.dialer.connect(at(self.listener))
        await self.connection.call("echo", 1)
        await anyio.wait_all_tasks_blocked()
        self.tasks = len(anyio.get_running_tasks())

    async def check_open(self) -> None:
        """The connection lives, carries calls, and holds no stream; no task is left."""
        connection, back = self.open, self.listener.connection(self.dialer.node_id)
        assert back is not None
        assert await connection.call("echo", b"still here") == b"still here"
        await eventually(lambda: not (connection._streams or connection.core.streams))
        await eventually(lambda: not (back._streams or back.core.streams))
        assert not connection._pings
        await eventually(lambda: len(anyio.get_running_tasks()) == self.tasks)

    async def check_idle(self) -> None:
        """Nothing is connected or being connected; no task is left."""
        for node in (self.dialer, self.listener):
            for connection in list(node._connections.values()):
                if node._pool.get(self.listener.node_id) or node._pool.get(self.dialer.node_id):
                    connection.abort()
        await eventually(lambda: is_idle(self.dialer) and is_idle(self.listener))
        await eventually(lambda: len(anyio.get_running_tasks()) == self.tasks)


@asynccontextmanager
async def world(**settings: Any) -> AsyncIterator[World]:
    async def hang(request: Incoming) -> CborValue:
        await anyio.sleep_forever()
        return None

    async def refuse(request: Incoming) -> CborValue:
        raise MeshError("no")

    async def mirror(request: Incoming) -> None:
        async for data in request.stream:
            await request.stream.send(data)

    async def deaf(request: Incoming) -> None:
        await request.stream.receive_exactly(1)
        while not request.stream._is_abandoned:  # noqa: ASYNC110 - it must not read
            await anyio.sleep(0.005)

    async def own(connection: Connection) -> None:
        async with await connection.accept_raw_stream() as stream:
            await stream.send(await stream.receive())
        await connection.wait_closed()

    async with endpoint(**settings) as dialer, endpoint(**settings) as listener:
        for name, handler in (("hang", hang), ("refuse", refuse)):
            listener.register_call(name, handler, scope="x")
        for name, serve in (("mirror", mirror), ("deaf", deaf)):
            listener.register_service(name, serve, scope="x")
        listener.register_alpn("own/1", own)
        await anyio.wait_all_tasks_blocked()
        the_world = World(dialer, listener)
        the_world.tasks = len(anyio.get_running_tasks())
        yield the_world


# -- on a connection


async def call(connection: Connection) -> None:
    assert await connection.call("echo", b"x" * 5000) == b"x" * 5000


async def call_refused(connection: Connection) -> None:
    with pytest.raises(MeshError):
        await connection.call("refuse")


async def call_timed_out(connection: Connection) -> None:
    with pytest.raises(MeshError):
        await connection.call("hang", timeout=0.02)


async def ping(connection: Connection) -> None:
    await connection.ping()


async def open_and_close(connection: Connection) -> None:
    stream = await connection.open_stream("mirror")
    await stream.aclose()


async def open_and_reset(connection: Connection) -> None:
    stream = await connection.open_stream("mirror")
    stream.reset()


async def converse(connection: Connection) -> None:
    async with await connection.open_stream("mirror", {"a": 1}) as stream:
        await stream.send_message([1, 2, 3])
        assert await stream.receive_message() == [1, 2, 3]
        await stream.send(b"12345")
        assert await stream.receive_exactly(5) == b"12345"
        await stream.send_eof()
        assert [data async for data in stream] == []


async def write_to_the_deaf(connection: Connection) -> None:
    async with await connection.open_stream("deaf", timeout=0.05) as stream:
        with pytest.raises(MeshError):
            await stream.send(bytes(300_000))
        stream.reset()


async def refused_service(connection: Connection) -> None:
    async with await connection.open_stream("nowhere") as stream:
        with pytest.raises(MeshError):
            await stream.receive()


@pytest.mark.parametrize(
    "operation",
    [
        call,
        call_refused,
        call_timed_out,
        ping,
        open_and_close,
        open_and_reset,
        converse,
        write_to_the_deaf,
        refused_service,
    ],
)
async def test_operations_of_a_connection(
    operation: Callable[[Connection], Coroutine[Any, Any, None]],
) -> None:
    async with world(stream_window=64 << 10, send_buffer=64 << 10) as w:
        await w.connect()
        steps = await at_each_await(lambda: operation(w.open), w.check_open)
        assert steps >= (0 if operation in (open_and_close, open_and_reset) else 1)


async def test_waiting_for_a_stream_slot() -> None:
    async with world(max_streams=1) as w:
        await w.connect()
        blocker = await w.open.open_stream("mirror")
        await blocker.send(b"x")

        async def wait() -> None:
            with pytest.raises(MeshError):
                await w.open.call("echo", 1, timeout=0.02)

        async def nothing() -> None:
            assert w.open.info.streams == 1

        assert await at_each_await(wait, nothing) >= 1
        await blocker.aclose()
        await w.check_open()


async def test_many_cancelled_calls_leave_memory_flat() -> None:
    async with world() as w:
        await w.connect()
        for _ in range(200):
            with anyio.move_on_after(0.001):
                await w.open.call("hang")
        await w.check_open()
        assert len(w.dialer._driver._heap) < 1000


# -- making and ending connections


async def test_connecting() -> None:
    async with world() as w:
        steps = await at_each_await(lambda: w.dialer.connect(at(w.listener)), w.check_idle)
        assert steps >= 1


async def test_the_inside_of_a_dial() -> None:
    async with world() as w:
        target = at(w.listener)

        async def dial() -> None:
            await w.dialer._dial(target, target.addresses[0], "mesh/1", b"")

        assert await at_each_await(dial, w.check_idle) >= 2


async def test_the_inside_of_a_dial_with_an_own_protocol() -> None:
    async with world() as w:
        target = at(w.listener)

        async def dial() -> None:
            connection = await w.dialer._dial(target, target.addresses[0], "own/1", b"")
            async with await connection.open_raw_stream() as stream:
                await stream.send(b"x")
                assert await stream.receive() == b"x"

        async def check() -> None:
            for connection in list(w.dialer._connections.values()):
                connection.abort()
            await w.check_idle()

        assert await at_each_await(dial, check) >= 2


async def test_closing_a_connection() -> None:
    async with world(send_buffer=1 << 20) as w:

        async def close() -> None:
            await w.open.close(linger=0.02)

        async def again() -> None:
            await w.check_idle()
            await prepare()

        async def prepare() -> None:
            w.connection = await w.dialer.connect(at(w.listener))
            stream = await w.open.open_stream("deaf")
            await stream.send(bytes(500_000))

        await prepare()
        assert await at_each_await(close, again) >= 1


async def test_a_whole_endpoint() -> None:
    async with world() as w:
        sockets: list[int] = []

        async def live() -> None:
            async with endpoint(linger=0.05) as node:
                sockets.append(node._driver.socket.raw.fileno())
                nodes.append(node)
                connection = await node.connect(at(w.listener))
                await connection.call("echo", 1)

        async def check() -> None:
            for node in nodes:
                assert node._driver.socket.raw.fileno() == -1, "the socket is closed"
                assert is_idle(node) or not node._connections
            nodes.clear()
            await w.check_idle()

        nodes: list[Endpoint] = []
        assert await at_each_await(live, check) >= 3
        assert sockets


# -- afterwards


async def test_no_processor_time_is_burnt_after_a_cancellation() -> None:
    async with world(stream_window=64 << 10, send_buffer=64 << 10) as w:
        await w.connect()
        for operation in (
            lambda: w.open.call("hang"),
            lambda: w.open.wait_closed(),
            lambda: write_to_the_deaf(w.open),
        ):
            with anyio.move_on_after(0.03):
                await operation()
        await w.check_open()
        cpu, began = time.process_time(), time.monotonic()
        await anyio.sleep(1.0)
        share = (time.process_time() - cpu) / (time.monotonic() - began)
        assert share < 0.05, f"{share:.0%} of a core while idle"


async def test_a_cancellation_at_the_very_end_loses_no_answer_twice() -> None:
    # The handler runs once for each call whatever becomes of its caller.
    ran = 0

    async def count(request: Incoming) -> CborValue:
        nonlocal ran
        ran += 1
        return ran

    async with world() as w:
        w.listener.register_call("count", count, scope="x")
        await w.connect()
        calls = answers = 0
        for microseconds in range(0, 6000, 60):
            calls += 1
            with anyio.move_on_after(microseconds / 1e6):
                await w.open.call("count")
                answers += 1
        await w.check_open()
        assert answers <= ran <= calls
