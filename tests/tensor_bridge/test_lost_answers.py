"""The link breaks exactly between an action and its answer: nothing is done twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
import torch

from auth import MeshError, TokenLimits
from tensor_bridge import NoSuchTensor
from tensor_bridge.arrivals import Arrival
from tensor_bridge.serve_create import CREATE_CALL, CreateCall, dense_meta
from tensor_bridge.service import DELETE_CALL, INFO_CALL, MINT_CALL
from tensor_bridge.wire import Stored
from tests.tensor_bridge.nodes import Node, eventually, node, together
from transport import AppCode, CborValue, Incoming
from transport.services import _Service

pytestmark = pytest.mark.anyio

QUICK = TokenLimits(claim_seconds=1.0, progress_seconds=1.0)


def lose_answers(server: Node, call: str, times: int = 1) -> list[CborValue]:
    """Cut the link after `call` has acted and before it answers; return the answers."""
    services = server.endpoint._services._services
    real = services[call]
    answers: list[CborValue] = []

    def lose(request: Incoming, answer: CborValue) -> CborValue:
        answers.append(answer)
        if len(answers) <= times:
            request.connection.abort(AppCode.LEFT)
        return answer

    async def act(request: Incoming) -> CborValue:
        if real.is_call:
            return lose(request, await real.handler(request))
        say = request.stream.send_reply
        request.stream.send_reply = lambda answer: say(lose(request, answer))  # type: ignore[method-assign]
        return await real.handler(request)

    services[call] = _Service(act, real.scope, is_call=real.is_call)
    return answers


async def test_put_asks_again_and_finds_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    async with together(node(), node()) as (a, client):
        told: list[Stored] = []
        keep = Arrival.keep

        def keep_and_cut(arrival: Arrival) -> Stored:
            told.append(keep(arrival))
            if len(told) == 1:
                a.endpoint.connections[0].abort(AppCode.LEFT)
            return told[-1]

        monkeypatch.setattr(Arrival, "keep", keep_and_cut)
        at_a = await client.client(a, reconnect=True)
        tensor = torch.arange(1000)
        ref = await at_a.put(tensor, name="once")
        assert len(told) > 1, "it was asked again"
        assert {stored.object_id for stored in told} == {ref.object_id}
        assert len(a.store) == 1
        assert torch.equal(await at_a.get(ref), tensor)
        await eventually(lambda: a.is_empty)


async def test_create_makes_one_tensor() -> None:
    async with together(node(), node()) as (a, client):
        answers = lose_answers(a, CREATE_CALL, times=2)
        at_a = await client.client(a, reconnect=True)
        ref = await at_a.create("randn", (100,), seed=3, name="once")
        assert len(answers) == 3
        assert answers[0] == answers[1] == answers[2]
        assert len(a.store) == 1
        expected = torch.randn(100, generator=torch.Generator().manual_seed(3))
        assert torch.equal(await at_a.get(ref), expected)
        other = await at_a.create("randn", (100,), seed=3, name="once")
        assert other.object_id != ref.object_id, "another wish is another tensor"
        await eventually(lambda: a.is_empty)


async def test_create_by_two_tries_at_once_makes_one_tensor() -> None:
    async with together(node(), node()) as (a, client):
        connection = await client.connection(a)
        order = CreateCall("ab" * 16, "ones", dense_meta(torch.float32, (1 << 20,))).encode()
        answers: list[CborValue] = []
        overtaken: list[str] = []

        async def attempt() -> None:
            try:
                answers.append(await connection.call(CREATE_CALL, order))
            except MeshError as error:
                overtaken.append(str(error))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(attempt)
        assert answers
        assert all(answer == answers[0] for answer in answers)
        assert all("a later try" in text for text in overtaken)
        assert len(a.store) == 1
        await eventually(lambda: a.is_empty)


async def test_a_create_that_the_caller_gave_up_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with together(node(), node()) as (a, client):
        at_a = await client.client(a)
        working = anyio.Event()

        async def hang(call: CreateCall, tensor: torch.Tensor) -> None:
            working.set()
            await anyio.sleep_forever()

        monkeypatch.setattr("tensor_bridge.serve_create._fill", hang)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(at_a.create, "zeros", (1000,))
            await working.wait()
            assert len(a.service.arrivals) == 1
            tasks.cancel_scope.cancel()
        await eventually(lambda: a.is_empty and a.store.used() == (0, 0))


async def test_delete_is_done_though_its_answer_was_lost() -> None:
    async with together(node(), node()) as (a, client):
        at_a = await client.client(a, reconnect=True)
        kept, ref = await at_a.put(torch.ones(3)), await at_a.put(torch.ones(3))
        answers = lose_answers(a, DELETE_CALL)
        await at_a.delete(ref)
        assert len(answers) == 1, "the second try found nothing to delete"
        assert [each.object_id for each in await at_a.list()] == [kept.object_id]
        with pytest.raises(NoSuchTensor):
            await at_a.delete(ref)  # the control: a tensor that was gone before is an error


async def test_copy_makes_one_copy_and_a_token_that_nobody_got_expires() -> None:
    async with together(node(tokens=QUICK), node(), node()) as (a, b, client):
        at_a, at_b = [await client.client(each, reconnect=True) for each in (a, b)]
        ref = await at_a.put(torch.arange(100))
        answers = lose_answers(a, MINT_CALL)
        copy = await at_a.copy_to(ref, at_b)
        assert len(answers) == 2
        assert len(b.store) == 1
        assert torch.equal(await at_b.get(copy), torch.arange(100))
        assert a.tokens.counts().live == 1, "the one that was lost on the way"
        await eventually(lambda: a.is_empty and b.is_empty)


@pytest.mark.parametrize("call", [CREATE_CALL, DELETE_CALL, INFO_CALL])
async def test_without_a_way_back_the_loss_is_an_error(call: str) -> None:
    async with together(node(), node()) as (a, client):
        at_a = await client.client(a)
        ref = await at_a.put(torch.ones(3))
        uses: dict[str, Callable[[], Awaitable[object]]] = {
            CREATE_CALL: lambda: at_a.create("ones", (3,)),
            DELETE_CALL: lambda: at_a.delete(ref),
            INFO_CALL: lambda: at_a.info(ref.object_id),
        }
        answers = lose_answers(a, call)
        with pytest.raises(MeshError, match="left"):
            await uses[call]()
        assert len(answers) == 1


async def test_what_only_reads_is_not_repeated() -> None:
    async with together(node(), node()) as (a, client):
        at_a = await client.client(a, reconnect=True)
        ref = await at_a.put(torch.ones(3))
        answers = lose_answers(a, INFO_CALL)
        with pytest.raises(MeshError, match="left"):
            await at_a.info(ref.object_id)
        assert await at_a.info(ref.object_id) == ref
        assert len(answers) == 2
