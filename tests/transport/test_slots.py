"""Who waits for a stream slot gets it in turn, and costs nobody else a look."""

from __future__ import annotations

import math

import anyio
import anyio.lowlevel
import pytest

from tests.transport.nodes import at, endpoint
from transport import Incoming
from transport.slots import Slots

pytestmark = pytest.mark.anyio

MANY = 500


class Peer:
    """Allows streams, and counts how often it is asked whether it does."""

    def __init__(self, allows: int = 0) -> None:
        self.allows = allows
        self.looks = 0
        self.opened: list[int] = []
        self.slots = Slots(self.is_free)

    def is_free(self) -> bool:
        self.looks += 1
        return self.allows > 0

    async def open(self, number: int, patience: float = math.inf) -> bool:
        if not self.slots.take() and not await self.slots.wait(30.0, patience):
            return False
        self.allows -= 1
        self.opened.append(number)
        return True

    def allow(self, count: int) -> None:
        self.allows += count
        self.slots.give()


async def test_all_get_their_turn_in_order_for_a_few_looks_each() -> None:
    peer = Peer()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for number in range(MANY):
                tasks.start_soon(peer.open, number)
            await anyio.wait_all_tasks_blocked()
            came = [*peer.slots._queue.values()]
            assert len(came) == MANY
            peer.slots.give()
            assert [event.is_set() for event in came] == [True] + [False] * (MANY - 1)
            await anyio.wait_all_tasks_blocked()
            while len(peer.opened) < MANY:
                had = len(peer.opened)
                peer.allow(10)
                await anyio.wait_all_tasks_blocked()
                assert len(peer.opened) == had + 10
    assert peer.looks < 4 * MANY


async def test_nobody_overtakes_who_waits() -> None:
    peer = Peer()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(peer.open, 1)
            await anyio.wait_all_tasks_blocked()
            peer.allow(1)
            assert not peer.slots.take()
            tasks.start_soon(peer.open, 2)
            await anyio.wait_all_tasks_blocked()
            assert peer.opened == [1]
            peer.allow(1)
    assert peer.opened == [1, 2]


async def test_who_leaves_with_a_slot_in_sight_passes_it_on() -> None:
    peer = Peer()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()

            async def leave() -> None:
                with scope:
                    await peer.open(1)

            tasks.start_soon(leave)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(peer.open, 2)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            peer.allow(1)  # which wakes the one that is about to leave
    assert peer.opened == [2]


async def test_patience_lasts_as_long_as_there_are_slots_for_anybody() -> None:
    peer = Peer()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(peer.open, number)
            await anyio.wait_all_tasks_blocked()

            async def allow() -> None:
                while len(peer.opened) < 9:
                    await anyio.sleep(0.1)
                    peer.allow(1)

            tasks.start_soon(allow)
            assert await peer.open(8, patience=0.5), "it has waited for longer than that"
        began = anyio.current_time()
        peer.allows = 0
        assert not await peer.open(9, patience=0.1)
        assert anyio.current_time() - began >= 0.1
        assert not peer.slots._queue


async def test_calls_beyond_the_limit_wait_in_turn() -> None:
    running, most = 0, 0
    async with endpoint(max_streams=4) as listener, endpoint() as dialer:

        async def count(request: Incoming) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await anyio.lowlevel.checkpoint()
            running -= 1

        listener.register_call("count", count, scope="x")
        connection = await dialer.connect(at(listener))
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for _ in range(200):
                    tasks.start_soon(connection.call, "count")
    assert 1 < most <= 4
