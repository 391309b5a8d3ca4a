"""A backward that fails says where and why, ends everywhere, and hinders no other."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from torch.autograd import Function

from mesh.autograd import BackwardError, ContextGone
from mesh.rpc import RpcTimeout
from tensor_bridge import QuotaExceeded
from tests.mesh.autograd.nodes import Worker, in_thread, quiet, workers
from tests.mesh.nodes import eventually

pytestmark = pytest.mark.anyio


class Raising(Function):
    """Passes on a tensor, and raises where its gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError("as was expected")


def scale(worker: Worker, x: torch.Tensor) -> torch.Tensor:
    return x * worker.weight


def two(worker: Worker, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * worker.weight, x + 1


def raising(worker: Worker, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Raising.apply(x)  # type: ignore[no-untyped-call]
    return result


def through(worker: Worker, x: torch.Tensor, name: str) -> torch.Tensor:
    """Has the next worker call a function, and scales what it gives."""
    return worker.call(worker.others[0], name, x) * worker.weight


async def test_what_is_raised_anywhere_reaches_the_root_with_its_place() -> None:
    def program(a: Worker, b: Worker, c: Worker) -> None:
        x = torch.ones(3, requires_grad=True)
        label = a.agent.label(c.node_id)
        for _ in range(2):
            with a.context() as context_id:
                loss = a.call(b, through, x, "raising").sum()
                with pytest.raises(BackwardError, match="as was expected") as raised:
                    a.backward(context_id, loss)
                told = str(raised.value)
                assert told.startswith(f"Error on Node {c.node_id.short}: as was expected")
                assert label in told
                assert "test_failures.py:" in told
                assert isinstance(raised.value.__cause__, ValueError)
                assert 'raise ValueError("as was expected")' in raised.value.__cause__.__notes__[0]
                a.backward(context_id, a.call(b, through, x, "scale").sum())  # all goes on
                expected = (b.weight * c.weight).detach()
                assert torch.equal(a.gradients(context_id)[x], expected)

    async with workers(3, scale, raising, through) as (a, b, c):
        b.others = [c]
        await in_thread(program, a, b, c)
        await quiet(a, b, c)


async def test_what_fails_leaves_no_gradient_anywhere_if_that_is_asked_for() -> None:
    def program(a: Worker, b: Worker, c: Worker) -> None:
        x = torch.ones(3, requires_grad=True)

        def gradients() -> list[dict[torch.Tensor, torch.Tensor]]:
            every = [each.gradients(context_id) for each in (a, b, c)]
            return [{leaf: each.clone() for leaf, each in some.items()} for some in every]

        for atomic in (False, True):
            with a.context() as context_id:
                loss = a.call(b, through, x, "scale").sum()
                a.backward(context_id, loss, atomic=atomic, retain_graph=True)
                before = gradients()
                assert [len(each) for each in before] == [1, 1, 1]
                # It fails at the root, when the others are done; and where nobody has begun.
                for bad in (
                    a.call(b, through, raising(a, x), "scale"),
                    a.call(b, through, x, "raising"),
                ):
                    with pytest.raises(BackwardError, match="as was expected"):
                        a.backward(context_id, bad.sum(), atomic=atomic)
                for each in b.agent.autograd.contexts, c.agent.autograd.contexts:
                    (context,) = each
                    wait_until(lambda context=context: not context.asides)  # type: ignore[misc]

                def same() -> list[bool]:
                    return [
                        all(torch.equal(each[leaf], old[leaf]) for leaf in each)
                        for each, old in zip(gradients(), before, strict=True)  # noqa: B023
                    ]

                # Their runs may be adding still: they have sent gradients before.
                wait_until(lambda: same() == [True, atomic, atomic])  # noqa: B023
                a.backward(context_id, loss, atomic=atomic)  # adds up
                assert torch.equal(a.gradients(context_id)[x], 2 * before[0][x])

    async with workers(3, scale, raising, through) as (a, b, c):
        b.others = [c]
        await in_thread(program, a, b, c)
        await quiet(a, b, c)


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


async def test_what_cannot_be_gone_backward_from_is_refused() -> None:
    def program(a: Worker, b: Worker) -> None:
        x = torch.ones(3, requires_grad=True)
        with a.context() as context_id:
            y = a.call(b, scale, x)
            for wrong, text in (
                ([], "No tensors provided for gradient computation"),
                ([torch.ones(1)], "requires_grad not set on"),
                ([y], "is not a scalar, all roots need to be scalar"),
                ([torch.ones(1, requires_grad=True)], "does not have a valid gradient function"),
            ):
                with pytest.raises(RuntimeError, match=text):
                    a.backward(context_id, *wrong)
            with pytest.raises(TypeError, match="incompatible function arguments"):
                a.backward(context_id, None)  # type: ignore[arg-type]
            with pytest.raises(ContextGone, match="Could not find autograd context with id: 77"):
                a.backward(77, y.sum())
            with (
                pytest.raises(RuntimeError, match="Already have an autograd context id"),
                a.context(),
            ):
                pass
            with pytest.raises(BackwardError, match=r"Use mesh\.autograd\.backward"):
                y.sum().backward()
            kept = y
        with a.context() as context_id, pytest.raises(BackwardError, match="leads into"):
            a.backward(context_id, (kept * a.call(b, scale, x)).sum())

    async with workers(2, scale) as (a, b):
        await in_thread(program, a, b)
        await quiet(a, b)


async def test_without_gradients_nothing_is_recorded() -> None:
    def program(a: Worker, b: Worker) -> None:
        x = torch.ones(3, requires_grad=True)
        with a.context() as context_id:
            with torch.no_grad():
                assert not a.call(b, scale, x).requires_grad
            context = a.agent.autograd.contexts.find(context_id)
            assert not context.sent
            assert not context.received
            assert a.call(b, scale, x).grad_fn is not None
        assert a.call(b, scale, x).grad_fn is None  # in no context

    async with workers(2, scale) as (a, b):
        await in_thread(program, a, b)


async def test_a_call_that_outlives_its_context_is_dropped_and_counted() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(worker: Worker, x: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert go_on.wait(10)
        return worker.call(worker.others[0], scale, x)

    def program(a: Worker, b: Worker, c: Worker) -> None:
        x = torch.ones(3, requires_grad=True)
        with a.context():
            late = a.agent.bridge.start(lambda: a.agent.call(b.node_id, "slow", (x,)))
            assert begun.wait(10)
        go_on.set()
        assert torch.equal(a.agent.bridge.wait(late), b.others[0].weight)
        assert len(c.agent.autograd.contexts) == 0
        assert b.agent.autograd.contexts.late >= 1
        with a.context() as context_id:
            a.backward(context_id, a.call(b, scale, x).sum())
            assert torch.equal(a.gradients(context_id)[x], b.weight.detach())

    async with workers(3, scale, slow) as (a, b, c):
        b.others = [c]
        await in_thread(program, a, b, c)
        await quiet(a, b, c)


async def test_a_context_that_ends_amid_a_backward_ends_that() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def program(a: Worker, b: Worker) -> None:
        x = torch.ones(3, requires_grad=True)
        with a.context() as context_id:
            y = a.call(b, scale, x)

            def hold(_: torch.Tensor) -> None:
                reached.set()
                assert go_on.wait(10)

            y.register_hook(hold)
            loss = y.sum()
            failed = []

            def run() -> None:
                try:
                    a.backward(context_id, loss)
                except BackwardError as error:
                    failed.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            assert reached.wait(10)
        go_on.set()
        thread.join(10)
        assert not thread.is_alive()
        assert "Could not find autograd context" in str(failed[0])

    async with workers(2, scale) as (a, b):
        await in_thread(program, a, b)
        await quiet(a, b)


async def test_the_loss_of_a_node_ends_a_backward_with_its_name() -> None:
    """The middle one, while the last one computes."""
    reached, go_on = threading.Event(), threading.Event()

    def holding(worker: Worker, x: torch.Tensor) -> torch.Tensor:
        result = x * worker.weight

        def hold(_: torch.Tensor) -> None:
            reached.set()
            assert go_on.wait(10)

        result.register_hook(hold)
        return result

    async with workers(3, scale, holding, through) as (a, b, c):
        b.others = [c]
        raised: list[BaseException] = []

        def program() -> None:
            x = torch.ones(3, requires_grad=True)
            with a.context() as context_id:
                loss = a.call(b, through, x, "holding").sum()
                with pytest.raises(BackwardError) as error:
                    a.backward(context_id, loss)
                raised.append(error.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(in_thread, program)
            await eventually(reached.is_set)
            began = time.monotonic()
            for peer in (a, c):
                connection = b.agent._node.endpoint.connection(peer.node_id)
                assert connection is not None
                await connection.close()
            await eventually(lambda: bool(raised))
            assert time.monotonic() - began < 3
            go_on.set()
        assert a.agent.label(b.node_id) in str(raised[0])
        await quiet(a, c)  # b has nobody left to say that it is over, but for its lease
        await quiet(b)


async def test_contexts_of_callers_that_are_gone_lapse() -> None:
    async with workers(3, scale, through) as (a, b, c):
        b.others = [c]
        with a.context():
            x = torch.ones(3, requires_grad=True)
            await a.agent.call(b.node_id, "through", (x, "scale"))
            assert len(b.agent.autograd.contexts) == len(c.agent.autograd.contexts) == 1
            connection = b.agent._node.endpoint.connection(a.node_id)
            assert connection is not None
            await connection.close()
            await quiet(b, c)
            assert len(a.agent.autograd.contexts) == 1  # its own ends where it began
        await quiet(a)


async def test_fast_needs_all_that_was_sent() -> None:
    def program(a: Worker, b: Worker) -> None:
        x = torch.ones(3, requires_grad=True)
        with a.context() as context_id:
            a.backward(context_id, a.call(b, through, x, "scale").sum(), fast=True)
            assert torch.equal(a.gradients(context_id)[x], (a.weight * b.weight).detach())
        with a.context() as context_id:
            y, _ = a.call(b, two, x)
            a.backward(context_id, y.sum(), fast=True)  # another tensor of the same message
            assert torch.equal(a.gradients(context_id)[x], b.weight.detach())
            a.call(b, scale, x)
            with pytest.raises(BackwardError, match="ran for more than the set timeout"):
                a.backward(context_id, a.call(b, scale, x).sum(), fast=True)

    async with workers(2, scale, two, through, timeout=1.0) as (a, b):
        b.others = [a]
        await in_thread(program, a, b)
        await quiet(a, b)


async def test_gradients_that_never_come_end_the_wait() -> None:
    def program(a: Worker, b: Worker) -> None:
        x = torch.ones(3, requires_grad=True)
        with a.context() as context_id:
            loss = a.call(b, scale, x).sum()
            with pytest.raises(BackwardError) as raised:
                a.backward(context_id, loss)
            assert isinstance(raised.value.__cause__, RpcTimeout)

    async def nothing(*_: Any) -> None:
        await anyio.sleep_forever()

    async with workers(2, scale, timeout=0.5) as (a, b):
        b.agent.send_gradients = nothing  # type: ignore[method-assign]
        await in_thread(program, a, b)
        await quiet(a, b)


async def test_what_a_graph_keeps_of_a_caller_takes_room_of_its_until_the_context_ends() -> None:
    def program(a: Worker, b: Worker) -> None:
        room = b.agent.service._room
        room._max_bytes_per_peer = 36
        x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
        with a.context() as context_id:
            for _ in range(2):
                loss = a.call(b, scale, x).sum()  # keeps 12 bytes, for the gradient of the weight
            for _ in range(3):
                a.call(b, torch.neg, y)  # keeps none
                wait_until(lambda: room.used == 24)
            loss = loss + a.call(b, scale, x).sum()
            with pytest.raises(QuotaExceeded):
                a.call(b, scale, x)
            wait_until(lambda: room.used == 36)
            room._max_bytes_per_peer = 72  # three gradients take some, too, on their way
            a.backward(context_id, loss)
            assert torch.equal(a.gradients(context_id)[x], 2 * b.weight.detach())
        wait_until(lambda: not room.used)

    async with workers(2, scale) as (a, b):
        await in_thread(program, a, b)
        await quiet(a, b)
        gc.collect()
        await eventually(lambda: not b.agent.service._room.used)
