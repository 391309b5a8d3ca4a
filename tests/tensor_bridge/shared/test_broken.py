"""Moves whose shared memory breaks, stalls, or has to be shared with others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import anyio
import anyio.lowlevel
import pytest
import torch

from tensor_bridge import Progress, TensorChanged
from tensor_bridge.codec import describe
from tensor_bridge.lanes.shared import Link, SharedLane
from tensor_bridge.lanes.shared.blocks import OwnBlocks
from tensor_bridge.lanes.shared.host import unavailable
from tensor_bridge.lanes.shared.link import SLOTS
from tensor_bridge.memory import Payload, tensor_bytes
from tests.tensor_bridge.nodes import LANES, Node, eventually, node, together
from tests.tensor_bridge.tensors import filled, same
from transport import ConnectionClosed, DeadlineExceeded, Incoming, Stream

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

MIB = 1 << 20
SIZE = 20 * MIB + 5
"""More than twice what is on the way at once."""


@pytest.fixture(autouse=True)
def by_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no tensor lie in a block, which would take no slot."""
    monkeypatch.setattr(OwnBlocks, "take", lambda self, nbytes: None)


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[Node, Node, Node]]:
    shared = LANES["shared-memory"]
    async with together(*(node(lanes=shared) for _ in range(3))) as (a, b, client):
        yield a, b, client


def link(one: Node, other: Node) -> Link:
    """The end at `one` of the link of two nodes."""
    connection = one.endpoint.connection(other.endpoint.node_id)
    assert connection is not None
    assert one.lanes._sharing is not None
    found = one.lanes._sharing.link(connection)
    assert found is not None
    return found


class Once:
    """A progress callback that does something when half has moved, and notes how far it was."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action: Callable[[], object] | None = action
        self.seen: list[int] = []

    def __call__(self, progress: Progress) -> None:
        self.seen.append(progress.moved)
        if progress.moved >= SIZE // 2 and self.action is not None:
            action, self.action = self.action, None
            action()


def end(one: Node, other: Node) -> None:
    link(one, other).end("the test ends it")


def break_the_protocol(one: Node, other: Node) -> None:
    link(one, other)._sock.send(b"\xff" * 16)


class Room:
    """A place for bytes."""

    def __init__(self, room: memoryview) -> None:
        self.room = room
        self.nbytes = len(room)

    def advance(self, nbytes: int) -> None:
        pass

    def adopt(self, storage: torch.UntypedStorage) -> None:
        raise AssertionError


breaks = pytest.mark.parametrize("way", [end, break_the_protocol], ids=lambda way: way.__name__)
sides = pytest.mark.parametrize("side", ["the mover", "the other"])


@breaks
@sides
async def test_a_put_and_a_get_go_on_over_quic(
    nodes: tuple[Node, Node, Node], way: Callable[[Node, Node], None], side: str
) -> None:
    a, b, client = nodes
    pair = (client, a) if side == "the mover" else (a, client)
    tensor = filled((SIZE,), torch.uint8)
    at_a = await client.client(a)
    putting = Once(lambda: way(*pair))
    ref = await at_a.put(tensor, progress=putting)
    assert same(a.store.get(ref.object_id).tensor, tensor)
    assert putting.action is None
    assert min(putting.seen[len(putting.seen) // 2 :]) > MIB, "it went on where it was"
    status = client.lanes.status(await client.connection(a))
    assert status.name == "quic"
    assert status.reason
    at_b, ref = await client.client(b), client.has(b, tensor)
    pair = (client, b) if side == "the mover" else (b, client)
    getting = Once(lambda: way(*pair))
    assert same(await at_b.get(ref, progress=getting), tensor)
    assert getting.action is None
    assert getting.seen == sorted(getting.seen)
    await eventually(lambda: a.is_empty and b.is_empty)


@breaks
@sides
async def test_a_copy_goes_on_over_quic_with_the_same_token(
    nodes: tuple[Node, Node, Node], way: Callable[[Node, Node], None], side: str
) -> None:
    a, b, client = nodes
    tensor = filled((SIZE,), torch.uint8)
    at_a, at_b = await client.client(a), await client.client(b)
    ref = client.has(a, tensor)

    async def watch() -> None:
        while not any(each.moved > SIZE // 2 for each in b.service.arrivals._coming.values()):
            await anyio.lowlevel.checkpoint()
        way(*((b, a) if side == "the mover" else (a, b)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        copy = await at_a.copy_to(ref, at_b)
    assert same(b.store.get(copy.object_id).tensor, tensor)
    connection = b.endpoint.connection(a.endpoint.node_id)
    assert connection is not None
    assert b.lanes.status(connection).name == "quic"
    await eventually(lambda: a.is_empty and b.is_empty)


async def test_a_peer_that_keeps_every_slot_stalls_the_move_and_loses_the_link(
    nodes: tuple[Node, Node, Node],
) -> None:
    a, _, client = nodes
    at_a, tensor = await client.client(a), filled((SIZE,), torch.uint8)
    await at_a.put(torch.zeros(5))
    ours, theirs = link(client, a), link(a, client)
    theirs._give = lambda slot: None  # type: ignore[method-assign]
    at_a._stall_seconds = 0.2
    with pytest.raises(DeadlineExceeded, match="no progress"):
        await at_a.put(tensor)
    assert ours.why_ended == "it gives no slot back"
    ref = await at_a.put(tensor)
    assert same(a.store.get(ref.object_id).tensor, tensor)
    await eventually(lambda: len(a.service.arrivals) <= 1)


async def test_memory_that_is_given_back_amid_a_move_is_not_read(
    nodes: tuple[Node, Node, Node],
) -> None:
    a, _, client = nodes
    at_a, tensor = await client.client(a), filled((SIZE,), torch.uint8)
    with pytest.raises(TensorChanged, match="resized"):
        await at_a.put(tensor, progress=Once(lambda: tensor.untyped_storage().resize_(0)))
    ours = link(client, a)
    await eventually(lambda: ours._outgoing.free == SLOTS and not ours._sendings)
    await at_a.put(torch.zeros(5))
    await eventually(lambda: a.is_empty)


async def test_small_moves_do_not_wait_for_large_ones(nodes: tuple[Node, Node, Node]) -> None:
    a, _, client = nodes
    at_a, tensor = await client.client(a), filled((SIZE,), torch.uint8)
    ended: list[str] = []

    async def put(name: str, it: torch.Tensor, times: int) -> None:
        for _ in range(times):
            await at_a.put(it)
        ended.append(name)

    await at_a.put(torch.zeros(5))
    async with anyio.create_task_group() as tasks:
        for index in range(4):
            tasks.start_soon(put, f"large {index}", tensor, 2)
        tasks.start_soon(put, "small", torch.zeros(5), 2)
    assert ended[0] == "small"
    assert link(client, a)._outgoing.free == SLOTS


@pytest.mark.parametrize("too_many", [0, 1])
async def test_what_came_before_the_receiver_was_ready_is_counted_too(
    nodes: tuple[Node, Node, Node], too_many: int
) -> None:
    a, _, client = nodes
    await (await client.client(a)).put(torch.zeros(5))
    ours, theirs = link(client, a), link(a, client)
    ended = anyio.Event()
    failures: list[Exception] = []
    tensor = torch.arange(10).to(torch.uint8)
    room = bytearray(10 - too_many)

    async def receive(stream: Stream) -> None:
        with theirs.landing(stream.stream_id) as landing:
            await stream.send_reply(None)
            await eventually(lambda: landing.arrivals._waiting)
            lane = SharedLane(stream, theirs, landing, stall_seconds=2)
            await lane.receive(Room(memoryview(room)))

    async def take(incoming: Incoming) -> None:
        try:
            await receive(incoming.stream)
        except ConnectionClosed as error:
            failures.append(error)
        finally:
            ended.set()

    a.endpoint.register_service("take", take, scope="x")
    connection = await client.connection(a)
    async with await connection.open_stream("take") as stream:
        await stream.reply()
        lane = SharedLane(stream, ours, None, stall_seconds=2)
        await lane.send(Payload(tensor, describe(tensor)), lambda _: None)
        with anyio.fail_after(2):
            await ended.wait()
    assert len(failures) == too_many
    assert (room == tensor_bytes(tensor)) == (not too_many)
    assert (theirs.why_ended is not None) == bool(too_many)


@pytest.mark.parametrize("side", ["put", "get"])
async def test_what_is_gathered_goes_piece_by_piece(
    nodes: tuple[Node, Node, Node], side: str
) -> None:
    a, _, client = nodes
    at_a, tensor = await client.client(a), filled((900, 700), torch.float32)[:, ::2]
    ref = await at_a.put(tensor) if side == "put" else client.has(a, tensor)
    there = a.store.get(ref.object_id).tensor if side == "put" else await at_a.get(ref)
    assert same(there, tensor)
    assert client.lanes.status(await client.connection(a)).name == "shared-memory"
