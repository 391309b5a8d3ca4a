"""Where operations run, and when futures are complete."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from mesh.collective import RankLost
from mesh.distributed import MeshWork
from mesh.threads import OpThread


@pytest.fixture
def ops() -> Iterator[OpThread]:
    made = OpThread("ops")
    yield made
    assert made.close(5)


def test_a_claim_comes_before_what_is_submitted_meanwhile(ops: OpThread) -> None:
    order: list[str] = []
    assert ops.claim()
    assert not ops.claim()
    ops.submit(lambda: order.append("later"))
    assert not ops.drain(0.02)
    order.append("here")
    ops.release()
    assert ops.drain(5)
    assert order == ["here", "later"]
    assert ops.claim()
    ops.release()


def test_nothing_is_claimed_while_something_is_queued(ops: OpThread) -> None:
    going, go = threading.Event(), threading.Event()

    def task() -> None:
        going.set()
        go.wait(5)

    ops.submit(task)
    assert going.wait(5)
    assert not ops.claim()
    go.set()
    assert ops.drain(5)


def test_closing_waits_for_what_is_queued_behind_a_claim(ops: OpThread) -> None:
    order: list[str] = []
    assert ops.claim()
    ops.submit(lambda: order.append("queued"))
    assert not ops.close(0.02)
    assert not ops.claim()
    ops.release()
    assert ops.close(5)
    assert order == ["queued"]
    with pytest.raises(RuntimeError):
        ops.submit(lambda: None)


def now(task: Callable[[], None]) -> None:
    task()


def work() -> MeshWork:
    return MeshWork("all_reduce #1", [torch.ones(1)], time.monotonic() + 10)


def test_there_is_no_future_until_it_is_asked_for() -> None:
    made = work()
    asked: list[Callable[[], None]] = []
    made.end(None, asked.append)
    assert not asked
    assert made.is_completed()
    assert made.is_success()
    assert made.wait()
    future = made.get_future()
    assert future.done()
    assert torch.equal(future.value()[0], torch.ones(1))
    assert made.get_future() is future


def test_a_future_that_was_asked_for_before_is_complete_before_a_wait_returns() -> None:
    made = work()
    future = made.get_future()
    assert not made.is_completed()
    asked: list[Callable[[], None]] = []
    made.end(None, asked.append)
    assert len(asked) == 1
    assert not made.is_completed()
    assert made.wait()  # before the thread that is to complete it comes to it
    assert future.done()
    asked[0]()


@pytest.mark.parametrize("early", [True, False])
def test_an_error_is_raised_by_the_wait_and_the_future(early: bool) -> None:
    made = work()
    error = RankLost("all_reduce", ranks=(1,), why="killed")
    future = made.get_future() if early else None
    made.end(error, now)
    with pytest.raises(RankLost) as caught:
        made.wait()
    assert caught.value is error
    assert made.exception() is error
    assert not made.is_success()
    with pytest.raises(RuntimeError, match="killed"):
        (future or made.get_future()).wait()


def test_all_waiters_are_woken() -> None:
    made = work()
    seen: list[bool] = []
    threads = [threading.Thread(target=lambda: seen.append(made.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    made.end(None, now)
    for thread in threads:
        thread.join(5)
    assert seen == [True] * 3
