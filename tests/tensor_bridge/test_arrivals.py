"""Arrivals: held by one at a time, taken over, kept after a break, forgotten when of no use."""

from __future__ import annotations

import gc
import weakref

import anyio
import anyio.lowlevel
import pytest
import torch

from auth import NodeId
from tensor_bridge import NoSuchTensor, QuotaExceeded, StoreLimits, TensorStore, describe
from tensor_bridge.arrivals import MAX_FINISHED, Arrivals
from transport import ConnectionClosed, DeadlineExceeded, PeerLost, ProtocolError, StreamReset

pytestmark = pytest.mark.anyio

ALICE, BOB = NodeId(b"\x01" * 32), NodeId(b"\x02" * 32)
META = describe(torch.zeros(100, dtype=torch.uint8))
LIMITS = StoreLimits(max_bytes=250)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Room:
    def __init__(self) -> None:
        self.clock = Clock()
        self.store = TensorStore(LIMITS)
        self.arrivals = Arrivals(self.store, resume_seconds=30.0, clock=self.clock)

    async def land(self, upload: str, nbytes: int, then: Exception | None = None) -> int:
        """Let bytes land, then fail; return where the next try would go on."""
        async with self.arrivals.hold(ALICE, upload, META) as arrival:
            before = arrival.moved
            assert arrival.landing is not None
            arrival.landing.advance(nbytes)
            if then is not None:
                raise then
        return before


@pytest.fixture
def room() -> Room:
    return Room()


@pytest.mark.parametrize("kind", [PeerLost, ConnectionClosed, DeadlineExceeded])
async def test_a_broken_link_keeps_what_has_landed_for_a_while(
    room: Room, kind: type[Exception]
) -> None:
    for _ in range(2):
        with pytest.raises(kind):
            await room.land("u", 30, kind("link"))
    assert await room.land("u", 0) == 60
    assert room.store.used() == (100, 1)
    room.clock.now = 29.9
    room.arrivals.expire(room.clock())
    assert len(room.arrivals) == 1
    room.clock.now = 30.0
    room.arrivals.expire(room.clock())
    assert (len(room.arrivals), room.store.used()) == (0, (0, 0))


@pytest.mark.parametrize("kind", [StreamReset, ProtocolError])
async def test_who_gives_up_leaves_nothing(room: Room, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        await room.land("u", 30, kind("given up"))
    assert (len(room.arrivals), room.store.used()) == (0, (0, 0))
    assert await room.land("u", 1) == 0


async def test_a_finished_arrival_is_found_again(room: Room) -> None:
    async with room.arrivals.hold(ALICE, "u", META, name="w") as arrival:
        stored = arrival.keep()
    assert len(room.arrivals) == 0
    assert room.store.get(stored.object_id).name == "w"
    async with room.arrivals.hold(ALICE, "u", META) as again:
        assert (again.moved, again.landing) == (100, None)
        assert again.keep() is stored
    assert room.store.used() == (100, 1)
    room.store.delete(stored.object_id)
    with pytest.raises(NoSuchTensor):
        async with room.arrivals.hold(ALICE, "u", META):
            pass
    room.clock.now = 60.0
    room.arrivals.expire(room.clock())
    assert await room.land("u", 0) == 0  # forgotten: a new one


async def test_a_later_try_cancels_the_holder_and_goes_on_from_its_byte(room: Room) -> None:
    held, seen = anyio.Event(), []

    async def hang() -> None:
        async with room.arrivals.hold(ALICE, "u", META) as arrival:
            assert arrival.landing is not None
            arrival.landing.advance(40)
            held.set()
            await anyio.sleep_forever()
        seen.append("cancelled")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hang)
        await held.wait()
        async with room.arrivals.hold(ALICE, "u", META) as arrival:
            assert arrival.moved == 40
            arrival.keep()
    assert seen == ["cancelled"]
    assert room.store.used() == (100, 1)


async def test_one_that_waits_gets_a_new_arrival_if_the_former_was_dropped(room: Room) -> None:
    held = anyio.Event()

    async def hang() -> None:
        async with room.arrivals.hold(ALICE, "u", META) as arrival:
            assert arrival.landing is not None
            arrival.landing.advance(40)
            held.set()
            try:
                await anyio.sleep_forever()
            finally:
                raise StreamReset("given up")

    async def give_up() -> None:
        with pytest.raises(StreamReset):
            await hang()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(give_up)
        await held.wait()
        async with room.arrivals.hold(ALICE, "u", META) as arrival:
            assert arrival.moved == 0
    assert room.store.used() == (100, 1)


async def test_ids_are_each_owners_own_and_of_one_tensor(room: Room) -> None:
    await room.land("u", 10)
    async with room.arrivals.hold(BOB, "u", META) as arrival:
        assert arrival.moved == 0
    with pytest.raises(ProtocolError, match="another tensor"):
        async with room.arrivals.hold(ALICE, "u", describe(torch.zeros(1))):
            pass
    assert await room.land("u", 0) == 10  # none the worse for it
    room.arrivals.drop_owner(ALICE)
    assert (room.store.used(ALICE), room.store.used(BOB)) == ((0, 0), (100, 1))


async def test_no_room_no_arrival(room: Room) -> None:
    await room.land("u1", 0)
    await room.land("u2", 0)
    with pytest.raises(QuotaExceeded):
        await room.land("u3", 0)
    assert len(room.arrivals) == 2


async def test_memory_that_cannot_be_had_is_given_back(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_: object) -> None:
        raise QuotaExceeded("allocation")

    monkeypatch.setattr("tensor_bridge.landing_memory.allocate", none_left)

    async def land() -> None:
        async with room.arrivals.hold(ALICE, "u", META) as arrival:
            assert arrival.landing is not None
            arrival.landing.allocate()

    with pytest.raises(QuotaExceeded):
        await land()
    assert (len(room.arrivals), room.store.used()) == (0, (0, 0))


async def test_closing_forgets_at_once_or_when_let_go_of(room: Room) -> None:
    await room.land("u1", 10)
    async with room.arrivals.hold(ALICE, "u2", META):
        room.arrivals.close()
        assert room.store.used() == (100, 1)
    assert (len(room.arrivals), room.store.used()) == (0, (0, 0))


async def test_finished_ones_are_remembered_in_a_bounded_number(room: Room) -> None:
    nothing = describe(torch.empty(0))
    for number in range(MAX_FINISHED + 10):
        async with room.arrivals.hold(ALICE, str(number), nothing) as arrival:
            room.store.delete(arrival.keep().object_id)
        await anyio.lowlevel.checkpoint()  # there are thousands of them
    assert len(room.arrivals._finished) == MAX_FINISHED


async def test_a_deleted_tensor_is_freed_though_its_arrival_is_remembered(room: Room) -> None:
    async with room.arrivals.hold(ALICE, "u", META) as arrival:
        assert arrival.landing is not None
        memory = weakref.ref(arrival.landing.tensor)
        stored = arrival.keep()
    del arrival
    room.store.delete(stored.object_id)
    gc.collect()
    assert memory() is None


class Lying:
    """A tensor that lies elsewhere."""

    nbytes = 100
    writes = 1
    raw = torch.zeros(100, dtype=torch.uint8)

    def copied(self) -> torch.Tensor:
        return self.raw.clone()


async def test_what_was_given_up_before_it_came_is_not_kept(room: Room) -> None:
    room.arrivals.undo(ALICE, "u")
    assert room.arrivals.keep_outside(ALICE, "u", META, Lying()) is None
    assert (len(room.store), room.store.used()) == (0, (0, 0))
    assert room.arrivals.keep_outside(BOB, "u", META, Lying()) is not None
    room.arrivals.undo(BOB, "u")
    assert (len(room.store), room.store.used()) == (0, (0, 0))
    room.clock.now = 30.0
    room.arrivals.expire(room.clock())
    assert not room.arrivals._undone
    for number in range(MAX_FINISHED + 10):
        room.arrivals.undo(ALICE, str(number))
    assert len(room.arrivals._undone) == MAX_FINISHED
