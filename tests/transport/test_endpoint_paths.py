"""Paths that change and peers that die while others go on."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from auth import SocketAddress
from tests.transport.nodes import endpoint, eventually, peer_process
from transport import Connection, Incoming, PeerAddress

pytestmark = pytest.mark.anyio

MIB = 1 << 20
TRANSFER = 4 * MIB
"""Enough for two changes of the port in the middle: datagrams by the thousand."""


class Relay:
    """Passes datagrams between one dialer and one listener, as a NAT does.

    Attributes:
        address: where the dialer finds it.
        sources: the addresses that the listener has seen it send from, the latest last.
        passed: datagrams on their way to the listener.
    """

    def __init__(self, listener: SocketAddress) -> None:
        self._listener = listener
        self._inside = self._open()
        self._outside = self._open()
        self._retired: list[socket.socket] = []
        self._dialer: SocketAddress | None = None
        self.address: SocketAddress = self._inside.getsockname()
        self.sources = [self._outside.getsockname()]
        self.passed = 0

    def switch(self) -> None:
        """Send from another port from now on; what comes back to the former one is lost."""
        self._retired.append(self._outside)
        self._outside = self._open()
        self.sources.append(self._outside.getsockname())

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._inwards)
            tasks.start_soon(self._outwards)

    def close(self) -> None:
        for sock in (self._inside, self._outside, *self._retired):
            sock.close()

    async def _inwards(self) -> None:
        while True:
            await anyio.wait_readable(self._inside)
            data, self._dialer = self._inside.recvfrom(65535)
            self._send(self._outside, data, self._listener)
            self.passed += 1

    async def _outwards(self) -> None:
        while True:
            sock = self._outside
            with anyio.move_on_after(0.02):
                await anyio.wait_readable(sock)
            try:
                data, source = sock.recvfrom(65535)
            except BlockingIOError:
                continue
            if source == self._listener and sock is self._outside and self._dialer is not None:
                self._send(self._inside, data, self._dialer)

    @staticmethod
    def _send(sock: socket.socket, data: bytes, target: SocketAddress) -> None:
        try:
            sock.sendto(data, target)
        except BlockingIOError:
            pass  # lost, as on any full queue

    @staticmethod
    def _open() -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * MIB)
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
        return sock


@asynccontextmanager
async def relay(listener: SocketAddress) -> AsyncIterator[Relay]:
    between = Relay(listener)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(between.run)
            yield between
            tasks.cancel_scope.cancel()
    finally:
        between.close()


@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_transfer_survives_a_change_of_the_source_port(way: str) -> None:
    pattern = bytes(range(256)) * (MIB // 256)
    arrived = bytearray()
    over = anyio.Event()

    async def receive(request: Incoming) -> None:
        async for data in request.stream:
            arrived.extend(data)
        over.set()

    async def send(request: Incoming) -> None:
        for _ in range(TRANSFER // MIB):
            await request.stream.send(pattern)

    async with endpoint() as listener, endpoint() as dialer:
        listener.register_service("up", receive, scope="x")
        listener.register_service("down", send, scope="x")
        async with relay(("127.0.0.1", listener.port)) as between:
            connection = await dialer.connect(PeerAddress(listener.node_id, (between.address,)))
            (back,) = listener.connections
            assert back.remote_address == between.sources[0]

            async def disturb() -> None:
                for share in (0.25, 0.5):
                    await eventually(
                        lambda share=share: (
                            connection.info.bytes_sent  # type: ignore[misc]
                            + connection.info.bytes_received
                            > share * TRANSFER
                        ),
                        20.0,
                    )
                    between.switch()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(disturb)
                stream = await connection.open_stream(way)
                if way == "up":
                    for _ in range(TRANSFER // MIB):
                        await stream.send(pattern)
                    await stream.send_eof()
                    with anyio.fail_after(20):
                        await over.wait()
                else:
                    async for data in stream:
                        arrived.extend(data)
            await stream.aclose()
            assert len(between.sources) == 3
            assert arrived == pattern * (TRANSFER // MIB)
            assert back.remote_address == between.sources[-1], "the listener has followed"
            assert listener.connections == (back,), "and it is one connection all the time"
            assert await back.ping() < 3.0


async def test_a_switch_without_a_listener_that_follows_would_be_noticed() -> None:
    # The control of the test above: a relay that passes nothing any more ends the connection.
    async with (
        endpoint(liveness=0.6) as listener,
        endpoint(liveness=0.6) as dialer,
        relay(("127.0.0.1", listener.port)) as between,
    ):
        connection = await dialer.connect(PeerAddress(listener.node_id, (between.address,)))
        between._listener = ("127.0.0.1", 9)
        with anyio.fail_after(5):
            await connection.wait_closed()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
async def test_one_killed_of_three_disturbs_neither_of_the_others() -> None:
    async with (
        endpoint(liveness=2.0) as node,
        peer_process() as victim,
        peer_process() as one,
        peer_process() as two,
    ):
        lost = await node.connect(victim.address)
        others = [await node.connect(peer.address) for peer in (one, two)]
        worst = 0.0
        pings = 0

        async def watch(connection: Connection) -> None:
            nonlocal worst, pings
            while True:
                worst = max(worst, await connection.ping(timeout=3.0))
                pings += 1
                await anyio.sleep(0.01)

        async with anyio.create_task_group() as tasks:
            for connection in others:
                tasks.start_soon(watch, connection)
            await eventually(lambda: pings >= 4)
            began = time.monotonic()
            victim.send(signal.SIGKILL)
            with anyio.fail_after(5):
                await lost.wait_closed()
            noticed = time.monotonic() - began
            at_loss = pings
            await eventually(lambda: pings >= at_loss + 10)
            tasks.cancel_scope.cancel()
        assert noticed <= 2.5
        assert worst < 1.0
        assert all(connection.is_open for connection in others)
        assert set(node.connections) == set(others)
