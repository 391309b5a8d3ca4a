"""What nodes answer about themselves, and to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from auth import AccessDenied, SecretKey, Ticket, allow_any
from mesh import Node
from mesh.errors import NodeError, ProtocolError, UnknownPeer, Unreachable
from mesh.peerbook import suggest_petname
from mesh.services import announce, error_of, error_value
from tests.mesh.nodes import machine, node
from transport import CborValue, Connection

pytestmark = pytest.mark.anyio

PING: CborValue = {"target": "nobody", "count": 1, "timeout": 1.0}


async def link(here: Node, there: Node) -> Connection:
    return await (await here.connect(there.ticket())).connection()


@pytest.mark.parametrize(("call", "value"), [("node.status", None), ("node.ping_peer", PING)])
async def test_admin_calls_need_the_scope(call: str, value: CborValue) -> None:
    async with node() as here, node(allow_any(("node",))) as strict, node() as lax:
        with pytest.raises(AccessDenied):
            await (await link(here, strict)).call(call, value)
        await (await link(here, lax)).call(call, value)  # positive control


@pytest.mark.parametrize("call", ["node.info", "node.announce"])
async def test_calls_about_the_node_need_the_scope(call: str) -> None:
    value: CborValue = {"addresses": [], "host": "x"}
    async with node() as here, node(allow_any(("tensor",))) as strict, node() as lax:
        with pytest.raises(AccessDenied):
            await (await link(here, strict)).call(call, value)
        await (await link(here, lax)).call(call, value)  # positive control


async def test_status_lists_peers_and_not_the_asker() -> None:
    async with node() as here, node() as there, node() as third:
        await third.connect(there.ticket())
        answer: Any = await (await link(here, there)).call("node.status")
        assert [peer["node_id"] for peer in answer["peers"]] == [str(third.node_id)]
        assert answer["peers"][0]["state"] == "authorized"
        assert answer["peers"][0]["path"] == f"127.0.0.1:{third.endpoint.port}"
        assert answer["tables"]["connections"] == 2
        assert answer["addresses"] == [f"127.0.0.1:{there.endpoint.port}"]
        assert answer["peers_left_out"] == 0


async def test_status_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.services.MAX_PEERS", 2)
    async with node() as here, node() as there, node() as third:
        for _ in range(4):
            there.directory.reached(SecretKey.generate().node_id, (("192.0.2.1", 1),))
        await third.connect(there.ticket())
        answer: Any = await (await link(here, there)).call("node.status")
        assert len(answer["peers"]) == 2
        assert answer["peers"][0]["node_id"] == str(third.node_id)  # open sessions first
        assert answer["peers_left_out"] == 3


async def test_ping_by_another_node() -> None:
    async with node() as here, node() as there, node() as third:
        connection = await link(here, there)
        value: CborValue = {"target": third.ticket().encode(), "count": 2, "timeout": 2.0}
        answer: Any = await connection.call("node.ping_peer", value)
        assert answer["node_id"] == str(third.node_id)
        assert answer["path"] == f"127.0.0.1:{third.endpoint.port}"
        assert len(answer["rtts"]) == 2
        assert all(0 < rtt < 2 for rtt in answer["rtts"])


async def test_ping_of_nobody_tells_why() -> None:
    async with node() as here, node() as there:
        answer: Any = await (await link(here, there)).call("node.ping_peer", PING)
        error = error_of(answer["error"])
        assert isinstance(error, UnknownPeer)
        assert "nobody" in str(error)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"target": "x"},
        {"target": 1, "count": 1, "timeout": 1.0},
        {"target": "x", "count": 0, "timeout": 1.0},
        {"target": "x", "count": 101, "timeout": 1.0},
        {"target": "x", "count": 1, "timeout": 0.0},
        {"target": "x", "count": 1, "timeout": 61.0},
        {"target": "x", "count": 1, "timeout": float("nan")},
    ],
)
async def test_malformed_ping(value: CborValue) -> None:
    async with node() as here, node() as there:
        with pytest.raises(ProtocolError, match="parameters"):
            await (await link(here, there)).call("node.ping_peer", value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"addresses": "127.0.0.1:1"},
        {"addresses": ["host.example:1"]},
        {"addresses": ["1.2.3.4:0"]},
    ],
)
async def test_malformed_announcement(value: CborValue, tmp_path: Path) -> None:
    async with node() as here, machine(tmp_path) as there:
        assert there.home is not None
        there.home.authorized_keys(there.node_id).add(here.node_id)
        with pytest.raises(ProtocolError):
            await (await link(here, there)).call("node.announce", value)
        assert there.home.peers.entries() == ()


async def test_announcement_teaches_both(tmp_path: Path) -> None:
    async with machine(tmp_path / "a") as a, machine(tmp_path / "b") as b:
        assert a.home is not None
        assert b.home is not None
        a.home.authorized_keys(a.node_id).add(b.node_id)
        connection = await link(b, a)
        assert await announce(b, connection) != ""
        for one, other in ((a, b), (b, a)):
            assert one.home is not None
            entry = one.home.peers.get(other.node_id)
            assert entry is not None
            assert entry.addresses == (("127.0.0.1", other.endpoint.port),)
            assert entry.seen is not None


async def test_announcement_names_whoever_joined(tmp_path: Path) -> None:
    async with machine(tmp_path / "a") as a, machine(tmp_path / "b") as b:
        assert a.home is not None
        assert b.home is not None
        a.home.authorized_keys(a.node_id).add(b.node_id)
        host = await announce(b, await link(b, a))
        assert a.home.peers.petnames()[b.node_id] == suggest_petname(host, ())
        # Whoever joined asks its user what to call the other.
        assert b.home.peers.petnames()[a.node_id] is None


async def test_name_from_an_invite_reaches_the_book(tmp_path: Path) -> None:
    async with machine(tmp_path / "a") as a, machine(tmp_path / "b") as b, node() as c:
        assert a.home is not None
        keys = a.home.authorized_keys(a.node_id)
        keys.add(b.node_id, "gpu-b")
        await announce(b, await link(b, a))
        assert a.home.peers.petnames() == {b.node_id: "gpu-b"}
        # A name that the book gave to another stays with that one.
        a.home.peers.remember(SecretKey.generate().node_id, petname="gpu-c")
        keys.add(c.node_id, "gpu-c")
        await announce(c, await link(c, a))
        assert a.home.peers.petnames()[c.node_id] is None


async def test_a_node_that_does_not_stay_is_not_to_be_dialled(tmp_path: Path) -> None:
    async with machine(tmp_path / "a") as a, machine(tmp_path / "b") as b:
        assert a.home is not None
        a.home.authorized_keys(a.node_id).add(b.node_id)
        await announce(b, await link(b, a), stays=False)
        entry = a.home.peers.get(b.node_id)
        assert entry is not None
        assert entry.addresses == ()


async def test_programs_are_not_written_down(tmp_path: Path) -> None:
    async with machine(tmp_path / "a") as a:
        assert a.home is not None
        async with Node.client(a.ticket(), home=a.home) as program:
            connection = await program.dial(a.node_id)
            await connection.call("node.announce", {"addresses": ["192.0.2.1:1"], "host": "x"})
        assert a.home.peers.entries() == ()


def test_errors_survive_an_answer() -> None:
    error = Unreachable("connecting", peer="gpu-a", after=1.5, why="no answer", fix="Go there.")
    copy = error_of(error_value(error))
    assert type(copy) is Unreachable
    assert str(copy) == str(error)
    assert type(error_of(error_value(NodeError("x")))) is NodeError


@pytest.mark.parametrize("value", [None, 1, {}, {"code": 1}, {"code": "no-such", "after": "x"}])
def test_error_that_is_none(value: CborValue) -> None:
    assert str(error_of(value))


def test_unused_ticket_has_no_invite() -> None:
    assert Ticket(SecretKey.generate().node_id).invite is None
