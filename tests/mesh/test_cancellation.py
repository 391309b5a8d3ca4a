"""Every operation of nodes, peers and daemons, cancelled at each await, leaves nothing behind."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from auth import AuthorizedKeys, SecretKey
from mesh import Home, Node, Peer
from mesh.daemon import Daemon, control, join_without_daemon
from tests.cancelling import (
    Operation,
    Scenarios,
    at_each_await,
    at_each_turn,
    process_holdings,
)
from tests.mesh.nodes import LOOPBACK, eventually, machine
from tests.transport.wires import Hesitant, endpoint_holdings
from transport import AppCode

pytestmark = pytest.mark.anyio

SOME = torch.arange(30_000).reshape(300, 100).t()


def holdings(node: Node, name: str) -> dict[str, object]:
    """Return how much of everything a node holds."""
    tables = {f"{key} of {name}": size for key, size in node.table_sizes().items()}
    service = node._tensors
    return (
        tables
        | endpoint_holdings(node.endpoint, name)
        | {
            f"tensor bytes of {name}": None if service is None else service.store.used(),
        }
    )


# -- nodes and peers


class Meshed:
    """Two nodes with tensors, a third that uses them, and a fourth that nobody has met."""

    def __init__(self, a: Node, b: Node, here: Node, other: Node) -> None:
        self.a, self.b, self.here, self.other = a, b, here, other
        self.at_a: Peer
        self.at_b: Peer

    def held(self) -> dict[str, object]:
        held = process_holdings()
        for node, name in (
            (self.a, "a"),
            (self.b, "b"),
            (self.here, "here"),
            (self.other, "the other"),
        ):
            held |= holdings(node, name)
        return held

    def clear(self) -> None:
        """Delete every tensor of this node's."""
        for node in (self.a, self.b):
            assert node._tensors is not None
            node._tensors.store.delete_owner(self.here.node_id)

    def part(self, one: Node, other: Node) -> None:
        """Close the connection between two nodes, if there is one, as if it had never been."""
        connection = one.endpoint.connection(other.node_id)
        if connection is not None:
            connection.abort(AppCode.NO_ERROR)


@asynccontextmanager
async def meshed() -> AsyncIterator[Meshed]:
    def node(*, tensors: bool) -> Node:
        return Node.embedded(
            key=SecretKey.generate(), authorizer=Hesitant(), config=LOOPBACK, tensors=tensors
        )

    async with (
        node(tensors=True) as a,
        node(tensors=True) as b,
        node(tensors=False) as here,
        node(tensors=False) as other,
    ):
        m = Meshed(a, b, here, other)
        m.at_a, m.at_b = await here.connect(a.ticket()), await here.connect(b.ticket())
        await b.connect(a.ticket())
        # What each pair shares is there from now on.
        ref = await m.at_a.put(SOME)
        await (await ref.copy_to(m.at_b)).get()
        m.clear()
        yield m


NODES: Scenarios[Meshed] = Scenarios()


@NODES.covers("mesh.Node.__aenter__", "mesh.Node.__aexit__", stride=3)
async def open_a_node_that_joins(m: Meshed) -> AsyncIterator[Operation]:
    nodes: list[Node] = []

    async def run() -> None:
        node = Node(
            key=key, authorizer=Hesitant(), config=LOOPBACK, join=[m.other.ticket()], tensors=True
        )
        nodes.append(node)
        async with node:
            assert m.other.endpoint.connection(node.node_id) is not None

    key = SecretKey.generate()
    yield run
    for node in nodes:
        assert node._endpoint is None
    connection = m.other.endpoint.connection(key.node_id)
    if connection is not None:
        connection.abort(AppCode.NO_ERROR)


@NODES.covers("mesh.Node.connect")
async def connect(m: Meshed) -> AsyncIterator[Operation]:
    yield partial(m.here.connect, m.other.ticket())
    m.part(m.here, m.other)


@NODES.covers("mesh.Node.lane")
async def lane(m: Meshed) -> AsyncIterator[Operation]:
    assert m.here.lanes is m.here.lanes
    m.here.directory.reached(m.other.node_id, m.other.addresses)
    connection = await m.here.dial(m.other.node_id)

    async def run() -> None:
        status = await m.here.lane(connection)
        assert status is not None
        assert status.name == "quic"

    yield run
    m.part(m.here, m.other)


@NODES.covers("mesh.Node.dial")
async def dial(m: Meshed) -> AsyncIterator[Operation]:
    m.here.directory.reached(m.other.node_id, m.other.addresses)
    yield partial(m.here.dial, m.other.node_id)
    m.part(m.here, m.other)


@NODES.covers("mesh.Node.dial", "mesh.Peer.ping")
async def dial_a_peer_that_is_on_its_way_back(m: Meshed) -> AsyncIterator[Operation]:
    # Dialled again and again with pauses in between.
    peer = await m.here.connect(m.other.ticket())
    connection = m.other.endpoint.connection(m.here.node_id)
    assert connection is not None
    connection.abort(AppCode.LEFT)
    await eventually(lambda: m.here.endpoint.connection(m.other.node_id) is None)
    tries = 0
    dial_once = m.here.endpoint._dial_once

    async def refuse(*arguments: object) -> object:
        nonlocal tries
        tries += 1
        where = (m.other.node_id, ("127.0.0.1", 9)) if tries < 2 else arguments
        if tries < 2:
            return await dial_once(arguments[0], where[1], *arguments[2:])  # type: ignore[arg-type]
        return await dial_once(*arguments)  # type: ignore[arg-type]

    m.here.endpoint._dial_once = refuse  # type: ignore[method-assign, assignment]
    yield peer.ping
    m.here.endpoint._dial_once = dial_once  # type: ignore[method-assign]
    m.here._recently_lost.joined(m.other.node_id)
    m.part(m.here, m.other)


@NODES.covers("mesh.Peer.connection", "mesh.Peer.close")
async def close_a_peer(m: Meshed) -> AsyncIterator[Operation]:
    async def run() -> None:
        peer = await m.here.connect(m.other.ticket())
        assert (await peer.connection()).is_open
        await peer.close()

    yield run
    m.part(m.here, m.other)


@NODES.covers("mesh.Peer.ping", "mesh.Peer.info")
async def ask_a_peer(m: Meshed) -> AsyncIterator[Operation]:
    async def run() -> None:
        assert await m.at_a.ping() > 0
        assert (await m.at_a.info())["node_id"] == str(m.a.node_id)

    yield run


@NODES.covers(
    "mesh.Peer.put",
    "mesh.Peer.tensors",
    "mesh.TensorRef.get",
    "mesh.TensorRef.copy_to",
    "mesh.TensorRef.delete",
    stride=4,
)
async def put_copy_get_delete(m: Meshed) -> AsyncIterator[Operation]:
    async def run() -> None:
        ref = await m.at_a.put(SOME)
        copy = await ref.copy_to(m.at_b)
        assert torch.equal(await copy.get(), SOME)
        await ref.delete()

    yield run
    m.clear()


@NODES.covers("mesh.Peer.create")
async def create(m: Meshed) -> AsyncIterator[Operation]:
    yield partial(m.at_a.create, "zeros", (100_000,))
    m.clear()


@pytest.mark.parametrize("name", NODES.all)
async def test_nodes_at_each_await(name: str) -> None:
    scenario = NODES.all[name]
    async with meshed() as m:
        await at_each_await(partial(scenario.prepare, m), m.held, stride=scenario.stride)


@pytest.mark.parametrize("name", ["open_a_node_that_joins"])
async def test_nodes_at_each_turn_of_the_loop(name: str) -> None:
    scenario = NODES.all[name]
    async with meshed() as m:
        assert await at_each_turn(partial(scenario.prepare, m), m.held) > 5


# -- daemons


class Machines:
    """A machine with a running daemon, another with a node alone, and the home of a third."""

    def __init__(self, home: Home, daemon: Daemon, host: Node, spare: Path) -> None:
        self.home = home
        self.daemon = daemon
        self.host = host
        self.spare = spare

    def held(self) -> dict[str, object]:
        return (
            process_holdings()
            | holdings(self.daemon.node, "the daemon")
            | holdings(self.host, "the host")
        )


@asynccontextmanager
async def machines(directory: Path) -> AsyncIterator[Machines]:
    home = Home(directory / "here")
    daemon = Daemon(home, LOOPBACK)
    async with (
        daemon.running(observe=_ignore, refused=_ignore),
        machine(directory / "host") as host,
    ):
        yield Machines(home, daemon, host, directory / "spare")


def _ignore(*_: object) -> None:
    pass


DAEMONS: Scenarios[Machines] = Scenarios()


@DAEMONS.covers("mesh.control")
async def command(m: Machines) -> AsyncIterator[Operation]:
    async def run() -> None:
        async with control(m.home) as connection:
            await connection.call("node.status")

    yield run


@DAEMONS.covers("mesh.Daemon.running", "mesh.Daemon.stopped", stride=3)
async def run_a_daemon(m: Machines) -> AsyncIterator[Operation]:
    home = Home(m.spare)
    home.create()

    async def run() -> None:
        daemon = Daemon(home, LOOPBACK)
        async with daemon.running(observe=_ignore, refused=_ignore):
            async with control(home) as connection:
                await connection.call("node.stop")
            await daemon.stopped()

    yield run
    assert home.running() is None
    assert not home.run_path.exists()
    assert home.daemon_lock.acquire(), "the lock is held"
    home.daemon_lock.release()


@DAEMONS.covers("mesh.join_without_daemon", stride=3)
async def join(m: Machines) -> AsyncIterator[Operation]:
    # Whoever was not let in trusts nobody.
    home = Home(m.spare)

    async def run() -> None:
        assert (await join_without_daemon(home, m.host.invite())).node_id == m.host.node_id

    yield run
    if home.exists():
        here = home.key().node_id
        assert isinstance(m.host.authorizer, AuthorizedKeys)
        is_let_in = here in {entry.node_id for entry in m.host.authorizer.entries()}
        assert is_let_in or not home.authorized_keys(here).entries()
    shutil.rmtree(m.spare, ignore_errors=True)


@pytest.mark.parametrize("name", DAEMONS.all)
async def test_daemons_at_each_await(name: str, tmp_path: Path) -> None:
    scenario = DAEMONS.all[name]
    async with machines(tmp_path) as m:
        await at_each_await(partial(scenario.prepare, m), m.held, stride=scenario.stride)
