"""A node for async programs: its presets, its peers, its end."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import anyio
import pytest
import torch

import mesh.upkeep
from auth import (
    AccessDenied,
    AccessRequest,
    AuthorizedKeys,
    ConnectRequest,
    Credential,
    Denial,
    Grant,
    IdentityError,
    Invite,
    SecretKey,
    SharedSecret,
    Ticket,
    all_of,
    allow_any,
    callback,
    deny_all,
)
from mesh import Home, Node, PeerState, PeerStatus
from mesh.daemon import Daemon
from mesh.errors import NodeError, UnknownPeer, Unreachable
from tests.mesh.nodes import LOOPBACK, eventually, machine, node, program
from transport import AddressInUse, Connection, EndpointConfig, Incoming, ServiceUnknown

pytestmark = pytest.mark.anyio


def status_of(node: Node, other: Node) -> PeerStatus:
    return next(status for status in node.peers() if status.node_id == other.node_id)


async def test_connect_ping_info() -> None:
    async with node() as here, node() as there:
        peer = await here.connect(there.ticket())
        assert peer.node_id == there.node_id
        assert 0 < await peer.ping() < 3
        info = await peer.info()
        assert info["node_id"] == str(there.node_id)
        assert info["boot"] == there.endpoint.boot.hex()
        assert info["devices"][0] == "cpu"  # type: ignore[index,call-overload]
        again = await here.connect(there.node_id)
        assert await again.connection() is await peer.connection()


async def test_known_address_is_dialled_at_once() -> None:
    took = []
    async with node() as there:
        for _ in range(5):
            async with node() as here:
                began = time.monotonic()
                await here.connect(there.ticket())
                took.append(time.monotonic() - began)
    assert min(took) < 0.2


async def test_names_of_a_peer(tmp_path: Path) -> None:
    async with node() as there, program(home=tmp_path) as here:
        await here.connect(there.ticket())
        for name in (there.node_id.short, str(there.node_id), str(there.node_id)[:10].upper()):
            assert (await here.connect(name)).node_id == there.node_id


async def test_handlers_of_the_application() -> None:
    async def double(request: Incoming) -> object:
        return {"twice": 2 * request.value["n"], "for": request.peer.node_id.raw}  # type: ignore

    async with node() as here, node() as there:
        there.endpoint.register_call("app.double", double, scope="app")  # type: ignore[arg-type]
        connection = await (await here.connect(there.ticket())).connection()
        answer = await connection.call("app.double", {"n": 21})
        assert answer == {"twice": 42, "for": here.node_id.raw}


async def test_states_tell_failures_apart() -> None:
    class Choosy:
        async def authorize(self, request: object) -> Grant | Denial:
            return Denial("not-authorized", "not today")

    async with node() as here, node() as good, node(Choosy()) as choosy:
        gone = Ticket(SecretKey.generate().node_id, (("127.0.0.1", 9),))
        wrong = Ticket(SecretKey.generate().node_id, good.addresses)
        here.directory.reached(good.node_id, good.addresses)

        await here.connect(good.node_id)
        with pytest.raises(AccessDenied, match="not today"):
            await here.connect(choosy.ticket())
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9"):
            await here.connect(gone, timeout=0.5)
        with pytest.raises(Unreachable):
            await here.connect(wrong, timeout=2.0)

        found = {status.node_id: status for status in here.peers()}
        assert found[good.node_id].state is PeerState.AUTHORIZED
        assert found[good.node_id].path == f"127.0.0.1:{good.endpoint.port}"
        assert found[good.node_id].outbound is True
        assert (found[good.node_id].bytes_sent or 0) > 1000
        assert found[choosy.node_id].state is PeerState.REFUSED
        assert found[choosy.node_id].reason == "not today"
        assert found[choosy.node_id].path is None
        assert found[gone.node_id].state is PeerState.DISCOVERED
        assert "127.0.0.1:9" in (found[gone.node_id].reason or "")
        assert found[wrong.node_id].state is not PeerState.AUTHORIZED
        assert here.node_id not in found
        assert status_of(good, here).state is PeerState.AUTHORIZED
        assert status_of(good, here).outbound is False


async def test_key_without_an_address() -> None:
    async with node() as here:
        stranger = SecretKey.generate().node_id
        began = time.monotonic()
        with pytest.raises(UnknownPeer, match="an address of it") as caught:
            await here.connect(stranger)
        assert time.monotonic() - began < 1
        assert "mesh join mesh1..." in str(caught.value)


async def test_errors_name_the_peer_and_count_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EndpointConfig(bind="127.0.0.1:0", liveness=0.6)
    async with machine(tmp_path) as here:
        assert here.home is not None
        gone = SecretKey.generate().node_id
        here.home.peers.remember(gone, petname="gpu-a", addresses=[("127.0.0.1", 9)])
        with pytest.raises(Unreachable, match=rf"with gpu-a \({gone.short}\)"):
            await here.connect("gpu-a", timeout=0.3)
        there = Node.embedded(
            key=SecretKey.generate(), authorizer=allow_any(), config=config, tensors=False
        )
        async with there:
            peer = await here.connect(there.ticket())
            here.home.peers.remember(there.node_id, petname="gpu-b")
            with pytest.raises(ServiceUnknown, match=r"with gpu-b \("):
                await peer.put(torch.ones(3))

        async def dial(*_: object, **__: object) -> Connection:
            await anyio.sleep(0.3)
            raise Unreachable("connecting", peer=there.node_id.short, after=0.0)

        monkeypatch.setattr(here, "dial", dial)
        with pytest.raises(Unreachable, match=r"with gpu-b \(") as caught:
            await peer.put(torch.ones(3), timeout=20.0)
        assert (caught.value.after or 0.0) >= 0.3


async def test_a_program_finds_the_daemon_of_its_machine(tmp_path: Path) -> None:
    home, other = Home(tmp_path / "a"), Home(tmp_path / "b")
    other.create()
    daemon = Daemon(home, LOOPBACK)
    async with daemon.running(observe=lambda _: None, refused=lambda *_: None):
        async with program(home=home.path) as node:
            peer = await node.connect(str(home.key().node_id))
            assert await peer.ping() > 0
        # Whoever is not of the machine knows nothing of its run file.
        async with program(home=other.path) as node:
            with pytest.raises(UnknownPeer):
                await node.connect(home.key().node_id)
    async with program(home=home.path) as node:
        with pytest.raises(UnknownPeer):  # it runs no more
            await node.connect(home.key().node_id)


async def test_status_tells_who_may_use_whom(tmp_path: Path) -> None:
    async with node() as there, machine(tmp_path) as here:
        await here.connect(there.ticket())
        await eventually(lambda: bool(there.endpoint.connections))
        ours, theirs = status_of(here, there), status_of(there, here)
        assert (ours.may_use_this, ours.this_may_use) == (False, True)
        assert (theirs.may_use_this, theirs.this_may_use) == (True, None)
        assert here.home is not None
        here.home.authorized_keys(here.node_id).add(there.node_id)
        await (await here.connect(there.node_id)).close()
        await here.connect(there.ticket())
        assert status_of(here, there).may_use_this is True


async def test_a_refused_peer_is_told_what_to_do(tmp_path: Path) -> None:
    async with machine(tmp_path) as there, node() as here, node() as late:
        with pytest.raises(AccessDenied) as caught:
            await here.connect(there.ticket())
        assert f"mesh allow {here.node_id}" in (caught.value.fix or "")
        invite = there.invite()
        await here.connect(invite)
        with pytest.raises(AccessDenied) as caught:
            await late.connect(invite)
        assert "another: mesh invite" in (caught.value.fix or "")


async def test_a_program_whose_key_is_new_each_time_is_told_to_use_an_invite(
    tmp_path: Path,
) -> None:
    async with machine(tmp_path) as there:
        async with program(home=tmp_path / "nobody") as here:
            with pytest.raises(AccessDenied, match="needs an invite each time") as caught:
                await here.connect(there.ticket())
            assert "mesh allow" not in str(caught.value)
        async with program(home=tmp_path / "nobody", key=SecretKey.generate()) as here:
            with pytest.raises(AccessDenied, match="mesh allow"):
                await here.connect(there.ticket())


async def test_leaving_is_told() -> None:
    async with node() as there:
        async with node() as here:
            await here.connect(there.ticket())
            await eventually(lambda: bool(there.endpoint.connections))
            connection = there.endpoint.connections[0]
        error = await connection.wait_closed()
        assert error.why == "left"
        state = status_of(there, here)
        assert (state.state, state.reason) == (PeerState.AUTHENTICATED, "left")


async def test_a_closed_peer_is_dialled_again() -> None:
    async with node() as here, node() as there:
        peer = await here.connect(there.ticket())
        first = await peer.connection()
        await peer.close()
        await peer.close()
        assert first.closed is not None
        assert await peer.ping() > 0
        assert await peer.connection() is not first


@pytest.mark.parametrize("tensors", [False, True])
async def test_error_of_the_block_comes_out_as_it_is(tensors: bool) -> None:
    async def block() -> None:
        async with node(tensors=tensors) as here, node(tensors=tensors) as there:
            await here.connect(there.ticket())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await block()


async def test_cancelling_the_block_leaves_nothing() -> None:
    here, there = node(), node()
    async with there:
        with anyio.move_on_after(0.3) as scope:
            async with here:
                port = here.endpoint.port
                await here.connect(there.ticket())
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        await eventually(lambda: not there.endpoint.connections)
    async with Node.embedded(
        key=SecretKey.generate(),
        authorizer=deny_all(),
        config=EndpointConfig(bind=f"127.0.0.1:{port}"),
        tensors=False,
    ):
        pass  # the port is free again


async def test_failing_to_join_closes_the_node(tmp_path: Path) -> None:
    gone = Ticket(SecretKey.generate().node_id, (("127.0.0.1", 9),))
    here = Node.client(gone, home=tmp_path, config=EndpointConfig(connect_timeout=0.3))
    with pytest.raises(Unreachable):
        async with here:
            pytest.fail("entered")
    async with node() as other:
        assert other.endpoint.port
    with pytest.raises(NodeError, match="opened before"):
        async with here:
            pytest.fail("entered")


async def test_use_before_and_after_it_is_open() -> None:
    here = node()
    async with node() as there:
        with pytest.raises(NodeError, match="async with"):
            await here.connect(there.ticket())
        async with here:
            peer = await here.connect(there.ticket())
        with pytest.raises(NodeError, match="not open"):
            await peer.ping()
        with pytest.raises(NodeError, match="not open"):
            await here.connect(there.ticket())


async def test_busy_address() -> None:
    async with node() as first:
        config = EndpointConfig(bind=f"127.0.0.1:{first.endpoint.port}")
        second = Node.embedded(
            key=SecretKey.generate(), authorizer=deny_all(), config=config, tensors=False
        )
        with pytest.raises(AddressInUse, match=f"{first.endpoint.port}.*port 0"):
            async with second:
                pytest.fail("entered")


async def test_client_admits_nobody(tmp_path: Path) -> None:
    async with program(home=tmp_path) as here, node() as there:
        with pytest.raises(AccessDenied):
            await there.connect(here.ticket())
        await here.connect(there.ticket())  # positive control: the other way works


async def test_invite_lets_a_program_in_once(tmp_path: Path) -> None:
    async with machine(tmp_path / "m") as there:
        assert there.home is not None
        invite = Invite.issue(there.home.key(), ("tensor", "node"), 60.0, time.time(), "laptop")
        ticket = there.ticket(invite).encode()
        async with program(ticket, home=tmp_path / "none") as here:
            await (await here.connect(ticket)).info()
            assert there.label(here.node_id) == f"laptop ({here.node_id.short})"
        with pytest.raises(AccessDenied, match="used"):
            async with program(ticket, home=tmp_path / "none"):
                pytest.fail("entered")


async def test_program_acts_under_its_machine(tmp_path: Path) -> None:
    home = Home(tmp_path / "mine")
    mine = home.create().node_id
    async with machine(tmp_path / "theirs") as there:
        with pytest.raises(AccessDenied, match="not among"):
            async with program(there.ticket(), home=home.path):
                pytest.fail("entered")
        assert there.home is not None
        there.home.authorized_keys(there.node_id).add(mine, "mine", scopes=("node", "admin"))
        async with program(there.ticket(), home=home.path) as here:
            assert here.node_id != mine
            connection = await here.dial(there.node_id)
            assert await connection.call("node.info")
            status = status_of(there, here)
            assert status.machine == mine
            # The machine may, and its programs may not: their scopes say nothing of it.
            with pytest.raises(AccessDenied):
                await connection.call("node.status")
        # Its key ended with it: nobody will look for it.
        await eventually(lambda: here.node_id not in {peer.node_id for peer in there.peers()})


async def test_workers_of_machines_that_know_each_other_meet(tmp_path: Path) -> None:
    ours, theirs = Home(tmp_path / "ours"), Home(tmp_path / "theirs")
    ids = [home.create().node_id for home in (ours, theirs)]
    async with (
        Node.worker(ours, config=LOOPBACK) as first,
        Node.worker(ours, config=LOOPBACK) as second,
        Node.worker(theirs, config=LOOPBACK) as stranger,
    ):
        await (await first.connect(second.ticket())).info()
        assert (await first.connect(second.node_id.short)).node_id == second.node_id
        with pytest.raises(AccessDenied, match="not among"):
            await stranger.connect(first.ticket())
        ours.authorized_keys(ids[0]).add(ids[1])
        await (await stranger.connect(first.ticket())).info()
        with pytest.raises(NodeError, match="invites are to machines"):
            first.invite()


async def test_invite_of_a_machine(tmp_path: Path) -> None:
    async with machine(tmp_path / "m") as there, node() as other:
        ticket = there.invite("laptop", scopes=("node",), lifetime=60.0)
        async with program(ticket, home=tmp_path / "none") as here:
            await (await here.connect(there.node_id)).info()
            assert there.label(here.node_id).startswith("laptop ")
        with pytest.raises(NodeError, match="invites are to machines"):
            other.invite()


@pytest.fixture
def watched_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the files of keys ten times as often as usual."""
    monkeypatch.setattr("mesh.upkeep.POLL_SECONDS", mesh.upkeep.POLL_SECONDS / 10)


@pytest.mark.usefixtures("watched_closely")
async def test_removed_key_is_cut_off(tmp_path: Path) -> None:
    async with machine(tmp_path / "m") as there, node() as here:
        assert there.home is not None
        keys = there.home.authorized_keys(there.node_id)
        keys.add(here.node_id, "here")
        peer = await here.connect(there.ticket())
        connection = await peer.connection()
        await peer.info()
        keys.remove(here.node_id)
        with anyio.fail_after(5):
            error = await connection.wait_closed()
        assert "no longer authorized" in str(error)
        with pytest.raises(AccessDenied, match="not among"):
            await peer.info()


@pytest.mark.usefixtures("watched_closely")
async def test_a_changed_line_takes_effect_on_the_live_connection(tmp_path: Path) -> None:
    async with machine(tmp_path / "m") as there, node() as here:
        assert there.home is not None
        keys = there.home.authorized_keys(there.node_id)
        keys.add(here.node_id, "here")
        peer = await here.connect(there.ticket())
        connection = await peer.connection()
        await peer.info()
        keys.add(here.node_id, "here", scopes=["tensor"])
        back = there.endpoint.connection(here.node_id)
        assert back is not None
        await eventually(lambda: back.grant == Grant(frozenset({"tensor"})))
        with pytest.raises(AccessDenied):
            await peer.info()
        keys.add(here.node_id, "here", expires=time.time() + 2)
        await eventually(lambda: back.grant is not None and back.grant.expires_at is not None)
        await peer.info()
        with anyio.fail_after(5):
            error = await connection.wait_closed()
        assert "the grant has expired" in str(error)


@pytest.mark.usefixtures("watched_closely")
async def test_files_of_keys_are_watched_wherever_they_stand(tmp_path: Path) -> None:
    keys = AuthorizedKeys(tmp_path / "keys")
    both = all_of(keys, SharedSecret(b"sixteen bytes or more", scopes=["*"]))
    shared = SharedSecret(b"sixteen bytes or more")
    async with (
        node(both) as there,
        Node.client(home=tmp_path / "none", secret=shared, config=LOOPBACK) as here,
    ):
        keys.add(here.node_id)
        peer = await here.connect(there.ticket())
        connection = await peer.connection()
        await peer.info()
        keys.remove(here.node_id)
        with anyio.fail_after(5):
            await connection.wait_closed()


async def test_a_credential_of_the_clients_reaches_the_callback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    def decision(request: AccessRequest) -> Grant | Denial:
        if not isinstance(request, ConnectRequest):
            return request.grant
        if request.credential == Credential(b"open sesame"):
            return Grant(frozenset({"node"}))
        return Denial("password", "ask the porter")

    home = tmp_path / "none"
    async with node(callback(decision)) as there:
        client = Node.client(credential=b"open sesame", home=home, config=LOOPBACK)
        assert "sesame" not in repr(client.__dict__)
        async with client:
            peer = await client.connect(there.ticket())
            await peer.info()
            await peer.close()
            await peer.info()  # shown again to the next connection
        async with Node.client(home=home, config=LOOPBACK) as stranger:
            with pytest.raises(AccessDenied, match="ask the porter"):
                await stranger.connect(there.ticket())
    assert "sesame" not in caplog.text
    with pytest.raises(IdentityError, match="4096"):
        Node.client(credential=bytes(4097), home=home)


async def test_a_shared_secret_lets_clients_in_and_tensors_move(tmp_path: Path) -> None:
    shared = SharedSecret(b"sixteen bytes or more")
    home = tmp_path / "none"
    async with (
        node(shared, tensors=True) as a,
        node(SharedSecret(b"sixteen bytes or more"), tensors=True) as b,
        Node.client(home=home, secret=shared, config=LOOPBACK) as here,
    ):
        at_a = await (await here.connect(a.ticket())).put(torch.arange(7))
        at_b = await here.connect(b.ticket())
        with pytest.raises(AccessDenied, match="source of the fetch"):
            await at_a.copy_to(at_b)
        await a.connect(b.ticket())  # so that each knows that the other knows
        copied = await at_a.copy_to(at_b)
        assert torch.equal(await copied.get(), torch.arange(7))
        async with Node.client(home=home, config=LOOPBACK) as stranger:
            with pytest.raises(AccessDenied, match="shared secret"):
                await stranger.connect(a.ticket())


async def test_several_in_one_process() -> None:
    async with node() as a, node() as b, node() as c:
        ids = {(await x.connect(y.ticket())).node_id for x, y in ((a, b), (b, c), (c, a))}
        assert ids == {a.node_id, b.node_id, c.node_id}
        await eventually(lambda: all(len(n.endpoint.connections) == 2 for n in (a, b, c)))


async def test_many_at_once_with_the_default_address() -> None:
    nodes = [
        Node.embedded(key=SecretKey.generate(), authorizer=deny_all(), tensors=False)
        for _ in range(20)
    ]
    async with anyio.create_task_group() as tasks:
        ports: set[int] = set()
        everyone = anyio.Event()

        async def live(each: Node) -> None:
            async with each:
                ports.add(each.addresses[0][1])
                if len(ports) == len(nodes):
                    everyone.set()
                await everyone.wait()

        for each in nodes:
            tasks.start_soon(live, each)
    assert len(ports) == len(nodes)
    assert 0 not in ports


async def test_authorizer_is_asked_about_outbound_peers_too() -> None:
    asked: list[ConnectRequest] = []

    class Listening:
        async def authorize(self, request: object) -> Grant | Denial:
            if isinstance(request, ConnectRequest):
                asked.append(request)
            return Denial("no", "we only dial")

    async with node(Listening()) as here, node() as there:
        await (await here.connect(there.ticket())).info()
        assert [request.outbound for request in asked] == [True]
        with pytest.raises(AccessDenied):
            await there.endpoint.connections[0].call("node.info")


async def test_tensors(tmp_path: Path) -> None:
    async with (
        node(tensors=True) as a,
        node(tensors=True) as b,
        program(home=tmp_path / "none") as here,
    ):
        tensor = torch.arange(200_000, dtype=torch.float32).reshape(400, 500).t()
        seen: list[int] = []
        at_a = await (await here.connect(a.ticket())).put(
            tensor, "w", progress=lambda progress: seen.append(progress.moved)
        )
        assert seen[-1] == tensor.nbytes
        before = (await here.dial(a.node_id)).info
        at_b = await at_a.copy_to(await here.connect(b.ticket()))
        after = (await here.dial(a.node_id)).info
        assert after.bytes_received - before.bytes_received < 20_000
        assert torch.equal(await at_b.get(), tensor)
        assert at_b.peer.node_id == b.node_id
        assert a.table_sizes()["tensor_bytes"] == b.table_sizes()["tensor_bytes"] == tensor.nbytes
        await at_a.delete()
        await at_b.delete()
        for each in (a, b):
            sizes = each.table_sizes()
            assert (sizes["tensors"], sizes["tensor_bytes"], sizes["tokens"]) == (0, 0, 0)


async def test_a_program_outlives_its_first_delegation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.node.PROGRAM_LIFETIME", 0.6)
    monkeypatch.setattr("auth.delegation.CLOCK_SKEW", 0.0)
    here, there = Home(tmp_path / "here"), tmp_path / "there"
    own = here.create()
    async with machine(there) as daemon:
        keys = Home(there).authorized_keys(daemon.node_id)
        keys.add(own.node_id, "here")
        async with program(daemon.ticket(), home=here.path) as client:
            connection = daemon.endpoint.connection(client.node_id)
            assert connection is not None
            ends = []
            with anyio.fail_after(5):
                while len(ends) < 4:
                    assert connection.grant is not None
                    if connection.grant.expires_at not in ends:
                        ends.append(connection.grant.expires_at)
                    await anyio.sleep(0.02)
            assert connection.is_open
            assert ends == sorted(ends)
            assert await (await client.connect(daemon.ticket())).ping() > 0


async def test_a_key_that_is_gone_ends_a_program_and_not_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mesh.node.PROGRAM_LIFETIME", 0.6)
    monkeypatch.setattr("auth.delegation.CLOCK_SKEW", 0.0)
    here, there = Home(tmp_path / "here"), tmp_path / "there"
    own = here.create()
    async with machine(there) as daemon:
        Home(there).authorized_keys(daemon.node_id).add(own.node_id, "here")
        async with program(daemon.ticket(), home=here.path) as client:
            here.key_path.unlink()
            connection = daemon.endpoint.connection(client.node_id)
            assert connection is not None
            with anyio.fail_after(5):
                error = await connection.wait_closed()
            assert isinstance(error, AccessDenied)
            assert "could not be renewed" in caplog.text
