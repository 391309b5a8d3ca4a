"""Large copies by two threads: every byte, in turns, and nothing under way between two of them."""

from __future__ import annotations

import _thread
import ctypes
import mmap
import os

import anyio
import pytest
import torch

from tensor_bridge import TensorChanged, copying, tensor_bytes
from tensor_bridge.copying import PIECE, SHARED_FROM, TURN_BYTES, copy_in_turns, copy_now
from tensor_bridge.huge_pages import HUGE_PAGE, collapse
from tensor_bridge.lanes.shared.host import unavailable
from tensor_bridge.lanes.shared.mapping import map_memory
from tests.tensor_bridge.nodes import eventually
from tests.tensor_bridge.shared.test_pool import closing, memory

pytestmark = pytest.mark.anyio

SIZES = (0, 1, PIECE + 1, SHARED_FROM, TURN_BYTES, 2 * TURN_BYTES + PIECE + 7)


def random(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


@pytest.fixture(params=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    processors = {0} if request.param == "one thread" else {0, 1}
    monkeypatch.setattr(copying.os, "sched_getaffinity", lambda _: processors)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", SIZES)
async def test_every_byte_is_copied_and_counted(size: int) -> None:
    source, target = random(size), random(size)
    parts: list[int] = []
    await copy_in_turns(tensor_bytes(target), tensor_bytes(source), parts.append)
    assert torch.equal(source, target)
    assert sum(parts) == size
    assert all(part <= TURN_BYTES for part in parts)


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("gives", [True, False], ids=["huge", "small"])
async def test_new_memory_is_filled_by_huge_pages_or_without(
    gives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def give(address: int) -> bool:
        asked.append(address - ctypes.addressof(content))
        return gives and collapse(address)

    monkeypatch.setattr(copying, "collapse", give)
    size = 4 * HUGE_PAGE + PIECE // 2 + 7
    with closing(memory(size, 0)) as descriptor:
        content = map_memory(descriptor, size, mmap.MAP_SHARED)
    source, target = random(size), memoryview(content).cast("B")
    await copy_in_turns(target, tensor_bytes(source), lambda _: None, fresh=size)
    assert target == tensor_bytes(source)
    assert sorted(asked)[:1] == [0]
    assert all(at % HUGE_PAGE == 0 and at + HUGE_PAGE <= size for at in asked)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", SIZES)
def test_a_copy_at_once(size: int) -> None:
    source, target = random(size), random(size)
    copy_now(tensor_bytes(target), tensor_bytes(source))
    assert torch.equal(source, target)


async def test_what_is_not_as_long_is_refused() -> None:
    with pytest.raises(ValueError, match="length"):
        copy_now(memoryview(bytearray(2)), memoryview(bytearray(3)))


@pytest.mark.usefixtures("threads")
async def test_a_source_that_goes_is_not_read_any_more() -> None:
    source, target = random(2 * TURN_BYTES), torch.zeros(2 * TURN_BYTES, dtype=torch.uint8)
    looks = iter([True, False])
    with pytest.raises(TensorChanged, match="resized"):
        await copy_in_turns(
            tensor_bytes(target),
            tensor_bytes(source),
            lambda _: None,
            is_intact=lambda: next(looks),
        )
    assert torch.equal(target[:TURN_BYTES], source[:TURN_BYTES])
    assert not target[TURN_BYTES:].any()


@pytest.mark.parametrize("how", ["cancelled", "raised"])
async def test_nothing_is_under_way_when_it_ends_early(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying.os, "sched_getaffinity", lambda _: {0, 1})
    before = _thread._count()
    source, target = random(2 * TURN_BYTES), torch.zeros(2 * TURN_BYTES, dtype=torch.uint8)

    def moved(_: int) -> None:
        if how == "raised":
            raise OverflowError
        scope.cancel()

    with anyio.CancelScope() as scope:
        try:
            await copy_in_turns(tensor_bytes(target), tensor_bytes(source), moved)
        except OverflowError:
            assert how == "raised"
        else:
            raise AssertionError("it was not ended")
    left = target.clone()
    await eventually(lambda: _thread._count() == before)
    assert torch.equal(target, left)
    assert not target[TURN_BYTES:].any()


async def test_without_a_second_thread_one_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copying.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(copying._thread, "start_new_thread", no_thread)
    source, target = random(SHARED_FROM), random(SHARED_FROM)
    copy_now(tensor_bytes(target), tensor_bytes(source))
    assert torch.equal(source, target)


def test_the_processors_are_asked_for() -> None:
    assert os.sched_getaffinity(0)
