"""Either of the two processes killed at any moment: the other, and the peer, have a named error."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import anyio
import pytest

from auth import MeshError
from tests.cancelling import process_holdings
from tests.programs import Program
from tests.transport.nodes import at, endpoint, eventually
from tests.transport.process.test_life import is_gone, pid
from tests.transport.process.test_sharing import daemon, memories, path, patient, shared
from transport import EndpointLost, Incoming, PeerLost

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has endpoint processes"),
]

__all__ = ["path", "patient"]  # fixtures

ROUNDS = 50
MIB = 1 << 20

PROGRAM = """
import anyio, sys
from auth import SecretKey, allow_any, NodeId
from transport import Endpoint, EndpointConfig, PeerAddress

async def main():
    share = sys.argv[3] if sys.argv[3:] else None
    config = EndpointConfig(bind="127.0.0.1:0", placement="process", share=share, linger=0.1)
    async with Endpoint(SecretKey.generate(), allow_any(), config) as node:
        print(node._engine._child.pid, flush=True)
        where = PeerAddress(NodeId.parse(sys.argv[1]), (("127.0.0.1", int(sys.argv[2])),))
        connection = await node.connect(where)
        room = memoryview(bytearray(3 << 20))
        while True:
            async with await connection.open_stream("mirror", len(room)) as stream:
                await stream.send_lent(room)
                await stream.receive_into(room)
            await connection.call("echo", 1)

anyio.run(main)
"""


async def _mirror(request: Incoming) -> None:
    assert isinstance(request.value, int)
    room = memoryview(bytearray(request.value))
    await request.stream.receive_into(room)
    await request.stream.send_lent(room)


async def test_programs_killed_at_random_points() -> None:
    chance = random.Random(5)
    async with endpoint(linger=0.1) as listener:
        listener.register_service("mirror", _mirror, scope="x")
        for _ in range(ROUNDS):
            arguments = ["-c", PROGRAM, str(listener.node_id), str(listener.port)]
            with Program(arguments, torch=False) as program:
                assert program.stdout is not None
                number = int(await anyio.to_thread.run_sync(program.stdout.readline))
                await eventually(lambda: listener.connections)
                (connection,) = listener.connections
                await anyio.sleep(chance.random() * 0.3)
                os.kill(program.pid, signal.SIGKILL)
                with anyio.fail_after(3):
                    assert isinstance(await connection.wait_closed(), PeerLost)
                await eventually(lambda: is_gone(number), 2)  # noqa: B023
            await eventually(lambda: not listener._connections)


async def test_programs_that_share_a_process_killed_at_random_points(path: Path) -> None:
    chance = random.Random(6)
    async with daemon(path), shared(path) as node, endpoint(linger=0.1) as listener:
        listener.register_service("mirror", _mirror, scope="x")
        connection = await node.connect(at(listener))
        before = descriptors(pid(node))
        for _ in range(ROUNDS):
            arguments = ["-c", PROGRAM, str(listener.node_id), str(listener.port), str(path)]
            with Program(arguments, torch=False) as program:
                assert program.stdout is not None
                number = int(await anyio.to_thread.run_sync(program.stdout.readline))
                assert number == pid(node)
                await eventually(lambda: len(listener.connections) == 2, 20)
                (theirs,) = (
                    each for each in listener.connections if each.peer.node_id != node.node_id
                )
                await anyio.sleep(chance.random() * 0.3)
                os.kill(program.pid, signal.SIGKILL)
                with anyio.fail_after(3):
                    assert isinstance(await theirs.wait_closed(), PeerLost)
            await eventually(lambda: memories(pid(node)) == 1)
            await eventually(lambda: descriptors(pid(node)) == before)
            assert await connection.call("echo", 1) == 1


def descriptors(process: int) -> int:
    """How many a process has open."""
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


async def test_processes_killed_at_random_points() -> None:
    chance = random.Random(7)
    async with endpoint(linger=0.1) as listener:
        listener.register_service("mirror", _mirror, scope="x")
        await anyio.wait_all_tasks_blocked()
        before = process_holdings()
        for _ in range(ROUNDS):
            async with endpoint(placement="process", linger=0.1) as node:
                connection = await node.connect(at(listener))
                room = memoryview(bytearray(3 * MIB))
                async with anyio.create_task_group() as tasks:

                    async def kill() -> None:
                        await anyio.sleep(chance.random() * 0.3)
                        os.kill(pid(node), signal.SIGKILL)

                    tasks.start_soon(kill)
                    with pytest.raises(MeshError) as caught, anyio.fail_after(5):
                        await _move_for_ever(connection, room)
                error = caught.value
                assert isinstance(error, EndpointLost), error
                assert "SIGKILL" in str(error)
            await eventually(lambda: not listener._connections)
        await eventually(lambda: process_holdings() == before)


async def _move_for_ever(connection, room: memoryview) -> None:  # type: ignore[no-untyped-def]
    while True:
        async with await connection.open_stream("mirror", len(room)) as stream:
            await stream.send_lent(room)
            await stream.receive_into(room)
        await connection.call("echo", 1)
