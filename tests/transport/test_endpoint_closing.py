"""Leaving: what was accepted arrives, what is left is bounded, and nothing stays behind."""

from __future__ import annotations

import hashlib
import time

import anyio
import pytest

from auth import AccessDenied, Delegation, Grant, MeshError, SecretKey, allow_any
from tests.transport.nodes import Events, Policy, at, config, endpoint, eventually, is_idle, pair
from transport import (
    AppCode,
    Connection,
    ConnectionClosed,
    Endpoint,
    Incoming,
    PeerLeft,
)
from transport.cbor import CborValue

pytestmark = pytest.mark.anyio

MIB = 1 << 20


async def test_leaving_at_once_delivers_everything_that_was_accepted() -> None:
    data = bytes(range(256)) * (4 * MIB // 256)
    digests: list[str] = []
    received = anyio.Event()

    async def receive(request: Incoming) -> None:
        digest = hashlib.sha256()
        async for part in request.stream:
            digest.update(part)
            await anyio.sleep(0.001)  # slower than the sender
        digests.append(digest.hexdigest())
        received.set()

    async with endpoint() as listener:
        listener.register_service("put", receive, scope="x")
        async with endpoint() as dialer:
            connection = await dialer.connect(at(listener))
            stream = await connection.open_stream("put")
            await stream.send(data)
            await stream.send_eof()
        with anyio.fail_after(10):
            await received.wait()
    assert digests == [hashlib.sha256(data).hexdigest()]


async def test_closing_a_connection_delivers_too() -> None:
    total = 0
    received = anyio.Event()

    async def receive(request: Incoming) -> None:
        nonlocal total
        async for part in request.stream:
            total += len(part)
            await anyio.sleep(0.001)
        received.set()

    async with pair() as (_, listener, connection):
        listener.register_service("put", receive, scope="x")
        stream = await connection.open_stream("put")
        await stream.send(bytes(MIB))
        await stream.send_eof()
        with anyio.fail_after(4):  # less than what a close lingers at most
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(connection.close)
                tasks.start_soon(connection.close)
            await received.wait()
        assert total == MIB
        assert not connection.is_open
        await connection.close()


async def test_a_reader_that_never_reads_holds_nobody_back_for_long() -> None:
    async def sleeper(request: Incoming) -> None:
        await anyio.sleep_forever()

    async with endpoint() as listener:
        listener.register_service("sleep", sleeper, scope="x")
        began = 0.0
        async with endpoint(linger=0.3, send_buffer=4 * MIB) as dialer:
            connection = await dialer.connect(at(listener))
            stream = await connection.open_stream("sleep")
            await stream.send(bytes(3 * MIB))
            began = time.monotonic()
        assert 0.25 < time.monotonic() - began < 1.5


async def test_nothing_opens_on_a_closing_connection() -> None:
    wake = anyio.Event()

    async def sleeper(request: Incoming) -> None:
        await wake.wait()
        async for _ in request.stream:
            pass

    async with pair(stream_window=64 << 10, linger=30.0) as (_, listener, connection):
        listener.register_service("sleep", sleeper, scope="x")
        stream = await connection.open_stream("sleep")
        await stream.send(bytes(500_000))
        async with anyio.create_task_group() as tasks:

            async def close() -> None:
                await connection.close(AppCode.LEFT, "bye", linger=30.0)

            tasks.start_soon(close)
            await eventually(lambda: not connection.is_open)
            assert connection.closed is None
            with pytest.raises(ConnectionClosed, match="closing"):
                await connection.call("echo", 1)
            wake.set()
        assert connection.closed is not None


async def test_the_peer_reads_code_and_reason_of_a_close() -> None:
    async with pair() as (dialer, listener, connection):
        back = listener.connection(dialer.node_id)
        assert back is not None
        await connection.close(AppCode.DENIED, "x" * 2000 + "\udc80")
        error = await back.wait_closed()
        assert isinstance(error, AccessDenied)
        assert error.why is not None
        assert 200 < len(error.why) <= 256


async def test_an_error_in_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with pair():
            raise ZeroDivisionError


@pytest.mark.parametrize("how", ["error", "cancel"])
async def test_leaving_in_a_hurry_says_goodbye_and_is_quick(how: str) -> None:
    async def sleeper(request: Incoming) -> None:
        await anyio.sleep_forever()

    async with endpoint() as listener:
        listener.register_service("sleep", sleeper, scope="x")
        events = Events(listener)

        async def run() -> None:
            async with endpoint() as dialer:
                connection = await dialer.connect(at(listener))
                stream = await connection.open_stream("sleep")
                await stream.send(bytes(MIB))
                nonlocal began
                began = time.monotonic()
                if how == "error":
                    raise ZeroDivisionError
                scope.cancel()
                await anyio.sleep_forever()

        began = 0.0
        with anyio.CancelScope() as scope:
            if how == "error":
                with pytest.raises(ZeroDivisionError):
                    await run()
            else:
                await run()
        assert time.monotonic() - began < 2.0
        await eventually(lambda: events.of(PeerLeft), timeout=1)
        assert isinstance(events.of(PeerLeft)[0].error, ConnectionClosed), "left, not lost"


async def test_a_cancelled_program_still_delivers_its_last_words() -> None:
    got: list[CborValue] = []

    async def note(request: Incoming) -> CborValue:
        got.append(request.value)
        return None

    async with endpoint() as listener:
        listener.register_call("note", note, scope="x")
        with anyio.CancelScope() as scope:
            async with endpoint() as dialer:
                connection = await dialer.connect(at(listener))
                try:
                    scope.cancel()
                    await anyio.sleep_forever()
                finally:
                    with anyio.CancelScope(shield=True):
                        await connection.call("note", "farewell", timeout=3)
        assert got == ["farewell"]


async def test_leaving_wakes_whoever_waits() -> None:
    errors: list[MeshError] = []

    async def wait(connection: Connection) -> None:
        try:
            await connection.call("hang")
        except MeshError as error:
            errors.append(error)

    async def hang(request: Incoming) -> CborValue:
        await anyio.sleep_forever()
        return None

    async with endpoint() as listener, anyio.create_task_group() as tasks:
        listener.register_call("hang", hang, scope="x")
        async with endpoint() as dialer:
            connection = await dialer.connect(at(listener))
            tasks.start_soon(wait, connection)
            await anyio.wait_all_tasks_blocked()
    assert isinstance(errors[0], ConnectionClosed)


async def test_handlers_are_cancelled_when_their_endpoint_leaves() -> None:
    started, cancelled = anyio.Event(), anyio.Event()

    async def hang(request: Incoming) -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    async with endpoint() as dialer:
        async with endpoint() as listener:
            listener.register_service("hang", hang, scope="x")
            connection = await dialer.connect(at(listener))
            stream = await connection.open_stream("hang")
            await started.wait()
        assert cancelled.is_set()
        with pytest.raises(ConnectionClosed):
            await stream.receive()


async def test_nothing_stays_in_the_tables_when_a_peer_leaves() -> None:
    async with endpoint() as listener:
        for _ in range(3):
            async with endpoint() as dialer:
                connection = await dialer.connect(at(listener))
                await connection.call("echo", 1)
                await connection.open_stream("echo")
        await eventually(lambda: is_idle(listener))
        assert len(listener._engine.driver._heap) < 100


# -- grants that end


async def test_an_expired_grant_closes_the_connection_with_the_reason() -> None:
    grant = Grant(frozenset({"*"}), expires_at=time.time() + 0.3)
    async with endpoint(Policy(connect=grant)) as listener, endpoint() as dialer:
        connection = await dialer.connect(at(listener))
        assert await connection.call("echo", 1) == 1
        with anyio.fail_after(3):
            error = await connection.wait_closed()
        assert isinstance(error, AccessDenied)
        assert "expired" in str(error)


async def test_revoking_a_peer_closes_its_connections_and_stops_its_handlers() -> None:
    cancelled = anyio.Event()

    async def hang(request: Incoming) -> None:
        try:
            await request.stream.send(b"on it")
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    async with endpoint() as listener, endpoint() as dialer, endpoint() as other:
        listener.register_service("hang", hang, scope="x")
        connection = await dialer.connect(at(listener))
        spared = await other.connect(at(listener))
        stream = await connection.open_stream("hang")
        assert await stream.receive_exactly(5) == b"on it"
        assert listener.revoke(dialer.node_id, "removed from the list") == 1
        with anyio.fail_after(1):
            await cancelled.wait()
        with pytest.raises(AccessDenied, match="removed from the list"):
            await stream.receive()
        assert await spared.call("echo", 1) == 1
        assert listener.revoke(dialer.node_id, "again") == 0


async def test_revoking_a_machine_closes_its_programs() -> None:
    machine, program = SecretKey.generate(), SecretKey.generate()
    statement = Delegation.issue(machine, program.node_id, ("x",), 600.0, time.time())
    async with (
        endpoint() as listener,
        Endpoint(program, allow_any(), config(), delegation=statement) as dialer,
    ):
        connection = await dialer.connect(at(listener))
        assert listener.revoke(machine.node_id, "sold") == 1
        assert isinstance(await connection.wait_closed(), AccessDenied)


async def test_a_peer_revoked_while_it_is_being_admitted_does_not_get_in() -> None:
    asked, answer = anyio.Event(), anyio.Event()

    class Slow(Policy):
        async def authorize(self, request: object) -> Grant:
            asked.set()
            await answer.wait()
            return Grant(frozenset({"*"}))

    async with endpoint(Slow()) as listener, endpoint() as dialer:
        async with anyio.create_task_group() as tasks:

            async def dial() -> None:
                with pytest.raises(AccessDenied):
                    await dialer.connect(at(listener))

            tasks.start_soon(dial)
            await asked.wait()
            assert listener.revoke(dialer.node_id, "no") == 1
            answer.set()
        assert not listener.connections
