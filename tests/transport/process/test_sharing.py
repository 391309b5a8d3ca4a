"""Programs that share an endpoint process: nothing else is shared, and none is in another's way."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from tests.cancelling import process_holdings
from tests.programs import Program
from tests.transport.nodes import at, endpoint, eventually
from tests.transport.process.test_life import engine, is_gone, pid
from transport import Endpoint, EndpointLost, Incoming, PeerLost
from transport.process import client, hub, sharing
from transport.process.records import MAX_PACKET, Kind, decode, encode
from transport.process.spawn import Child

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has endpoint processes"),
]

MIB = 1 << 20


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the process takes to start, nobody turns elsewhere."""
    monkeypatch.setattr(sharing, "JOIN_SECONDS", 30.0)


@asynccontextmanager
async def daemon(path: Path) -> AsyncIterator[None]:
    """What a machine's daemon does for its programs, for the block."""
    with sharing.listening(path) as listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sharing.share, listener)
            yield
            tasks.cancel_scope.cancel()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of the socket: longer than an address of one may be."""
    directory = tmp_path / ("long" * 40)
    directory.mkdir()
    return directory / "endpoint.sock"


def shared(path: Path, **settings: object) -> asynccontextmanager[Endpoint]:  # type: ignore[valid-type]
    return endpoint(placement="process", share=str(path), **settings)


def is_shared(node: Endpoint) -> bool:
    return isinstance(engine(node)._child, sharing.SharedProcess)


def memories(process: int, name: str = "memfd:quicmesh") -> int:
    """How many programs' memory, or what else, a process has mapped."""
    return Path(f"/proc/{process}/maps").read_text().count(name)


async def _mirror(request: Incoming) -> None:
    async for data in request.stream:
        await request.stream.send(data)


async def _deaf(request: Incoming) -> None:
    await request.stream.receive_exactly(1)
    await anyio.sleep_forever()


async def test_programs_share_a_process_and_nothing_else(path: Path) -> None:
    before = process_holdings()
    async with daemon(path):
        async with shared(path) as one, shared(path) as other, endpoint() as listener:
            listener.register_service("mirror", _mirror, scope="x")
            process = pid(one)
            assert is_shared(one)
            assert pid(other) == process
            assert memories(process) == 2
            connections = [await node.connect(at(listener)) for node in (one, other)]
            assert {each.peer.node_id for each in listener.connections} == {
                one.node_id,
                other.node_id,
            }
            assert await (await other.connect(at(one))).call("echo", 1) == 1
            data = os.urandom(MIB) * 3
            async with anyio.create_task_group() as tasks:

                async def move(number: int) -> None:
                    async with await connections[number].open_stream("mirror") as stream:
                        room = memoryview(bytearray(len(data)))
                        async with anyio.create_task_group() as both:
                            both.start_soon(stream.send_lent, memoryview(data))
                            await stream.receive_into(room)
                        assert room == data

                tasks.start_soon(move, 0)
                tasks.start_soon(move, 1)
        await eventually(lambda: memories(process) == 0)
        port = one.port
        async with shared(path, bind=f"127.0.0.1:{port}") as again:  # free as soon as it is left
            assert pid(again) == process
            assert memories(process, "torch") == 0
    assert is_gone(process)
    assert not os.path.exists(path)  # noqa: ASYNC240, PTH110
    await eventually(lambda: process_holdings() == before)


async def test_a_process_that_is_killed_is_lost_to_all_and_the_next_starts_another(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with daemon(path), endpoint() as listener:
        async with shared(path) as one, shared(path) as other:
            connections = [await node.connect(at(listener)) for node in (one, other)]
            began = time.monotonic()
            os.kill(pid(one), signal.SIGKILL)
            for connection in connections:
                error = await connection.wait_closed()
                assert isinstance(error, EndpointLost)
                assert "was killed" in str(error)
            assert time.monotonic() - began < 2
            async with shared(path) as third:
                assert is_shared(third)
                assert await (await third.connect(at(listener))).call("echo", 3) == 3
        assert "killed by SIGKILL" in caplog.text


async def test_the_daemons_end_is_said_at_once(path: Path) -> None:
    async with endpoint() as listener, anyio.create_task_group() as tasks:
        over = anyio.Event()

        async def live(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            async with daemon(path):
                task_status.started()
                await over.wait()

        await tasks.start(live)
        async with shared(path) as node:
            connection = await node.connect(at(listener))
            (back,) = listener.connections
            over.set()
            with anyio.fail_after(2):
                error = await connection.wait_closed()
                assert isinstance(error, EndpointLost)
                assert "machine's daemon, which has ended" in str(error)
                assert isinstance(await back.wait_closed(), PeerLost)
            with pytest.raises(EndpointLost, match="daemon"):
                await node.connect(at(listener))
    async with shared(path) as node:  # nobody is there now
        assert not is_shared(node)


DAEMON = """
import anyio, sys
from pathlib import Path
from transport.process.sharing import listening, share
with listening(Path(sys.argv[1])) as listener:
    print("up", flush=True)
    anyio.run(share, listener)
"""


async def test_a_daemon_that_is_killed_takes_the_process_with_it(path: Path) -> None:
    async with endpoint() as listener:
        with Program(["-c", DAEMON, str(path)], torch=False) as program:
            assert program.stdout is not None
            await anyio.to_thread.run_sync(program.stdout.readline)
            async with shared(path) as node:
                process = pid(node)
                connection = await node.connect(at(listener))
                program.kill()
                with anyio.fail_after(2):
                    error = await connection.wait_closed()
                assert isinstance(error, EndpointLost)
                assert "daemon" in str(error)
                await eventually(lambda: is_gone(process), 2)
        async with shared(path) as node:  # the socket's file is still there
            assert not is_shared(node)


PROGRAM = """
import anyio, sys, os
from auth import SecretKey, allow_any, NodeId
from transport import Endpoint, EndpointConfig, PeerAddress

async def main():
    config = EndpointConfig(
        bind="127.0.0.1:0", placement="process", share=sys.argv[3], liveness=0.5
    )
    async with Endpoint(SecretKey.generate(), allow_any(), config) as node:
        where = PeerAddress(NodeId.parse(sys.argv[1]), (("127.0.0.1", int(sys.argv[2])),))
        connection = await node.connect(where)
        stream = await connection.open_stream("deaf")
        print(node._engine._child.pid, flush=True)
        await stream.send_lent(memoryview(bytes(100 << 20)))

anyio.run(main)
"""


async def test_a_program_that_dies_or_stops_is_lost_alone(path: Path) -> None:
    async with daemon(path), shared(path) as node, endpoint(liveness=60.0) as listener:
        listener.register_service("deaf", _deaf, scope="x")
        connection = await node.connect(at(listener))
        arguments = ["-c", PROGRAM, str(listener.node_id), str(listener.port), str(path)]
        for number in (signal.SIGKILL, signal.SIGSTOP):
            with Program(arguments, torch=False) as program:
                assert program.stdout is not None
                line = await anyio.to_thread.run_sync(program.stdout.readline)
                assert int(line) == pid(node)
                (back,) = (
                    each for each in listener.connections if each.peer.node_id != node.node_id
                )
                assert memories(pid(node)) == 2
                os.kill(program.pid, number)
                with anyio.fail_after(3):
                    assert isinstance(await back.wait_closed(), PeerLost)
                program.kill()
            await eventually(lambda: memories(pid(node)) == 1)
            assert await connection.call("echo", 1) == 1


async def test_a_process_that_is_stopped_is_left(path: Path) -> None:
    async with daemon(path), endpoint() as listener:
        async with shared(path, liveness=0.5) as node:
            process = pid(node)
            connection = await node.connect(at(listener))
            os.kill(process, signal.SIGSTOP)
            with anyio.fail_after(5):
                error = await connection.wait_closed()
            assert isinstance(error, EndpointLost)
            assert "as if it were stopped" in str(error)
            os.kill(process, signal.SIGCONT)
            await eventually(lambda: memories(process) == 0)
        async with shared(path) as node:
            assert pid(node) == process


async def test_a_stopped_daemon_holds_nobody_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "JOIN_SECONDS", 0.1)
    with sharing.listening(path):
        async with shared(path) as node:
            assert not is_shared(node)


async def test_a_fork_of_a_program_holds_nothing_and_is_told_so(path: Path) -> None:
    async with daemon(path), shared(path) as node, endpoint() as listener:
        connection = await node.connect(at(listener))
        there, here = os.pipe()
        if (child := os.fork()) == 0:
            try:
                engine(node)._check()
            except EndpointLost as error:
                os.write(here, str(error).encode())
            finally:
                os._exit(0)
        os.close(here)
        said = os.read(there, 4096).decode()
        os.close(there)
        os.waitpid(child, 0)  # noqa: ASYNC222 - it has ended
        assert "forked" in said
        assert await connection.call("echo", 1) == 1


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[hub.Hub]:
    """What serves programs, in this process."""
    here, there = socket.socketpair()
    with here, there, sharing.listening(path) as listener:
        serves = hub.Hub(listener, there)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serves.run, None)
            yield serves
            here.close()


async def setup_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What a program says first."""
    setups: list[bytes] = []

    async def remember(path: str, setup: bytes, *rest: object) -> None:
        setups.append(setup)

    with monkeypatch.context() as patch:
        patch.setattr(client, "join", remember)
        async with shared(path):
            pass
    (setup,) = setups
    return setup


async def answer(path: Path, packet: bytes, *given: int) -> str:
    """What is said to a program that comes with a packet and descriptors."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        with sharing._reachable(path) as name:
            sock.connect(name)
        socket.send_fds(sock, [packet], given)
        await anyio.wait_readable(sock)
        (record,) = decode(memoryview(sock.recv(MAX_PACKET)))
        return f"{record.kind.name} {bytes(record.payload).decode(errors='replace')}"


async def test_who_can_not_be_served_is_told_why(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "SETUP_SECONDS", 0.2)
    setup = await setup_of(path, monkeypatch)
    async with serving(path) as serves:
        await anyio.wait_all_tasks_blocked()
        before = process_holdings()
        with (
            (tmp_path / "file").open("wb+") as file,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
            socket.socket() as tcp,
        ):
            plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
            os.ftruncate(plain, 256 * MIB)
            life, theirs = os.pipe()
            udp.bind(("127.0.0.1", 0))
            good = (udp.fileno(), theirs)
            assert "begins" in await answer(path, encode(Kind.PING))
            assert "REFUSED" in await answer(path, b"garbage")
            assert "REFUSED" in await answer(path, setup)
            assert "no use" in await answer(path, setup, file.fileno(), theirs)
            assert "no use" in await answer(path, setup, tcp.fileno(), theirs)
            assert "no use" in await answer(path, setup, *good, plain)
            assert "no use" in await answer(path, setup, *good, file.fileno())
            bad = setup.replace(b"liveness", b"lively__")
            assert "no use" in await answer(path, bad, *good)
            with monkeypatch.context() as patch:
                patch.setattr(hub, "VERSION", 99)
                assert "version" in await answer(path, setup, *good)
            with monkeypatch.context() as patch:
                patch.setattr(hub, "MAX_PROGRAMS", 0)
                assert "already" in await answer(path, setup, *good)
            with monkeypatch.context() as patch:
                patch.setattr(hub, "peer_of", lambda sock: (os.getpid(), os.geteuid() + 1))
                assert "another user" in await answer(path, setup, *good)
            with monkeypatch.context() as patch:
                patch.setattr(hub, "peer_of", lambda sock: (0, os.geteuid()))
                assert "namespace" in await answer(path, setup, *good)
            assert "JOINED" in await answer(path, setup, *good)
            for descriptor in (plain, life, theirs):
                os.close(descriptor)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            with sharing._reachable(path) as name:
                silent.connect(name)
            await anyio.wait_readable(silent)
        await eventually(lambda: not serves._servers and process_holdings() == before)


async def test_a_program_that_talks_nonsense_is_parted_with_alone(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(path) as serves, endpoint() as listener:
        async with shared(path) as one, shared(path) as other:
            connections = [await node.connect(at(listener)) for node in (one, other)]
            channel = engine(one)._channel
            assert channel is not None
            channel.socket.send(b"nonsense")
            with anyio.fail_after(5):
                assert isinstance(await connections[0].wait_closed(), EndpointLost)
            assert await connections[1].call("echo", 1) == 1
            assert len(serves._servers) == 1
        assert "could not be served any more" in caplog.text


@pytest.mark.attack
async def test_a_program_that_asks_and_does_not_listen_is_parted_with_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.process.server.MOST_UNHEARD", MIB)
    setup = await setup_of(path, monkeypatch)
    question = encode(Kind.SYNC, number=1)
    flood, life = question * (MAX_PACKET // len(question)), os.pipe()
    async with serving(path) as serves, endpoint() as listener, shared(path) as other:
        connection = await other.connect(at(listener))
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        ):
            udp.bind(("127.0.0.1", 0))
            with sharing._reachable(path) as name:
                deaf.connect(name)
            socket.send_fds(deaf, [setup], (udp.fileno(), life[1]))
            deaf.setblocking(False)
            await eventually(lambda: len(serves._servers) == 2)
            most = 0
            with anyio.fail_after(20):
                while len(serves._servers) == 2:
                    try:
                        deaf.send(flood)
                    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                        await anyio.sleep(0.001)
                    await anyio.lowlevel.checkpoint()
                    most = max(most, *(each._channel._kept for each in serves._servers))
            assert MIB // 2 < most < 4 * MIB
            assert await connection.call("echo", 1) == 1
    for each in life:
        os.close(each)


@pytest.mark.attack
async def test_newcomers_that_say_nothing_are_few(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "MAX_NEWCOMERS", 2)
    monkeypatch.setattr(hub, "SETUP_SECONDS", 0.2)
    async with serving(path) as serves:
        silent = []
        try:
            for _ in range(5):
                silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                with sharing._reachable(path) as name:
                    silent[-1].connect(name)
            most = 0
            with anyio.fail_after(5):
                for each in silent:  # each has its turn, and is told that it has said nothing
                    while not _has_come(each):
                        most = max(most, serves._programs)
                        await anyio.sleep(0.01)
            assert most == 2
        finally:
            for each in silent:
                each.close()
        async with shared(path) as node:
            assert is_shared(node)


def _has_come(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


async def test_a_process_of_another_user_is_given_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(path) as serves:
        monkeypatch.setattr(sharing, "peer_of", lambda sock: (os.getpid(), os.geteuid() + 1))
        async with shared(path) as node:
            assert not is_shared(node)
        assert f"of user {os.geteuid() + 1}" in caplog.text
        assert not serves._servers


async def test_it_ends_when_there_has_been_no_program_for_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "IDLE_SECONDS", 0.05)
    here, there = socket.socketpair()
    with here, there, sharing.listening(path) as listener:
        with anyio.fail_after(5):
            await hub.Hub(listener, there).run(None)
    assert isinstance(here, socket.socket)


async def test_one_that_does_not_start_is_tried_again_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "quicmesh")
    monkeypatch.setattr(sharing, "JOIN_SECONDS", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        async with daemon(path):
            with monkeypatch.context() as other:
                other.setattr(client, "spawn", _spawn_nothing)
                with pytest.raises(EndpointLost, match="nothing"):
                    async with shared(path):
                        pass
            await eventually(lambda: "exit status 1" in caplog.text)


def _spawn_nothing(*args: object) -> tuple[Child, socket.socket]:
    raise EndpointLost("starting the endpoint process", why="nothing is started")
