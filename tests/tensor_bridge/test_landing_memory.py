"""Memory is used again when nobody has it any more, and is otherwise as torch's own."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import torch

from tensor_bridge import describe, landing_memory
from tensor_bridge.landing_memory import LEAST_BYTES, LandingMemory
from tensor_bridge.lanes.shared import blocks
from tests.tensor_bridge.nodes import eventually, node, together
from tests.tensor_bridge.tensors import filled, same

pytestmark = pytest.mark.anyio

LARGE = describe(torch.empty(LEAST_BYTES, dtype=torch.uint8))
TURNED = describe(torch.empty(LEAST_BYTES // 16, 4, dtype=torch.float32).t())
"""As many bytes of another type and layout."""


@asynccontextmanager
async def memory() -> AsyncIterator[LandingMemory]:
    async with anyio.create_task_group() as tasks:
        yield LandingMemory(tasks.start_soon)
        tasks.cancel_scope.cancel()


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


async def test_what_was_let_go_of_is_used_again() -> None:
    async with memory() as room:
        tensor = room.allocate(LARGE)
        where = address(tensor)
        del tensor
        twin = room.allocate(TURNED)
        assert address(twin) == where
        assert describe(twin) == TURNED
        assert twin.untyped_storage().nbytes() == LEAST_BYTES
        assert room.nbytes == LEAST_BYTES
        assert address(room.allocate(LARGE)) != where  # in use
        where = address(twin)
        del twin
        other = describe(torch.empty(LEAST_BYTES + 1, dtype=torch.uint8))
        assert address(room.allocate(other)) != where  # of another size


def _view(tensor: torch.Tensor) -> object:
    return tensor[5:9]


def _graph(tensor: torch.Tensor) -> object:
    return (tensor[:4].to(torch.float32).requires_grad_() * tensor[:4].view(torch.uint8)).sum()


KEEPERS: dict[str, Callable[[torch.Tensor], object]] = {
    "a view": _view,
    "the storage": lambda tensor: tensor.untyped_storage(),
    "a typed storage": lambda tensor: tensor.view(torch.int32).untyped_storage(),
    "an array": lambda tensor: tensor.numpy(),
    "another's data": lambda tensor: torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage()
    ),
    "a capsule": lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
    "a graph": _graph,
    "a clone to come": lambda tensor: tensor._lazy_clone(),  # type: ignore[operator]
    "a weak name": lambda tensor: weakref.ref(tensor.untyped_storage()),
    "a cycle": lambda tensor: _cycle(tensor),
}


def _cycle(tensor: torch.Tensor) -> object:
    cycle: list[Any] = [tensor]
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize("keeper", KEEPERS)
async def test_what_anybody_can_get_at_is_not(keeper: str) -> None:
    async with memory() as room:
        tensor = room.allocate(LARGE).fill_(7)
        where = address(tensor)
        kept = KEEPERS[keeper](tensor)
        del tensor
        other = room.allocate(LARGE).fill_(1)
        assert address(other) != where
        if isinstance(kept, torch.Tensor) and kept.numel() > 1:
            assert kept.view(torch.uint8)[0] == 7
        del kept
        gc.collect()


def _grown(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    storage.resize_(2 * LEAST_BYTES)
    assert storage.nbytes() == 2 * LEAST_BYTES
    assert tensor[-1] == 7


def _shared(tensor: torch.Tensor) -> None:
    tensor.share_memory_()
    assert tensor.is_shared()
    assert tensor[-1] == 7


def _seen_by_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()


def _named(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().tag = "mine"  # type: ignore[attr-defined]


CHANGES = [_grown, _shared, _seen_by_numpy, _named]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
async def test_what_is_no_more_as_it_was_is_forgotten(
    change: Callable[[torch.Tensor], None],
) -> None:
    async with memory() as room:
        tensor = room.allocate(LARGE).fill_(7)
        change(tensor)
        del tensor
        before = {id(block.storage) for block in room._blocks}
        twin = room.allocate(LARGE)
        assert {id(block.storage) for block in room._blocks}.isdisjoint(before)
        storage = twin.untyped_storage()
        assert storage.nbytes() == LEAST_BYTES
        assert storage.resizable()
        assert not storage.is_shared()
        assert not vars(storage)


async def test_a_tensor_is_as_any_other() -> None:
    async with memory() as room:
        for _ in range(2):  # in new memory, and in the same again
            tensor = room.allocate(LARGE).fill_(7)
            twin = copy.deepcopy(tensor)
            assert torch.equal(twin, tensor)
            assert address(twin) != address(tensor)
            file = io.BytesIO()
            torch.save(tensor, file)
            file.seek(0)
            assert torch.equal(torch.load(file, weights_only=True), tensor)
            tensor.resize_(2 * LEAST_BYTES)
            assert tensor[LEAST_BYTES - 1] == 7
            assert tensor.untyped_storage().nbytes() == 2 * LEAST_BYTES
            parameter = torch.nn.Parameter(room.allocate(TURNED).fill_(1.0))
            (parameter * parameter).sum().backward()
            assert parameter.grad is not None
            assert bool((parameter.grad == 2).all())
            del tensor, twin, parameter


async def test_a_storage_is_freed_and_regrown() -> None:
    # What FSDP does with the storages of parameters that nobody needs for a while.
    async with memory() as room:
        tensor = room.allocate(LARGE).fill_(7)
        storage = tensor.untyped_storage()
        storage.resize_(0)
        assert (storage.nbytes(), storage.data_ptr()) == (0, 0)
        storage.resize_(LEAST_BYTES)
        tensor.fill_(3)
        other = room.allocate(LARGE).fill_(1)
        assert bool((tensor == 3).all())
        storage.resize_(0)
        del tensor, storage
        twin = room.allocate(LARGE).fill_(2)
        assert twin.untyped_storage().nbytes() == LEAST_BYTES
        assert bool((other == 1).all())


async def test_it_is_let_go_of_in_another_thread() -> None:
    async with memory() as room:
        held = [room.allocate(LARGE)]
        where = address(held[0])
        thread = threading.Thread(target=held.clear)
        thread.start()
        await anyio.to_thread.run_sync(thread.join)
        assert address(room.allocate(LARGE)) == where


async def test_so_much_is_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing_memory, "MOST_BYTES", 3 * LEAST_BYTES)
    async with memory() as room:
        held = [room.allocate(LARGE) for _ in range(5)]
        assert room.nbytes == 3 * LEAST_BYTES
        first, last = address(held[0]), address(held[-1])
        storage = weakref.ref(held[0].untyped_storage())
        held.clear()
        assert storage() is None  # forgotten first, and so gone with its tensor
        assert address(room.allocate(LARGE)) == last != first
        huge = describe(torch.empty(3 * LEAST_BYTES + 1, dtype=torch.uint8))
        small = describe(torch.empty(LEAST_BYTES - 1, dtype=torch.uint8))
        kept = room.nbytes
        room.allocate(huge)
        room.allocate(small)
        assert room.nbytes == kept
        # What there is makes room for another size before that is allocated.
        room.allocate(describe(torch.empty(3 * LEAST_BYTES, dtype=torch.uint8)))
        assert room.nbytes == 3 * LEAST_BYTES


async def test_after_a_while_it_is_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing_memory, "KEEP_SECONDS", 0.05)
    async with memory() as room:
        for _ in range(2):  # whoever watches comes back
            tensor = room.allocate(LARGE)
            storage = weakref.ref(tensor.untyped_storage())
            del tensor
            assert room.nbytes == LEAST_BYTES
            await eventually(lambda: room.nbytes == 0)
            assert storage() is None
        kept = room.allocate(LARGE).fill_(7)
        await eventually(lambda: room.nbytes == 0)
        assert bool((kept == 7).all())


async def test_it_ends_with_its_endpoint() -> None:
    async with memory() as room:
        room.allocate(LARGE)
        assert room.nbytes == LEAST_BYTES
    assert room.nbytes == 0
    room.allocate(LARGE)
    assert room.nbytes == 0
    async with node() as own:
        tensor = own.lanes.memory.allocate(LARGE)
        assert own.lanes.memory.nbytes == LEAST_BYTES
        del tensor
    assert own.lanes.memory.nbytes == 0


@pytest.mark.parametrize("lane", ["quic", "shared-memory"], indirect=True)
async def test_moves_land_in_it(lane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST_BYTES", 0)  # what lies in a block has landed nowhere
    tensors = [filled((LEAST_BYTES,), torch.uint8, seed) for seed in range(3)]
    async with together(node(), node()) as (a, client):
        at_a = await client.client(a)
        where = set()
        for tensor in tensors:
            ref = await at_a.put(tensor)
            where.add(address(a.store.get(ref.object_id).tensor))
            back = await at_a.get(ref)
            assert same(back, tensor)
            where.add(address(back))
            del back
            await at_a.delete(ref)
        assert len(where) == 2  # one here, and one there
