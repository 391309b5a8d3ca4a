"""quicmesh: calls and streams of the transport, each end in a process of its own."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection as Pipe

import anyio

from auth import NodeId, SecretKey, allow_any
from tests.benchmarks.harness import child, resident_bytes
from transport import Connection, Endpoint, EndpointConfig, Incoming, PeerAddress

CONFIG = EndpointConfig(bind="127.0.0.1:0")
SMALL = b"x" * 64


async def _serve(pipe: Pipe) -> None:
    async def echo(request: Incoming):
        return request.value

    async def sink(request: Incoming) -> None:
        total = 0
        while total < request.value:
            total += len(await request.stream.receive(1 << 20))
        await request.stream.send_message(total)

    async with Endpoint(SecretKey.generate(), allow_any(), CONFIG) as endpoint:
        endpoint.register_call("echo", echo, scope="bench")
        endpoint.register_service("sink", sink, scope="bench")
        pipe.send((str(endpoint.node_id), endpoint.addresses))
        await anyio.sleep_forever()


def serve(pipe: Pipe) -> None:
    anyio.run(_serve, pipe)


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


def latencies(count: int) -> list[float]:
    """Return the seconds of each of `count` calls with 64 bytes either way."""

    async def run(where: tuple[str, tuple]) -> list[float]:
        async with _Dialled(where) as connection:
            return [await _timed_call(connection) for _ in range(count)]

    with child(serve) as (where, _):
        return anyio.run(run, where)


def throughput(nbytes: int) -> float:
    """Return bytes per second of one stream."""

    async def run(where: tuple[str, tuple]) -> float:
        async with _Dialled(where) as connection:
            began = time.perf_counter()
            async with await connection.open_stream("sink", nbytes) as stream:
                await stream.send(bytes(nbytes))
                await stream.receive_message()
            return nbytes / (time.perf_counter() - began)

    with child(serve) as (where, _):
        return anyio.run(run, where)


def flatness(count: int) -> tuple[float, float, int]:
    """Return the median call in the first and the last thousand of `count`, and memory growth."""

    async def run(where: tuple[str, tuple]) -> tuple[float, float, int]:
        async with _Dialled(where) as connection:
            for _ in range(1000):  # warm: caches fill, the allocator settles
                await _timed_call(connection)
            before = resident_bytes()
            times = [await _timed_call(connection) for _ in range(count)]
            return _median(times[:1000]), _median(times[-1000:]), resident_bytes() - before

    with child(serve) as (where, _):
        return anyio.run(run, where)


async def _timed_call(connection: Connection) -> float:
    began = time.perf_counter()
    await connection.call("echo", SMALL)
    return time.perf_counter() - began


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
