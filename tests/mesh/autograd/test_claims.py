"""Backwards through reducers of several nodes: in turn, in no circle, and nothing stays claimed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mesh.autograd import BackwardError, claims, leaves, reducers
from mesh.autograd.leaves import Leaves
from tests.mesh.autograd.nodes import Worker, in_thread, quiet, workers

pytestmark = pytest.mark.anyio


def scale(worker: Worker, x: torch.Tensor) -> torch.Tensor:
    return x * worker.weight


def failing(worker: Worker, x: torch.Tensor) -> torch.Tensor:
    y = x * worker.weight
    y.register_hook(lambda _: 1 / 0)
    return y


@pytest.fixture
def lenders(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Workers whose weights count as those that a reducer reads."""
    found: list[Worker] = []
    monkeypatch.setattr(reducers, "are_there", lambda: True)
    monkeypatch.setattr(reducers, "reduced", lambda: {id(each.weight) for each in found})
    return found


def backward(a: Worker, through: list[Worker], name: str = "scale") -> torch.Tensor:
    """Go through workers, and back; return the gradient of the beginning."""
    x = torch.ones(3, requires_grad=True)
    with a.context() as context_id:
        y = x
        for each in through:
            y = a.call(each, name, y)
        a.backward(context_id, y.sum())
        return a.gradients(context_id)[x]


def none_is_held(*all_workers: Worker) -> bool:
    return not any(id(each.weight) in leaves._loans._holders for each in all_workers)


@pytest.mark.parametrize("ranks", ["by age", "none"])
async def test_two_backwards_through_two_reducers_each_do_not_wait_in_a_circle(
    ranks: str, lenders: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has the first node's when the other has the second's; without an order, both wait."""
    claim = Leaves.claim
    order: list[Any] = []
    both_are_here = threading.Barrier(2)
    has = {"b": threading.Event(), "c": threading.Event()}

    def held_up(self: Leaves, nodes: Any, rank: Any, seconds: float = 0.0) -> bool:
        mine = {id(each.variable) for each in nodes}
        where = "b" if id(b.weight) in mine else "c" if id(c.weight) in mine else ""
        if rank not in order:  # at the root, where nothing is to be had
            order.append(rank)
            both_are_here.wait(5)
        if where:
            # The first to come has b's first, the second one c's.
            own = "b" if rank == order[0] else "c"
            if where != own:
                has[own].wait(5)
                has[where].wait(5)
        got = claim(self, nodes, rank if ranks == "by age" else None, seconds)
        if where and got:
            has[where].set()
        return got

    async with workers(3, scale, timeout=10.0 if ranks == "by age" else 1.0) as (a, b, c):
        lenders += [b, c]
        expected = (b.weight * c.weight).detach()
        monkeypatch.setattr(Leaves, "claim", held_up)
        failed: list[BaseException] = []

        def one() -> None:
            try:
                assert torch.equal(backward(a, [b, c]), expected)
            except BackwardError as error:
                failed.append(error)

        def both() -> None:
            threads = [threading.Thread(target=one) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        await in_thread(both)
        assert bool(failed) == (ranks == "none"), failed
        await quiet(a, b, c)
        assert none_is_held(b, c)


def through(worker: Worker, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = worker.module(x).tanh()  # type: ignore[attr-defined]
    return y


@pytest.fixture
def modules() -> Iterator[Callable[[], list[DistributedDataParallel]]]:
    """What makes two, of a process group of this process alone: slowly, the first time."""

    def make() -> list[DistributedDataParallel]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return [DistributedDataParallel(torch.nn.Linear(3, 3)) for _ in range(2)]

    yield make
    dist.destroy_process_group()


@pytest.mark.parametrize("atomic", [False, True])
async def test_two_backwards_through_two_real_modules_at_once(
    atomic: bool, modules: Callable[[], list[DistributedDataParallel]]
) -> None:
    async with workers(3, through) as (a, b, c):
        b.module, c.module = made = await in_thread(modules)  # type: ignore[attr-defined]
        both_are_here = threading.Barrier(2)

        def one(way: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            x = torch.randn(2, 3, requires_grad=True)
            with a.context() as context_id:
                y = twin = x
                for each in way:
                    y, twin = a.call(each, through, y), each.module.module(twin).tanh()
                both_are_here.wait(5)
                a.backward(context_id, y.sum(), atomic=atomic)
                of_all = [[x], *(list(each.module.module.parameters()) for each in way)]
                found = [
                    each.gradients(context_id)[leaf]
                    for each, its_own in zip([a, *way], of_all, strict=True)
                    for leaf in its_own
                ]
            return found, list(
                torch.autograd.grad(twin.sum(), [leaf for each in of_all for leaf in each])
            )

        def both() -> None:
            with ThreadPoolExecutor(2) as threads:
                for _ in range(5):
                    for found, expected in threads.map(one, ([b, c], [c, b])):
                        torch.testing.assert_close(found, expected)

        await in_thread(both)
        await quiet(a, b, c)
        assert not leaves._loans._holders
        assert all(leaf.grad is None for each in made for leaf in each.parameters())


async def test_many_backwards_through_reducers_all_come_to_an_end(lenders: list[Worker]) -> None:
    async with workers(4, scale) as (a, b, c, d):
        lenders += [a, b, c]
        ways = [[b, c], [c, b], [c, d, b], [b], [c, c]]

        def one(number: int) -> None:
            for turn in range(3):
                way = ways[(number + turn) % len(ways)]
                expected = torch.ones(3)
                for each in way:
                    expected = expected * each.weight.detach()
                torch.testing.assert_close(backward(a, way), expected)
            done.append(number)

        done: list[int] = []

        def all_at_once() -> None:
            threads = [threading.Thread(target=one, args=(number,)) for number in range(5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        await in_thread(all_at_once)
        assert sorted(done) == list(range(5))
        await quiet(a, b, c, d)
        assert none_is_held(a, b, c)


async def test_what_another_has_for_too_long_ends_the_backward(lenders: list[Worker]) -> None:
    async with workers(3, scale, timeout=0.5) as (a, b, c):
        lenders += [b, c]
        wanted = {id(c.weight)}
        for rank in (None, (0, ())):  # one that is waited for, and one that is retreated from
            assert leaves._loans.take(wanted, rank, 0.0, lambda: False)
            began = time.monotonic()
            with pytest.raises(BackwardError, match="set timeout"):
                await in_thread(backward, a, [b, c])
            assert 0.4 < time.monotonic() - began < 5
            await quiet(a, b, c)
            assert none_is_held(b)
            leaves._loans.give(wanted)
        await in_thread(backward, a, [b, c])
        await quiet(a, b, c)


async def test_a_backward_that_fails_leaves_nothing_claimed(
    lenders: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with workers(3, scale, failing) as (a, b, c):
        lenders += [b, c]
        with pytest.raises(BackwardError, match="division by zero"):
            await in_thread(backward, a, [b, c], "failing")
        await quiet(a, b, c)
        assert none_is_held(b, c)

        def refused(*_: Any) -> None:
            raise BackwardError("backward", why="for a test")

        monkeypatch.setattr(b.agent.autograd._passes, "_start_children", refused)
        monkeypatch.setattr(claims.Claims, "_counted", refused)
        with pytest.raises(BackwardError, match="for a test"):
            await in_thread(backward, a, [b, c])
        await quiet(a, b, c)
        assert none_is_held(b, c)


async def test_the_end_of_a_context_frees_what_is_claimed_in_it(lenders: list[Worker]) -> None:
    async with workers(3, scale) as (a, b, c):
        lenders += [b, c]

        def program() -> None:
            x = torch.ones(3, requires_grad=True)
            with a.context() as context_id:
                loss = a.call(c, scale, a.call(b, scale, x)).sum()
                passes, context = a.agent.autograd._passes, a.agent.autograd.contexts
                marking = passes._marker.marked(
                    context.find(context_id), [loss], fast=False, seconds=5.0
                )
                assert marking.lenders == 2
                passes._claims.claimed(marking, 5.0)
                assert not none_is_held(b)
                assert not none_is_held(c)

        await in_thread(program)
        await quiet(a, b, c)
        assert none_is_held(b, c)


@pytest.mark.parametrize("late", ["one", "both"])
async def test_reducers_that_were_made_after_the_calls_never_wait_in_a_circle(
    late: str, lenders: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their nodes had foretold what answers depend on, and none was told of before the run."""
    async with workers(3, scale) as (a, b, c):
        monkeypatch.setattr(reducers, "are_there", lambda: bool(lenders))

        def program() -> None:
            x = torch.ones(3, requires_grad=True)
            with a.context() as context_id:
                loss = a.call(c, scale, a.call(b, scale, x)).sum()
                lenders.extend([b] if late == "one" else [b, c])
                if late == "both":
                    with pytest.raises(BackwardError, match="had used before"):
                        a.backward(context_id, loss)
                    return
                a.backward(context_id, loss)
                assert torch.equal(a.gradients(context_id)[x], (b.weight * c.weight).detach())

        await in_thread(program)
        await quiet(a, b, c)
        assert none_is_held(b, c)
