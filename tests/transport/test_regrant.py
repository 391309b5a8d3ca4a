"""What a peer is granted changes while it is connected."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from auth import AccessDenied, AccessRequest, ConnectRequest, Denial, Grant, SecretKey, allow_any
from tests.transport.nodes import Events, at, config, endpoint, eventually
from transport import Connection, Endpoint, Incoming, PeerLeft, PeerRevoked
from transport.cbor import CborValue

pytestmark = pytest.mark.anyio

ALL = Grant(frozenset({"*"}))


class Changing:
    """An authorizer whose mind a test changes."""

    def __init__(self) -> None:
        self.answer: Grant | Denial = ALL

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        return self.answer if isinstance(request, ConnectRequest) else ALL


class Scene:
    """A node with two services that last, and a friend who uses both."""

    def __init__(self, node: Endpoint, friend: Endpoint, policy: Changing) -> None:
        self.node, self.friend, self.policy = node, friend, policy
        self.events = Events(node)
        self.ended: list[str] = []
        for name in ("reads", "writes"):
            node.register_service(name, self.last, scope=name)
        node.register_call("think", self.think, scope="writes")

    async def last(self, request: Incoming) -> None:
        try:
            while True:
                await request.stream.send(await request.stream.receive())
        finally:
            self.ended.append(request.service)

    async def think(self, request: Incoming) -> CborValue:
        try:
            await anyio.sleep_forever()
        finally:
            self.ended.append(request.service)

    @property
    def back(self) -> Connection:
        connection = self.node.connection(self.friend.node_id)
        assert connection is not None
        return connection

    async def change(self, answer: Grant | Denial) -> None:
        self.policy.answer = answer
        await self.node.reconsider(self.friend.node_id)


@asynccontextmanager
async def scene() -> AsyncIterator[tuple[Scene, Connection]]:
    policy = Changing()
    async with endpoint(policy) as node, endpoint() as friend:
        yield Scene(node, friend, policy), await friend.connect(at(node))


async def test_fewer_scopes_end_the_streams_that_need_more_and_no_others() -> None:
    async with scene() as (it, connection):
        reading, writing = [await connection.open_stream(name) for name in ("reads", "writes")]
        for stream in (reading, writing):
            await stream.send(b"x")
            assert await stream.receive() == b"x"
        refused: list[AccessDenied] = []

        async def think() -> None:
            try:
                await connection.call("think")
            except AccessDenied as error:
                refused.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(think)
            await eventually(lambda: len(it.node._services._running) == 3)
            await it.change(Grant(frozenset({"reads"})))
            with anyio.fail_after(3):
                with pytest.raises(AccessDenied):
                    await writing.receive()
        assert refused
        await eventually(lambda: sorted(it.ended) == ["think", "writes"])
        await reading.send(b"y")
        assert await reading.receive() == b"y"
        with pytest.raises(AccessDenied):
            await connection.call("think", timeout=5)
        assert connection.is_open
        # And back: what is granted again can be used again.
        await it.change(ALL)
        again = await connection.open_stream("writes")
        await again.send(b"z")
        assert await again.receive() == b"z"
        await again.aclose()
        await reading.aclose()
        await eventually(lambda: not it.node._services._running)


async def test_a_sooner_expiry_ends_the_connection_then_and_a_later_one_does_not() -> None:
    async with scene() as (it, connection):
        await it.change(Grant(frozenset({"*"}), time.time() + 0.3))
        await it.change(Grant(frozenset({"*"}), time.time() + 60))
        await anyio.sleep(0.5)
        assert await connection.call("echo", 1) == 1
        began = time.monotonic()
        await it.change(Grant(frozenset({"*"}), time.time() + 0.3))
        with anyio.fail_after(5):
            error = await connection.wait_closed()
        assert 0.2 < time.monotonic() - began < 3
        assert isinstance(error, AccessDenied)
        assert error.why == "the grant has expired"
        assert it.events.of(PeerRevoked) == [
            PeerRevoked(it.friend.node_id, "the grant has expired")
        ]


async def test_a_no_closes_what_the_peer_has_dialled() -> None:
    async with scene() as (it, connection):
        await it.change(Denial("gone", "you were removed"))
        with anyio.fail_after(3):
            error = await connection.wait_closed()
        assert isinstance(error, AccessDenied)
        assert error.why == "you were removed"
        assert it.events.of(PeerLeft)
        assert it.events.of(PeerRevoked) == [PeerRevoked(it.friend.node_id, "you were removed")]


async def test_where_we_have_dialled_a_no_takes_only_its_grant() -> None:
    policy = Changing()
    async with endpoint(policy) as node, endpoint() as friend:
        connection = await node.connect(at(friend))
        back = friend.connection(node.node_id)
        assert back is not None
        assert await back.call("echo", 1) == 1
        policy.answer = Denial("gone", "no")
        await node.reconsider(friend.node_id)
        assert connection.grant is None
        with pytest.raises(AccessDenied):
            await back.call("echo", 1)
        assert await connection.call("echo", 1) == 1
        policy.answer = ALL
        await node.reconsider(friend.node_id)
        assert await back.call("echo", 1) == 1


async def test_others_are_left_alone() -> None:
    async with scene() as (it, connection), endpoint() as other:
        theirs = await other.connect(at(it.node))
        await it.change(Denial("gone", "no"))
        with anyio.fail_after(3):
            await connection.wait_closed()
        assert await theirs.call("echo", 1) == 1


async def test_who_is_not_in_yet_is_not_let_in_by_it() -> None:
    entered, go_on = anyio.Event(), anyio.Event()

    class Slow:
        asked = 0

        async def authorize(self, request: AccessRequest) -> Grant | Denial:
            self.asked += 1
            entered.set()
            await go_on.wait()
            return Denial("closed", "no")

    slow = Slow()
    async with (
        endpoint(slow) as node,
        Endpoint(SecretKey.generate(), allow_any(), config()) as dialer,
        anyio.create_task_group() as tasks,
    ):

        async def dial() -> None:
            with pytest.raises(AccessDenied):
                await dialer.connect(at(node))

        tasks.start_soon(dial)
        await entered.wait()
        await node.reconsider(dialer.node_id)
        assert slow.asked == 1
        go_on.set()


async def test_revoking_tells_observers_also_of_a_peer_that_is_not_here() -> None:
    async with endpoint() as node, endpoint() as friend:
        events = Events(node)
        assert node.revoke(friend.node_id, "removed") == 0
        assert events.seen == [PeerRevoked(friend.node_id, "removed")]
