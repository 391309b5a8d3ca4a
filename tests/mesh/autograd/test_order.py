"""Each rule of the order in which a run waits is needed: without it, it waits for ever, or errs."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import anyio
import pytest
import torch

from mesh.autograd import BackwardError, contexts, run
from mesh.autograd.nodes import Gate, sent
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


def test_gates_and_what_they_hold_up_are_no_accelerators_whatever_the_default_device() -> None:
    with torch.device("meta"):
        edge = sent(1, 0, torch.ones(1, device="cpu", requires_grad=True))
        gate: Any = Gate.apply(None, 1, None, edge)  # type: ignore[no-untyped-call]
    assert edge.is_cpu
    assert gate.is_cpu


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


def through(worker: Worker, x: torch.Tensor) -> torch.Tensor:
    return worker.call(worker.others[0], scale, x) * worker.weight


def once(a: Worker, b: Worker) -> None:
    """What a call gives, has come from further on."""
    x = torch.ones(3, requires_grad=True)
    with a.context() as context_id:
        a.backward(context_id, a.call(b, through, x).sum())
        assert a.gradients(context_id)[x].abs().sum() > 0


@pytest.mark.parametrize("is_waited_for", [True, False])
async def test_a_run_begins_when_all_is_marked_that_the_root_asks_for(
    is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks come late where nobody waits for them: what they would have added is not run."""
    monkeypatch.setattr(contexts, "foretold", lambda *_: None)
    async with workers(2, scale, timeout=2.0) as (a, b):
        marker = a.agent.autograd._passes._marker
        spread = marker._spread_in_thread

        def late(*args: Any) -> None:
            time.sleep(0.1)
            with contextlib.nullcontext() if is_waited_for else contextlib.suppress(Exception):
                spread(*args)

        def unheard(*args: Any) -> None:
            threading.Thread(target=late, args=args).start()

        marker._spread_in_thread = late if is_waited_for else unheard  # type: ignore[method-assign]
        if is_waited_for:
            await in_thread(twice, a, b)
        else:
            with pytest.raises((BackwardError, KeyError)):
                await in_thread(twice, a, b)
        await quiet(a, b)


@pytest.mark.parametrize("is_waited_for", [True, False])
async def test_a_run_begins_when_all_is_marked_that_another_asks_for(is_waited_for: bool) -> None:
    async with workers(3, scale, through, timeout=2.0) as (a, b, c):
        b.others = [c]
        marker = b.agent.autograd._passes._marker
        spread = marker._spread

        async def late(*args: Any) -> int:
            await anyio.sleep(0.1)
            return await spread(*args)

        async def unheard(*args: Any) -> int:
            async def later() -> None:
                with contextlib.suppress(Exception):  # all may be over by then
                    await late(*args)

            b.agent.start_soon(later)
            return 0

        marker._spread = late if is_waited_for else unheard  # type: ignore[method-assign]
        if is_waited_for:
            await in_thread(once, a, b)
        else:
            with pytest.raises((BackwardError, KeyError)):
                await in_thread(once, a, b)
        await quiet(a, b, c)


@pytest.mark.parametrize("told", [None, ({},)])
async def test_what_was_foretold_wrongly_ends_the_backward(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for what nobody sends, and nothing is left out."""
    foretold = contexts.foretold
    monkeypatch.setattr(contexts, "foretold", (told and (lambda *_: told)) or foretold)
    async with workers(2, scale, timeout=20.0) as (a, b):
        if told is None:
            await in_thread(twice, a, b)
        else:
            with pytest.raises(BackwardError, match="not what it has foretold") as raised:
                await in_thread(twice, a, b)
            assert a.agent.label(b.node_id) in str(raised.value)
        await quiet(a, b)


@pytest.mark.parametrize("waits", [True, False])
async def test_gradients_wait_until_it_is_marked_what_needs_them(waits: bool) -> None:
    """Of what was foretold, the node that they go to learns when the root's run has begun."""
    async with workers(2, scale, timeout=20.0 if waits else 1.0) as (a, b):
        marker = a.agent.autograd._passes._marker
        asked = marker.asked

        async def late(marking: Any, peer: Any) -> Any:
            hidden = {} if waits else {peer: marking.unasked.pop(peer)}
            await anyio.sleep(0.1)
            marking.unasked.update(hidden)
            return await asked(marking, peer)

        marker.asked = late  # type: ignore[method-assign]
        if waits:
            await in_thread(twice, a, b)
        else:
            with pytest.raises(BackwardError, match="set timeout"):
                await in_thread(twice, a, b)
        await quiet(a, b)
