"""Each rule of the order in which a run waits is needed: without it, it waits for ever, or errs."""

from __future__ import annotations

import contextlib
from typing import Any

import anyio
import pytest
import torch

from mesh.autograd import BackwardError, run
from mesh.autograd.nodes import Gate
from mesh.autograd.run import Run
from tests.mesh.autograd.nodes import Worker, in_thread, quiet, workers

pytestmark = pytest.mark.anyio


def scale(worker: Worker, x: torch.Tensor) -> torch.Tensor:
    return x * worker.weight


def twice(a: Worker, b: Worker) -> None:
    """What each of two calls gives, the next one needs."""
    x = torch.ones(3, requires_grad=True)
    with a.context() as context_id:
        y = a.call(b, scale, torch.tanh(a.call(b, scale, torch.tanh(x))))
        a.backward(context_id, y.sum())
        assert a.gradients(context_id)[x].abs().sum() > 0


def ascending(self: Run) -> Any:
    return _gates(self, reverse=True, sequence=0)


def eager(self: Run) -> Any:
    return _gates(self, reverse=False, sequence=2**62)


def _gates(self: Run, *, reverse: bool, sequence: int) -> Any:
    sent, needed = self.marking.context.sent, self.marking.needed
    gate: Any = None
    for number in sorted(needed, key=lambda each: sent[each].clock, reverse=reverse):
        edges = [sent[number].edges[index] for index in sorted(needed[number])]
        gate = Gate.apply(self, number, gate, *edges)  # type: ignore[no-untyped-call]
        gate.grad_fn._set_sequence_nr(sequence)
    return gate


@pytest.mark.parametrize("gates", [None, ascending, eager])
async def test_gates_wait_for_the_latest_message_first_and_when_nothing_else_is_left(
    gates: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gates is not None:
        monkeypatch.setattr(run.Run, "_gates", gates)
    async with workers(2, scale, timeout=20.0 if gates is None else 0.4) as (a, b):
        if gates is None:
            await in_thread(twice, a, b)
        else:
            with pytest.raises(BackwardError, match="set timeout"):
                await in_thread(twice, a, b)
        await quiet(a, b)


@pytest.mark.parametrize("is_acknowledged", [True, False])
async def test_a_run_begins_when_all_is_marked(is_acknowledged: bool) -> None:
    """Marks come late where nobody waits for them: what they would have added is not run."""
    async with workers(2, scale, timeout=2.0) as (a, b):
        passes = b.agent.autograd._passes
        spread = passes._spread

        async def late(*args: Any) -> None:
            await anyio.sleep(0.1)
            await spread(*args)

        async def unheard(*args: Any) -> None:
            with contextlib.suppress(Exception):  # all may be over by then
                await late(*args)

        async def unacknowledged(*args: Any) -> None:
            b.agent.start_soon(lambda: unheard(*args))

        passes._spread = late if is_acknowledged else unacknowledged  # type: ignore[method-assign]
        if is_acknowledged:
            await in_thread(twice, a, b)
        else:
            with pytest.raises((BackwardError, KeyError)):
                await in_thread(twice, a, b)
        await quiet(a, b)
