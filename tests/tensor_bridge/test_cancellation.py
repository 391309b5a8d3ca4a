"""Every operation on tensors, cancelled at each await, leaves nothing behind at any node."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio.lowlevel
import pytest
import torch

from auth import Claim, TokenBook, TokenFacts
from tensor_bridge import (
    QuicLane,
    SharedLane,
    TensorClient,
    TensorRef,
    TensorService,
    TensorStore,
)
from tensor_bridge.codec import describe
from tensor_bridge.lanes.shared.blocks import LEAST_BYTES
from tensor_bridge.lanes.shared.link import SLOTS, Link
from tensor_bridge.memory import Payload, tensor_bytes
from tensor_bridge.moves import settle
from tests.cancelling import (
    Operation,
    Scenarios,
    at_each_await,
    at_each_turn,
    at_its_end,
    process_holdings,
)
from tests.tensor_bridge.nodes import LANES, Node, eventually, linked, node, together
from tests.tensor_bridge.shared.test_broken import Room
from tests.tensor_bridge.tensors import filled, same
from tests.transport.wires import Hesitant, endpoint_holdings
from transport import CborValue, Incoming, Stream

pytestmark = pytest.mark.anyio

SCENARIOS: Scenarios[Moves] = Scenarios()
covers = SCENARIOS.covers

SOME = filled((300, 100), torch.float32).t()
"""120,000 bytes, not in order: more than one packet and one piece."""

LOT = filled((250_000,), torch.uint8)
"""More than the buffers on the way hold: each part of it is awaited."""


class Moves:
    """Two nodes with tensors, a client of both, and everything that the three hold."""

    def __init__(
        self, a: Node, b: Node, client: Node, at_a: TensorClient, at_b: TensorClient
    ) -> None:
        self.a, self.b, self.client = a, b, client
        self.at_a, self.at_b = at_a, at_b

    def held(self) -> dict[str, object]:
        held = process_holdings()
        for each, name in ((self.a, "a"), (self.b, "b"), (self.client, "the client")):
            tokens = each.tokens.counts()
            held |= (
                endpoint_holdings(each.endpoint, name)
                | each.lane_holdings(name)
                | {
                    f"tensors of {name}": len(each.store),
                    f"bytes and objects taken at {name}": each.store.used(),
                    f"arrivals of {name}": len(each.service.arrivals),
                    f"tokens of {name}": tokens.live,
                    f"bytes exposed by {name}": tokens.exposed_bytes,
                }
            )
        return held

    def clear(self) -> None:
        """Delete what was put, but for what the store of `a` began with."""
        for each in (self.a, self.b):
            each.store.delete_owner(self.client.endpoint.node_id)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `LOT` go round more slots than there are."""
    monkeypatch.setattr("tensor_bridge.lanes.shared.link.SLOT_BYTES", 16 << 10)


@asynccontextmanager
async def moves() -> AsyncIterator[Moves]:
    small: dict[str, Any] = {
        "authorizer": Hesitant(),
        "stream_window": 64 << 10,
        "send_buffer": 64 << 10,
        "liveness": 10.0,  # what is left behind is counted, links too
    }
    async with together(node(**small), node(**small), node(**small)) as (a, b, client):
        at_a, at_b = await client.client(a, reconnect=True), await client.client(b, reconnect=True)
        world = Moves(a, b, client, at_a, at_b)
        # So that the connection that nodes make for themselves is there, and what each pair shares.
        await at_b.get(await at_b.put(SOME))
        await at_a.get(ref := await at_a.put(SOME))
        await at_a.copy_to(ref, at_b)
        world.clear()
        yield world


@asynccontextmanager
async def there(m: Moves, tensor: torch.Tensor) -> AsyncIterator[TensorRef]:
    """A tensor of the client's at `a`, for the block."""
    ref = m.client.has(m.a, tensor)
    yield ref
    if ref.object_id in m.a.store:
        m.a.store.delete(ref.object_id)


@covers("tensor_bridge.TensorClient.put")
async def put(m: Moves) -> AsyncIterator[Operation]:
    yield partial(_check_put, m, SOME)
    m.clear()


@covers("tensor_bridge.TensorClient.put")
async def put_nothing(m: Moves) -> AsyncIterator[Operation]:
    yield partial(_check_put, m, torch.empty(1, 0, 2))
    m.clear()


@covers(
    "tensor_bridge.TensorClient.put",
    "tensor_bridge.QuicLane.send",
    "tensor_bridge.QuicLane.receive",
    stride=9,
)
async def put_a_lot(m: Moves) -> AsyncIterator[Operation]:
    yield partial(_check_put, m, LOT)
    m.clear()


async def _check_put(m: Moves, tensor: torch.Tensor) -> None:
    ref = await m.at_a.put(tensor)
    assert same(m.a.store.get(ref.object_id).tensor, tensor)


@covers("tensor_bridge.TensorClient.create")
async def create(m: Moves) -> AsyncIterator[Operation]:
    async def run() -> None:
        ref = await m.at_a.create("arange", (200_000,), dtype=torch.int32)
        expected = torch.arange(200_000, dtype=torch.int32)
        assert torch.equal(m.a.store.get(ref.object_id).tensor, expected)

    yield run
    m.clear()


@covers("tensor_bridge.TensorClient.get")
async def get(m: Moves) -> AsyncIterator[Operation]:
    async with there(m, SOME) as ref:

        async def run() -> None:
            assert same(await m.at_a.get(ref), SOME)

        yield run


@covers("tensor_bridge.TensorClient.get", stride=9)
async def get_a_lot(m: Moves) -> AsyncIterator[Operation]:
    async with there(m, LOT) as ref:

        async def run() -> None:
            assert same(await m.at_a.get(ref), LOT)

        yield run


@covers("tensor_bridge.TensorClient.copy_to")
async def copy(m: Moves) -> AsyncIterator[Operation]:
    async with there(m, SOME) as ref:
        yield partial(_check_copy, m, ref, SOME)
    m.clear()


@covers("tensor_bridge.TensorClient.copy_to")
async def copy_a_lot(m: Moves) -> AsyncIterator[Operation]:
    async with there(m, LOT) as ref:
        yield partial(_check_copy, m, ref, LOT)
    m.clear()


async def _check_copy(m: Moves, ref: TensorRef, tensor: torch.Tensor) -> None:
    made = await m.at_a.copy_to(ref, m.at_b)
    assert same(m.b.store.get(made.object_id).tensor, tensor)


@covers("tensor_bridge.TensorClient.delete")
async def delete(m: Moves) -> AsyncIterator[Operation]:
    async with there(m, SOME) as ref:
        yield partial(m.at_a.delete, ref)


@covers("tensor_bridge.TensorClient.info")
async def info(m: Moves) -> AsyncIterator[Operation]:
    async with there(m, SOME) as ref:

        async def run() -> None:
            assert await m.at_a.info(ref.object_id) == ref

        yield run


@covers("tensor_bridge.TensorClient.list")
async def list_all(m: Moves) -> AsyncIterator[Operation]:
    # More than a page of them.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("tensor_bridge.service.PAGE", 2)
    refs = [m.client.has(m.a, torch.empty(0)) for _ in range(5)]

    async def run() -> None:
        assert len(await m.at_a.list()) == len(refs)

    yield run
    monkeypatch.undo()
    m.clear()


@covers("tensor_bridge.QuicLane.send", "tensor_bridge.QuicLane.receive", stride=3)
async def lane(m: Moves) -> AsyncIterator[Operation]:
    theirs: list[Stream] = []

    async def take(incoming: Incoming) -> None:
        theirs.append(incoming.stream)
        room = bytearray(len(data))
        await QuicLane(incoming.stream, stall_seconds=5).receive(Room(memoryview(room)))
        assert room == data
        await QuicLane(incoming.stream, stall_seconds=5).send(payload, _ignore)

    tensor = torch.arange(102_400).to(torch.uint8)
    payload, data = Payload(tensor, describe(tensor)), bytes(tensor_bytes(tensor))
    name = "tests.lane"
    if name not in m.a.endpoint.services:
        m.a.endpoint.register_service(name, take, scope="x")
    connection = await m.client.connection(m.a)

    async def run() -> None:
        async with await connection.open_stream(name) as stream:
            there = QuicLane(stream, stall_seconds=5)
            await there.send(payload, _ignore)
            room = bytearray(len(data))
            await there.receive(Room(memoryview(room)))
            assert room == data

    yield run


@covers("tensor_bridge.SharedLane.send", "tensor_bridge.SharedLane.receive", stride=3)
async def shared_lane(m: Moves) -> AsyncIterator[Operation]:
    async def take(incoming: Incoming) -> None:
        stream = incoming.stream
        room = bytearray(len(data))
        with theirs.landing(stream.stream_id) as landing:
            await stream.send_reply(None)
            lane = SharedLane(stream, theirs, landing, stall_seconds=5)
            await lane.receive(Room(memoryview(room)))
        assert room == data
        await lane.send(payload, _ignore)
        await settle(stream)

    tensor = torch.arange(202_400).to(torch.uint8)
    payload, data = Payload(tensor, describe(tensor)), bytes(tensor_bytes(tensor))
    name = "tests.shared lane"
    m.a.endpoint._services._services.pop(name, None)
    m.a.endpoint.register_service(name, take, scope="x")
    connection = await m.client.connection(m.a)

    async def run() -> None:
        async with await connection.open_stream(name) as stream:
            with ours.landing(stream.stream_id) as landing:
                await stream.reply()
                lane = SharedLane(stream, ours, landing, stall_seconds=5)
                await lane.send(payload, _ignore)
                room = bytearray(len(data))
                await lane.receive(Room(memoryview(room)))
                assert room == data
        assert not landing.arrivals.next()

    async with linked(connection.peer) as (ours, theirs):
        yield run
        for link in (ours, theirs):
            await eventually(lambda: link._outgoing.free == SLOTS and not link._landings)  # noqa: B023
            assert link._outgoing.free == SLOTS


@covers("tensor_bridge.Lanes.offer", "tensor_bridge.Lanes.meet")
async def get_together(m: Moves) -> AsyncIterator[Operation]:
    async with together(*(node(lanes=LANES["shared-memory"]) for _ in range(2))) as (one, other):
        connection = await one.connection(other)

        async def run() -> None:
            assert (await one.lanes.offer(connection, 1)).names == ("shared-memory",)
            await one.lanes.meet(connection)

        yield run


@covers("tensor_bridge.Lanes.take_over", stride=2)
async def handed_over(m: Moves) -> AsyncIterator[Operation]:
    async with together(*(node(lanes=LANES["shared-memory"]) for _ in range(2))) as (one, other):
        client, tensor = await one.client(other), filled((5000,), torch.uint8)
        ref = await client.put(tensor, shareable=True)
        await eventually(lambda: all(link.calls is not None for link in _links(one, other)))

        async def run() -> None:
            assert same(await client.get(ref, copy=False), tensor)

        yield run
        await eventually(lambda: not any(link._landings for link in _links(one, other)))
        await client.delete(ref)


@covers("tensor_bridge.Lanes.lend", "tensor_bridge.Lanes.take_back", stride=2)
async def kept_in_a_block(m: Moves) -> AsyncIterator[Operation]:
    async with together(*(node(lanes=LANES["shared-memory"]) for _ in range(2))) as (one, other):
        client, tensor = await one.client(other), filled((LEAST_BYTES,), torch.uint8)
        await client.delete(await client.put(tensor))
        await eventually(lambda: all(link.calls is not None for link in _links(one, other)))

        async def run() -> None:
            ref = await client.put(tensor)
            assert same(await client.get(ref), tensor)

        yield run
        other.store.delete_owner(one.endpoint.node_id)
        ours, theirs = _links(one, other)
        await eventually(lambda: not ours.blocks.has_lent(LEAST_BYTES))
        await eventually(lambda: len(theirs.their_blocks._blocks) == len(ours.blocks) <= 1)
        assert not any(block.readers for block in ours.blocks._blocks.values())
        assert other.is_empty


@covers("tensor_bridge.Lanes.lending", "tensor_bridge.Lanes.borrowed", stride=2)
async def lent_for_a_call(m: Moves) -> AsyncIterator[Operation]:
    async with together(*(node(lanes=LANES["shared-memory"]) for _ in range(2))) as (one, other):
        client, tensor = await one.client(other), filled((LEAST_BYTES,), torch.uint8)
        await client.delete(await client.put(tensor))
        await eventually(lambda: all(link.calls is not None for link in _links(one, other)))
        here = one.endpoint.connection(other.endpoint.node_id)
        there = other.endpoint.connection(one.endpoint.node_id)
        assert here is not None
        assert there is not None
        meta = describe(tensor)

        async def run() -> None:
            async with one.lanes.lending(here, {7: Payload(tensor, meta)}) as lent:
                loan = await other.lanes.borrowed(there, *lent[7], meta)
                assert loan is not None
                assert same(loan.raw, tensor)

        yield run
        ours, theirs = _links(one, other)
        await eventually(lambda: not ours.blocks.has_lent(LEAST_BYTES))
        await eventually(lambda: len(theirs.their_blocks._blocks) == len(ours.blocks) <= 1)


def _links(*nodes: Node) -> list[Link]:
    sharings = [each.lanes._sharing for each in nodes]
    pairs = [pair for each in sharings if each is not None for pair in each._pairs.values()]
    return [pair.link for pair in pairs if pair.link is not None]


@covers("transport.Connection.call", stride=2)
async def carried_call(m: Moves) -> AsyncIterator[Operation]:
    async def echo(incoming: Incoming) -> CborValue:
        await anyio.lowlevel.checkpoint()
        return incoming.value

    async with together(*(node(lanes=LANES["shared-memory"]) for _ in range(2))) as (one, other):
        other.endpoint.register_call("echo", echo, scope="x")
        connection = await one.connection(other)
        await one.lanes.meet(connection)
        there = other.endpoint.connection(one.endpoint.node_id)
        assert there is not None
        await eventually(lambda: connection.carrier is not None and there.carrier is not None)
        ours, theirs = (each.carrier._link for each in (connection, there))  # type: ignore[union-attr]
        await eventually(lambda: ours.calls._tasks and theirs.calls and theirs.calls._tasks)

        async def run() -> None:
            assert await connection.call("echo", 5) == 5

        yield run
        await eventually(lambda: ours.calls.sizes == theirs.calls.sizes == (0, 0, 0))
        assert ours.why_ended is None


def _ignore(_: int) -> None:
    pass


@covers("tensor_bridge.TensorService.__aenter__", "tensor_bridge.TensorService.__aexit__")
async def a_service(m: Moves) -> AsyncIterator[Operation]:
    endpoint = m.client.endpoint
    services, observers = dict(endpoint._services._services), list(endpoint._observers)
    endpoint._services._services.clear()
    endpoint._observers.clear()

    async def run() -> None:
        async with TensorService(endpoint, TensorStore(), TokenBook(), Hesitant()):
            pass

    yield run
    endpoint._services._services = services
    endpoint._observers[:] = observers


@pytest.mark.parametrize("name", SCENARIOS.all)
async def test_at_each_await(name: str) -> None:
    scenario = SCENARIOS.all[name]
    async with moves() as m:
        await at_each_await(partial(scenario.prepare, m), m.held, stride=scenario.stride)


@pytest.mark.parametrize("name", ["put", "create", "copy"])
async def test_at_each_turn_of_the_loop(name: str) -> None:
    scenario = SCENARIOS.all[name]
    async with moves() as m:
        assert await at_each_turn(partial(scenario.prepare, m), m.held) > 5


async def test_a_copy_cancelled_exactly_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is consumed once at most, and there is a copy exactly if its caller knows of it."""
    consumed: Counter[int] = Counter()
    deliver = Claim.delivered
    tokens: list[TokenFacts] = []  # kept, so that no two have one id

    def delivered(claim: Claim) -> None:
        deliver(claim)
        tokens.append(claim.facts)
        consumed[id(claim.facts)] += 1

    monkeypatch.setattr(Claim, "delivered", delivered)
    made: list[TensorRef] = []

    @asynccontextmanager
    async def copying() -> AsyncIterator[Operation]:
        async with there(m, torch.ones(5)) as ref:

            async def run() -> None:
                made.append(await m.at_a.copy_to(ref, m.at_b))

            yield run
        m.clear()

    def check(has_ended: bool) -> None:
        assert len(made) == has_ended
        for ref in made:
            assert ref.object_id in m.b.store or ref.object_id in cleared
        made.clear()

    cleared: set[str] = set()
    async with moves() as m:
        clear = m.clear

        def remember_and_clear() -> None:
            cleared.update(m.b.store._objects)
            clear()

        m.clear = remember_and_clear  # type: ignore[method-assign]
        ended = await at_its_end(copying, m.held, check, times=250)
    assert 25 < ended < 225, "some came to their end first and some did not"
    assert set(consumed.values()) == {1}
    assert len(consumed) >= ended


async def test_a_put_cancelled_exactly_at_its_end() -> None:
    @asynccontextmanager
    async def putting() -> AsyncIterator[Operation]:
        async def run() -> None:
            refs.append(await m.at_a.put(torch.ones(5)))

        refs: list[TensorRef] = []
        yield run
        for ref in refs:
            m.a.store.delete(ref.object_id)

    async with moves() as m:
        ended = await at_its_end(putting, m.held, lambda _: None, times=200)
    assert 20 < ended < 180
