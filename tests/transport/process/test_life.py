"""The endpoint process lives and dies with its program, and neither leaves the other waiting."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from tests.cancelling import process_holdings
from tests.programs import Program
from tests.transport.nodes import at, config, endpoint, eventually
from transport import (
    AddressInUse,
    Connection,
    ConnectionClosed,
    Endpoint,
    EndpointConfig,
    EndpointLost,
    Incoming,
    PeerAddress,
    PeerLost,
    TransportError,
)
from transport.process.client import ProcessEngine

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has endpoint processes"),
]

MIB = 1 << 20


def engine(node: Endpoint) -> ProcessEngine:
    assert isinstance(node._engine, ProcessEngine)
    return node._engine


def pid(node: Endpoint) -> int:
    child = engine(node)._child
    assert child is not None
    return child.pid


def is_gone(number: int) -> bool:
    """Whether a process has ended, reaped by its parent or not."""
    try:
        with open(f"/proc/{number}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@asynccontextmanager
async def placed() -> AsyncIterator[tuple[Endpoint, Endpoint, Connection]]:
    """A dialer whose packets a process moves, a listener in the loop, and their connection."""
    async with endpoint(placement="process") as dialer, endpoint(placement="loop") as listener:
        listener.register_call("hang", _hang, scope="x")
        listener.register_service("mirror", _mirror, scope="x")
        listener.register_service("deaf", _deaf, scope="x")
        yield dialer, listener, await dialer.connect(at(listener))


async def _hang(request: Incoming) -> None:
    await anyio.sleep_forever()


async def _mirror(request: Incoming) -> None:
    async for data in request.stream:
        await request.stream.send(data)


async def _deaf(request: Incoming) -> None:
    await request.stream.receive_exactly(1)
    await anyio.sleep_forever()


async def test_everything_crosses_and_nothing_is_left_behind() -> None:
    before = process_holdings()
    async with placed() as (dialer, listener, connection):
        number = pid(dialer)
        assert await connection.call("echo", {"x": [1, b"2"]}) == {"x": [1, b"2"]}
        back = listener.connection(dialer.node_id)
        assert back is not None
        assert await back.call("echo", "back") == "back"
        assert 0 < await connection.ping() < 3
        data = os.urandom(100_000) * 53
        async with await connection.open_stream("mirror") as stream:
            room = memoryview(bytearray(len(data)))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream.send_lent, memoryview(data))
                await stream.receive_into(room)
            assert room == data
            await stream.send(b"x" * 300_000)
            assert await stream.receive_exactly(300_000) == b"x" * 300_000
        await eventually(lambda: connection.info.bytes_sent > len(data))
        assert connection.info.streams == 0
        assert connection.info.rtt is not None
        assert connection.remote_address == ("127.0.0.1", listener.port)
        shared = engine(dialer)._memory
        assert shared is not None
        await eventually(lambda: shared.free == 256 * MIB)
    assert is_gone(number)
    await eventually(lambda: process_holdings() == before)


async def test_a_process_that_is_killed_fails_everything_at_once_with_the_cause() -> None:
    before = process_holdings()
    errors: list[BaseException] = []

    async def take(what: object) -> None:
        with pytest.raises(EndpointLost) as caught:
            await what  # type: ignore[misc]
        errors.append(caught.value)

    async with placed() as (dialer, listener, connection):
        back = listener.connection(dialer.node_id)
        assert back is not None
        stream = await connection.open_stream("deaf")
        reader = await connection.open_stream("mirror")
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take, connection.call("hang", None))
            tasks.start_soon(take, stream.send_lent(memoryview(bytes(40 * MIB))))
            tasks.start_soon(take, reader.receive_into(memoryview(bytearray(MIB))))
            await anyio.sleep(0.05)
            os.kill(pid(dialer), signal.SIGKILL)
        with pytest.raises(EndpointLost, match="killed by SIGKILL"):
            await dialer.connect(at(listener))
        assert isinstance(connection.closed, EndpointLost)
        assert all("SIGKILL" in str(error) for error in errors)
        assert len(errors) == 3
        assert isinstance(await back.wait_closed(), PeerLost)
        assert time.monotonic() - began < 3  # the liveness bound
    await eventually(lambda: process_holdings() == before)


PROGRAM = """
import anyio, sys, os
from auth import SecretKey, allow_any, NodeId
from transport import Endpoint, EndpointConfig, PeerAddress

async def main():
    config = EndpointConfig(bind="127.0.0.1:0", placement="process")
    async with Endpoint(SecretKey.generate(), allow_any(), config) as node:
        where = PeerAddress(NodeId.parse(sys.argv[1]), (("127.0.0.1", int(sys.argv[2])),))
        connection = await node.connect(where)
        if sys.argv[3] == "fork":
            if os.fork() == 0:  # a child that holds on to whatever it has inherited
                os.execvp("sleep", ["sleep", "20"])
        stream = await connection.open_stream("deaf")
        print(node._engine._child.pid, flush=True)
        await stream.send_lent(memoryview(bytes(100 << 20)))

anyio.run(main)
"""


@pytest.mark.parametrize("how", ["alone", "fork"])
async def test_a_program_that_is_killed_takes_its_process_with_it(how: str) -> None:
    async with endpoint() as listener:
        listener.register_service("deaf", _deaf, scope="x")
        arguments = ["-c", PROGRAM, str(listener.node_id), str(listener.port), how]
        with Program(arguments, torch=False) as program:
            assert program.stdout is not None
            number = int(await anyio.to_thread.run_sync(program.stdout.readline))
            (connection,) = listener.connections
            os.kill(program.pid, signal.SIGKILL)
            with anyio.fail_after(1):
                assert isinstance(await connection.wait_closed(), PeerLost)
            await eventually(lambda: is_gone(number), 1)


BARE = """
import fcntl, os, sys
sys.path[:] = [each for each in sys.path if not each.endswith("site-packages")]
for module in os, fcntl:
    for name in [each for each in dir(module) if "SEAL" in each or "_open" in each]:
        delattr(module, name)
del os.memfd_create
"""
"""``sitecustomize.py``: of a Python that was built for an old system, as those are that shall run
on any, and that finds no packages by itself."""

ELSEWHERE = """
import json, sys
sys.path += [each for each in json.loads(sys.argv.pop()) if each not in sys.path]
sys.path.append(b"what imports pass over")
"""


@pytest.mark.parametrize("kind", ["bare", "isolated", "shadowed"])
async def test_it_finds_what_the_program_has_found_in_a_python_of_any_kind(
    kind: str, tmp_path: Path
) -> None:
    if kind == "bare":
        (tmp_path / "sitecustomize.py").write_text(BARE)
    else:
        name = "anyio.py" if kind == "isolated" else "transport.py"
        (tmp_path / name).write_text("raise ImportError('it is of somebody else')")
    flags = ["-I"] if kind == "isolated" else []
    async with endpoint() as listener:
        listener.register_service("deaf", _deaf, scope="x")
        where = [str(listener.node_id), str(listener.port), "alone", json.dumps(sys.path)]
        async with await anyio.open_process(
            [sys.executable, *flags, "-c", ELSEWHERE + PROGRAM, *where],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        ) as program:
            assert program.stdout is not None
            with anyio.fail_after(20):
                said = await program.stdout.receive()
            assert said.strip().isdigit(), said
            program.kill()


STOPPED = """
import anyio, sys
from auth import SecretKey, allow_any, NodeId
from transport import Endpoint, EndpointConfig, PeerAddress

async def main():
    config = EndpointConfig(bind="127.0.0.1:0", placement="process", liveness=0.5)
    async with Endpoint(SecretKey.generate(), allow_any(), config) as node:
        where = PeerAddress(NodeId.parse(sys.argv[1]), (("127.0.0.1", int(sys.argv[2])),))
        connection = await node.connect(where)
        print(node.port, flush=True)
        print("closed:", await connection.wait_closed(), flush=True)
        print(await (await node.connect(where)).call("echo", "again"), flush=True)

anyio.run(main)
"""


async def test_a_program_that_is_stopped_is_lost_to_its_peers_and_may_come_back() -> None:
    async with endpoint(liveness=60.0, placement="loop") as listener:
        arguments = ["-c", STOPPED, str(listener.node_id), str(listener.port)]
        with Program(arguments, torch=False) as program:
            assert program.stdout is not None
            port = int(await anyio.to_thread.run_sync(program.stdout.readline))
            (connection,) = listener.connections
            with anyio.move_on_after(0.8):  # nothing is said, and all is well
                await connection.wait_closed()
            assert connection.is_open
            os.kill(program.pid, signal.SIGSTOP)
            with anyio.fail_after(5):
                error = await connection.wait_closed()
            assert isinstance(error, PeerLost)
            assert "stopped" in str(error)
            # Who calls meanwhile is told so, too.
            where = PeerAddress(connection.peer.node_id, (("127.0.0.1", port),))
            with pytest.raises(TransportError, match="stopped"), anyio.fail_after(5):
                await listener.connect(where)
            os.kill(program.pid, signal.SIGCONT)
            said = await anyio.to_thread.run_sync(program.stdout.readline)
            assert said.startswith("closed: ")
            assert "did not go on" in said
            assert await anyio.to_thread.run_sync(program.stdout.readline) == "again\n"


async def test_a_process_that_is_stopped_is_replaced_by_an_error() -> None:
    async with (
        endpoint(placement="process", liveness=0.5) as dialer,
        endpoint(placement="loop") as listener,
    ):
        connection = await dialer.connect(at(listener))
        os.kill(pid(dialer), signal.SIGSTOP)
        with anyio.fail_after(5):
            error = await connection.wait_closed()
        assert isinstance(error, EndpointLost)
        assert "as if it were stopped" in str(error)


async def test_a_process_that_answers_nothing_is_given_up_whatever_the_liveness_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transport.process.client.ANSWER_SECONDS", 0.5)
    async with endpoint(placement="process", liveness=600.0) as node:
        await engine(node).up()
        os.kill(pid(node), signal.SIGSTOP)
        await eventually(lambda: engine(node)._lost)
        assert "has not answered" in str(engine(node)._lost)


async def test_signals_to_everybody_do_not_end_it() -> None:
    async with placed() as (dialer, _, connection):
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid(dialer), signum)
        assert os.getpgid(pid(dialer)) == pid(dialer)
        assert await connection.call("echo", 1) == 1


async def test_a_forked_program_is_told_so_and_does_no_harm() -> None:
    async with placed() as (dialer, _, connection):
        there, here = os.pipe()
        if (child := os.fork()) == 0:
            try:
                engine(dialer)._check()
            except EndpointLost as error:
                os.write(here, str(error).encode())
            finally:
                os._exit(0)
        os.close(here)
        said = os.read(there, 4096).decode()
        os.close(there)
        os.waitpid(child, 0)  # noqa: ASYNC222 - it has ended
        assert "forked" in said
        assert "Open one in each process" in said
        assert await connection.call("echo", 1) == 1


async def test_its_log_is_the_programs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quicmesh")
    async with placed() as (dialer, _, connection):
        # A record that makes no sense there fails the connection that it is of, and says so.
        mirror = engine(dialer)._links[1]
        mirror._opened += 5
        mirror.open_stream()
        engine(dialer).pump(mirror)
        with anyio.fail_after(5):
            await connection.wait_closed()
        await eventually(lambda: "a connection failed inside" in caplog.text)
        assert "the program counts otherwise" in caplog.text


async def test_an_address_in_use_is_an_error_as_ever() -> None:
    async with endpoint() as other:
        with pytest.raises(AddressInUse):
            async with endpoint(bind=f"127.0.0.1:{other.port}", placement="process"):
                pass


async def test_a_process_that_does_not_come_up_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = process_holdings()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with endpoint(placement="loop") as other, endpoint(placement="process") as node:
        for _ in range(2):
            with pytest.raises(EndpointLost, match="exit status 1") as caught:
                await node.connect(at(other))
            assert "standard error output" in str(caught.value)
            assert 'placement="loop"' in str(caught.value)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(EndpointLost, match=r'No such file.*placement="loop"'):
        async with endpoint(placement="process"):
            pass
    await eventually(lambda: process_holdings() == before)


async def test_who_leaves_before_it_is_up_does_not_wait_for_it() -> None:
    before = process_holdings()
    async with endpoint(placement="process") as node:
        number = pid(node)
        os.kill(number, signal.SIGSTOP)  # it takes as long as it likes
        began = time.monotonic()
    assert time.monotonic() - began < 1
    assert is_gone(number)
    await eventually(lambda: process_holdings() == before)


async def test_the_time_for_a_dial_begins_when_it_is_up() -> None:
    async with endpoint(placement="loop") as other, endpoint(placement="process") as node:
        os.kill(pid(node), signal.SIGSTOP)
        with anyio.move_on_after(0.2) as impatient:
            await node.connect(at(other), timeout=0.1)
        assert impatient.cancelled_caught
        os.kill(pid(node), signal.SIGCONT)
        assert await (await node.connect(at(other))).call("echo", 1) == 1


async def test_who_dials_learns_that_the_node_closes_before_it_is_up() -> None:
    async with endpoint(placement="loop") as other, anyio.create_task_group() as tasks:

        async def dial() -> None:
            with pytest.raises(ConnectionClosed, match="closing"):
                await node.connect(at(other))

        async with endpoint(placement="process") as node:
            os.kill(pid(node), signal.SIGSTOP)
            tasks.start_soon(dial)
            await anyio.wait_all_tasks_blocked()


async def test_words_that_are_not_ours_end_it() -> None:
    async with placed() as (dialer, _, connection):
        link = engine(dialer)._links[1]
        from transport.process.records import Kind, Record

        with pytest.raises(TransportError):
            link.take(Record(Kind.OFFER, 0, 1, 0, 0, memoryview(b"")))
        assert await connection.call("echo", 1) == 1


def test_a_placement_that_is_none_is_refused() -> None:
    with pytest.raises(TransportError, match="placement"):
        EndpointConfig(placement="elsewhere")


async def test_a_reader_that_sleeps_stops_the_writer() -> None:
    async def lazy(request: Incoming) -> None:
        started.append(request)
        await anyio.sleep_forever()

    started: list[Incoming] = []
    async with (
        endpoint(placement="process", linger=0.01) as listener,
        endpoint(placement="loop", linger=0.01) as dialer,
    ):
        listener.register_service("lazy", lazy, scope="x")
        connection = await dialer.connect(at(listener))
        stream = await connection.open_stream("lazy")
        with anyio.move_on_after(0.5):
            while True:
                await stream.send(bytes(MIB // 4))
        buffered = started[0].stream.core.incoming.delivered
        assert 0 < buffered <= config().stream_window
        assert stream.core.remote_stop is None
