"""Endpoints on loopback for tests, and a peer in a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from auth import (
    AccessRequest,
    Authorizer,
    ConnectRequest,
    Denial,
    Grant,
    NodeId,
    SecretKey,
    ServiceRequest,
    allow_any,
)
from tests.placements import placed
from tests.programs import Program
from transport import Connection, Endpoint, EndpointConfig, EndpointEvent, Incoming, PeerAddress
from transport.cbor import CborValue

REPOSITORY = Path(__file__).parents[2]


def config(**settings: Any) -> EndpointConfig:
    return EndpointConfig(**{"bind": "127.0.0.1:0", **placed(settings), **settings})


@asynccontextmanager
async def endpoint(
    authorizer: Authorizer | None = None, key: SecretKey | None = None, **settings: Any
) -> AsyncIterator[Endpoint]:
    async with Endpoint(
        key or SecretKey.generate(), authorizer or allow_any(), config(**settings)
    ) as node:
        node.register_call("echo", _echo, scope="x")
        yield node


@asynccontextmanager
async def pair(**settings: Any) -> AsyncIterator[tuple[Endpoint, Endpoint, Connection]]:
    """Two endpoints, and the connection that the first has dialled to the second."""
    async with endpoint(**settings) as dialer, endpoint(**settings) as listener:
        yield dialer, listener, await dialer.connect(at(listener))


def at(node: Endpoint, *, host: str = "127.0.0.1") -> PeerAddress:
    return PeerAddress(node.node_id, ((host, node.port),))


async def _echo(request: Incoming) -> CborValue:
    return request.value


class Events:
    """Collects the events of an endpoint."""

    def __init__(self, node: Endpoint) -> None:
        self.seen: list[EndpointEvent] = []
        node.subscribe(self.seen.append)

    def of(self, kind: type[EndpointEvent]) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]


async def eventually(condition: Callable[[], object], timeout: float = 5.0) -> None:
    """Wait for what no event tells a test of."""
    with anyio.fail_after(timeout):
        while not condition():  # noqa: ASYNC110 - the conditions are of all kinds
            await anyio.sleep(0.005)


def is_idle(node: Endpoint) -> bool:
    """Whether an endpoint holds nothing of any peer's."""
    return not (
        node._connections
        or node._pool._open
        or node._pool._hellos
        or node._dialer._flights
        or node._engine.demux.connections
        or node._engine.demux.half_open
        or node._engine.driver._pumping
        or node._engine.driver._due
    )


class Policy:
    """An authorizer that answers from a table and remembers what it was asked."""

    def __init__(self, *, connect: Grant | Denial | None = None) -> None:
        self.connect: Grant | Denial = connect or Grant(frozenset({"*"}))
        self.denied_services: dict[str, Denial] = {}
        self.asked: list[AccessRequest] = []

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        self.asked.append(request)
        if isinstance(request, ConnectRequest):
            return Grant(frozenset({"*"})) if request.outbound else self.connect
        if isinstance(request, ServiceRequest) and request.service in self.denied_services:
            return self.denied_services[request.service]
        return request.grant


class PeerProcess:
    """An endpoint in another process, which can be killed and stopped."""

    def __init__(self, process: Program, node_id: NodeId, port: int) -> None:
        self.process = process
        self.node_id = node_id
        self.port = port

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.node_id, (("127.0.0.1", self.port),))

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def _process(key: SecretKey, port: int) -> Iterator[Program]:
    arguments = ["-m", "tests.transport.peer_process", str(port)]
    with Program(arguments, stdin=True, torch=False) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(key.to_bytes().hex() + "\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def peer_process(key: SecretKey | None = None, port: int = 0) -> AsyncIterator[PeerProcess]:
    """Start a peer that offers ``echo``, ``hang`` and ``sink``; kill it at the end."""
    key = key or SecretKey.generate()
    with _process(key, port) as process:
        assert process.stdout is not None
        line = await anyio.to_thread.run_sync(process.stdout.readline)
        yield PeerProcess(process, key.node_id, int(line))
