"""Dialling: one flight for many callers, several addresses, addresses where nobody answers."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest

from auth import (
    AccessRequest,
    ConnectRequest,
    Grant,
    MeshError,
    SecretKey,
    SocketAddress,
    allow_any,
)
from tests.transport.nodes import Events, at, config, endpoint, eventually, is_idle, peer_process
from transport import (
    AddressError,
    Connection,
    ConnectionClosed,
    ConnectTimeout,
    Endpoint,
    IdentityInUse,
    PeerAddress,
    PeerJoined,
    Unreachable,
)

pytestmark = pytest.mark.anyio


@contextmanager
def silent() -> Iterator[SocketAddress]:
    """An address where something listens and never answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()


@contextmanager
def closed() -> Iterator[SocketAddress]:
    """An address where nothing listens."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        address = sock.getsockname()
    yield address


async def together(*callers: object) -> list[object]:
    """Run coroutines at once; return each one's result or error."""
    results: list[object] = [None] * len(callers)

    async def one(index: int, caller: object) -> None:
        try:
            results[index] = await caller  # type: ignore[misc]
        except MeshError as error:
            results[index] = error

    async with anyio.create_task_group() as tasks:
        for index, caller in enumerate(callers):
            tasks.start_soon(one, index, caller)
    return results


# -- one flight


async def test_fifty_callers_make_one_handshake() -> None:
    async with endpoint() as listener, endpoint() as dialer:
        events = Events(listener)
        connections = await together(*[dialer.connect(at(listener)) for _ in range(50)])
        assert len({id(connection) for connection in connections}) == 1
        assert isinstance(connections[0], Connection)
        assert await connections[0].call("echo", 1) == 1
        assert len(events.of(PeerJoined)) == 1
        assert len(listener._connections) == 1


async def test_a_cancelled_caller_leaves_the_flight_to_the_others() -> None:
    async with endpoint() as listener, endpoint() as dialer:
        found: list[Connection] = []

        async def patient() -> None:
            found.append(await dialer.connect(at(listener)))

        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as hasty:
                    hasty.start_soon(dialer.connect, at(listener))
                    await anyio.wait_all_tasks_blocked()
                    tasks.start_soon(patient)
                    await anyio.wait_all_tasks_blocked()
                    scope.cancel()
        assert await found[0].call("echo", 1) == 1


async def test_the_last_caller_to_go_ends_the_flight() -> None:
    with silent() as address:
        async with endpoint() as dialer:
            target = PeerAddress(SecretKey.generate().node_id, (address,))
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(dialer.connect, target)
                await eventually(lambda: dialer._connections)
                tasks.cancel_scope.cancel()
            assert not dialer._dialer._flights
            await eventually(lambda: is_idle(dialer))


async def test_a_flight_that_fails_fails_for_each_with_an_error_of_its_own() -> None:
    with closed() as address:
        async with endpoint() as dialer:
            target = PeerAddress(SecretKey.generate().node_id, (address,))
            errors = await together(*[dialer.connect(target) for _ in range(5)])
            assert len({id(error) for error in errors}) == 5
            assert all(isinstance(error, Unreachable) for error in errors)


async def test_after_a_failure_the_next_call_dials_anew() -> None:
    async with endpoint() as listener, endpoint() as dialer:
        with closed() as address, pytest.raises(Unreachable):
            await dialer.connect(PeerAddress(listener.node_id, (address,)))
        assert await (await dialer.connect(at(listener))).call("echo", 1) == 1


# -- several addresses


async def test_a_dead_address_beside_a_live_one_costs_less_than_a_second() -> None:
    with silent() as dead:
        async with endpoint() as listener, endpoint() as dialer:
            began = time.monotonic()
            connection = await dialer.connect(
                PeerAddress(listener.node_id, (dead, ("127.0.0.1", listener.port)))
            )
            assert time.monotonic() - began < 1.0
            assert connection.remote_address == ("127.0.0.1", listener.port)
            await eventually(lambda: len(dialer._connections) == 1)
            assert dialer.known_addresses(listener.node_id) == (("127.0.0.1", listener.port),)


@pytest.mark.alone
async def test_a_refused_address_makes_way_at_once() -> None:
    with closed() as dead:
        async with endpoint() as listener, endpoint() as dialer:
            began = time.monotonic()
            await dialer.connect(
                PeerAddress(listener.node_id, (dead, ("127.0.0.1", listener.port)))
            )
            assert time.monotonic() - began < 0.24, "no stagger is waited for"


@pytest.mark.parametrize(("dead", "live"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
async def test_families_race_and_the_one_that_works_wins(dead: str, live: str) -> None:
    async with endpoint(bind="[::]:0") as dialer, endpoint(bind="[::]:0") as listener:
        family = socket.AF_INET6 if ":" in dead else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as mute:
            mute.bind((dead, 0))
            nobody = (dead, mute.getsockname()[1])
            began = time.monotonic()
            connection = await dialer.connect(
                PeerAddress(listener.node_id, (nobody, (live, listener.port)))
            )
            assert time.monotonic() - began < 1.0
            assert connection.remote_address == (live, listener.port)


@pytest.mark.alone
async def test_an_address_that_this_host_has_no_way_to_makes_way_at_once() -> None:
    async with endpoint() as listener, endpoint() as dialer:
        began = time.monotonic()
        there = ("127.0.0.1", listener.port)
        await dialer.connect(PeerAddress(listener.node_id, (("2001:db8::1", 9), there)))
        assert time.monotonic() - began < 0.24, "no stagger is waited for"
        with pytest.raises(Unreachable, match=r"\[2001:db8::1\]:9: .*socket is for IPv4 alone"):
            await dialer.connect(PeerAddress(SecretKey.generate().node_id, (("2001:db8::1", 9),)))
        await eventually(lambda: len(dialer._connections) == 1)


async def test_the_winner_is_remembered_and_dialled_first() -> None:
    with silent() as dead:
        async with endpoint() as listener, endpoint() as dialer:
            there = ("127.0.0.1", listener.port)
            target = PeerAddress(listener.node_id, (dead, there))
            took = []
            for _ in range(2):
                began = time.monotonic()
                connection = await dialer.connect(target)
                took.append(time.monotonic() - began)
                assert connection.remote_address == there
                await connection.close()
            assert took[1] < 0.25 <= took[0], "no stagger beside the dead one any more"


async def test_where_nothing_comes_back_the_firewalls_are_named() -> None:
    with silent() as mute, closed() as refused:
        async with endpoint() as dialer:
            target = PeerAddress(SecretKey.generate().node_id, (mute,))
            with pytest.raises(ConnectTimeout, match=r"UDP is blocked.*ufw allow PORT/udp"):
                await dialer.connect(target, timeout=0.2)
            with pytest.raises(Unreachable) as caught:
                await dialer.connect(PeerAddress(target.node_id, (refused,)))
            assert "blocked" not in str(caught.value), "a refusal came through"


async def test_where_something_else_answers_no_firewall_is_blamed() -> None:
    with closed() as refused:
        async with endpoint() as listener, endpoint() as dialer:
            stranger = SecretKey.generate().node_id
            there = ("127.0.0.1", listener.port)
            for target, alpn in ((at(listener), "nope/1"), (PeerAddress(stranger, (there,)), None)):
                with pytest.raises(Unreachable, match="Something answers there") as caught:
                    await dialer.connect(target, alpn=alpn or "mesh/1")
                assert "firewall" not in str(caught.value)
                assert caught.value.answered
            with pytest.raises(Unreachable, match="firewall"):
                await dialer.connect(PeerAddress(stranger, (refused, there)))


async def test_a_firewall_of_this_host_is_named() -> None:
    with silent() as address:
        async with endpoint() as dialer:
            sock = dialer._socket

            def refuse(data: bytes, target: SocketAddress) -> bool:
                sock._note(target, PermissionError(errno.EPERM, "Operation not permitted"))
                return True

            sock.send = refuse  # type: ignore[method-assign]
            with pytest.raises(ConnectTimeout, match=r"firewall .*\(Operation not permitted\)"):
                await dialer.connect(
                    PeerAddress(SecretKey.generate().node_id, (address,)), timeout=0.2
                )


async def test_every_address_is_named_with_its_own_error() -> None:
    with closed() as refused, silent() as mute:
        async with endpoint() as other, endpoint() as dialer:
            target = PeerAddress(
                SecretKey.generate().node_id,
                (refused, ("127.0.0.1", other.port), mute),
            )
            with pytest.raises(ConnectTimeout) as caught:
                await dialer.connect(target, timeout=0.8)
            text = str(caught.value)
            assert f"{refused[0]}:{refused[1]}: " in text
            assert "nothing listens" in caught.value.attempts[f"127.0.0.1:{refused[1]}"]
            assert other.node_id.short in caught.value.attempts[f"127.0.0.1:{other.port}"]
            assert caught.value.attempts[f"127.0.0.1:{mute[1]}"] == "no answer"
            assert not caught.value.is_refused
            assert target.node_id.short in text


async def test_a_peer_has_not_ended_while_one_of_its_addresses_is_silent() -> None:
    with closed() as refused, silent() as mute:
        async with endpoint() as dialer:
            target = PeerAddress(SecretKey.generate().node_id, (refused, mute))
            with pytest.raises(ConnectTimeout, match="nothing listens") as caught:
                await dialer.connect(target, timeout=0.5)
            assert not caught.value.is_refused


async def test_a_closed_port_is_known_long_before_the_deadline() -> None:
    with closed() as address:
        async with endpoint() as dialer:
            began = time.monotonic()
            with pytest.raises(Unreachable, match="nothing listens") as caught:
                await dialer.connect(
                    PeerAddress(SecretKey.generate().node_id, (address,)), timeout=10
                )
            assert time.monotonic() - began < 1.0
            assert not isinstance(caught.value, ConnectTimeout)
            assert caught.value.is_refused


async def test_an_address_that_never_answers_is_named_at_the_deadline() -> None:
    with silent() as address:
        async with endpoint() as dialer:
            began = time.monotonic()
            with pytest.raises(ConnectTimeout, match=f":{address[1]}: no answer") as caught:
                await dialer.connect(
                    PeerAddress(SecretKey.generate().node_id, (address,)), timeout=0.4
                )
            assert 0.4 <= time.monotonic() - began < 1.0
            assert caught.value.after == pytest.approx(0.4, abs=0.3)
            assert caught.value.exit_code == 3
            await eventually(lambda: is_idle(dialer))


async def test_addresses_learned_are_used_for_a_bare_node_id() -> None:
    async with endpoint() as listener, endpoint() as dialer:
        dialer.add_addresses(listener.node_id, (("127.0.0.1", listener.port),))
        assert await (await dialer.connect(listener.node_id)).call("echo", 1) == 1


async def test_the_addresses_kept_for_one_peer_are_bounded() -> None:
    async with endpoint() as node:
        peer = SecretKey.generate().node_id
        for port in range(1, 200):
            node.add_addresses(peer, (("192.0.2.1", port),))
        known = node.known_addresses(peer)
        assert len(known) <= 16
        assert known[0] == ("192.0.2.1", 199), "the latest first"


async def test_an_unknown_node_id_is_said_to_be_one() -> None:
    async with endpoint() as dialer:
        with pytest.raises(
            Unreachable, match=r"no address of it is known.*ticket.*mesh1"
        ) as caught:
            await dialer.connect(SecretKey.generate().node_id)
        assert caught.value.attempts == {}


async def test_a_node_does_not_dial_itself() -> None:
    async with endpoint() as node:
        with pytest.raises(AddressError, match="itself"):
            await node.connect(at(node))


@pytest.mark.parametrize("host", ["localhost", "", "1.2.3"])
async def test_a_name_is_no_address(host: str) -> None:
    async with endpoint() as node:
        with pytest.raises(AddressError):
            await node.connect(PeerAddress(SecretKey.generate().node_id, ((host, 5),)))
        with pytest.raises(AddressError, match="port 0"):
            await node.connect(PeerAddress(SecretKey.generate().node_id, (("127.0.0.1", 0),)))


async def test_a_closing_endpoint_dials_nobody_and_ends_flights() -> None:
    with silent() as address:
        target = PeerAddress(SecretKey.generate().node_id, (address,))
        errors: list[BaseException] = []

        async def caller(dialer: Endpoint) -> None:
            try:
                await dialer.connect(target)
            except MeshError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            async with endpoint() as dialer:
                tasks.start_soon(caller, dialer)
                await eventually(lambda: dialer._connections)
            with pytest.raises(ConnectionClosed, match="closing"):
                await dialer.connect(target)
        assert len(errors) == 1


# -- both at once


@pytest.mark.parametrize("round_", range(6))
async def test_two_that_dial_each_other_keep_one_connection(round_: int) -> None:
    async with endpoint() as one, endpoint() as two:
        events = Events(one), Events(two)
        mine, theirs = await together(one.connect(at(two)), two.connect(at(one)))
        assert isinstance(mine, Connection)
        assert isinstance(theirs, Connection)
        assert one.connections == (mine,)
        assert two.connections == (theirs,)
        assert mine.outbound != theirs.outbound, "the two ends of one connection"
        assert await mine.call("echo", 1) == 1
        assert await theirs.call("echo", 2) == 2
        await eventually(lambda: len(one._connections) == len(two._connections) == 1)
        assert mine.is_open
        assert theirs.is_open
        for each in events:
            assert [type(event) for event in each.seen] == [PeerJoined], "one peer, and no quarrel"


@pytest.mark.parametrize("delay", [0.0005, 0.001, 0.002, 0.004, 0.008, 0.015])
async def test_no_call_is_lost_whoever_is_a_little_later(delay: float) -> None:
    async with endpoint() as one, endpoint() as two:
        answers: list[object] = []

        async def use(node: Endpoint, other: Endpoint, wait: float) -> None:
            await anyio.sleep(wait)
            connection = await node.connect(at(other))
            answers.extend([await connection.call("echo", number) for number in range(5)])
            await anyio.sleep(0.1)
            answers.append(await connection.call("echo", 5))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use, one, two, 0)
            tasks.start_soon(use, two, one, delay)
        assert len(answers) == 12
        assert len(one.connections) == len(two.connections) == 1


class Slow:
    """An authorizer that admits everybody after some thought."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def authorize(self, request: AccessRequest) -> Grant:
        if isinstance(request, ConnectRequest):
            await anyio.sleep(self._seconds)
            return Grant(frozenset({"*"}))
        return request.grant


@pytest.mark.parametrize(("thought", "other"), [(0.05, 0.05), (0.0, 0.3), (0.3, 0.0), (0.0, 1.3)])
async def test_two_that_dial_each_other_agree_however_slow_their_authorizers(
    thought: float, other: float
) -> None:
    keys = sorted((SecretKey.generate() for _ in range(2)), key=lambda key: key.node_id)
    async with endpoint(Slow(thought), keys[0]) as one, endpoint(Slow(other), keys[1]) as two:
        found = await together(one.connect(at(two)), two.connect(at(one)))
        await eventually(lambda: len(one._connections) == len(two._connections) == 1)
        for connection in found:
            assert isinstance(connection, Connection)
            assert connection.is_open
            assert await connection.call("echo", 1) == 1
        assert one.connections == (found[0],)
        assert two.connections == (found[1],)


async def test_a_callers_dial_ends_when_the_peer_gets_through_first() -> None:
    with silent() as nowhere:
        async with endpoint() as one, endpoint() as two:
            found: list[Connection] = []

            async def wait() -> None:
                # The address known of the other is dead; only the other's own dial can help.
                found.append(await one.connect(PeerAddress(two.node_id, (nowhere,)), timeout=5))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await eventually(lambda: one._connections)
                await two.connect(at(one))
            assert not found[0].outbound
            assert await found[0].call("echo", 1) == 1
            await eventually(lambda: len(one._connections) == 1)


async def test_a_connection_of_its_own_protocol_that_nobody_takes_is_closed() -> None:
    served: list[Connection] = []

    async def handler(connection: Connection) -> None:
        served.append(connection)
        await connection.wait_closed()

    async with endpoint() as listener, endpoint() as dialer:
        listener.register_alpn("app/1", handler)
        taken: list[Connection] = []
        for number in range(12):
            with anyio.move_on_after(number / 1000):
                taken.append(await dialer.connect(at(listener), alpn="app/1"))
        taken.append(await dialer.connect(at(listener), alpn="app/1"))
        await eventually(lambda: len(dialer._connections) == len(taken))
        await eventually(lambda: len(listener._connections) == len(taken))
        assert all(connection.is_open for connection in taken)


# -- the same key again


async def test_a_restarted_peer_on_another_port_takes_its_former_place() -> None:
    key = SecretKey.generate()
    async with endpoint() as node:
        async with peer_process(key) as first:
            old = await node.connect(first.address)
            assert await old.call("echo", 1) == 1
        async with peer_process(key) as second:
            began = time.monotonic()
            new = await node.connect(second.address)
            if new is old:  # the loss was not noticed yet
                with pytest.raises(MeshError):
                    await new.call("echo", 2, timeout=2)
                new = await node.connect(second.address)
            assert await new.call("echo", 2) == 2
            assert time.monotonic() - began < 2.0
            assert new.remote_boot != old.remote_boot


async def test_a_restarted_peer_on_the_same_port_is_reached_within_the_liveness_bound() -> None:
    key = SecretKey.generate()
    async with endpoint() as node:
        async with peer_process(key) as first:
            await node.connect(first.address)
        async with peer_process(key, port=first.port) as second:
            began = time.monotonic()
            answer = None
            while answer is None and time.monotonic() - began < 4.0:
                try:
                    connection = await node.connect(second.address)
                    answer = await connection.call("echo", 2, timeout=1)
                except MeshError:
                    pass
            assert answer == 2
            # At once where the closed port was reported in between; else the old link, whose port
            # has a process again, is silent for the bound of 3 s.
            assert time.monotonic() - began < 3.5


async def test_a_peer_that_restarted_dials_us_and_is_taken_for_its_former_self() -> None:
    key = SecretKey.generate()
    async with endpoint() as listener:
        ghost = Endpoint(key, allow_any(), config(linger=0.1))
        async with ghost:
            old = await ghost.connect(at(listener))
            back = listener.connection(ghost.node_id)
            # It vanishes without a word: its socket is deaf and mute from now on.
            ghost._socket.receive = lambda limit: []  # type: ignore[method-assign]
            ghost._socket.send = lambda data, address: True  # type: ignore[method-assign]
            async with Endpoint(key, allow_any(), config(linger=0.1)) as reborn:
                began = time.monotonic()
                connection = await reborn.connect(at(listener))
                assert time.monotonic() - began < 2.0
                assert await connection.call("echo", 1) == 1
                assert back is not None
                assert not back.is_open
                assert listener.connection(key.node_id) is not back
            old.abort()


async def test_the_same_key_alive_twice_is_refused_with_the_place_of_the_first() -> None:
    key = SecretKey.generate()
    async with endpoint() as listener, endpoint(key=key) as first, endpoint(key=key) as second:
        connection = await first.connect(at(listener))
        with pytest.raises(IdentityInUse, match=f"identity in use at 127.0.0.1:{first.port}"):
            await second.connect(at(listener))
        assert await connection.call("echo", 1) == 1


async def test_a_peer_that_lost_the_connection_unheard_gets_another() -> None:
    async with endpoint() as listener, endpoint() as dialer:
        old = await dialer.connect(at(listener))
        # The dialer forgets the connection without a word that the listener could hear.
        send, dialer._socket.send = dialer._socket.send, lambda data, address: True  # type: ignore[method-assign]
        old.abort()
        dialer._socket.send = send  # type: ignore[method-assign]
        dialer._engine.demux.remove(old.core)
        began = time.monotonic()
        new = await dialer.connect(at(listener))
        assert time.monotonic() - began < 2.5
        assert await new.call("echo", 1) == 1
        assert len(listener.connections) == 1
