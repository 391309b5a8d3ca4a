"""Every operation of the transport, cancelled at each await, leaves nothing behind."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from auth import Delegation, MeshError, SecretKey
from tests.cancelling import Operation, Scenarios, at_each_await, at_each_turn, at_its_end
from tests.transport.nodes import at, endpoint
from tests.transport.wires import Wires, wires
from transport import Connection, Endpoint, PeerAddress, Stream
from transport.frames import ok_reply

pytestmark = pytest.mark.anyio

SMALL = {"stream_window": 64 << 10, "send_buffer": 64 << 10}
"""Buffers that a test soon fills."""

BULK = bytes(150_000)

SCENARIOS: Scenarios[Wires] = Scenarios()
covers = SCENARIOS.covers


# -- calls and pings


@covers("transport.Connection.call")
async def call(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        assert await w.connection.call("echo", b"x" * 5000) == b"x" * 5000

    yield run


@covers("transport.Connection.call")
async def call_refused(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        with pytest.raises(MeshError):
            await w.connection.call("refuse")

    yield run


@covers("transport.Connection.call")
async def call_timed_out(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        with pytest.raises(MeshError):
            await w.connection.call("hang", timeout=0.01)

    yield run


@covers("transport.Connection.ping")
async def ping(w: Wires) -> AsyncIterator[Operation]:
    yield w.connection.ping


# -- streams to a service


@covers(
    "transport.Connection.open_stream",
    "transport.Stream.write_request",
    "transport.Stream.__aenter__",
    "transport.Stream.__aexit__",
    "transport.Stream.aclose",
)
async def open_and_close(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        async with await w.connection.open_stream("mirror"):
            pass

    yield run


@covers("transport.Stream.aclose")
async def close_a_stream(w: Wires) -> AsyncIterator[Operation]:
    stream = await w.connection.open_stream("mirror")
    yield stream.aclose
    stream.reset()


@covers(
    "transport.Stream.send_message",
    "transport.Stream.receive_message",
    "transport.Stream.send",
    "transport.Stream.receive_exactly",
    "transport.Stream.receive_into",
    "transport.Stream.send_eof",
    "transport.Stream.__anext__",
    "transport.Stream.receive",
)
async def converse(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        async with await w.connection.open_stream("mirror", {"a": 1}) as stream:
            await stream.send_message([1, 2, 3])
            assert await stream.receive_message() == [1, 2, 3]
            await stream.send(b"12345")
            assert await stream.receive_exactly(5) == b"12345"
            await stream.send_eof()
            assert [data async for data in stream] == []

    yield run


@covers("transport.Stream.receive")
async def receive_what_comes_later(w: Wires) -> AsyncIterator[Operation]:
    # Whatever has come is there for the next who reads: cancelling a read loses nothing.
    async with await w.connection.open_stream("mirror") as stream:
        await stream.send(b"abc")
        got = bytearray()

        async def run() -> None:
            got.extend(await stream.receive())

        yield run
        while len(got) < 3:
            got.extend(await stream.receive())
        assert got == b"abc"


@covers("transport.Stream.reply")
async def take_a_reply(w: Wires) -> AsyncIterator[Operation]:
    async with await w.connection.open_stream("mirror") as stream:
        await stream.send_eof()
        yield stream.reply
        assert await stream.reply() is None
        assert [data async for data in stream] == []


@covers("transport.Stream.send")
async def send_to_the_deaf(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        async with await w.connection.open_stream("deaf", timeout=0.03) as stream:
            with pytest.raises(MeshError):
                await stream.send(BULK)
            stream.reset()

    yield run


@covers("transport.Stream.send", "transport.Stream.receive_exactly", stride=5)
async def send_more_than_fits(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        async with await w.connection.open_stream("mirror") as stream:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream.send, BULK)
                assert await stream.receive_exactly(len(BULK)) == BULK
            await stream.send_eof()

    yield run


@covers("transport.Stream.drained")
async def wait_until_all_has_come(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        counts: list[int] = []
        async with await w.connection.open_stream("mirror") as stream:
            await stream.drained(counts.append)
            await stream.send(bytes(1000))
            before = w.connection.core.unacknowledged(stream.core)
            await stream.drained(counts.append)
            assert sum(counts) >= before
            assert w.connection.core.unacknowledged(stream.core) == 0
            await stream.send_eof()

    yield run


@covers("transport.Stream.send_lent", "transport.Stream.receive_into", stride=3)
async def lend_more_than_fits(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        room = bytearray(len(BULK))
        async with await w.connection.open_stream("mirror") as stream:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream.send_lent, memoryview(BULK))
                await stream.receive_into(memoryview(room))
            assert room == BULK
            await stream.send_eof()

    yield run


@covers("transport.Stream.receive")
async def refused_service(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        async with await w.connection.open_stream("nowhere") as stream:
            with pytest.raises(MeshError):
                await stream.receive()

    yield run


# -- the serving end of a stream


@covers("transport.Stream.send_reply", stride=3)
async def send_reply(w: Wires) -> AsyncIterator[Operation]:
    stream = await w.answer()

    async def run() -> None:
        await stream.send_reply(BULK)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_drain, w.opened)
        yield run
        stream.reset()
        tasks.cancel_scope.cancel()
    w.opened.reset()


@covers("transport.Stream.write_answer", stride=3)
async def write_answer(w: Wires) -> AsyncIterator[Operation]:
    stream = await w.answer()

    async def run() -> None:
        await stream.write_answer(ok_reply(BULK))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_drain, w.opened)
        yield run
        stream.reset()
        tasks.cancel_scope.cancel()
    w.opened.reset()


@covers("transport.Stream.fail")
async def fail(w: Wires) -> AsyncIterator[Operation]:
    stream = await w.answer()

    async def run() -> None:
        try:
            await stream.fail(MeshError("no"))
        finally:
            assert stream.is_closed

    yield run
    stream.reset()
    w.opened.reset()


@covers("transport.Stream.receive_request")
async def receive_request(w: Wires) -> AsyncIterator[Operation]:
    stream = await w.answer()
    await w.opened.send_message(1)

    async def run() -> None:
        assert await stream.receive_request(100) == b"\x01"

    yield run
    await stream.aclose()
    w.opened.reset()


async def _drain(stream: Stream) -> None:
    try:
        async for _ in stream:
            pass
    except MeshError:
        pass


# -- a protocol of the app's own


@covers(
    "transport.Endpoint.connect",
    "transport.Connection.open_raw_stream",
    "transport.Connection.wait_closed",
    "transport.Connection.close",
)
async def own_protocol(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        connection = await w.dialer.connect(at(w.listener), alpn="own/1")
        try:
            async with await connection.open_raw_stream() as stream:
                await stream.send(b"x")
                assert await stream.receive() == b"x"
            await connection.close()
            await connection.wait_closed()
        finally:
            connection.abort()

    yield run


@covers("transport.Connection.close", stride=3)
async def close_with_unread_bytes(w: Wires) -> AsyncIterator[Operation]:
    connection = await w.own()
    stream = await connection.open_raw_stream()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_send, stream, BULK)
        await anyio.wait_all_tasks_blocked()
        yield partial(connection.close, linger=0.03)
        assert connection.closed is not None, "it is closed all the same"


@covers("transport.Connection.wait_closed")
async def wait_closed(w: Wires) -> AsyncIterator[Operation]:
    connection = await w.own()

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_abort_soon, connection)
            await connection.wait_closed()

    yield run
    connection.abort()


@covers("transport.Connection.wait_regranted")
async def wait_regranted(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(w.dialer.reconsider, w.listener.node_id)
            await w.connection.wait_regranted()

    yield run


@covers("transport.Connection.accept_raw_stream", "transport.Connection.next_stream")
async def accept_raw_stream(w: Wires) -> AsyncIterator[Operation]:
    connection = await w.own()
    back = next(each for each in w.listener._connections.values() if each.alpn == "own/1")
    async with await connection.open_raw_stream() as first:
        # The stream that the handler has accepted; on it, it opens the ones that the test accepts.
        await first.send(b"x")
        assert await first.receive() == b"x"

        async def run() -> None:
            theirs = await back.open_raw_stream()
            try:
                await theirs.send(b"y")
                async with await connection.accept_raw_stream() as stream:
                    assert await stream.receive() == b"y"
                    await stream.send_eof()
            finally:
                theirs.reset()

        yield run
    connection.abort()


async def _send(stream: Stream, data: bytes) -> None:
    try:
        await stream.send(data)
    except (MeshError, anyio.ClosedResourceError):
        pass


async def _abort_soon(connection: Connection) -> None:
    await anyio.lowlevel.checkpoint()
    connection.abort()


# -- endpoints


@covers("transport.Endpoint.connect")
async def connect(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        await w.dialer.connect(at(w.other))

    yield run
    # A connection that was made while its dialer was cancelled is one that others can find.
    _abort_all(w.dialer, w.other)


@covers("transport.Endpoint.reconsider")
async def reconsider(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        await w.listener.reconsider(w.dialer.node_id)

    yield run


@covers("transport.Endpoint.present")
async def present(w: Wires) -> AsyncIterator[Operation]:
    machine = SecretKey.generate()
    own = w.dialer.node_id
    delegation = Delegation.issue(machine, own, ("node",), 60.0, time.time())

    async def run() -> None:
        await w.dialer.present(delegation)

    yield run


@covers("transport.Endpoint.__aenter__", "transport.Endpoint.__aexit__")
async def open_an_endpoint(w: Wires) -> AsyncIterator[Operation]:
    async def run() -> None:
        async with endpoint():
            pass

    yield run


@covers("transport.Endpoint.__aenter__", "transport.Endpoint.__aexit__", stride=2)
async def a_whole_endpoint(w: Wires) -> AsyncIterator[Operation]:
    nodes: list[Endpoint] = []

    async def run() -> None:
        async with endpoint(linger=0.05) as node:
            nodes.append(node)
            connection = await node.connect(at(w.other))
            await connection.call("echo", 1)

    yield run
    for node in nodes:
        assert node._socket.raw.fileno() == -1, "the socket is open"
    _abort_all(w.other)


def _abort_all(*nodes: Endpoint) -> None:
    for node in nodes:
        for connection in list(node._connections.values()):
            if connection.is_admitted and connection.peer.node_id in {n.node_id for n in nodes}:
                connection.abort()


@pytest.mark.parametrize("name", SCENARIOS.all)
async def test_at_each_await(name: str) -> None:
    scenario = SCENARIOS.all[name]
    async with wires(**SMALL) as w:
        await at_each_await(partial(scenario.prepare, w), w.held, stride=scenario.stride)


@pytest.mark.parametrize(
    "name", ["connect", "own_protocol", "open_an_endpoint", "a_whole_endpoint"]
)
async def test_at_each_turn_of_the_loop(name: str) -> None:
    scenario = SCENARIOS.all[name]
    async with wires(**SMALL) as w:
        assert await at_each_turn(partial(scenario.prepare, w), w.held) > 5


async def test_a_call_cancelled_exactly_at_its_end() -> None:
    """The handler runs once for each call, whatever becomes of its caller."""

    @asynccontextmanager
    async def counting() -> AsyncIterator[Operation]:
        before = w.ran

        async def run() -> None:
            answers.append(await w.connection.call("count"))

        answers: list[object] = []
        yield run
        assert len(answers) <= 1
        assert w.ran - before in ({1} if answers else {0, 1})

    async with wires() as w:
        ended = await at_its_end(counting, w.held, lambda _: None, times=500)
    assert 50 < ended < 450


# -- what a cancellation must not cost


async def test_a_slot_for_a_stream_is_waited_for_and_given_up() -> None:
    async with wires(max_streams=1) as w:

        @asynccontextmanager
        async def waiting() -> AsyncIterator[Operation]:
            async def run() -> None:
                with pytest.raises(MeshError):
                    await w.connection.call("echo", 1, timeout=0.01)

            yield run

        async with await w.connection.open_stream("mirror") as blocker:
            await blocker.send(b"x")
            assert await blocker.receive() == b"x"
            assert await at_each_await(waiting, w.held) >= 1


async def test_many_cancelled_calls_leave_memory_flat() -> None:
    async with wires() as w:
        for _ in range(200):
            with anyio.move_on_after(0.001):
                await w.connection.call("hang")
        assert len(w.dialer._engine.driver._heap) < 1000


@pytest.mark.parametrize("held_up", [False, True])
async def test_no_processor_time_is_burnt_after_a_cancellation(held_up: bool) -> None:
    """Neither when all is over nor while a cancelled block still has something to do."""
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind(("127.0.0.1", 0))
    nobody = PeerAddress(SecretKey.generate().node_id, (silent.getsockname(),))

    async def write(w: Wires) -> None:
        async with await w.connection.open_stream("deaf") as stream:
            await stream.send(BULK)

    async def until_cancelled(operation: Operation) -> None:
        try:
            await operation()
        finally:
            with anyio.CancelScope(shield=True):
                await over.wait()

    over = anyio.Event()
    with silent:
        async with wires(**SMALL) as w:
            async with anyio.create_task_group() as tasks:
                for operation in (
                    partial(w.connection.call, "hang"),
                    partial(w.dialer.connect, nobody),
                    partial(write, w),
                    w.connection.wait_closed,
                ):
                    tasks.start_soon(until_cancelled if held_up else _run, operation)
                await anyio.sleep(0.1)
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    if held_up:
                        share = await _load()
                    over.set()
            if not held_up:
                share = await _load()
            assert await w.connection.call("echo", 1) == 1
    # Two idle nodes take a hundredth of a slow core; a spin takes all of one.
    assert share < 0.05, f"{share:.0%} of a core"


async def _run(operation: Operation) -> None:
    await operation()


async def _load() -> float:
    """Return what part of a core this process uses during a second, once it has settled."""
    await anyio.sleep(0.2)
    cpu, began = time.process_time(), time.monotonic()
    await anyio.sleep(1.0)
    return (time.process_time() - cpu) / (time.monotonic() - began)
