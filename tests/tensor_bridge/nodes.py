"""Nodes with tensors in one process, over real sockets on loopback."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import anyio
import torch
from anyio.abc import TaskStatus

from auth import Authorizer, PeerIdentity, SecretKey, TokenBook, TokenLimits, allow_any
from tensor_bridge import (
    LaneConfig,
    Lanes,
    MoveLimits,
    StoreLimits,
    TensorClient,
    TensorRef,
    TensorService,
    TensorStore,
)
from tensor_bridge.lanes.shared.link import Link
from tensor_bridge.wire import ReadOpen
from tests.placements import placed
from transport import Connection, Endpoint, EndpointConfig, PeerAddress, Stream
from transport.process import ProcessEngine
from transport.process.spawn import Child

__all__ = ["LANES", "Node", "eventually", "linked", "node", "preferred", "together"]

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27

PROCESS = "process"
"""The way of moving everything in which QUIC is it, and an endpoint process moves that."""

LANES = {
    "quic": LaneConfig(shared_memory=False),
    "shared-memory": LaneConfig(shared_from=1, in_process=False),
    "in-process": LaneConfig(shared_from=1),
    PROCESS: LaneConfig(shared_memory=False),
}
"""How nodes are made to move everything by one lane, by its name."""

preferred = "quic"
"""What nodes of tests take: see the fixture `lane`."""

shared: str | None = None
"""Where they share an endpoint process, if they don't have one each: see the same."""


@dataclasses.dataclass
class Node:
    """One node: its endpoint, its tensors, its tokens."""

    endpoint: Endpoint
    store: TensorStore
    tokens: TokenBook
    service: TensorService
    lanes: Lanes

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.endpoint.node_id, (("127.0.0.1", self.endpoint.port),))

    @property
    def is_empty(self) -> bool:
        """Whether nothing of a move is left, objects aside."""
        held = sum(self.store._charges.values())
        return (
            len(self.service.arrivals) == 0
            and self.tokens.counts().live == 0
            and self.store.used() == (held, len(self.store))
            and all(connection.info.streams == 0 for connection in self.endpoint.connections)
        )

    def lane_holdings(self, name: str) -> dict[str, object]:
        """Return how much of everything the node's lanes hold."""
        sharing = self.lanes._sharing
        assert sharing is not None
        pairs = list(sharing._pairs.values())
        links = [pair.link for pair in pairs if pair.link is not None]
        return {
            f"meetings of {name}": sum(pair.meeting is not None for pair in pairs),
            f"links of {name}": len(links),
            f"free slots of {name}": sum(link._outgoing.free for link in links),
            f"sendings of {name}": sum(len(link._sendings) for link in links),
            f"slots at {name}": sum(link._incoming.here for link in links if link._incoming),
            f"landings of {name}": sum(len(link._landings) for link in links),
            f"packets unsent of {name}": sum(len(link._unsent) for link in links),
            f"watchers of {name}": sum(len(link._watchers) for link in links),
        }

    def fall_silent(self) -> None:
        """Send nothing any more, as a host that was unplugged."""
        engine = self.endpoint._engine
        if isinstance(engine, ProcessEngine):
            assert isinstance(engine._child, Child), "it would be the end of others as well"
            os.kill(engine._child.pid, signal.SIGSTOP)  # ended by force when the node is closed
        else:
            engine.driver._send = lambda transmit: None  # type: ignore[attr-defined]

    def hear_nothing_of(self, peer: Node) -> None:
        """Have the kernel drop what `peer` sends here, until `hear_all` (Linux)."""
        program = (
            (0x28, 0, 0, 0),  # load the source port, the first half-word of a UDP datagram
            (0x15, 0, 1, peer.endpoint.port),  # another one: take it
            (0x06, 0, 0, 0),
            (0x06, 0, 0, 0xFFFFFFFF),
        )
        code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *op) for op in program))
        head = struct.pack("@HP", len(program), ctypes.addressof(code))
        self.endpoint._socket.raw.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, head)

    def hear_all(self) -> None:
        """Take what comes from everybody again."""
        self.endpoint._socket.raw.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    async def connection(self, peer: Node) -> Connection:
        return await self.endpoint.connect(peer.address)

    async def read(
        self, peer: Node, *, token: bytes | None = None, object_id: str | None = None, **more: int
    ) -> Stream:
        """Open a read at `peer` by hand, to break off wherever a test wants to."""
        connection = await self.connection(peer)
        order = ReadOpen(object_id, token, **more)
        return await connection.open_stream("tensor.read", order.encode())

    def has(self, peer: Node, tensor: torch.Tensor) -> TensorRef:
        """Have `tensor` at `peer` as this node's own, without the way there."""
        stored = peer.store.put(tensor, owner=self.endpoint.node_id)
        return TensorRef(
            peer.endpoint.node_id, stored.object_id, stored.version, stored.meta, stored.name
        )

    async def token(self, peer: Node, ref: TensorRef, audience: Node) -> bytes:
        """Have `peer` mint a token for `audience` to read a tensor of this node's there."""
        client = await self.client(peer)
        async with client._minted(ref, audience.endpoint.node_id) as (minted, _):
            return minted.token

    async def client(self, peer: Node, *, reconnect: bool = False) -> TensorClient:
        async def dial() -> Connection:
            return await self.connection(peer)

        return TensorClient(await dial(), reconnect=dial if reconnect else None, lanes=self.lanes)


@contextlib.asynccontextmanager
async def node(
    *,
    authorizer: Authorizer | None = None,
    store: StoreLimits | None = None,
    tokens: TokenLimits | None = None,
    moves: MoveLimits | None = None,
    lanes: LaneConfig | None = None,
    **settings: Any,
) -> AsyncIterator[Node]:
    """A node that lives for the block; `settings` are of its endpoint."""
    authorizer = authorizer or allow_any()
    where = {"placement": "process", "share": shared} if preferred == PROCESS else placed(settings)
    settings = {"bind": "127.0.0.1:0", "linger": 0.5, "liveness": 1.0} | where | settings
    config = EndpointConfig(**settings)
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(
            Endpoint(SecretKey.generate(), authorizer, config)
        )
        own_store, book = TensorStore(store), TokenBook(tokens)
        ways = Lanes(endpoint, lanes or LANES[preferred])
        service = TensorService(endpoint, own_store, book, authorizer, limits=moves, lanes=ways)
        await stack.enter_async_context(service)
        yield Node(endpoint, own_store, book, service, ways)


@contextlib.asynccontextmanager
async def together(*nodes: AbstractAsyncContextManager[Node]) -> AsyncIterator[tuple[Node, ...]]:
    """Nodes that live for the block, each in a task of its own, so that they leave together."""
    over = anyio.Event()

    async def live(
        each: AbstractAsyncContextManager[Node], *, task_status: TaskStatus[Node]
    ) -> None:
        async with each as up:
            task_status.started(up)
            await over.wait()

    async with anyio.create_task_group() as tasks:
        yield tuple([await tasks.start(live, each) for each in nodes])
        over.set()


@contextlib.asynccontextmanager
async def linked(peer: PeerIdentity) -> AsyncIterator[tuple[Link, Link]]:
    """Both ends of a link through shared memory, without the way to it."""
    socks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in socks:
        sock.setblocking(False)
    one, other = (Link(sock, peer, os.getpid()) for sock in socks)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.run)
        tasks.start_soon(other.run)
        yield one, other
        one.end("the test is over")


async def eventually(condition, seconds: float = 5.0) -> None:  # type: ignore[no-untyped-def]
    """Wait until `condition()` holds, for as long as news takes to cross the loopback."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - the state of a node, which tells nobody
            await anyio.sleep(0.01)
