"""How nodes find each other: what is dialled, what is said when nobody is there, who comes back."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from auth import (
    AccessDenied,
    AccessRequest,
    Denial,
    Grant,
    MeshError,
    NodeId,
    SecretKey,
    SocketAddress,
    Ticket,
    allow_any,
    deny_all,
)
from mesh import Home, Node, PeerState, PeerStatus
from mesh.daemon import Daemon, control, join_without_daemon
from mesh.errors import DeadlineExceeded, UnknownPeer, Unreachable
from mesh.recently_lost import RETURN_SECONDS
from mesh.services import ping
from tests.mesh.nodes import LOOPBACK, eventually, machine, node
from transport import EndpointConfig, Incoming

pytestmark = pytest.mark.anyio

NOWHERE: SocketAddress = ("192.0.2.1", 4433)


def embedded(key: SecretKey, *, bind: str = "127.0.0.1:0") -> Node:
    config = EndpointConfig(bind=bind, liveness=1.0, linger=0.3)
    return Node.embedded(key=key, authorizer=allow_any(), config=config, tensors=False)


@contextlib.contextmanager
def silent() -> Iterator[SocketAddress]:
    """An address where something listens and never answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()


@asynccontextmanager
async def running(home: Home) -> AsyncIterator[Daemon]:
    daemon = Daemon(home, LOOPBACK)
    async with daemon.running(observe=lambda event: None, refused=lambda node_id, error: None):
        yield daemon


def status_of(here: Node, node_id: NodeId) -> PeerStatus:
    return next(status for status in here.peers() if status.node_id == node_id)


# -- several addresses


@pytest.mark.alone
async def test_the_address_that_won_is_shown_and_stays_first() -> None:
    with silent() as mute:
        async with node() as there, embedded(SecretKey.generate(), bind="0.0.0.0:0") as here:
            live = ("127.0.0.1", there.endpoint.port)
            began = time.monotonic()
            peer = await here.connect(Ticket(there.node_id, (NOWHERE, mute, live)))
            assert time.monotonic() - began < 1.0
            assert status_of(here, there.node_id).path == f"127.0.0.1:{live[1]}"
            await peer.close()
            assert status_of(here, there.node_id).path is None
            assert status_of(here, there.node_id).addresses[0] == live
            began = time.monotonic()
            assert await peer.ping() > 0
            assert time.monotonic() - began < 0.25


async def test_its_own_key_in_a_list_is_skipped_whatever_the_addresses() -> None:
    key = SecretKey.generate()
    with silent() as mute:
        async with node() as other:
            own = Ticket(key.node_id, (mute, ("127.0.0.1", 9), NOWHERE))
            here = Node(
                key=key,
                authorizer=allow_any(),
                config=LOOPBACK,
                join=(own, other.ticket(), own.encode()),
            )
            began = time.monotonic()
            async with here:
                assert time.monotonic() - began < 2.0
                assert [status.node_id for status in here.peers()] == [other.node_id]
                with pytest.raises(MeshError, match="itself"):
                    await here.connect(own)


async def test_an_own_address_among_those_of_a_peer_does_no_harm() -> None:
    async with node() as here, node() as there:
        target = Ticket(there.node_id, (*here.addresses, *there.addresses))
        assert await (await here.connect(target)).ping() > 0
        only = Ticket(SecretKey.generate().node_id, here.addresses)
        with pytest.raises(Unreachable, match=here.node_id.short):
            await here.connect(only)


async def test_nothing_here_resolves_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(name: str) -> object:
        def ask(*arguments: object, **more: object) -> object:
            asked.append(name)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

        return ask

    for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr"):
        monkeypatch.setattr(socket, name, refuse(name))
    monkeypatch.setattr(socket, "getnameinfo", refuse("getnameinfo"))
    monkeypatch.setattr(socket, "getfqdn", lambda name="": "nohost.invalid")
    monkeypatch.setattr(socket, "gethostname", lambda: "nohost.invalid")
    homes = Home(tmp_path / "a"), Home(tmp_path / "b")
    async with running(homes[0]) as a:
        began = time.monotonic()
        await join_without_daemon(homes[1], a.node.invite("b"), "a")
        async with running(homes[1]) as b:
            assert await (await b.node.connect("a")).ping() > 0
            assert time.monotonic() - began < 5.0
    assert asked == []


async def test_a_random_key_is_nobody_at_once_and_the_sources_are_named(tmp_path: Path) -> None:
    async with machine(tmp_path) as here:
        assert here.home is not None
        began = time.monotonic()
        with pytest.raises(UnknownPeer) as caught:
            await here.connect(SecretKey.generate().node_id)
        assert time.monotonic() - began < 1.0
        for source in ("open connections", "addresses from tickets", str(here.home.peers.path)):
            assert source in str(caught.value)
        assert caught.value.exit_code == 3


async def test_an_unknown_key_at_known_addresses_names_each() -> None:
    with silent() as mute:
        async with node() as here, node() as other:
            where = Ticket(SecretKey.generate().node_id, (mute, *other.addresses))
            began = time.monotonic()
            with pytest.raises(Unreachable) as caught:
                await here.connect(where, timeout=1.0)
            assert time.monotonic() - began < 2.0
            assert set(caught.value.attempts) == {
                f"127.0.0.1:{mute[1]}",
                f"127.0.0.1:{other.endpoint.port}",
            }


# -- what is said of a peer


async def test_ping_is_a_number_or_one_of_three_reasons() -> None:
    async with node() as here, node(deny_all()) as closed, node() as live:
        gone = Ticket(SecretKey.generate().node_id, (("127.0.0.1", 9),)).encode()
        answer = await ping(here, live.ticket().encode(), 2, 3.0)
        assert all(isinstance(rtt, float) and 0 < rtt < 3 for rtt in answer["rtts"])  # type: ignore
        kinds: dict[type[MeshError], int] = {}
        for target, kind in ((closed.ticket().encode(), AccessDenied), (gone, Unreachable)):
            began = time.monotonic()
            with pytest.raises(kind) as caught:
                await ping(here, target, 1, 3.0)
            assert time.monotonic() - began < 3.5
            assert caught.value.why
            kinds[kind] = caught.value.exit_code
        # Alive, and mute: neither dead nor refusing.
        live.endpoint._engine.driver._send = lambda transmit: None  # type: ignore[method-assign]
        with pytest.raises(DeadlineExceeded) as silence:
            await ping(here, live.node_id.short, 1, 0.3)
        kinds[DeadlineExceeded] = silence.value.exit_code
        assert sorted(kinds.values()) == [3, 4, 5]


async def test_status_separates_how_far_it_got() -> None:
    class Choosy:
        async def authorize(self, request: AccessRequest) -> Grant | Denial:
            return Denial("not-authorized", "not in authorized keys")

    with silent() as mute:
        async with node() as here, node() as good, node(Choosy()) as choosy:
            strangers = [SecretKey.generate().node_id for _ in range(3)]
            untried, quiet, impostor = strangers
            here.directory.told(untried, (NOWHERE,))
            await here.connect(good.ticket())
            for ticket, timeout in (
                (choosy.ticket(), 3.0),
                (Ticket(quiet, (mute,)), 0.3),
                (Ticket(impostor, good.addresses), 3.0),
            ):
                with pytest.raises(MeshError):
                    await here.connect(ticket, timeout=timeout)
            async with node() as leaver:
                await here.connect(leaver.ticket())
            await eventually(lambda: here.endpoint.connection(leaver.node_id) is None)
            found = {status.node_id: status for status in here.peers()}
            assert {node_id: status.state for node_id, status in found.items()} == {
                untried: PeerState.DISCOVERED,
                quiet: PeerState.DISCOVERED,
                impostor: PeerState.REACHABLE,
                leaver.node_id: PeerState.AUTHENTICATED,
                good.node_id: PeerState.AUTHORIZED,
                choosy.node_id: PeerState.REFUSED,
            }
            assert found[untried].reason is None
            assert "no answer" in (found[quiet].reason or "")
            assert good.node_id.short in (found[impostor].reason or "")
            assert found[leaver.node_id].reason == "left"
            assert found[choosy.node_id].reason == "not in authorized keys"


@pytest.mark.parametrize("bind", ["lo:0", "127.0.0.0/8:0", "127.0.0.1,[::1]"])
async def test_the_command_reaches_a_daemon_that_chose_interfaces(
    tmp_path: Path, bind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.udp.BUFFER_SIZE", (1 << 30) - 7)
    home = Home(tmp_path)
    daemon = Daemon(home, EndpointConfig(bind=bind, linger=0.3))
    async with daemon.running(observe=lambda event: None, refused=lambda node_id, error: None):
        async with control(home) as connection:
            answer = await connection.call("node.status")
        assert isinstance(answer, dict)
        (warning,) = answer["warnings"]  # type: ignore[misc]
        assert "net.core.rmem_max" in str(warning)


# -- who comes back


async def test_a_peer_that_starts_anew_on_its_port_is_reached_by_the_next_call() -> None:
    key = SecretKey.generate()
    async with node() as here:
        async with embedded(key) as there:
            peer = await here.connect(there.ticket())
            port = there.endpoint.port
        assert here.endpoint.connection(key.node_id) is None
        began = time.monotonic()
        pings: list[float] = []

        async def ask() -> None:
            pings.append(await peer.ping(timeout=8.0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.sleep(0.7)
            assert not pings
            async with embedded(key, bind=f"127.0.0.1:{port}"):
                await eventually(lambda: bool(pings))
        assert time.monotonic() - began < 5.0


async def test_a_peer_that_starts_anew_elsewhere_is_reached_once_it_dials_in() -> None:
    key = SecretKey.generate()
    async with node() as here:
        async with embedded(key) as there:
            peer = await here.connect(there.ticket())
        pings: list[float] = []

        async def ask() -> None:
            pings.append(await peer.ping(timeout=8.0))

        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.sleep(0.3)
            async with embedded(key) as reborn:
                await reborn.connect(here.ticket())
                await eventually(lambda: bool(pings))
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("question", ["info", "ping"])
async def test_a_question_over_a_link_that_nobody_keeps_is_asked_again(question: str) -> None:
    key = SecretKey.generate()
    async with node() as here, embedded(key) as there:
        peer = await here.connect(there.ticket())
        # Gone without a word: nothing leaves it any more.
        there.endpoint._engine.driver._send = lambda transmit: None  # type: ignore[method-assign]
        began = time.monotonic()
        answers: list[object] = []

        async def ask() -> None:
            asking = peer.info if question == "info" else peer.ping
            answers.append(await asking(timeout=8.0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            async with embedded(key) as reborn:
                boot = reborn.endpoint.boot.hex()
                await reborn.connect(here.ticket())
                await eventually(lambda: bool(answers))
        assert time.monotonic() - began < 5.0
        if question == "info":
            assert answers[0]["boot"] == boot  # type: ignore[index]


async def test_a_peer_that_does_not_come_back_is_an_error_in_time() -> None:
    key = SecretKey.generate()
    async with node() as here:
        async with embedded(key) as there:
            peer = await here.connect(there.ticket())
        began = time.monotonic()
        with pytest.raises(Unreachable):
            await peer.connection(timeout=1.0)
        assert 0.3 < time.monotonic() - began < 1.5
        # Long gone: one try, and the error.
        here._recently_lost._lost_at[key.node_id] -= RETURN_SECONDS
        began = time.monotonic()
        with pytest.raises(Unreachable):
            await peer.connection()
        assert time.monotonic() - began < 1.0
        assert status_of(here, key.node_id).state is PeerState.DISCOVERED


async def test_who_was_left_on_purpose_is_not_waited_for() -> None:
    async with node() as here, node() as there:
        peer = await here.connect(there.ticket())
        await peer.close()
        assert here._recently_lost.seconds_left(there.node_id) == 0.0
        # The control: the other side was left.
        await eventually(lambda: there._recently_lost.seconds_left(here.node_id) > 0)
    async with node() as here, node(deny_all()) as there:
        with pytest.raises(AccessDenied):
            await here.connect(there.ticket())
        assert here._recently_lost.seconds_left(there.node_id) == 0.0


# -- a lost answer


async def test_join_again_after_the_answer_was_lost(tmp_path: Path) -> None:
    homes = Home(tmp_path / "a"), Home(tmp_path / "b")
    async with running(homes[0]) as a:
        endpoint, cuts = a.node.endpoint, 0
        real = endpoint.authorizer.authorize

        async def authorize(request: AccessRequest) -> Grant | Denial:
            nonlocal cuts
            answer = await real(request)
            cuts += 1
            if cuts == 1:  # the invite is spent, and the newcomer does not hear of it
                for connection in tuple(endpoint._connections.values()):
                    connection.abort()
            return answer

        endpoint.authorizer.authorize = authorize  # type: ignore[method-assign]
        ticket = a.node.invite("b")
        with pytest.raises(MeshError):
            await join_without_daemon(homes[1], ticket, "a")
        b_id = homes[1].key().node_id
        keys = homes[0].authorized_keys(a.node.node_id)
        assert [entry.node_id for entry in keys.entries()] == [b_id]
        assert homes[1].authorized_keys(b_id).entries() == (), "trust is taken back"
        joined = await join_without_daemon(homes[1], ticket, "a")
        assert joined.petname == "a"
        assert [entry.node_id for entry in keys.entries()] == [b_id], "and it is let in once"
        assert len(homes[1].authorized_keys(b_id).entries()) == 1
        # The control: the invite is spent, so another newcomer is refused.
        with pytest.raises(AccessDenied):
            await join_without_daemon(Home(tmp_path / "c"), ticket, "a")


async def test_a_handler_of_the_application_is_not_asked_twice() -> None:
    async with node() as here, node() as there:
        asked: list[object] = []

        async def act(request: Incoming) -> None:
            asked.append(request.value)
            request.connection.abort()

        there.endpoint.register_call("act", act, scope="x")
        peer = await here.connect(there.ticket())
        connection = await peer.connection()
        with pytest.raises(MeshError):
            await connection.call("act", 1)
        assert await peer.ping() > 0
        assert asked == [1]
