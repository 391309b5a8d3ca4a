"""Any tensor arrives to the bit, wherever in its move the link is cut, and however often."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from auth import TokenLimits
from tensor_bridge import DTYPES, TensorRef
from tests.tensor_bridge.nodes import Node, eventually, node, together
from tests.tensor_bridge.tensors import PLAIN, filled, same
from transport import AppCode, Connection

pytestmark = pytest.mark.anyio

MOST_BYTES = 600_000
"""More than two pieces of a move, and hundreds of packets."""

slow_examples = settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # What a cut does depends on the turn of the loop that it falls in: there is nothing to shrink.
    phases=[Phase.explicit, Phase.generate],
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A view of any type, any order of its dimensions, with gaps, an offset, or no element."""
    dtype = DTYPES[draw(st.sampled_from(PLAIN))]
    room = MOST_BYTES // dtype.itemsize
    shape: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        shape.append(draw(st.integers(0, max(1, room // max(1, math.prod(shape))))))
    tensor = filled(tuple(shape), dtype, draw(st.integers(0, 9)))
    if shape:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
        for axis, size in enumerate(tensor.shape):
            start, step = draw(st.integers(0, min(size, 3))), draw(st.integers(1, 3))
            tensor = tensor[(*(slice(None),) * axis, slice(start, None, step))]
        if draw(st.booleans()):
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 2)), *tensor.shape)
    return tensor


QUICK = TokenLimits(claim_seconds=2.5, progress_seconds=2.5)
"""A token whose delivery nobody could acknowledge, for the link was cut, is there until then."""

cuts = st.lists(st.tuples(st.integers(0, 150), st.booleans()), max_size=4)
"""When the link is cut, in turns of the event loop since it was there, and from which side."""


def _ends(one: Node, other: Node) -> tuple[Connection, Connection] | None:
    """Both ends of the link between two nodes, once it is there."""
    here = one.endpoint.connection(other.endpoint.node_id)
    there = other.endpoint.connection(one.endpoint.node_id)
    return None if here is None or there is None else (here, there)


async def while_cut(
    one: Node, other: Node, when: list[tuple[int, bool]], move: Callable[[], Awaitable[TensorRef]]
) -> TensorRef:
    """Run `move` while the connection between two nodes is cut again and again."""

    async def cut() -> None:
        for turns, from_here in when:
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            # A link that only one of them has is one that is still made: then nobody was there.
            while (ends := _ends(one, other)) is None:  # noqa: ASYNC110 - of either node, no event
                await anyio.sleep(0.002)
            connection = ends[0 if from_here else 1]
            connection.abort(AppCode.LEFT, "cut")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cut)
        try:
            return await move()
        finally:
            tasks.cancel_scope.cancel()


@given(tensor=tensors(), cuts=cuts)
@slow_examples
async def test_put_and_get(tensor: torch.Tensor, cuts: list[tuple[int, bool]]) -> None:
    async with together(node(), node()) as (a, client):
        at_a = await client.client(a, reconnect=True)
        ref = await while_cut(client, a, cuts, lambda: at_a.put(tensor))
        assert same(a.store.get(ref.object_id).tensor, tensor)
        assert len(a.store) == 1, "one put, one object"
        back: list[torch.Tensor] = []

        async def get() -> TensorRef:
            back.append(await at_a.get(ref))
            return ref

        await while_cut(client, a, cuts, get)
        assert same(back[0], tensor)
        await eventually(lambda: a.is_empty)


@given(tensor=tensors(), cuts=cuts)
@slow_examples
async def test_copy(tensor: torch.Tensor, cuts: list[tuple[int, bool]]) -> None:
    async with together(node(tokens=QUICK), node(), node()) as (a, b, client):
        at_a, at_b = [await client.client(each, reconnect=True) for each in (a, b)]
        ref = client.has(a, tensor)
        await b.connection(a)  # a link has to be there before it can break
        copy = await while_cut(a, b, cuts, lambda: at_a.copy_to(ref, at_b))
        assert same(b.store.get(copy.object_id).tensor, tensor)
        assert len(b.store) == 1, "one order, one copy"
        await eventually(lambda: a.is_empty and b.is_empty)


async def test_one_tensor_to_many_at_once() -> None:
    async with together(node(), node(), node(), node()) as (a, b, c, client):
        at_a, at_b, at_c = [await client.client(each) for each in (a, b, c)]
        tensor = filled((300, 700), torch.float32).t()
        ref = client.has(a, tensor)
        arrived: list[torch.Tensor] = []

        async def get() -> None:
            arrived.append(await at_a.get(ref))

        async def copy(target: Node, client_of: object) -> None:
            made = await at_a.copy_to(ref, client_of)  # type: ignore[arg-type]
            arrived.append(target.store.get(made.object_id).tensor)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(get)
                tasks.start_soon(copy, b, at_b)
                tasks.start_soon(copy, c, at_c)
        assert len(arrived) == 9
        assert all(same(each, tensor) for each in arrived)
        await eventually(lambda: a.is_empty and b.is_empty and c.is_empty)
