"""How two get to shared memory, and how a third does not."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator

import anyio
import pytest
import torch

from auth import AccessRequest, Denial, Grant, NodeId, PeerIdentity, SecretKey, ServiceRequest
from tensor_bridge import LaneConfig
from tensor_bridge.lanes.shared import host, rendezvous, sharing
from tensor_bridge.lanes.shared.host import ANSWERER, ASKER, FACTS, Facts, apart, here, unavailable
from tensor_bridge.lanes.shared.meeting import (
    LANE_CALL,
    LaneAsked,
    LaneOffered,
    decode_answer,
    proof,
)
from tensor_bridge.lanes.shared.rendezvous import MAX_CALLERS, Found, admit, introduce
from tensor_bridge.lanes.shared.sockets import connect, listen
from tests.cancelling import process_holdings
from tests.tensor_bridge.nodes import LANES, Node, eventually, node, together
from transport import ProtocolError

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.attack,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

SHARED = LANES["shared-memory"]
SECRET = bytes(range(32))
PEER = PeerIdentity(SecretKey.generate().node_id)
A, B, C = (SecretKey.generate().node_id for _ in range(3))
NONCE = bytes(16)


# -- marks


def test_marks_are_equal_where_the_facts_are() -> None:
    assert apart(here().marks(ASKER, A, B, NONCE), here().marks(ASKER, A, B, NONCE)) is None


@pytest.mark.parametrize("index", range(len(FACTS)))
def test_each_fact_counts(index: int) -> None:
    values = list(here().values)
    values[index] += b"0"
    other = Facts(here().boot, tuple(values))
    why = apart(here().marks(ASKER, A, B, NONCE), other.marks(ASKER, A, B, NONCE))
    assert why == list(FACTS.values())[index]


@pytest.mark.parametrize(
    ("side", "asker", "answerer", "nonce"),
    [
        (ANSWERER, A, B, NONCE),  # sent back to who made them
        (ASKER, C, B, NONCE),  # passed on by a third
        (ASKER, A, C, NONCE),
        (ASKER, A, B, b"\1" * 16),  # repeated later
    ],
)
def test_marks_are_good_for_one_pair_one_side_and_one_time(
    side: bytes, asker: NodeId, answerer: NodeId, nonce: bytes
) -> None:
    marks = here().marks(ASKER, A, B, NONCE)
    assert apart(marks, here().marks(side, asker, answerer, nonce)) == FACTS["kernel"]


def test_without_the_boot_id_marks_can_not_be_made() -> None:
    other = Facts(b"another boot", here().values)
    assert apart(here().marks(ASKER, A, B, NONCE), other.marks(ASKER, A, B, NONCE)) is not None


# -- the socket


@contextlib.asynccontextmanager
async def admitting() -> AsyncIterator[tuple[bytes, list[Found | None]]]:
    """A listener that waits for `PEER`; yield its address and, later, whom it has admitted."""
    address, found = os.urandom(16), list[Found | None]()

    async def wait() -> None:
        with listen(address) as listener:
            found.append(await admit(listener, SECRET, PEER))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        yield address, found
        tasks.cancel_scope.cancel()
    for each in found:
        if each is not None:
            each.sock.close()


async def test_who_knows_the_secret_is_admitted_and_nobody_after() -> None:
    async with admitting() as (address, found):
        caller = await introduce(address, SECRET)
        await eventually(lambda: found)
        assert isinstance(found[0], Found)
        assert caller.process == found[0].process == os.getpid()
        with pytest.raises(OSError, match="refused"):
            await introduce(address, SECRET)  # what was good once
        caller.sock.close()


@pytest.mark.parametrize(
    "packet",
    [
        proof(bytes(32), ASKER),
        proof(SECRET, ANSWERER),
        SECRET,
        proof(SECRET, ASKER)[:-1],
        proof(SECRET, ASKER) + b"\0",
        b"x",
    ],
)
async def test_who_does_not_is_turned_away_and_the_peer_still_admitted(
    packet: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "quicmesh.tensors")
    async with admitting() as (address, found):
        with connect(address) as stranger:
            stranger.send(packet)
            await anyio.wait_readable(stranger)
            assert stranger.recv(64) == b""
        assert str(PEER) in caplog.text
        (await introduce(address, SECRET)).sock.close()
        await eventually(lambda: found)
        assert found[0] is not None


async def test_another_user_is_turned_away_unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "peer_user", lambda sock: (os.geteuid() + 1, 1))
    async with admitting() as (address, found):
        with connect(address) as stranger:
            stranger.send(proof(SECRET, ASKER))
            await anyio.wait_readable(stranger)
            with contextlib.suppress(ConnectionResetError):  # it was not even read
                assert stranger.recv(64) == b""
            with pytest.raises(ProtocolError, match="another user"):
                await introduce(address, SECRET)
        monkeypatch.undo()
        (await introduce(address, SECRET)).sock.close()
        await eventually(lambda: found)


async def test_silent_strangers_do_not_keep_the_peer_out() -> None:
    async with admitting() as (address, found):
        strangers = [connect(address) for _ in range(MAX_CALLERS - 1)]
        (await introduce(address, SECRET)).sock.close()
        await eventually(lambda: found)
        assert found[0] is not None
        for stranger in strangers:
            stranger.close()


async def test_too_many_strangers_end_the_meeting() -> None:
    async with admitting() as (address, found):
        for _ in range(MAX_CALLERS):
            with connect(address) as stranger:
                stranger.send(b"x")
                await anyio.wait_readable(stranger)
        await eventually(lambda: found)
        assert found == [None]


async def test_a_listener_that_does_not_know_the_secret_gets_nothing() -> None:
    address = os.urandom(16)
    with listen(address) as listener:

        async def pretend() -> None:
            await anyio.wait_readable(listener)
            sock, _ = listener.accept()
            with sock:
                sock.setblocking(False)
                await anyio.wait_readable(sock)
                sock.send(sock.recv(64))  # what it was shown is not what it has to show

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pretend)
            with pytest.raises(ProtocolError, match="not the peer"):
                await introduce(address, SECRET)


# -- two nodes


async def lane(one: Node, other: Node) -> tuple[str, str | None]:
    """Move something, and return by which lane and why."""
    client = await one.client(other)
    tensor = torch.arange(100_000)
    assert torch.equal(await client.get(await client.put(tensor)), tensor)
    status = one.lanes.status(await one.connection(other))
    return status.name, status.reason


async def test_moves_of_both_sides_go_by_one_link() -> None:
    async with together(node(lanes=SHARED), node(lanes=SHARED)) as (a, b):
        assert await lane(a, b) == ("shared-memory", None)
        before = process_holdings()
        assert await lane(b, a) == ("shared-memory", None)
        assert process_holdings() == before
        assert (await a.connection(b)).info.bytes_sent < 50_000


async def test_both_ask_at_once() -> None:
    async with together(node(lanes=SHARED), node(lanes=SHARED)) as (a, b):
        one = await a.connection(b)
        await eventually(lambda: b.endpoint.connection(a.endpoint.node_id) is not None)
        other = b.endpoint.connection(a.endpoint.node_id)
        assert other is not None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a.lanes.meet, one)
            tasks.start_soon(b.lanes.meet, other)
        assert a.lanes.status(one) == b.lanes.status(other)
        assert a.lanes.status(one).name == "shared-memory"
        holdings = [each.lane_holdings("it") for each in (a, b)]
        assert all(each["links of it"] == 1 and each["meetings of it"] == 0 for each in holdings)


async def test_small_moves_do_not_ask() -> None:
    apart = LaneConfig(in_process=False)
    async with together(node(lanes=apart), node(lanes=apart)) as (a, b):
        client, connection = await a.client(b), await a.connection(b)
        await client.put(torch.zeros(1000))
        assert "no move was large enough" in str(a.lanes.status(connection).reason)
        await client.put(torch.zeros(1 << 20))
        assert a.lanes.status(connection).reason is None


async def test_it_can_be_switched_off_on_either_side() -> None:
    off = LANES["quic"]
    async with together(node(lanes=SHARED), node(lanes=off)) as (on, without):
        assert await lane(on, without) == ("quic", "it is switched off")
        assert await lane(without, on) == ("quic", "it is switched off")


class Narrow:
    """Grants everything but the scope for shared memory."""

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        if isinstance(request, ServiceRequest) and request.scope == sharing.SCOPE:
            return Denial("scope", "not this")
        return Grant(frozenset({"*"}))


async def test_a_peer_that_does_not_grant_it() -> None:
    async with together(node(lanes=SHARED), node(lanes=SHARED, authorizer=Narrow())) as (a, b):
        assert await lane(a, b) == ("quic", f"the peer does not grant {sharing.SCOPE}")


async def test_a_peer_that_does_not_know_it() -> None:
    async with together(node(lanes=SHARED), node(lanes=SHARED)) as (a, b):
        del b.endpoint._services._services[LANE_CALL]
        assert await lane(a, b) == ("quic", "the peer shares no memory")


async def test_only_so_many_links() -> None:
    few = LaneConfig(shared_from=1, max_links=1)
    async with together(node(lanes=few), node(lanes=SHARED), node(lanes=SHARED)) as (a, b, c):
        assert await lane(a, b) == ("shared-memory", None)
        assert await lane(c, a) == ("quic", "the peer shares memory with as many as it may")
        assert await lane(b, c) == ("shared-memory", None)


async def test_a_peer_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MEETING_SECONDS", 0.1)
    async with together(node(lanes=SHARED), node(lanes=SHARED)) as (a, b):

        async def hang(incoming: object) -> None:
            await anyio.sleep_forever()

        del b.endpoint._services._services[LANE_CALL]
        b.endpoint.register_call(LANE_CALL, hang, scope="x")
        name, why = await lane(a, b)
        assert name == "quic"
        assert "answer" in str(why)


async def test_nobody_from_elsewhere_has_us_connect_to_anything() -> None:
    """A peer that makes no marks of this host answers with an address: it is not dialled."""
    async with together(node(lanes=SHARED), node(lanes=SHARED)) as (a, b):
        address = os.urandom(16)

        async def lure(incoming: object) -> object:
            return LaneOffered(address, SECRET, (bytes(32),) * len(FACTS)).encode()

        del b.endpoint._services._services[LANE_CALL]
        b.endpoint.register_call(LANE_CALL, lure, scope="x")  # type: ignore[arg-type]
        with listen(address) as listener:
            assert await lane(a, b) == ("quic", FACTS["kernel"])
            with pytest.raises(BlockingIOError):
                listener.accept()


async def ask(one: Node, other: Node) -> object:
    """Ask for shared memory by hand, and return what is answered."""
    ids = one.endpoint.node_id, other.endpoint.node_id
    asked = LaneAsked(NONCE, here().marks(ASKER, *ids, NONCE))
    connection = await one.connection(other)
    return decode_answer(await connection.call(LANE_CALL, asked.encode()))


async def test_an_offer_is_good_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MEETING_SECONDS", 0.05)
    async with together(node(lanes=SHARED), node(lanes=SHARED)) as (a, b):
        offered = await ask(a, b)
        assert isinstance(offered, LaneOffered)
        await eventually(lambda: b.lane_holdings("it")["meetings of it"] == 0)
        with pytest.raises(OSError, match="refused"):
            await introduce(offered.address, offered.secret)
        assert await lane(a, b) == ("shared-memory", None)


async def test_a_later_wish_takes_the_place_of_one_before() -> None:
    async with together(node(lanes=SHARED), node(lanes=SHARED)) as (a, b):
        before = process_holdings()
        first = await ask(a, b)
        for _ in range(5):
            await ask(a, b)
        assert isinstance(first, LaneOffered)
        assert b.lane_holdings("it")["meetings of it"] == 1
        with pytest.raises(OSError, match="refused"):
            await introduce(first.address, first.secret)
        assert await lane(a, b) == ("shared-memory", None)
        (await a.connection(b)).abort()
        await eventually(lambda: process_holdings()["descriptors"] <= before["descriptors"])  # type: ignore[operator]


async def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "MAX_MEETINGS", 1)
    async with together(*(node(lanes=SHARED) for _ in range(3))) as (a, b, c):
        assert isinstance(await ask(a, c), LaneOffered)
        assert not isinstance(await ask(b, c), LaneOffered)
        assert isinstance(await ask(a, c), LaneOffered), "its own, taken up again"


async def test_the_link_ends_with_the_connection() -> None:
    async with together(node(lanes=SHARED), node(lanes=SHARED)) as (a, b):
        before = process_holdings()
        assert await lane(a, b) == ("shared-memory", None)
        await (await a.connection(b)).close()
        await eventually(lambda: process_holdings()["descriptors"] == before["descriptors"])
        assert await lane(a, b) == ("shared-memory", None), "and the next has its own"


async def test_a_secret_is_in_no_repr_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    offered = LaneOffered(bytes(16), SECRET, ())
    assert repr(SECRET) not in repr(offered)
    async with together(node(lanes=SHARED), node(lanes=SHARED)) as (a, b):
        answer = await ask(a, b)
        assert isinstance(answer, LaneOffered)
        assert answer.secret.hex() not in caplog.text
        assert repr(answer.secret) not in caplog.text


@pytest.mark.parametrize("missing", ["memfd_create", "SO_PEERCRED", "/proc"])
async def test_elsewhere_than_on_linux_it_is_quic(
    monkeypatch: pytest.MonkeyPatch, missing: str, tmp_path: object
) -> None:
    if missing == "memfd_create":
        monkeypatch.delattr(os, missing)
    elif missing == "SO_PEERCRED":
        monkeypatch.delattr(socket, missing)
    else:
        monkeypatch.setattr(host, "_NAMESPACES", tmp_path)
    assert unavailable() is not None
    async with together(node(lanes=SHARED), node(lanes=SHARED)) as (a, b):
        assert await lane(a, b) == ("quic", unavailable())


async def test_a_link_that_comes_after_the_connection_has_gone_ends_at_once() -> None:
    async with together(node(lanes=SHARED), node(lanes=SHARED)) as (a, b):
        connection = await a.connection(b)
        connection.abort()
        await connection.wait_closed()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        assert a.lanes._sharing is not None
        with theirs, anyio.fail_after(2):
            await a.lanes._sharing._run(Found(ours, 1), connection, sharing._Pair())
        assert ours.fileno() == -1
