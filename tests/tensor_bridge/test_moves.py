"""Tensors between real endpoints: put, get, and copies that pass the client by."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
import torch

from tensor_bridge import DTYPES, Progress
from tests.tensor_bridge.nodes import Node, eventually, node, together
from tests.tensor_bridge.tensors import (
    DENSE,
    LAYOUTS,
    PLAIN,
    QUANTIZED,
    filled,
    quantized,
    quiet,
    same,
    same_layout,
)

pytestmark = pytest.mark.anyio

MIB = 1 << 20
LARGE = 16 * MIB
"""256 times what the client may carry of a copy, and as much as any window."""


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[Node, Node, Node]]:
    async with together(node(), node(), node()) as (a, b, c):
        yield a, b, c


async def test_every_type_there_and_back_and_across(nodes: tuple[Node, Node, Node]) -> None:
    a, b, client = nodes
    at_a, at_b = await client.client(a), await client.client(b)
    for index, name in enumerate(PLAIN):
        layout = list(LAYOUTS)[index % len(LAYOUTS)]
        tensor = LAYOUTS[layout](DTYPES[name])
        with quiet():
            ref = await at_a.put(tensor, name=name)
            copy = await at_a.copy_to(ref, at_b)
            back = await at_b.get(copy)
        assert same(back, tensor), (name, layout)
        assert (copy.node, copy.name, copy.meta) == (b.endpoint.node_id, name, ref.meta)
        await at_a.delete(ref)
        await at_b.delete(copy)
    await eventually(lambda: a.is_empty and b.is_empty)
    assert len(a.store) == len(b.store) == 0


async def test_every_layout_there_and_back(nodes: tuple[Node, Node, Node]) -> None:
    a, _, client = nodes
    at_a = await client.client(a)
    for layout, make in LAYOUTS.items():
        tensor = make(torch.bfloat16)
        back = await at_a.get(await at_a.put(tensor))
        assert same(back, tensor), layout
        assert same_layout(back, tensor) if layout in DENSE else back.is_contiguous(), layout


@pytest.mark.parametrize("per_channel", [False, True])
async def test_quantized_there_and_back(nodes: tuple[Node, Node, Node], per_channel: bool) -> None:
    a, _, client = nodes
    at_a = await client.client(a)
    for name in QUANTIZED:
        tensor = quantized(name, per_channel=per_channel)
        back = await at_a.get(await at_a.put(tensor))
        assert torch.equal(back.int_repr(), tensor.int_repr())
        assert torch.equal(back.dequantize(), tensor.dequantize())


async def test_a_large_copy_passes_the_client_by(nodes: tuple[Node, Node, Node], lane: str) -> None:
    a, b, client = nodes
    at_a, at_b = await client.client(a), await client.client(b)
    tensor = torch.arange(LARGE // 8)
    seen: list[Progress] = []
    copy = await at_a.copy_to(client.has(a, tensor), at_b, progress=seen.append)
    assert torch.equal(b.store.get(copy.object_id).tensor, tensor)
    assert b.store.get(copy.object_id).owner == client.endpoint.node_id
    infos = [(await client.connection(peer)).info for peer in (a, b)]
    carried = sum(info.bytes_sent + info.bytes_received for info in infos)
    assert carried < 64 * 1024
    between = a.endpoint.connection(b.endpoint.node_id)
    assert between is not None
    beside_quic = lane in ("shared-memory", "in-process")
    assert a.lanes.status(between).name == (lane if beside_quic else "quic")
    await eventually(lambda: (between.info.bytes_sent > LARGE) != beside_quic)
    assert seen[-1].moved == seen[-1].total == LARGE
    assert all(one.moved <= two.moved for one, two in pairwise(seen))


async def test_progress_of_put_and_get(nodes: tuple[Node, Node, Node]) -> None:
    a, _, client = nodes
    at_a = await client.client(a)
    putting: list[Progress] = []
    getting: list[Progress] = []
    ref = await at_a.put(filled((5 * MIB + 3,), torch.uint8), progress=putting.append)
    await at_a.get(ref, progress=getting.append)
    for seen in (putting, getting):
        assert seen[-1].moved == 5 * MIB + 3
        assert len(seen) > 1
        assert all(one.moved < two.moved for one, two in pairwise(seen))
        assert all(each.total == 5 * MIB + 3 for each in seen)
        assert all(0 <= one.seconds <= two.seconds for one, two in pairwise(seen))


async def test_lists_and_facts(nodes: tuple[Node, Node, Node]) -> None:
    a, _, client = nodes
    at_a = await client.client(a)
    refs = [await at_a.put(torch.tensor(number), name=f"n{number}") for number in range(70)]
    assert sorted(refs, key=lambda ref: ref.object_id) == list(await at_a.list())
    assert await at_a.info(refs[3].object_id) == refs[3]
    stranger = await nodes[1].client(a)
    assert await stranger.list() == ()
