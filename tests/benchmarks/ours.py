"""quicmesh: calls and streams of the transport, each end in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection as Pipe
from typing import TypeVar

import anyio

from auth import NodeId, SecretKey, allow_any
from tests.benchmarks.harness import child, resident_bytes
from transport import Connection, Endpoint, EndpointConfig, Incoming, PeerAddress
from transport.protocol import path_mtu

CONFIG = EndpointConfig(bind="127.0.0.1:0")
SMALL = b"x" * 64

T = TypeVar("T")


async def _serve(pipe: Pipe) -> None:
    async def echo(request: Incoming):
        return request.value

    async def sink(request: Incoming) -> None:
        room = memoryview(bytearray(request.value))
        await request.stream.receive_into(room)
        await request.stream.send_message(len(room))

    async with Endpoint(SecretKey.generate(), allow_any(), CONFIG) as endpoint:
        endpoint.register_call("echo", echo, scope="bench")
        endpoint.register_service("sink", sink, scope="bench")
        pipe.send((str(endpoint.node_id), endpoint.addresses))
        await anyio.sleep_forever()


def serve(pipe: Pipe, backend: str, datagram: int | None) -> None:
    _force(datagram)
    anyio.run(_serve, pipe, backend=backend)


def _force(datagram: int | None) -> None:
    """Have paths carry no more than `datagram` bytes; None: as much as they do."""
    if datagram is not None:
        path_mtu.LIKELY_SIZES = (datagram,)


class _Dialled:
    """An open connection to a serving child."""

    def __init__(self, where: tuple[str, tuple]) -> None:
        self._where = PeerAddress(NodeId.parse(where[0]), where[1])
        self._endpoint = Endpoint(SecretKey.generate(), allow_any(), CONFIG)

    async def __aenter__(self) -> Connection:
        await self._endpoint.__aenter__()
        return await self._endpoint.connect(self._where)

    async def __aexit__(self, *error: object) -> None:
        await self._endpoint.__aexit__(None, None, None)


class Quicmesh:
    """One contender: the event loop's name, and the size of its datagrams, None: discovered."""

    def __init__(self, backend: str = "asyncio", datagram: int | None = None) -> None:
        self._backend = backend
        self._datagram = datagram

    def latencies(self, count: int) -> list[float]:
        """Return the seconds of each of `count` calls with 64 bytes either way."""

        async def run(connection: Connection) -> list[float]:
            return [await _timed_call(connection) for _ in range(count)]

        return self._run(run)

    def throughput(self, nbytes: int) -> float:
        """Return bytes per second of one stream, on a connection that has carried one before."""

        async def run(connection: Connection) -> float:
            data = memoryview(bytes(nbytes))
            for _ in range(2):
                began = time.perf_counter()
                async with await connection.open_stream("sink", nbytes) as stream:
                    await stream.send_lent(data)
                    await stream.receive_message()
            return nbytes / (time.perf_counter() - began)

        return self._run(run)

    def _run(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        async def run(where: tuple[str, tuple]) -> T:
            async with _Dialled(where) as connection:
                return await work(connection)

        likely = path_mtu.LIKELY_SIZES
        _force(self._datagram)
        try:
            with child(serve, self._backend, self._datagram) as (where, _):
                return anyio.run(run, where, backend=self._backend)
        finally:
            path_mtu.LIKELY_SIZES = likely


def flatness(count: int) -> tuple[float, float, int]:
    """Return the median call in the first and the last thousand of `count`, and memory growth."""

    async def run(where: tuple[str, tuple]) -> tuple[float, float, int]:
        async with _Dialled(where) as connection:
            for _ in range(1000):  # warm: caches fill, the allocator settles
                await _timed_call(connection)
            before = resident_bytes()
            times = [await _timed_call(connection) for _ in range(count)]
            return _median(times[:1000]), _median(times[-1000:]), resident_bytes() - before

    with child(serve, "asyncio", None) as (where, _):
        return anyio.run(run, where)


async def _timed_call(connection: Connection) -> float:
    began = time.perf_counter()
    await connection.call("echo", SMALL)
    return time.perf_counter() - began


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
