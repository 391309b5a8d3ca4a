"""Two endpoints with a connection, handlers of each kind, and everything they hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel

from auth import AccessRequest, Grant, MeshError
from tests.cancelling import LATE, process_holdings
from tests.transport.nodes import at, endpoint, eventually
from transport import AppCode, Connection, Endpoint, Incoming, Stream
from transport.cbor import CborValue
from transport.engine import Engine
from transport.loop_engine import LoopEngine
from transport.process import ProcessEngine

__all__ = ["Wires", "endpoint_holdings", "wires"]


class Hesitant:
    """An authorizer that admits everybody, but awaits something first."""

    async def authorize(self, request: AccessRequest) -> Grant:
        await anyio.lowlevel.checkpoint()
        return Grant(frozenset({"*"}))


def endpoint_holdings(node: Endpoint, name: str) -> dict[str, object]:
    """Return how much of everything an endpoint holds."""
    streams = [
        stream
        for connection in node._connections.values()
        for stream in (*connection._streams, *connection.core.streams)
    ]
    connections = list(node._connections.values())
    return {
        **_engine_holdings(node._engine, name),
        f"connections of {name}": len(connections),
        f"open connections of {name}": len(node._pool._open),
        f"hellos of {name}": sum(node._pool._hellos.values()),
        f"dials of {name}": len(node._dialer._flights),
        f"observers of {name}": len(node._observers),
        f"handlers of {name}": len(node._services._running),
        f"streams of {name}": len(streams),
        f"pings of {name}": sum(len(connection._pings) for connection in connections),
        f"unclaimed of {name}": sum(len(connection._unclaimed) for connection in connections),
        f"callbacks of {name}": sum(len(connection._on_close) for connection in connections),
    }


def _engine_holdings(engine: Engine, name: str) -> dict[str, object]:
    if isinstance(engine, ProcessEngine):
        memory = engine._memory
        return {
            f"routes of {name}": sum(link.ended is None for link in engine._links.values()),
            f"{LATE}connections of {name}": len(engine._links),
            f"shared memory of {name}": None if memory is None else memory.free,
            f"orders of {name}": (len(engine._orders), len(engine._dials)),
            f"unfed of {name}": len(engine._unfed),
        }
    assert isinstance(engine, LoopEngine)
    demux, driver = engine.demux, engine.driver
    return {
        f"routes of {name}": sum(core.ended is None for core in demux.connections),
        f"{LATE}connections of {name}": len(demux.connections),
        f"{LATE}timers of {name}": len(driver._due),
        f"{LATE}half-open connections of {name}": demux.half_open,
        f"pumps of {name}": len(driver._pumping) + len(driver._again),
        f"datagrams unsent of {name}": len(driver._backlog),
    }


class Wires:
    """A dialer and a listener with an open connection, and a listener that nobody has dialled."""

    def __init__(self, dialer: Endpoint, listener: Endpoint, other: Endpoint) -> None:
        self.dialer = dialer
        self.listener = listener
        self.other = other
        self.connection: Connection
        self.taken: list[Stream] = []
        self.ran = 0

    def held(self) -> dict[str, object]:
        return {
            **process_holdings(),
            **endpoint_holdings(self.dialer, "the dialer"),
            **endpoint_holdings(self.listener, "the listener"),
            **endpoint_holdings(self.other, "the other listener"),
        }

    @property
    def back(self) -> Connection:
        """The same connection at the listener."""
        connection = self.listener.connection(self.dialer.node_id)
        assert connection is not None
        return connection

    async def answer(self, value: CborValue = None) -> Stream:
        """Open a stream to the service that leaves it to the test; return the listener's end."""
        self.taken.clear()
        self.opened = await self.connection.open_stream("leave")
        await eventually(lambda: self.taken)
        return self.taken[0]

    async def own(self) -> Connection:
        """Return a new connection of the app's own protocol."""
        return await self.dialer.connect(at(self.listener), alpn="own/1")


@asynccontextmanager
async def wires(**settings: Any) -> AsyncIterator[Wires]:
    async def hang(request: Incoming) -> CborValue:
        await anyio.sleep_forever()
        return None

    async def refuse(request: Incoming) -> CborValue:
        raise MeshError("no")

    async def count(request: Incoming) -> CborValue:
        w.ran += 1
        await anyio.lowlevel.checkpoint()
        return w.ran

    async def mirror(request: Incoming) -> None:
        async for data in request.stream:
            await request.stream.send(data)

    async def deaf(request: Incoming) -> None:
        await request.stream.receive_exactly(1)
        while not request.stream._is_abandoned:  # noqa: ASYNC110 - it must not read
            await anyio.sleep(0.002)

    async def leave(request: Incoming) -> None:
        w.taken.append(request.stream)
        while not request.stream.is_closed:  # noqa: ASYNC110 - by the test, which tells nobody
            await anyio.sleep(0.002)

    async def own(connection: Connection) -> None:
        async with await connection.accept_raw_stream() as stream:
            async for data in stream:
                await stream.send(data)
        await connection.wait_closed()

    async with (
        endpoint(Hesitant(), **settings) as dialer,
        endpoint(Hesitant(), **settings) as listener,
        endpoint(Hesitant(), **settings) as other,
    ):
        w = Wires(dialer, listener, other)
        for name, handler in (("hang", hang), ("refuse", refuse), ("count", count)):
            listener.register_call(name, handler, scope="x")
        for name, serve in (("mirror", mirror), ("deaf", deaf), ("leave", leave)):
            listener.register_service(name, serve, scope="x")
        listener.register_alpn("own/1", own)
        w.connection = await dialer.connect(at(listener))
        await w.connection.call("echo", 1)
        await anyio.wait_all_tasks_blocked()
        yield w
        w.connection.abort(AppCode.NO_ERROR)
