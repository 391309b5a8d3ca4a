"""Claims, starts and ends of a backward count only from who takes part in it, and stands above."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mesh.autograd import leaves, reducers
from mesh.autograd.wire import (
    CLAIM_SERVICE,
    SETTLE_SERVICE,
    START_SERVICE,
    ClaimOrder,
    Failure,
    SettleOrder,
    StartOrder,
)
from tests.mesh.autograd.nodes import Worker, in_thread, quiet, workers
from tests.mesh.autograd.test_failures import wait_until

pytestmark = pytest.mark.anyio


def scale(worker: Worker, x: torch.Tensor) -> torch.Tensor:
    return x * worker.weight


def through(worker: Worker, x: torch.Tensor) -> torch.Tensor:
    """Has the next worker scale, and scales what it gives."""
    return worker.call(worker.others[0], scale, x) * worker.weight


def say(by: Worker, to: Worker, service: str, order: Any) -> Any:
    peers = by.agent.autograd._passes._peers
    return by.agent.bridge.block_on(lambda: peers.call(to.node_id, service, order.encode()))


async def test_only_who_has_brought_the_marking_claims_starts_and_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with workers(3, scale, through) as (a, b, c):
        b.others = [c]
        monkeypatch.setattr(reducers, "are_there", lambda: True)
        monkeypatch.setattr(reducers, "reduced", lambda: {id(b.weight), id(c.weight)})

        def is_held(*owners: Worker) -> list[bool]:
            return [id(each.weight) in leaves._loans._holders for each in owners]

        def program() -> None:
            passes = a.agent.autograd._passes
            x = torch.ones(3, requires_grad=True)
            with a.context() as context_id:
                context = a.agent.autograd.contexts.find(context_id)
                loss = a.call(b, through, x).sum()
                marking = passes._marker.marked(context, [loss], fast=False, seconds=5.0)
                run = passes._claims.claimed(marking, 5.0)
                assert is_held(b, c) == [True, True]
                ids = context.id, marking.id, run.number
                # c takes part, and b may tell it what to do; a has never called it.
                for by, to in ((c, b), (a, c)):
                    for order in (ClaimOrder(*ids, 0, gives_up=True), ClaimOrder(*ids, 0)):
                        assert isinstance(say(by, to, CLAIM_SERVICE, order), Failure)
                    start = StartOrder(*ids, False, 5.0)
                    assert isinstance(say(by, to, START_SERVICE, start), Failure)
                assert is_held(b, c) == [True, True]
                passes._claims.give_up(marking, run)  # positive control
                wait_until(lambda: is_held(b, c) == [False, False])
                a.backward(context_id, loss)
                expected = (b.weight * c.weight).detach()
                assert torch.equal(a.gradients(context_id)[x], expected)

        await in_thread(program)
        await quiet(a, b, c)
        assert is_held(b, c) == [False, False]


async def test_only_who_has_started_a_run_says_what_is_to_be_of_what_it_put_aside() -> None:
    async with workers(3, scale, through) as (a, b, c):
        b.others = [c]
        commits = a.agent.autograd._passes._commits
        commit, settled = commits.commit, list[SettleOrder]()

        def between(marking: Any, run: Any, seconds: float) -> Any:
            ids = marking.context.id, marking.id, run.number
            for by, to in ((c, b), (a, c)):
                assert isinstance(say(by, to, SETTLE_SERVICE, SettleOrder(*ids, True)), Failure)
                assert say(by, to, SETTLE_SERVICE, SettleOrder(*ids, False)) is None
            settled.append(SettleOrder(*ids, True))
            for each in b, c:  # not added, and not let go of
                (context,) = each.agent.autograd.contexts
                assert not context.gradients
                assert len(context.asides) == 1
            return commit(marking, run, seconds)

        commits.commit = between  # type: ignore[method-assign]

        def program() -> None:
            x = torch.ones(3, requires_grad=True)
            with a.context() as context_id:
                a.backward(context_id, a.call(b, through, x).sum(), atomic=True)
                (order,) = settled
                assert isinstance(say(a, b, SETTLE_SERVICE, order), Failure)  # it counts once
                product = (b.weight * c.weight).detach()
                assert torch.equal(a.gradients(context_id)[x], product)
                assert torch.equal(b.gradients(context_id)[b.weight], c.weight.detach())
                assert torch.equal(c.gradients(context_id)[c.weight], b.weight.detach())

        await in_thread(program)
        await quiet(a, b, c)
