"""Tensors that lie at a peer in memory of their owner's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import AsyncIterator, Callable

import anyio
import anyio.lowlevel
import pytest
import torch

from auth import AccessRequest, Denial, Grant, ServiceRequest
from tensor_bridge import (
    QuotaExceeded,
    StoreLimits,
    TensorChanged,
    TensorClient,
    TensorRef,
    tensor_bytes,
)
from tensor_bridge.codec import describe
from tensor_bridge.huge_pages import HUGE_PAGE
from tensor_bridge.lanes.shared import blocks
from tensor_bridge.lanes.shared.blocks import (
    KEEP_SECONDS,
    LEAST_BYTES,
    OwnBlocks,
    TheirBlocks,
    room_for,
)
from tensor_bridge.lanes.shared.host import unavailable
from tensor_bridge.lanes.shared.protocol import MAX_BLOCKS, ForgottenMessage, ReturnedMessage
from tensor_bridge.serve_keep import FIND_CALL, KEEP_CALL
from tests.tensor_bridge.nodes import LANES, Node, eventually, node, together
from tests.tensor_bridge.shared.test_broken import link
from tests.tensor_bridge.shared.test_pool import SEALED, closing, memory
from tests.tensor_bridge.tensors import filled, same
from transport import Connection, ConnectionClosed, ProtocolError

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

SIZE = LEAST_BYTES + 5
WHOLE = room_for(SIZE)


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[Node, Node, Node]]:
    shared = LANES["shared-memory"]
    async with together(*(node(lanes=shared) for _ in range(3))) as (a, b, client):
        yield a, b, client


def tensor_of(seed: int, size: int = SIZE) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=_seeded(seed))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


async def ready(client: Node, a: Node, size: int = SIZE) -> TensorClient:
    """A client whose next put of that size takes a block."""
    at_a = await client.client(a)
    await at_a.delete(await at_a.put(tensor_of(0, size)))
    return at_a


def lies_outside(a: Node, ref: TensorRef) -> bool:
    return a.store.get(ref.object_id).outside is not None


async def test_what_was_put_lies_there_and_is_read_back(nodes: tuple[Node, Node, Node]) -> None:
    a, _, client = nodes
    at_a = await client.client(a)
    await at_a.delete(await at_a.put(tensor_of(1, LEAST_BYTES - 1)))  # which has them meet
    for seed in range(2, 6):
        ref = await at_a.put(tensor_of(seed), name="w")
        assert lies_outside(a, ref)
        assert a.store.get(ref.object_id).name == "w"
        assert a.store.used(client.endpoint.node_id) == (WHOLE, 1)
        assert same(await at_a.get(ref), tensor_of(seed))
        assert (await at_a.info(ref.object_id)).version == ref.version
        await at_a.delete(ref)
        assert len(a.store) == 0
    assert len(link(client, a).blocks) == 1  # the same each time
    assert link(client, a).blocks.nbytes == WHOLE


async def test_no_stream_is_opened_for_it(
    nodes: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, client = nodes
    at_a = await ready(client, a)

    async def refuse(self: Connection, service: str, *_: object, **__: object) -> None:
        raise AssertionError(f"a stream for {service}")

    monkeypatch.setattr(Connection, "open_stream", refuse)
    ref = await at_a.put(tensor_of(1))
    assert same(await at_a.get(ref), tensor_of(1))


@pytest.mark.parametrize(
    "tensor",
    [
        filled((513, 2053), torch.bfloat16),
        filled((513, 2053), torch.bfloat16).t(),
        filled((513, 2053), torch.bfloat16).requires_grad_(),
    ],
    ids=["rows", "columns", "grad"],
)
async def test_layouts(nodes: tuple[Node, Node, Node], tensor: torch.Tensor) -> None:
    a, _, client = nodes
    at_a = await ready(client, a, tensor.nbytes)
    ref = await at_a.put(tensor)
    assert lies_outside(a, ref)
    back = await at_a.get(ref)
    assert same(back, tensor)
    assert same(a.store.get(ref.object_id).tensor, tensor)


async def test_a_view_with_gaps_takes_another_way(nodes: tuple[Node, Node, Node]) -> None:
    a, _, client = nodes
    at_a = await ready(client, a)
    gaps = torch.zeros(2 * SIZE, dtype=torch.uint8)[::2]
    ref = await at_a.put(gaps)
    assert not lies_outside(a, ref)
    assert same(await at_a.get(ref), gaps)


@pytest.mark.attack
async def test_the_peers_program_has_a_copy_that_the_owner_can_not_change(
    nodes: tuple[Node, Node, Node],
) -> None:
    a, _, client = nodes
    at_a = await ready(client, a)
    ref = await at_a.put(tensor_of(1))
    stored, version = a.store.get(ref.object_id), a.store.get(ref.object_id).version
    (block,) = link(client, a).blocks._blocks.values()
    block.view[7] ^= 0xFF
    assert stored.raw[7] != tensor_of(1)[7]  # which is why nobody looks at it there
    block.view[7] ^= 0xFF
    tensor = stored.tensor
    block.view[7] ^= 0xFF
    assert same(tensor, tensor_of(1))
    assert stored.version == version
    assert stored.tensor is tensor
    tensor[0] += 1
    assert stored.version != version
    await eventually(lambda: block.free_since is not None)
    block.view[:SIZE] = bytes(SIZE)
    assert (await at_a.get(ref))[1:].equal(tensor_of(1)[1:])


async def test_others_are_sent_it(nodes: tuple[Node, Node, Node]) -> None:
    a, b, client = nodes
    at_a, at_b = await ready(client, a), await client.client(b)
    ref = await at_a.put(tensor_of(1))
    copy = await at_a.copy_to(ref, at_b)
    assert lies_outside(a, ref)
    assert same(b.store.get(copy.object_id).tensor, tensor_of(1))


async def test_a_tensor_that_changes_is_not_kept(nodes: tuple[Node, Node, Node]) -> None:
    a, _, client = nodes
    size = 2 * blocks.LEAST_BYTES + 16 * LEAST_BYTES
    at_a = await ready(client, a, size)
    tensor = tensor_of(1, size)
    with pytest.raises(TensorChanged, match="written to"):
        await at_a.put(tensor, progress=lambda _: tensor.add_(1))
    await at_a.delete(await at_a.put(tensor_of(2, size)))
    with pytest.raises(TensorChanged, match="resized"):
        await at_a.put(tensor, progress=lambda _: tensor.untyped_storage().resize_(0))
    assert len(a.store) == 0
    assert a.is_empty
    ref = await at_a.put(tensor_of(3, size))
    assert same(await at_a.get(ref), tensor_of(3, size))


async def test_quota_is_asked_before_anything_is_kept() -> None:
    limits, shared = StoreLimits(max_bytes_per_owner=WHOLE + SIZE), LANES["shared-memory"]
    async with together(node(store=limits, lanes=shared), node(lanes=shared)) as (a, client):
        at_a = await ready(client, a)
        ref = await at_a.put(tensor_of(1))
        second = await at_a.put(tensor_of(2))  # there is room for it, and not for a block
        assert lies_outside(a, ref)
        assert not lies_outside(a, second)
        with pytest.raises(QuotaExceeded):
            await at_a.put(tensor_of(3))
        assert a.store.used() == (WHOLE + SIZE, 2)
        for each, seed in ((ref, 1), (second, 2)):
            assert same(await at_a.get(each), tensor_of(seed))


class Without:
    """An authorizer that grants all but one service."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.asked = 0

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        if isinstance(request, ServiceRequest) and request.service == self.service:
            self.asked += 1
            return Denial("denied", "not this")
        return Grant(frozenset({"*"}))


@pytest.mark.parametrize("service", [KEEP_CALL, FIND_CALL])
async def test_who_does_not_allow_it_is_served_otherwise(service: str) -> None:
    without, shared = Without(service), LANES["shared-memory"]
    async with together(node(authorizer=without, lanes=shared), node(lanes=shared)) as (a, client):
        at_a = await ready(client, a)
        ref = await at_a.put(tensor_of(1))
        assert lies_outside(a, ref) == (service == FIND_CALL)
        assert same(await at_a.get(ref), tensor_of(1))
        assert without.asked == 1
        assert len(a.store) == 1


@pytest.mark.parametrize("when", ["before the call", "after its answer"])
async def test_what_is_cancelled_is_undone(
    nodes: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    a, _, client = nodes
    at_a = await ready(client, a)
    call, seen = Connection.call, []

    async def cancelling(self: Connection, name: str, *args: object, **kw: object) -> object:
        if name == KEEP_CALL and when == "before the call":
            scope.cancel()
        answer = await call(self, name, *args, **kw)  # type: ignore[arg-type]
        if name == KEEP_CALL:
            seen.append(len(a.store))
            scope.cancel()
            await anyio.lowlevel.checkpoint()
        return answer

    monkeypatch.setattr(Connection, "call", cancelling)
    with anyio.CancelScope() as scope:
        await at_a.put(tensor_of(1))
    assert scope.cancelled_caught
    assert seen == ([1] if when == "after its answer" else [])
    await eventually(lambda: len(a.store) == 0 and a.is_empty)
    await eventually(lambda: len(link(a, client).their_blocks._blocks) == 0)


@pytest.mark.parametrize("ender", ["owner", "keeper"])
async def test_an_object_outlives_the_link(nodes: tuple[Node, Node, Node], ender: str) -> None:
    a, _, client = nodes
    at_a = await ready(client, a)
    ref, ours = await at_a.put(tensor_of(1)), link(client, a)
    (ours if ender == "owner" else link(a, client)).end("the test ends it")
    await eventually(lambda: len(ours.blocks) == 0)
    assert lies_outside(a, ref)
    assert same(await at_a.get(ref), tensor_of(1))
    second = await at_a.put(tensor_of(2))
    assert same(a.store.get(ref.object_id).tensor, tensor_of(1))
    assert same(await at_a.get(second), tensor_of(2))


async def test_the_link_breaks_under_the_call(
    nodes: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, client = nodes
    at_a = await ready(client, a)
    call = Connection.call

    async def broken(self: Connection, name: str, *args: object, **kw: object) -> object:
        answer = await call(self, name, *args, **kw)  # type: ignore[arg-type]
        if name == KEEP_CALL:
            link(client, a).end("the test ends it")
            raise ConnectionClosed("a call", peer=self.peer)
        return answer

    monkeypatch.setattr(Connection, "call", broken)
    ref = await at_a.put(tensor_of(1))
    assert len(a.store) == 1  # taken up under the same upload id
    assert same(a.store.get(ref.object_id).tensor, tensor_of(1))


async def test_a_revoked_peer_loses_it(nodes: tuple[Node, Node, Node]) -> None:
    a, _, client = nodes
    at_a = await ready(client, a)
    await at_a.put(tensor_of(1))
    (block,) = link(client, a).blocks._blocks.values()
    a.service.forget(client.endpoint.node_id)
    await eventually(lambda: block.free_since is not None)


async def test_what_lies_free_for_long_is_forgotten(
    nodes: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, client = nodes
    at_a = await ready(client, a)
    ref = await at_a.put(tensor_of(1))
    ours, theirs = link(client, a).blocks, link(a, client).their_blocks
    ours.expire(time.monotonic() + 2 * KEEP_SECONDS)
    assert len(ours) == 1  # it is lent
    await at_a.delete(ref)
    link(client, a).take_what_is_there()
    ours.expire(time.monotonic() + KEEP_SECONDS)
    assert len(ours) == 0
    await eventually(lambda: not theirs._blocks)


class Ends:
    """Both ends' blocks, without a link."""

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self.theirs = TheirBlocks(self.told.append)
        self.own = OwnBlocks(self._send, self._forget)
        self.sent = 0

    def _forget(self, packet: bytes) -> None:
        self.told.append(packet)
        self.theirs.forget(packet[3])

    def _send(self, packet: bytes, descriptor: int) -> None:
        self.theirs.add(packet[3], descriptor)
        self.sent += 1


def test_little_of_a_block_is_unused() -> None:
    for size in (LEAST_BYTES, SIZE, 3 * HUGE_PAGE + 1, 4 * HUGE_PAGE, 4 * HUGE_PAGE + 1):
        assert size <= room_for(size) <= 1.25 * size
    assert room_for(4 * HUGE_PAGE + 1) == 5 * HUGE_PAGE


def test_a_block_is_used_again_for_what_needs_most_of_it() -> None:
    ends, large = Ends(), 16 * HUGE_PAGE
    block = ends.own.take(large)
    assert block is not None
    assert block.nbytes == large
    ends.own.returned(ends.own.lend(block, large))
    assert ends.own.take(large // 2) is not block
    assert ends.own.take(large + 1) is not block
    again = ends.own.take(large - 3 * HUGE_PAGE)
    assert again is block
    assert ends.own.take(LEAST_BYTES - 1) is None
    assert ends.own.take(blocks.MOST_BYTES + 1) is None


def test_the_free_make_room_for_what_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST_BYTES", 12 * HUGE_PAGE)
    ends = Ends()
    lent, first, second = (ends.own.take(4 * HUGE_PAGE) for _ in range(3))
    assert lent is not None
    assert first is not None
    assert second is not None
    for block in (first, second):
        ends.own.returned(ends.own.lend(block, 4 * HUGE_PAGE))
    assert ends.own.take(9 * HUGE_PAGE) is None
    assert len(ends.own) == 3  # nothing is forgotten where that does not help
    assert ends.own.take(7 * HUGE_PAGE) is not None
    assert len(ends.own) == 2  # the lent one is there, and not one of the free
    assert ends.own.take(HUGE_PAGE) is not None
    assert ends.own.take(HUGE_PAGE) is None
    assert ends.told == [ForgottenMessage(it.number).encode() for it in (first, second)]


def test_numbers_are_not_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_BLOCK", 2)
    ends = Ends()
    kept = ends.own.take(SIZE)
    assert kept is not None
    seen = []
    for _ in range(4):
        block = ends.own.take(SIZE)
        assert block is not None
        seen.append(block.number)
        ends.own.drop(block)
    assert (kept.number, seen) == (0, [1, 2, 1, 2])


def test_a_block_that_is_read_from_is_not_written_to() -> None:
    ends = Ends()
    block = ends.own.take(SIZE)
    assert block is not None
    lend = ends.own.lend(block, SIZE)
    assert ends.own.lent(lend) is block
    block.readers += 1
    ends.own.returned(lend)
    ends.own.returned(lend)  # as one that was dropped: it is nobody's
    assert ends.own.take(SIZE) is not block
    block.readers -= 1
    assert ends.own.take(SIZE) is block


@pytest.mark.parametrize("bound", ["MOST_BYTES", "MOST_IN_ALL", "MAX_BLOCKS"])
def test_bounds_of_the_owner(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    already = sum(each.nbytes for each in blocks._all)
    most = {"MOST_BYTES": 2 * WHOLE, "MOST_IN_ALL": already + 2 * WHOLE, "MAX_BLOCKS": 2}[bound]
    monkeypatch.setattr(blocks, bound, most)
    ends, other = Ends(), Ends()
    taken = [ends.own.take(SIZE) for _ in range(4)]
    assert sum(block is not None for block in taken) == 2
    assert (other.own.take(SIZE) is None) == (bound == "MOST_IN_ALL")


def test_what_other_threads_let_go_of_is_told_later() -> None:
    ends = Ends()
    block, meta = ends.own.take(SIZE), describe(tensor_of(0))
    assert block is not None
    loan = ends.theirs.lend(block.number, 7, meta)
    assert loan is not None
    held = [loan]
    del loan
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert ends.told == []
    ends.theirs.flush()
    assert ends.told == [ReturnedMessage(7).encode()]
    assert ends.theirs.lend(block.number, 8, meta) is not None


def test_a_view_of_it_keeps_it() -> None:
    ends = Ends()
    block, meta = ends.own.take(SIZE), describe(tensor_of(0))
    assert block is not None
    block.view[:SIZE] = tensor_bytes(tensor_of(3))
    loan = ends.theirs.lend(block.number, 7, meta)
    assert loan is not None
    raw = loan.raw[5:]
    del loan
    ends.theirs.forget(block.number)
    ends.theirs.close()
    assert ends.told == []
    assert torch.equal(raw, tensor_of(3)[5:])
    del raw
    assert len(ends.told) == 1


def unsealed() -> int:
    return memory(SIZE, 0)


def small() -> int:
    return memory(LEAST_BYTES - 1, SEALED)


def large() -> int:
    return memory(blocks.MOST_BYTES + 1, SEALED)


def no_memory() -> int:
    return os.eventfd(0)


@pytest.mark.attack
@pytest.mark.parametrize("make", [unsealed, small, large, no_memory])
def test_a_wrong_block_is_refused(make: Callable[[], int]) -> None:
    theirs = TheirBlocks(lambda _: None)
    with closing(make()) as descriptor, pytest.raises(ProtocolError):
        theirs.add(0, descriptor)
    with closing(memory(SIZE, SEALED)) as descriptor:
        theirs.add(0, descriptor)  # the positive control
        with pytest.raises(ProtocolError, match="taken"):
            theirs.add(0, descriptor)
        with pytest.raises(ProtocolError, match="not there"):
            theirs.forget(1)


@pytest.mark.attack
def test_too_many_blocks_are_refused() -> None:
    theirs = TheirBlocks(lambda _: None)
    with closing(memory(LEAST_BYTES, SEALED)) as descriptor:
        for number in range(MAX_BLOCKS):
            theirs.add(number, descriptor)
        with pytest.raises(ProtocolError, match="too many"):
            theirs.add(MAX_BLOCKS, descriptor)
    theirs = TheirBlocks(lambda _: None)
    with closing(memory(blocks.MOST_BYTES // 2 + 1, SEALED)) as descriptor:
        theirs.add(0, descriptor)
        with pytest.raises(ProtocolError, match="bytes"):
            theirs.add(1, descriptor)


@pytest.mark.attack
def test_a_block_is_lent_once_and_as_long_as_it_is() -> None:
    theirs, meta = TheirBlocks(lambda _: None), describe(tensor_of(0))
    with closing(memory(SIZE, SEALED)) as descriptor:
        theirs.add(0, descriptor)
    assert theirs.lend(1, 1, meta) is None
    with pytest.raises(ProtocolError, match="too small"):
        theirs.lend(0, 1, describe(tensor_of(0, SIZE + 1)))
    with pytest.raises(ProtocolError, match="no bytes"):
        theirs.lend(0, 1, describe(tensor_of(0, 0)))
    loan = theirs.lend(0, 1, meta)
    assert loan is not None
    with pytest.raises(ProtocolError, match="lent already"):
        theirs.lend(0, 2, meta)


@pytest.mark.attack
async def test_who_lends_twice_loses_the_link(nodes: tuple[Node, Node, Node]) -> None:
    a, _, client = nodes
    at_a = await ready(client, a)
    ref, ours = await at_a.put(tensor_of(1)), link(client, a)
    (block,) = ours.blocks._blocks.values()
    assert block.lend is not None
    ours.blocks.returned(block.lend)  # as who lies about what is lent
    second = await at_a.put(tensor_of(2))
    assert ours.why_ended is not None
    assert same(await at_a.get(second), tensor_of(2))
    assert a.store.get(ref.object_id).meta == ref.meta


def test_a_program_that_was_forked_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    assert ends.own.take(SIZE) is not None
    ends.own.close()
    assert len(ends.own) == 0
    assert ends.own.take(SIZE) is None
