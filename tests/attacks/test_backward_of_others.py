"""A node takes part in a backward only with those whose messages it has got, or sent.

A peer that may call a node knows, or guesses, the ids of a context of others: it can mark nothing
in it, start nothing, bring no gradients, and end nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

import anyio
import pytest
import torch

from auth import SecretKey
from mesh.autograd import marker, passes
from mesh.autograd.contexts import MAX_CONTEXTS_OF_ONE, Context, Contexts
from mesh.autograd.marking import MAX_RUNS
from mesh.autograd.wire import (
    MARK_SERVICE,
    RELEASE_SERVICE,
    START_SERVICE,
    Failure,
    Gradients,
    MarkingId,
    MarkOrder,
    StartOrder,
)
from mesh.rpc.links import ContextId, Link, current_context
from tests.mesh.autograd.nodes import Worker, in_thread, quiet, workers
from tests.mesh.nodes import eventually
from transport import LimitExceeded, ProtocolError

pytestmark = pytest.mark.anyio


def scale(worker: Worker, x: torch.Tensor) -> torch.Tensor:
    return x * worker.weight


def echo(worker: Worker) -> None:
    """Do nothing."""


async def say(by: Worker, to: Worker, service: str, value: Any) -> Any:
    connection = await by.agent.connected(to.node_id)
    return await connection.call(service, value)


async def test_only_those_who_take_part_mark_start_and_end() -> None:
    async with workers(3, scale) as (a, b, intruder):
        context = a.agent.autograd.begin()
        token = current_context.set(context.id)
        await a.agent.call(b.node_id, "scale", (torch.ones(3),))
        current_context.reset(token)

        theirs = b.agent.autograd.contexts.need(context.id)
        (number,) = theirs.sent
        by_intruder = MarkingId(intruder.node_id, 1)
        mark = MarkOrder(context.id, by_intruder, {number: frozenset({0})})
        answer = await say(intruder, b, MARK_SERVICE, mark.encode())
        assert Failure.is_in(answer)
        assert not theirs.markings

        start = StartOrder(context.id, by_intruder, 1, False, 5.0)
        assert Failure.is_in(await say(intruder, b, START_SERVICE, start.encode()))

        gradients = Gradients(context.id, by_intruder, 1, number, [torch.ones(3)])
        late = b.agent.autograd.contexts.late
        await intruder.agent.send_gradients(b.node_id, gradients.arguments())
        assert b.agent.autograd.contexts.late == late + 1  # of no marking: dropped

        with pytest.raises(ProtocolError):
            await say(intruder, b, RELEASE_SERVICE, {"context": context.id.encode()})
        assert b.agent.autograd.contexts.live(context.id) is theirs

        # Also if it makes itself a caller in it.
        own = Context(context.id)
        intruder.agent.autograd.contexts._contexts[context.id] = own
        token = current_context.set(context.id)
        await intruder.agent.call(b.node_id, "scale", (torch.ones(3),))
        current_context.reset(token)
        del intruder.agent.autograd.contexts._contexts[context.id]
        assert theirs.callers == {a.node_id, intruder.node_id}
        await say(intruder, b, RELEASE_SERVICE, {"context": context.id.encode()})
        assert b.agent.autograd.contexts.live(context.id) is theirs

        # The same from who takes part.
        marking = MarkingId(a.node_id, 1)
        mark = MarkOrder(context.id, marking, {number: frozenset({0})})
        assert await say(a, b, MARK_SERVICE, mark.encode()) == {"first": True}
        gradients = Gradients(context.id, marking, 1, number, [torch.ones(3)])
        with pytest.raises(ProtocolError):  # the intruder, of a marking that there is
            await intruder.agent.send_gradients(b.node_id, gradients.arguments())
        start = StartOrder(context.id, marking, 1, False, 5.0)
        assert Failure.is_in(await say(intruder, b, START_SERVICE, start.encode()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a.agent.send_gradients, b.node_id, gradients.arguments())
            assert await say(a, b, START_SERVICE, start.encode()) is None
        assert torch.equal(theirs.gradients[b.weight], torch.ones(3))
        assert await say(a, b, RELEASE_SERVICE, {"context": context.id.encode()}) is None
        await in_thread(a.agent.autograd.end, context)
        await quiet(a, b, intruder)


async def test_gradients_that_nobody_needs_are_refused() -> None:
    async with workers(2, scale) as (a, b):
        context = a.agent.autograd.begin()
        token = current_context.set(context.id)
        await a.agent.call(b.node_id, "scale", (torch.ones(3, requires_grad=True),))
        current_context.reset(token)
        (number,) = b.agent.autograd.contexts.need(context.id).sent
        marking = MarkingId(a.node_id, 1)
        for wanted in ({number: {7}}, {number + 1: {0}}):
            mark = MarkOrder(
                context.id, marking, {each: frozenset(what) for each, what in wanted.items()}
            )
            assert Failure.is_in(await say(a, b, MARK_SERVICE, mark.encode()))
        mark = MarkOrder(context.id, marking, {number: frozenset({0})})
        await say(a, b, MARK_SERVICE, mark.encode())
        for message, given in ((number, []), (number, [None, torch.ones(3)]), (99, [None])):
            gradients = Gradients(context.id, marking, 1, message, given)
            with pytest.raises(ProtocolError):
                await a.agent.send_gradients(b.node_id, gradients.arguments())
        with pytest.raises(ProtocolError):
            await a.agent.send_gradients(b.node_id, (b"", 1, b"", 1, 1, 1, []))
        # Those that wait for a run take room, and there are not many runs.
        room = b.agent.service._room
        before = room.used
        for run in range(1, MAX_RUNS + 1):
            good = Gradients(context.id, marking, run, number, [torch.ones(3)])
            await a.agent.send_gradients(b.node_id, good.arguments())
        assert room.used == before + 12 * MAX_RUNS
        more = Gradients(context.id, marking, MAX_RUNS + 1, number, [torch.ones(3)])
        with pytest.raises(LimitExceeded):
            await a.agent.send_gradients(b.node_id, more.arguments())
        await in_thread(a.agent.autograd.end, context)
        await quiet(a, b)
        assert not room.used


async def test_one_peer_leaves_room_for_the_marks_and_runs_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(marker, "MAX_MARKINGS", 2)
    monkeypatch.setattr(passes, "MAX_RUNS_OF_ONE", 1)
    async with workers(3, scale) as (a, b, other):
        context = a.agent.autograd.begin()
        other.agent.autograd.contexts._contexts[context.id] = Context(context.id)
        token = current_context.set(context.id)
        for by in (a, other):
            await by.agent.call(b.node_id, "scale", (torch.ones(3),))
        current_context.reset(token)
        theirs = b.agent.autograd.contexts.need(context.id)

        async def mark(by: Worker, number: int) -> Any:
            (sent,) = (n for n, each in theirs.sent.items() if each.peer == by.node_id)
            order = MarkOrder(context.id, MarkingId(by.node_id, number), {sent: frozenset({0})})
            return await say(by, b, MARK_SERVICE, order.encode())

        async def start(by: Worker, number: int) -> Any:
            order = StartOrder(context.id, MarkingId(by.node_id, number), 1, False, 5.0)
            return await say(by, b, START_SERVICE, order.encode())

        for number in range(2):
            assert not Failure.is_in(await mark(other, number))
        assert "are kept already" in str(await mark(other, 2))
        assert not Failure.is_in(await mark(a, 1))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start, other, 0)
            await eventually(lambda: b.agent.autograd.running == 1)
            assert "of this caller's" in str(await start(other, 1))
            tasks.start_soon(start, a, 1)
            await eventually(lambda: b.agent.autograd.running == 2)
            await in_thread(a.agent.autograd.end, context)
        await quiet(a, b)


async def test_contexts_of_one_caller_are_bounded_and_none_is_another_ones() -> None:
    async with workers(3, echo) as (a, b, other):
        contexts = b.agent.autograd.contexts

        async def call_in(by: Worker, owner: Worker, number: int) -> None:
            current_context.set(ContextId(owner.node_id, number))
            by.agent.autograd.contexts.join(ContextId(owner.node_id, number), by.node_id)
            by.agent.autograd._recorder.leaving = (  # type: ignore[method-assign]
                lambda to, tensors: Link(ContextId(owner.node_id, number))
            )
            await by.agent.call(b.node_id, "echo")

        for number in range(MAX_CONTEXTS_OF_ONE):
            contexts.join(ContextId(a.node_id, number), a.node_id)
        with pytest.raises(LimitExceeded):
            await call_in(a, a, MAX_CONTEXTS_OF_ONE)
        await call_in(other, other, 1)  # the same number as one of a's
        with pytest.raises(RuntimeError, match="Could not find"):
            contexts.find(1)  # whose?
        assert contexts.find(2).id.owner == a.node_id
        own = b.agent.autograd.begin()
        contexts.join(ContextId(a.node_id, own.id.number), other.node_id)
        assert contexts.find(own.id.number) is own
        assert contexts.join(ContextId(b.node_id, 5), a.node_id) is None  # never was, or is over
        await eventually(lambda: len(contexts) > 0)


def test_ids_of_contexts_are_not_to_be_guessed() -> None:
    contexts = Contexts(SecretKey.generate().node_id, 1.0)
    for rank in (None, 3):
        contexts.worker_id = rank
        numbers = [contexts.begin().id.number for _ in range(8)]
        steps = {later - before for before, later in itertools.pairwise(numbers)}
        assert min(map(abs, steps)) > 1 << 20
        assert rank is None or {number >> 48 for number in numbers} == {rank}
