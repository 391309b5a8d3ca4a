"""Any stride, offset and number of elements: out in row order, back in place."""

from __future__ import annotations

import pytest
import torch

from mesh.collective import (
    UnsupportedCollective,
    check_distinct,
    check_readable,
    check_writable,
    gathered,
    raw,
    scatter_back,
)

LAYOUTS = {
    "contiguous": lambda base: base,
    "transposed": lambda base: base.permute(3, 2, 1, 0),
    "column": lambda base: base[..., 1],
    "channels_last": lambda base: base.contiguous(memory_format=torch.channels_last),
    "offset": lambda base: base.reshape(-1)[5:17],
    "every third": lambda base: base.reshape(-1)[1::3],
    "scalar": lambda base: base.reshape(-1)[7],
    "empty": lambda base: base[:0],
    "flipped": lambda base: base.flip(0),
}
DTYPES = [torch.float32, torch.bool, torch.complex128, torch.float8_e4m3fn, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_there_and_back(layout, dtype) -> None:
    tensor = layout(torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).to(torch.float32).to(dtype))
    elements = gathered(tensor)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert elements.is_contiguous()
    assert elements.to(wide).tolist() == tensor.to(wide).reshape(-1).tolist()
    fresh = torch.flip(elements.clone().view(torch.uint8).view(-1, dtype.itemsize), (0,))
    fresh = fresh.contiguous().view(-1).view(dtype)
    if tensor.is_contiguous():
        assert elements.data_ptr() == tensor.data_ptr()
        raw(elements)[:] = raw(fresh)
        fresh = elements
    before = tensor._version
    scatter_back(fresh, tensor)
    assert tensor.to(wide).reshape(-1).tolist() == fresh.to(wide).tolist()
    assert tensor._version > before


def test_conjugate_and_negative_views() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    assert gathered(base.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert gathered(base.conj().imag).tolist() == [-2, 4]
    scatter_back(torch.tensor([5 + 6j, 7j]), base.conj())
    assert base.tolist() == [5 - 6j, -7j]


def test_expanded_tensors_can_be_read_but_not_written() -> None:
    tensor = torch.ones(1, 3).expand(4, 3)
    check_readable(tensor, "broadcast")
    assert gathered(tensor).shape == (12,)
    with pytest.raises(UnsupportedCollective, match=r"expand\(\)"):
        check_writable(tensor, "all_reduce")
    check_writable(torch.ones(1, 3).expand(1, 3), "all_reduce")


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.ones(2, device="meta"), "device 'meta'"),
        (lambda: torch.ones(2, 2).to_sparse(), "sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_other_kinds_are_refused(make, word) -> None:
    tensor = make()
    with pytest.raises(UnsupportedCollective, match=f"send on a tensor.*{word}"):
        check_readable(tensor, "send")


def test_requires_grad_and_inference_tensors() -> None:
    leaf = torch.ones(3, requires_grad=True)
    raw(gathered(leaf))[:4] = memoryview(b"\0\0\0\0")
    with torch.no_grad():
        scatter_back(torch.zeros(3), leaf)
    assert leaf.tolist() == [0, 0, 0]
    with torch.inference_mode():
        tensor = torch.ones(3)
        scatter_back(gathered(tensor), tensor)


def test_storage_stays_resizable() -> None:
    tensor = torch.ones(4)
    view = raw(gathered(tensor))
    del view
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(16)


def test_aliased_outputs_are_refused_with_their_indices() -> None:
    one, two = torch.empty(3), torch.empty(3)
    with pytest.raises(UnsupportedCollective, match="outputs 0 and 2 share"):
        check_distinct([one, two, one], "all_gather")
    whole = torch.empty(10)
    with pytest.raises(UnsupportedCollective, match="outputs 0 and 1 share"):
        check_distinct([whole[:6], whole[5:]], "all_gather")
    grid = torch.empty(4, 4)
    with pytest.raises(UnsupportedCollective, match="outputs 0 and 1 share"):
        check_distinct([grid[:, 1], grid[2:, :2]], "all_gather")


def test_distinct_outputs_are_not() -> None:
    grid = torch.empty(4, 4)
    check_distinct(list(grid.unbind(1)), "all_gather")
    check_distinct(list(grid.chunk(4)), "all_gather")
    check_distinct([grid[:2, :2], grid[:2, 2:], grid[2:]], "all_gather")
    check_distinct([torch.empty(0)] * 3, "all_gather")
