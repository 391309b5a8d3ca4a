"""Peers that die, freeze and come back, each a process of its own."""

from __future__ import annotations

import signal
import sys
import time

import anyio
import pytest

from auth import MeshError, SecretKey
from tests.transport.nodes import Events, endpoint, eventually, is_idle, peer_process
from transport import Connection, PeerLeft, PeerLost

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX"),
]


async def failing(connection: Connection, errors: list[MeshError], ended: list[float]) -> None:
    try:
        await connection.call("hang", timeout=20)
    except MeshError as error:
        errors.append(error)
        ended.append(time.monotonic())


@pytest.mark.skipif(sys.platform != "linux", reason="needs the host's reports of closed ports")
async def test_a_killed_peer_is_noticed_far_sooner_than_the_liveness_bound() -> None:
    async with endpoint(liveness=2.0) as node, peer_process() as victim, peer_process() as other:
        connection = await node.connect(victim.address)
        bystander = await node.connect(other.address)
        events = Events(node)
        errors: list[MeshError] = []
        ended: list[float] = []
        worst = 0.0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(failing, connection, errors, ended)
            await eventually(lambda: connection.info.streams == 1)
            await connection.ping()
            began = time.monotonic()
            victim.send(signal.SIGKILL)
            while not ended:
                worst = max(worst, await bystander.ping())
                await anyio.sleep(0.02)
        # A packet has to go out and come back as a report: a probe is due every third of the bound.
        assert ended[0] - began < 1.5
        assert isinstance(errors[0], PeerLost)
        assert victim.node_id.short in str(errors[0])
        assert worst < 1.0, "one dead peer leaves the others alone"
        assert [event.connection for event in events.of(PeerLeft)] == [connection]
        assert await bystander.call("echo", 1) == 1
        assert node.connection(victim.node_id) is None


async def test_a_frozen_peer_is_lost_within_the_bound_and_others_are_not() -> None:
    async with endpoint(liveness=0.8) as node, peer_process() as victim, peer_process() as other:
        connection = await node.connect(victim.address)
        bystander = await node.connect(other.address)
        errors: list[MeshError] = []
        ended: list[float] = []
        worst = 0.0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(failing, connection, errors, ended)
            await eventually(lambda: connection.info.streams == 1)
            began = time.monotonic()
            victim.send(signal.SIGSTOP)
            try:
                while not ended:
                    worst = max(worst, await bystander.ping())
                    await anyio.sleep(0.02)
            finally:
                victim.send(signal.SIGCONT)
        assert 0.4 < ended[0] - began < 2.4
        assert isinstance(errors[0], PeerLost)
        assert "nothing heard" in str(errors[0])
        assert worst < 1.0
        # It has come back to life: the next dial finds it.
        again = await node.connect(victim.address)
        assert again is not connection
        assert await again.call("echo", 1) == 1


async def test_an_idle_connection_outlives_many_liveness_bounds() -> None:
    async with endpoint(liveness=0.2) as node, peer_process() as peer:
        connection = await node.connect(peer.address)
        await anyio.sleep(0.7)
        assert connection.is_open
        assert await connection.call("echo", 1) == 1


async def test_a_writer_to_a_killed_peer_ends_too() -> None:
    async with endpoint() as node, peer_process() as victim:
        connection = await node.connect(victim.address)
        stream = await connection.open_stream("sink")
        await stream.send(bytes(1000))
        victim.send(signal.SIGKILL)

        async def write() -> None:
            while True:
                await stream.send(bytes(100_000))

        with pytest.raises(PeerLost), anyio.fail_after(5):
            await write()
        await eventually(lambda: is_idle(node))


async def test_a_peer_killed_in_the_middle_of_a_dial_fails_the_dial() -> None:
    key = SecretKey.generate()
    async with endpoint() as node, peer_process(key) as victim:
        victim.send(signal.SIGSTOP)  # its socket takes the packets, and nobody answers
        errors: list[MeshError] = []

        async def dial() -> None:
            try:
                await node.connect(victim.address, timeout=10)
            except MeshError as error:
                errors.append(error)

        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(dial)
            await eventually(lambda: node._connections)
            victim.send(signal.SIGKILL)
        assert "nothing listens" in str(errors[0])
        assert time.monotonic() - began < 5.0
        await eventually(lambda: is_idle(node))


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_call_to_a_dead_peer_ends_and_the_one_started_anew_answers_at_once(
    signal_: signal.Signals,
) -> None:
    key, liveness = SecretKey.generate(), 1.0
    async with endpoint(liveness=liveness) as node:
        async with peer_process(key) as first:
            connection = await node.connect(first.address)
            assert await connection.call("echo", 1) == 1
            errors: list[MeshError] = []
            ended: list[float] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(failing, connection, errors, ended)
                await eventually(lambda: connection.info.streams == 1)
                died = time.monotonic()
                first.send(signal_)
            assert ended[0] - died <= liveness + 1.0, "far below the 20 s that the call may take"
            assert isinstance(errors[0], PeerLost)
            port = first.port
        async with peer_process(key, port) as second:
            began = time.monotonic()
            again = await node.connect(second.address)
            assert await again.call("echo", 2) == 2
            assert time.monotonic() - began < liveness
