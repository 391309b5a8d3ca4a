"""quicmesh: calls and streams of the transport, each end in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from auth import NodeId, SecretKey, allow_any
from tests.benchmarks.harness import (
    SMALL,
    Filled,
    Pipe,
    Site,
    filled,
    obey_async,
)
from transport import Connection, Endpoint, EndpointConfig, Incoming, PeerAddress, Stream
from transport.protocol import path_mtu

LIVENESS = 30.0
"""Seconds. Ten connections that wait for their turns are not to keep the machine busy."""


class Quicmesh:
    """One contender.

    Args:
        backend: the event loop, "asyncio", "uvloop" or "trio".
        datagram: have paths carry no more than this; None: as much as they do.
        one_stream: small messages go to and fro on one stream, and not in a call each.
    """

    most = math.inf
    spins = False

    def __init__(
        self,
        backend: str = "asyncio",
        datagram: int | None = None,
        *,
        one_stream: bool = False,
    ) -> None:
        self._backend = backend
        self._datagram = datagram
        self._one_stream = one_stream

    def missing(self) -> str | None:
        if self._backend == "uvloop" and importlib.util.find_spec("uvloop") is None:
            return "uvloop is not installed"
        return None

    def serve(self, pipe: Pipe, site: Site) -> None:
        self._run(_serve, pipe, site)

    def dial(self, pipe: Pipe, site: Site, where: Any) -> None:
        self._run(_dial, pipe, site, where, self._one_stream)

    def _run(self, main: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        limit_datagrams(self._datagram)
        if self._backend == "uvloop":
            options = {"use_uvloop": True}
            anyio.run(main, *arguments, backend="asyncio", backend_options=options)
        else:
            anyio.run(main, *arguments, backend=self._backend)


def limit_datagrams(largest: int | None) -> None:
    """Have paths of this process carry no more than `largest` bytes; None: as much as they do."""
    if largest is not None:
        path_mtu.LIKELY_SIZES = (largest,)


def configuration(site: Site) -> EndpointConfig:
    """Return the defaults, bound to one address."""
    return EndpointConfig(bind=f"{site.address}:0", liveness=LIVENESS)


_room = Filled()
"""Where bytes land that come while others go."""


async def _serve(pipe: Pipe, site: Site) -> None:
    async with Endpoint(SecretKey.generate(), allow_any(), configuration(site)) as endpoint:
        endpoint.register_call("echo", _echo, scope="bench")
        endpoint.register_service("echo stream", _echo_stream, scope="bench")
        endpoint.register_service("sink", _sink, scope="bench")
        endpoint.register_service("both ways", _both_ways, scope="bench")
        pipe.send((str(endpoint.node_id), endpoint.addresses))
        await anyio.sleep_forever()


async def _echo(request: Incoming) -> Any:
    return request.value


async def _echo_stream(request: Incoming) -> None:
    await request.stream.send_reply(None)
    while True:
        await request.stream.send(await request.stream.receive(len(SMALL)))


async def _sink(request: Incoming) -> None:
    room = memoryview(filled(request.value))
    await request.stream.receive_into(room)
    await request.stream.send_message(len(room))
    await until_ended(request.stream)


async def _both_ways(request: Incoming) -> None:
    await _swap(request.stream, request.value)
    await until_ended(request.stream)


async def _swap(stream: Stream, nbytes: int) -> None:
    """Send so many bytes and receive as many at once."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.send_lent, memoryview(filled(nbytes)))
        await stream.receive_into(memoryview(_room(nbytes)))


async def until_ended(stream: Stream) -> None:
    """Wait for the other side to end the stream: it is to hear first that everything has come."""
    with contextlib.suppress(anyio.EndOfStream):
        await stream.receive(1)


async def _dial(pipe: Pipe, site: Site, where: Any, one_stream: bool) -> None:
    there = PeerAddress(NodeId.parse(where[0]), where[1])
    async with Endpoint(SecretKey.generate(), allow_any(), configuration(site)) as endpoint:
        connection = await endpoint.connect(there)

        async def small(count: int) -> list[float]:
            if not one_stream:
                return [await _timed_call(connection) for _ in range(count)]
            async with await connection.open_stream("echo stream") as stream:
                await stream.reply()
                return [await _round_trip(stream) for _ in range(count)]

        async def bulk(nbytes: int) -> float:
            began = time.perf_counter()
            async with await connection.open_stream("sink", nbytes) as stream:
                await stream.send_lent(memoryview(filled(nbytes)))
                await stream.receive_message()
            return time.perf_counter() - began

        async def both(nbytes: int) -> float:
            began = time.perf_counter()
            async with await connection.open_stream("both ways", nbytes) as stream:
                await _swap(stream, nbytes)
            return time.perf_counter() - began

        async def datagram(_: int) -> int:
            return connection.info.datagram_size

        await obey_async(pipe, {"small": small, "bulk": bulk, "both": both, "datagram": datagram})


async def _timed_call(connection: Connection) -> float:
    began = time.perf_counter()
    await connection.call("echo", SMALL)
    return time.perf_counter() - began


async def _round_trip(stream: Stream) -> float:
    began = time.perf_counter()
    await stream.send(SMALL)
    await stream.receive_exactly(len(SMALL))
    return time.perf_counter() - began
