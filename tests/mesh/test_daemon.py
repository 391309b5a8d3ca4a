"""The daemon in this process: one in a home, reachable by the command, linked to who it knows."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from auth import (
    AccessDenied,
    IdentityError,
    MeshError,
    NodeId,
    SocketAddress,
    Ticket,
)
from mesh import Home, Node, PeerState
from mesh.daemon import Daemon, control, join_without_daemon
from mesh.errors import HomeError, IdentityInUse, NotRunning, Unreachable
from mesh.runfile import RunFile
from mesh.services import error_of
from tests.mesh.nodes import LOOPBACK, eventually
from transport import EndpointConfig, EndpointEvent

pytestmark = pytest.mark.anyio

SOCKETS = shutil.ignore_patterns("*.sock")


class Log:
    """What a daemon reports."""

    def __init__(self) -> None:
        self.events: list[EndpointEvent] = []
        self.refusals: list[tuple[NodeId, MeshError]] = []

    def observe(self, event: EndpointEvent) -> None:
        self.events.append(event)

    def refused(self, node_id: NodeId, error: MeshError) -> None:
        self.refusals.append((node_id, error))


@asynccontextmanager
async def running(
    home: Home, config: EndpointConfig = LOOPBACK, log: Log | None = None
) -> AsyncIterator[Daemon]:
    log = log or Log()
    daemon = Daemon(home, config)
    async with daemon.running(observe=log.observe, refused=log.refused):
        yield daemon


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Home, Home]:
    return Home(tmp_path / "a"), Home(tmp_path / "b")


async def ask(home: Home, call: str, value: Any = None) -> Any:
    async with control(home) as connection:
        return await connection.call(call, value)


async def test_run_file_while_it_runs(homes: tuple[Home, Home]) -> None:
    home = homes[0]
    async with running(home) as daemon:
        written = home.running()
        assert written is not None
        assert written.node_id == daemon.node.node_id
        assert written.boot == daemon.node.endpoint.boot.hex()
        assert written.addresses == (("127.0.0.1", daemon.node.endpoint.port),)
    assert home.running() is None
    assert not home.run_path.exists()


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "[::1]:0", "127.0.0.1:0"])
async def test_command_reaches_it_however_it_listens(homes: tuple[Home, Home], bind: str) -> None:
    async with running(homes[0], EndpointConfig(bind=bind)) as daemon:
        answer = await ask(homes[0], "node.status")
        assert answer["node_id"] == str(daemon.node.node_id)
        assert answer["peers"] == []  # the command itself is nobody's peer


async def test_command_reaches_it_whatever_it_advertises(homes: tuple[Home, Home]) -> None:
    config = EndpointConfig(bind="127.0.0.1:0", advertise=("192.0.2.1:4433",))
    async with running(homes[0], config):
        answer = await ask(homes[0], "node.info")
        assert answer["node_id"]
        written = homes[0].running()
        assert written is not None
        assert written.addresses == (("192.0.2.1", 4433),)


async def test_stop(homes: tuple[Home, Home]) -> None:
    async with running(homes[0]) as daemon:
        await ask(homes[0], "node.stop")
        with anyio.fail_after(1):
            await daemon.stopped()


@pytest.mark.parametrize("call", ["node.stop", "node.join"])
async def test_peers_may_not_command_it(homes: tuple[Home, Home], call: str) -> None:
    value = {"ticket": "mesh1", "petname": None}
    async with running(homes[0]) as daemon:
        homes[1].create()
        homes[0].authorized_keys(daemon.node.node_id).add(homes[1].key().node_id)
        async with Node.client(daemon.node.ticket(), home=homes[1]) as stranger:
            connection = await stranger.dial(daemon.node.node_id)
            assert await connection.call("node.info")  # positive control
            with pytest.raises(AccessDenied):
                await connection.call(call, value)


async def test_nothing_runs(homes: tuple[Home, Home]) -> None:
    homes[0].create()
    with pytest.raises(NotRunning, match="mesh up"):
        await ask(homes[0], "node.info")


async def test_second_in_the_same_home(homes: tuple[Home, Home]) -> None:
    async with running(homes[0]) as daemon:
        address = f"127.0.0.1:{daemon.node.endpoint.port}"
        with pytest.raises(IdentityInUse, match=f"identity in use at {address} by process"):
            async with running(Home(homes[0].path)):
                pytest.fail("entered")
        assert await ask(homes[0], "node.info")
        assert homes[0].run_path.exists()


async def test_second_in_a_copy_of_the_home(homes: tuple[Home, Home]) -> None:
    async with running(homes[0]) as daemon:
        shutil.copytree(homes[0].path, homes[1].path, ignore=SOCKETS)
        address = f"127.0.0.1:{daemon.node.endpoint.port}"
        with pytest.raises(IdentityInUse, match=f"identity in use at {address}"):
            async with running(homes[1]):
                pytest.fail("entered")
        assert not homes[1].daemon_lock.is_held()
    shutil.rmtree(homes[1].path)
    shutil.copytree(homes[0].path, homes[1].path, ignore=SOCKETS)
    async with running(homes[1]):
        pass  # positive control: nobody else has it now


async def test_left_over_run_file(homes: tuple[Home, Home]) -> None:
    homes[0].create()
    RunFile(
        node_id=homes[0].key().node_id,
        pid=1,
        boot="00" * 16,
        started=0.0,
        version="0",
        control=(("127.0.0.1", 9),),
        addresses=(("127.0.0.1", 9),),
    ).save(homes[0].run_path)
    async with running(homes[0]) as daemon:
        content = json.loads(homes[0].run_path.read_text())
        assert content["control"] == [["127.0.0.1", daemon.node.endpoint.port]]


async def test_broken_book_is_said_at_the_start(homes: tuple[Home, Home]) -> None:
    homes[0].create()
    homes[0].peers.path.write_text("nonsense")
    with pytest.raises(HomeError, match="peers book"):
        async with running(homes[0]):
            pytest.fail("entered")
    homes[0].peers.path.unlink()
    async with running(homes[0]):
        pass


@pytest.mark.parametrize("by_daemon", [True, False])
async def test_join_works_both_ways(homes: tuple[Home, Home], by_daemon: bool) -> None:
    async with running(homes[0]) as a:
        ticket = a.node.invite("newcomer").encode()
        if by_daemon:
            async with running(homes[1]):
                value = {"ticket": ticket, "petname": "first"}
                answer = await ask(homes[1], "node.join", value)
        else:
            joined = await join_without_daemon(homes[1], Ticket.decode(ticket), "first")
            answer = joined.as_message()
        assert answer == {
            "node_id": str(a.node.node_id),
            "short": a.node.node_id.short,
            "petname": "first",
        }
        b_id = homes[1].key().node_id
        entry = homes[1].peers.get(a.node.node_id)
        assert entry is not None
        assert entry.petname == "first"
        assert entry.addresses == (("127.0.0.1", a.node.endpoint.port),)
        allowed = {key.node_id: key.petname for key in homes[1].authorized_keys(b_id).entries()}
        assert allowed == {a.node.node_id: "first"}
        # Now that both run, each dials the other by name.
        async with running(homes[1]) as b:
            await eventually(lambda: a.node.endpoint.connection(b_id) is not None)
            assert await (await a.node.connect("newcomer")).ping() > 0
            assert await (await b.node.connect("first")).ping() > 0
            assert (await (await a.node.connect("newcomer")).info())["node_id"] == str(b_id)


async def test_restart_on_another_port_is_found(homes: tuple[Home, Home]) -> None:
    async with running(homes[0]) as a:
        await join_without_daemon(homes[1], a.node.invite("b"), "a")

        def addresses_of_b() -> tuple[SocketAddress, ...]:
            entry = homes[0].peers.get(homes[1].key().node_id)
            return () if entry is None else entry.addresses

        for _ in range(2):
            async with running(homes[1]) as b:
                with anyio.fail_after(5):
                    await eventually(lambda: bool(a.node.endpoint.connections))
                    peer = await a.node.connect("b")
                    connection = await peer.connection()
                    here = ("127.0.0.1", b.node.endpoint.port)
                    assert connection.info.remote == f"127.0.0.1:{here[1]}"
                    # It is written down, and not beside the address that is no more.
                    await eventually(lambda here=here: addresses_of_b() == (here,))  # type: ignore
            await eventually(lambda: not a.node.endpoint.connections)


async def test_join_refused_leaves_no_trust(homes: tuple[Home, Home]) -> None:
    async with running(homes[0]) as a:
        homes[1].create()
        with pytest.raises(AccessDenied, match="not among"):
            await join_without_daemon(homes[1], a.node.ticket(), "a")
        assert homes[1].peers.entries() == ()
        assert homes[1].authorized_keys(homes[1].key().node_id).entries() == ()


async def test_join_of_a_spent_invite_tells_the_command(homes: tuple[Home, Home]) -> None:
    async with running(homes[0]) as a, running(homes[1]):
        ticket = a.node.invite()
        await join_without_daemon(Home(homes[0].path.parent / "c"), ticket)
        answer = await ask(homes[1], "node.join", {"ticket": ticket.encode(), "petname": None})
        error = error_of(answer["error"])
        assert isinstance(error, AccessDenied)
        assert "used" in str(error)


async def test_join_again_does_no_harm(homes: tuple[Home, Home]) -> None:
    async with running(homes[0]) as a:
        await join_without_daemon(homes[1], a.node.invite(), "a")
        joined = await join_without_daemon(homes[1], a.node.ticket())
        assert joined.petname == "a"


async def test_petname_that_is_taken_costs_no_invite(homes: tuple[Home, Home]) -> None:
    async with running(homes[0]) as a:
        ticket = a.node.invite()
        homes[1].create()
        other = Home(homes[0].path.parent / "c").create().node_id
        homes[1].peers.remember(other, petname="a")
        with pytest.raises(IdentityError, match=f"already means {other.short}"):
            await join_without_daemon(homes[1], ticket, "a")
        assert (await join_without_daemon(homes[1], ticket, "b")).petname == "b"


async def test_join_with_itself(homes: tuple[Home, Home]) -> None:
    async with running(homes[0]) as a:
        answer = await ask(
            homes[0], "node.join", {"ticket": a.node.ticket().encode(), "petname": None}
        )
        assert "this very machine" in str(error_of(answer["error"]))


async def test_link_to_a_dead_machine_waits_for_it(homes: tuple[Home, Home]) -> None:
    async with running(homes[0]) as a:
        await join_without_daemon(homes[1], a.node.invite("b"), "a")
        port = a.node.endpoint.port
    async with running(homes[1]) as b:
        a_id = homes[0].key().node_id
        await eventually(lambda: b.node.directory.last_dial(a_id)[1] is not None)
        status = next(peer for peer in b.node.peers() if peer.node_id == a_id)
        assert status.state is PeerState.DISCOVERED
        assert f"127.0.0.1:{port}" in (status.reason or "")
        with pytest.raises(Unreachable):
            await b.node.connect("a", timeout=0.5)
        async with running(homes[0], EndpointConfig(bind=f"127.0.0.1:{port}")):
            await eventually(lambda: b.node.endpoint.connection(a_id) is not None, 8.0)


async def test_refusal_is_reported_once(homes: tuple[Home, Home]) -> None:
    log = Log()
    async with running(homes[0]) as a:
        await join_without_daemon(homes[1], a.node.invite("b"), "a")
        homes[0].authorized_keys(a.node.node_id).remove(homes[1].key().node_id)
        async with running(homes[1], log=log) as b:
            await eventually(lambda: bool(log.refusals))
            node_id, error = log.refusals[0]
            assert node_id == a.node.node_id
            assert "not among" in str(error)
            status = next(peer for peer in b.node.peers() if peer.node_id == node_id)
            assert status.state is PeerState.REFUSED
            await anyio.sleep(1.5)  # for more dials, which are refused as well
            # A dial that is under way when the key goes is cut off with another reason.
            reasons = [error.why for _, error in log.refusals]
            assert len(reasons) == len(set(reasons)) <= 2


async def test_same_key_at_two_addresses_is_named(homes: tuple[Home, Home], tmp_path: Path) -> None:
    thief, log = Home(tmp_path / "thief"), Log()
    async with running(homes[0]) as a:
        await join_without_daemon(homes[1], a.node.invite("b"), "a")
        thief.path.mkdir(mode=0o700)
        for name in ("machine.key", "peers.json", "authorized_keys"):
            shutil.copy2(homes[1].path / name, thief.path / name)
        async with running(homes[1]) as b:
            port = b.node.endpoint.port
            await eventually(lambda: bool(a.node.endpoint.connections))
            async with running(thief, log=log):
                await eventually(lambda: bool(log.refusals))
        error = log.refusals[0][1]
        assert isinstance(error, IdentityInUse)
        assert f"identity in use at 127.0.0.1:{port}" in str(error)
