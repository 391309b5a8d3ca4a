"""Memory in huge pages: a wish, and the same bytes without."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from tensor_bridge import huge_pages
from tensor_bridge.huge_pages import HUGE_PAGE, collapse, in_huge_pages
from tensor_bridge.lanes.shared.host import unavailable
from tensor_bridge.lanes.shared.mapping import Mapped, map_memory
from tests.tensor_bridge.shared.test_pool import closing, memory

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

SIZE = 3 * HUGE_PAGE


def mapped(size: int = SIZE) -> Mapped:
    with closing(memory(size, 0)) as descriptor:
        return map_memory(descriptor, size, mmap.MAP_SHARED)


def test_sizes_are_rounded_up() -> None:
    sizes = [0, 1, HUGE_PAGE, HUGE_PAGE + 1]
    assert [in_huge_pages(it) for it in sizes] == [0, HUGE_PAGE, HUGE_PAGE, 2 * HUGE_PAGE]


@pytest.mark.parametrize("size", [HUGE_PAGE, SIZE, SIZE + 1, SIZE + mmap.PAGESIZE])
def test_large_memory_begins_with_a_huge_page_and_leaves_nothing(size: int) -> None:
    for _ in range(3):
        content = mapped(size)
        address = ctypes.addressof(content)
        assert address % HUGE_PAGE == 0
        content[size - 1] = 7
        del content
        assert f"{address:x}-" not in Path("/proc/self/maps").read_text()


def test_a_page_that_is_asked_for_is_zeros_and_keeps_what_is_written() -> None:
    content = mapped()
    address = ctypes.addressof(content)
    for at in range(0, SIZE, HUGE_PAGE):
        collapse(address + at)
        assert not any(bytes(content[at : at + HUGE_PAGE]))
        content[at + HUGE_PAGE - 1] = 9
    assert bytes(content).count(9) == 3


@pytest.mark.parametrize(("number", "goes_on"), [(22, False), (12, True)])
def test_who_can_not_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, number: int, goes_on: bool
) -> None:
    asked = []

    def madvise(*arguments: int) -> int:
        asked.append(arguments)
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(huge_pages, "_collapses", True)
    monkeypatch.setattr(huge_pages, "_madvise", madvise)
    content = mapped()
    assert not collapse(ctypes.addressof(content))
    assert not collapse(ctypes.addressof(content))
    assert len(asked) == 1 + goes_on
