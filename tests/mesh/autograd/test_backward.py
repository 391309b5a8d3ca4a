"""Backwards across nodes give what they would give on one, and leave nothing behind."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
import torch

from mesh.autograd import BackwardError, ContextGone, leaves, marker
from mesh.autograd.wire import MARK_SERVICE
from tests.mesh.autograd.nodes import Worker, in_thread, quiet, workers
from tests.mesh.nodes import eventually

pytestmark = pytest.mark.anyio


def scale(worker: Worker, x: torch.Tensor) -> torch.Tensor:
    return x * worker.weight


def two(worker: Worker, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * worker.weight, (x**2) * worker.weight


async def test_gradients_come_to_each_node_and_not_to_grad() -> None:
    def program(a: Worker, b: Worker) -> None:
        x = torch.tensor([3.0, 4.0, 5.0], requires_grad=True)
        with a.context() as context_id:
            loss = a.call(b, scale, x).sum() + (x * 2).sum()
            a.backward(context_id, loss)
            assert torch.equal(a.gradients(context_id)[x], b.weight.detach() + 2)
            assert torch.equal(b.gradients(context_id)[b.weight], x.detach())
            assert x.grad is None
            assert b.weight.grad is None
            a.backward(context_id, a.call(b, scale, x).sum())  # adds up
            assert torch.equal(a.gradients(context_id)[x], 2 * b.weight.detach() + 2)
            assert torch.equal(b.gradients(context_id)[b.weight], 2 * x.detach())
        with pytest.raises(ContextGone, match=f"context with id: {context_id}"):
            a.gradients(context_id)
        with pytest.raises(ContextGone):
            b.gradients(context_id)

    async with workers(2, scale) as (a, b):
        await in_thread(program, a, b)
        await quiet(a, b)


def relay(worker: Worker, x: torch.Tensor, hops: int) -> torch.Tensor:
    """Calls on, there and back again, between this node and the next."""
    y = torch.tanh(x * worker.weight)
    if not hops:
        return y
    return worker.call(worker.others[0], relay, y, hops - 1) * worker.weight + y


async def test_ping_pong_between_two_nodes_and_a_node_and_itself() -> None:
    def local(x: torch.Tensor, weights: list[torch.Tensor], at: int, hops: int) -> torch.Tensor:
        y = torch.tanh(x * weights[at])
        if not hops:
            return y
        return local(y, weights, 1 - at, hops - 1) * weights[at] + y

    def program(a: Worker, b: Worker) -> None:
        for first, second in ((a, b), (a, a)):
            first.others, second.others = [second], [first]
            x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
            copies = {w: w.weight.detach().clone().requires_grad_() for w in (a, b)}
            twin = x.detach().clone().requires_grad_()
            with a.context() as context_id:
                loss = a.call(second, relay, x, 12).sum()
                a.backward(context_id, loss)
                weights = [copies[second], copies[first]]
                local(twin, weights, 0, 12).sum().backward()
                torch.testing.assert_close(a.gradients(context_id)[x], twin.grad)
                for worker in {first, second}:
                    theirs = worker.gradients(context_id)[worker.weight]
                    torch.testing.assert_close(theirs, copies[worker].grad)

    async with workers(2, relay) as (a, b):
        await in_thread(program, a, b)
        await quiet(a, b)


async def test_what_the_loss_does_not_need_is_neither_sent_nor_awaited() -> None:
    sent: list[Any] = []

    def program(a: Worker, b: Worker) -> None:
        a.agent.autograd._passes._agent.send_gradients = spied(a)  # type: ignore[method-assign]
        x = torch.ones(3, requires_grad=True)
        ran: list[str] = []
        b.weight.register_hook(lambda g: ran.append("weight"))
        with a.context() as context_id:
            y, _unused = a.call(b, two, x)
            dead = a.call(b, scale, x)
            dead.register_hook(lambda g: ran.append("dead"))
            a.backward(context_id, y.sum())
            assert torch.equal(b.gradients(context_id)[b.weight], torch.ones(3))
            assert torch.equal(a.gradients(context_id)[x], b.weight.detach())
        assert ran == ["weight"]
        assert len(sent) == 1
        assert [each is None for each in sent[0][-1]] == [False, True]

    def spied(a: Worker) -> Any:
        real = a.agent.send_gradients

        async def send(to: Any, what: tuple[Any, ...]) -> None:
            sent.append((*what[:-1], list(what[-1])))
            await real(to, what)

        return send

    async with workers(2, scale, two) as (a, b):
        await in_thread(program, a, b)


async def test_the_graph_can_be_kept_and_its_marking_with_it() -> None:
    marks = 0

    def program(a: Worker, b: Worker) -> None:
        x = torch.ones(3, requires_grad=True)
        with a.context() as context_id:
            loss = a.call(b, scale, x).sum()
            for _ in range(3):
                a.backward(context_id, loss, retain_graph=True)
            assert torch.equal(a.gradients(context_id)[x], 3 * b.weight.detach())
            other = a.call(b, scale, x).sum()
            a.backward(context_id, other, loss)  # also at once, and marked anew
            assert torch.equal(a.gradients(context_id)[x], 5 * b.weight.detach())
            with pytest.raises(BackwardError, match="a second time"):
                a.backward(context_id, loss)
            assert marks == 3
            assert not any(each.markings for each in b.agent.autograd.contexts)

    async with workers(2, scale) as (a, b):
        call = a.agent.autograd._passes._peers.call

        async def counted(peer: Any, service: str, value: Any) -> Any:
            nonlocal marks
            marks += service == MARK_SERVICE
            return await call(peer, service, value)

        a.agent.autograd._passes._peers.call = counted  # type: ignore[method-assign]
        await in_thread(program, a, b)
        await quiet(a, b)


def together(worker: Worker, x: torch.Tensor, hops: int) -> torch.Tensor:
    """Has the next worker do the same; what comes of it depends on messages of both."""
    y = torch.tanh(x * worker.weight)
    return worker.call(worker.others[0], together, y, hops - 1) + x if hops else y


@pytest.mark.parametrize("hops", [0, 1, 2])
async def test_what_answers_foretell_is_asked_of_nobody_before_the_run(hops: int) -> None:
    """But where they depend on others' messages as well."""
    waves = []

    def whole(x: torch.Tensor, left: int = hops) -> torch.Tensor:
        y = torch.tanh(x * torch.tensor([1.0, 2.0, 3.0]))
        return whole(y, left - 1) + x if left else y

    def program(a: Worker, b: Worker) -> None:
        x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        with a.context() as context_id:
            y = a.call(b, together, x, hops)
            a.backward(context_id, a.call(b, together, torch.tanh(y), hops).sum())
            (gradient,) = torch.autograd.grad(whole(whole(x).tanh()).sum(), x)
            torch.testing.assert_close(a.gradients(context_id)[x], gradient)

    async with workers(3, together) as (a, b, c):
        a.others, b.others, c.others = [b], [c], [b]
        marker = a.agent.autograd._passes._marker
        spread = marker._spread_in_thread

        def counted(*args: Any) -> None:
            waves.append(args)
            spread(*args)

        marker._spread_in_thread = counted  # type: ignore[method-assign]
        await in_thread(program, a, b)
        await quiet(a, b, c)
    assert bool(waves) == bool(hops)


def add(worker: Worker, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


@pytest.mark.parametrize("at", ["another", "itself"])
async def test_what_gets_the_same_gradient_as_another_has_one_of_its_own(at: str) -> None:
    def program(a: Worker, b: Worker) -> None:
        x, y, z = (torch.ones(3, requires_grad=True) for _ in range(3))
        with a.context() as context_id:
            one = a.call(b, add, x, y) + z
            loss = (a.call(b, add, one, one) + a.call(b, add, one, z)).sum()
            for _ in range(2):
                a.backward(context_id, loss, retain_graph=True)
            gradients = a.gradients(context_id)
            assert [gradients[each].tolist() for each in (x, y, z)] == [[6.0] * 3] * 2 + [[8.0] * 3]

    async with workers(2, add) as (a, b):
        await in_thread(program, a, b if at == "another" else a)


async def test_a_result_can_be_the_loss_itself() -> None:
    def total(worker: Worker, x: torch.Tensor) -> torch.Tensor:
        return (x * worker.weight).sum()

    def program(a: Worker, b: Worker) -> None:
        x = torch.ones(3, requires_grad=True)
        with a.context() as context_id:
            a.backward(context_id, a.call(b, total, x))
            assert torch.equal(a.gradients(context_id)[x], b.weight.detach())
            reference = a.remote(b, "total", x)
            reference.backward(context_id)
            assert torch.equal(a.gradients(context_id)[x], 2 * b.weight.detach())

    async with workers(2, total) as (a, b):
        await in_thread(program, a, b)


async def test_backwards_at_the_same_time_in_one_context_and_in_many() -> None:
    def one(a: Worker, b: Worker, context_id: int, x: torch.Tensor) -> None:
        for _ in range(4):
            a.backward(context_id, a.call(b, relay, x, 3).sum())

    def program(a: Worker, b: Worker) -> None:
        x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
        with a.context() as context_id:
            a.backward(context_id, a.call(b, relay, x, 3).sum())
            expected = a.gradients(context_id)[x].clone(), b.gradients(context_id)[b.weight].clone()
        with a.context() as context_id:
            threads = [
                threading.Thread(
                    target=contextvars.copy_context().run, args=(one, a, b, context_id, x)
                )
                for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            torch.testing.assert_close(a.gradients(context_id)[x], 16 * expected[0])
            torch.testing.assert_close(b.gradients(context_id)[b.weight], 16 * expected[1])

        def alone() -> None:
            with a.context() as context_id:
                one(a, b, context_id, x)
                torch.testing.assert_close(a.gradients(context_id)[x], 4 * expected[0])
            done.append(True)

        done: list[bool] = []
        threads = [threading.Thread(target=alone) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == 4

    async with workers(2, relay) as (a, b):
        a.others, b.others = [b], [a]
        await in_thread(program, a, b)
        await quiet(a, b)


async def test_markings_that_nobody_uses_any_more_are_forgotten_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(marker, "MAX_MARKINGS", 3)

    def program(a: Worker, b: Worker) -> None:
        x = torch.ones(3, requires_grad=True)
        with a.context() as context_id:
            losses = [a.call(b, scale, x).sum() for _ in range(2)]
            for turn in range(8):
                a.backward(context_id, losses[turn % 2], retain_graph=True)
            assert torch.equal(a.gradients(context_id)[x], 8 * b.weight.detach())
            (there,) = b.agent.autograd.contexts
            assert len(there.markings) <= 2

    async with workers(2, scale) as (a, b):
        await in_thread(program, a, b)


async def test_a_context_of_a_task_of_the_loop_ends_everywhere() -> None:
    async with workers(2, scale) as (a, b):
        with a.context():
            await a.agent.call(b.node_id, "scale", (torch.ones(3, requires_grad=True),))
            assert len(b.agent.autograd.contexts) == 1
        await eventually(lambda: len(b.agent.autograd.contexts) == 0, 0.25)  # no lease is over

        def begin_another() -> None:
            with a.context():
                pass

        with a.context():
            inherited = contextvars.copy_context()
            with pytest.raises(RuntimeError, match="Already have an autograd context"):
                inherited.run(begin_another)
        inherited.run(begin_another)  # what is over is no hindrance
        await quiet(a, b)


async def test_an_operator_is_recorded_amid_a_coroutine_that_has_switched_gradients_off() -> None:
    begun, let_go = anyio.Event(), anyio.Event()

    async def without_gradients() -> None:
        with torch.no_grad():
            begun.set()
            await let_go.wait()

    def program(a: Worker, b: Worker) -> None:
        x = torch.ones(3, requires_grad=True)
        with a.context() as context_id:
            a.backward(context_id, a.call(b, torch.mul, x, 2).sum())
            assert torch.equal(a.gradients(context_id)[x], torch.full((3,), 2.0))

    async with workers(2) as (a, b), anyio.create_task_group() as tasks:
        tasks.start_soon(without_gradients)
        await begun.wait()
        await in_thread(program, a, b)
        let_go.set()


async def test_calls_in_a_context_wait_for_no_gradient_that_is_being_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adding, called = threading.Event(), threading.Event()
    own = leaves._own

    def slow(*args: Any, **options: Any) -> torch.Tensor:
        adding.set()
        assert called.wait(5)
        return own(*args, **options)

    monkeypatch.setattr(leaves, "_own", slow)

    def program(a: Worker, b: Worker) -> None:
        x = torch.ones(3, requires_grad=True)
        with a.context() as context_id:
            loss = a.call(b, scale, x).sum()
            here = contextvars.copy_context()
            thread = threading.Thread(target=a.backward, args=(context_id, loss))
            thread.start()
            assert adding.wait(5)
            here.run(a.call, b, scale, x)
            called.set()
            thread.join(5)
            assert torch.equal(a.gradients(context_id)[x], b.weight.detach())

    async with workers(2, scale) as (a, b):
        await in_thread(program, a, b)


def switch_off(worker: Worker) -> None:
    torch.set_grad_enabled(False)


def without_gradients(worker: Worker) -> Iterator[int]:
    with torch.no_grad():
        yield 1
        yield 2


async def test_functions_leave_gradients_switched_on_for_others_in_their_thread() -> None:
    def program(a: Worker, b: Worker) -> None:
        items = a.agent.stream(b.node_id, "without_gradients")
        assert a.agent.bridge.block_on(items.__anext__) == 1
        a.call(b, switch_off)
        x = torch.ones(3, requires_grad=True)
        with a.context():
            assert all(a.call(b, scale, x).requires_grad for _ in range(8))
        a.agent.bridge.block_on(items.aclose)

    async with workers(2, scale, switch_off, without_gradients) as (a, b):
        await in_thread(program, a, b)
