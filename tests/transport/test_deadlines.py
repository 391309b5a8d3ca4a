"""Many waits under one alarm: each ends at its own deadline, and leaves nothing behind."""

from __future__ import annotations

import math
import time

import anyio
import pytest

from transport.deadlines import Deadlines

pytestmark = pytest.mark.anyio


async def test_each_wait_ends_at_its_own_deadline() -> None:
    deadlines = Deadlines()
    began = time.monotonic()
    ended: list[int] = []

    async def wait(number: int, seconds: float) -> None:
        assert not await deadlines.begin(began + seconds).over()
        assert time.monotonic() - began > seconds - 0.002
        ended.append(number)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(deadlines.run)
        with anyio.fail_after(3):
            async with anyio.create_task_group() as waits:
                for number, seconds in ((3, 0.06), (1, 0.02), (2, 0.04)):
                    waits.start_soon(wait, number, seconds)
        tasks.cancel_scope.cancel()
    assert sorted(ended) == [1, 2, 3]
    assert not deadlines._waits


async def test_who_is_woken_waits_no_longer() -> None:
    deadlines = Deadlines()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(deadlines.run)
        wait = deadlines.begin(math.inf)
        with anyio.fail_after(3):
            async with anyio.create_task_group() as waits:
                waits.start_soon(wait.over)
                await anyio.wait_all_tasks_blocked()
                wait.wake()
        assert wait.is_woken
        tasks.cancel_scope.cancel()
    assert not deadlines._waits


async def test_a_wait_whose_time_has_come_already_ends_at_once() -> None:
    deadlines = Deadlines()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(deadlines.run)
        with anyio.fail_after(3):
            assert not await deadlines.begin(time.monotonic() - 1).over()
            assert not await deadlines.begin(-math.inf).over()
        tasks.cancel_scope.cancel()


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    deadlines = Deadlines()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(deadlines.run)
        with anyio.move_on_after(0.001):
            await deadlines.begin(time.monotonic() + 60).over()
        assert not deadlines._waits
        tasks.cancel_scope.cancel()


async def test_a_wait_that_was_ended_before_it_began_ends_at_once() -> None:
    deadlines = Deadlines()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(deadlines.run)
        wait = deadlines.begin(math.inf)
        wait.wake()
        wait.wake()
        with anyio.fail_after(3):
            assert await wait.over()
        tasks.cancel_scope.cancel()
