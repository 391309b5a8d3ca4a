"""Floods: what strangers make a node hold is bounded, and who is in keeps working meanwhile."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from auth import SecretKey
from tests.attacks.raw import RawClient, hello, raw_client, request
from tests.transport.nodes import at, endpoint, eventually
from transport import Connection, Endpoint, Incoming, Unreachable

pytestmark = [pytest.mark.anyio, pytest.mark.attack]


@asynccontextmanager
async def flooded(flood: Callable[[int], None]) -> AsyncIterator[tuple[Endpoint, Connection]]:
    """A node under `flood`, called with its port again and again, and a friend's connection."""
    async with endpoint() as node, endpoint() as friend, anyio.create_task_group() as tasks:
        connection = await friend.connect(at(node))

        async def attack() -> None:
            while True:
                flood(node.port)
                await anyio.sleep(0.002)

        tasks.start_soon(attack)
        yield node, connection
        tasks.cancel_scope.cancel()


async def works(connection: Connection, seconds: float) -> float:
    """Call for a while; return the slowest answer in seconds."""
    worst = 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        assert await connection.call("echo", b"x" * 2000, timeout=5) == b"x" * 2000
        worst = max(worst, time.monotonic() - began)
    return worst


@pytest.mark.alone
async def test_garbage_datagrams_are_dropped_and_counted() -> None:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def flood(port: int) -> None:
        for size in (0, 1, 20, 1200, 1472):
            sock.sendto(os.urandom(size), ("127.0.0.1", port))
            sock.sendto(b"\xc0\x00\x00\x00\x01" + os.urandom(size), ("127.0.0.1", port))

    try:
        async with flooded(flood) as (node, connection):
            assert await works(connection, 0.6) < 1.0
            assert sum(node.drops.values()) > 100
            assert len(node._connections) <= 40, "what looks like a handshake counts as one"
    finally:
        sock.close()


@pytest.mark.alone
async def test_half_open_handshakes_are_bounded_and_a_friend_keeps_working() -> None:
    clients: list[RawClient] = []

    def flood(port: int) -> None:
        if len(clients) < 100:
            client = RawClient(port, SecretKey.generate(), "mesh/1")
            clients.append(client)
            client.start()  # a first flight, and never a second

    try:
        async with flooded(flood) as (node, connection):
            worst = 0.0
            while len(clients) < 60:
                worst = max(worst, await works(connection, 0.2))
            assert worst < 1.0
            assert node._engine.demux.half_open <= 32, "of one host"
            assert len(node._connections) <= 34
            # A newcomer from the same host gets in: it can prove that its address is its own.
            async with endpoint() as late:
                assert await (await late.connect(at(node))).call("echo", 1) == 1
    finally:
        for client in clients:
            client.socket.close()


async def test_many_half_open_handshakes_make_newcomers_prove_their_address() -> None:
    async with endpoint(retry_threshold=2, max_half_open_per_host=8) as node:
        waiting = [RawClient(node.port, SecretKey.generate(), "mesh/1") for _ in range(2)]
        try:
            for client in waiting:
                client.start()
            await eventually(lambda: node._engine.demux.half_open == 2)
            # Past the threshold a newcomer that answers the Retry gets in ...
            async with raw_client(node.port, SecretKey.generate()) as client:
                assert client.quic._retry_source_connection_id is not None
                client.send(hello(), fin=True)
                await client.until(lambda: client.reply())
            # ... and one that does not (its address was not its own) makes no state.
            before = node._engine.demux.half_open
            forger = RawClient(node.port, SecretKey.generate(), "mesh/1")
            waiting.append(forger)
            forger.start()
            await anyio.sleep(0.1)
            assert node._engine.demux.half_open == before
        finally:
            for client in waiting:
                client.socket.close()


async def test_a_handshake_without_a_hello_takes_no_place_from_others_for_long() -> None:
    async with (
        endpoint(handshake_timeout=0.8, max_half_open=6, retry_threshold=6) as node,
        endpoint() as friend,
        endpoint() as late,
    ):
        connection = await friend.connect(at(node))
        clients = [RawClient(node.port, SecretKey.generate(), "mesh/1") for _ in range(12)]
        try:
            for client in clients:
                client.start()
            for client in clients:
                await client.run(0.03)
            assert any(client.handshaken for client in clients)
            assert node._engine.demux.half_open <= 6, "those who have not been admitted all count"
            assert len(node._connections) <= 7
            assert await connection.call("echo", 1) == 1
            for client in clients:
                client.socket.close()
            assert await (await late.connect(at(node))).call("echo", 1) == 1
        finally:
            for client in clients:
                client.socket.close()


async def test_a_connection_that_vanishes_half_open_is_cleared_away() -> None:
    async with endpoint(handshake_timeout=0.3) as node:
        client = RawClient(node.port, SecretKey.generate(), "mesh/1")
        client.start()
        await eventually(lambda: node._engine.demux.half_open == 1)
        client.socket.close()
        await eventually(lambda: not node._connections and not node._engine.demux.half_open)


@pytest.mark.alone
async def test_a_flood_of_hellos_ends_each_and_leaves_nothing() -> None:
    async with endpoint(handshake_timeout=2.0) as node, endpoint() as friend:
        connection = await friend.connect(at(node))
        ended = 0

        async def intrude() -> None:
            nonlocal ended
            async with raw_client(node.port, SecretKey.generate()) as client:
                client.send(b"\x00\x00\x00\x05hello")
                await client.until(lambda: client.reply() or client.ended, timeout=20)
                client.close()
                ended += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(15):
                tasks.start_soon(intrude)
            worst = await works(connection, 0.5)
        assert ended == 15
        assert worst < 1.5
        await eventually(lambda: len(node._connections) == 1)
        await eventually(lambda: len(node._engine.demux.connections) == 1)


async def test_connections_in_all_are_bounded() -> None:
    async with (
        endpoint(max_connections=3, max_half_open=3, retry_threshold=3) as node,
        endpoint() as one,
        endpoint() as two,
        endpoint() as three,
        endpoint() as four,
    ):
        for friend in (one, two, three):
            await friend.connect(at(node))
        with pytest.raises(Unreachable, match="no answer"):
            await four.connect(at(node), timeout=0.5)
        assert node.drops["too many connections"]
        connection = one.connection(node.node_id)
        assert connection is not None
        await connection.close()
        await eventually(lambda: len(node._engine.demux.connections) < 3)
        await four.connect(at(node))  # a place has become free


async def test_streams_opened_and_reset_again_and_again_leave_nothing() -> None:
    # Rapid reset (CVE-2023-44487): each stream costs its opener two frames.
    running = most = 0

    async def work(request: Incoming) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            async for _ in request.stream:
                pass
        finally:
            running -= 1

    async with endpoint(max_streams=16) as node, endpoint() as friend:
        node.register_service("work", work, scope="x")
        connection = await friend.connect(at(node))
        key = SecretKey.generate()
        async with raw_client(node.port, key) as client:
            client.send(hello(), fin=True)
            await client.until(lambda: client.reply())
            for number in range(1, 200):
                stream_id = 4 * number
                await client.until(
                    lambda s=stream_id: client.quic._remote_max_streams_bidi > s // 4  # type: ignore[misc]
                )
                client.send(request("work"), stream_id)
                client.quic.reset_stream(stream_id, 1)
                client.quic.stop_stream(stream_id, 1)
                client.flush()
            hostile = node.connection(key.node_id)
            assert hostile is not None
            await client.until(lambda: not running and not hostile.core.streams)
            assert most <= 16
            assert await connection.call("echo", 1) == 1


async def test_raw_streams_that_nobody_accepts_are_bounded() -> None:
    async def lazy(connection: Connection) -> None:
        await connection.wait_closed()

    async with endpoint(max_streams=8) as node:
        node.register_alpn("lazy/1", lazy)
        async with raw_client(node.port, SecretKey.generate(), alpn="lazy/1") as client:
            await client.until(lambda: client.quic._remote_max_streams_bidi == 8)
            for number in range(100):
                stream_id = 4 * number
                await client.until(
                    lambda s=stream_id: (  # type: ignore[misc]
                        client.ended or client.quic._remote_max_streams_bidi > s // 4
                    )
                )
                if client.ended:
                    break
                client.send(b"x", stream_id)
                client.quic.reset_stream(stream_id, 1)
                client.quic.stop_stream(stream_id, 1)
                client.flush()
            assert client.ended is not None
            assert "nobody has accepted" in client.ended.reason_phrase
