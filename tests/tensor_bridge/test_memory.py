"""Every element type in every layout, through bytes and back, to the bit."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensor_bridge import (
    CHUNK_BYTES,
    DTYPES,
    QuotaExceeded,
    TensorChanged,
    TensorMeta,
    UnsupportedTensor,
    allocate,
    chunks,
    describe,
    tensor_bytes,
)
from tensor_bridge.memory import NEW_WRITES
from tensor_bridge.store import writes_of
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


def carried(tensor: torch.Tensor, *, cut: int = 0) -> torch.Tensor:
    """Take `tensor` through bytes, taken up anew after `cut` of them, as a resumed move does."""
    meta = describe(tensor)
    twin = allocate(meta)
    room = tensor_bytes(twin)
    assert len(room) == meta.nbytes
    first = b"".join(chunks(tensor, meta))[:cut]
    room[:cut] = first
    at = cut
    for piece in chunks(tensor, meta, cut):
        assert 0 < len(piece) <= CHUNK_BYTES
        room[at : at + len(piece)] = piece
        at += len(piece)
    assert at == meta.nbytes
    return twin


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PLAIN)
def test_every_type_in_every_layout_arrives_to_the_bit(name: str, layout: str) -> None:
    tensor = LAYOUTS[layout](DTYPES[name])
    twin = carried(tensor)
    assert same(twin, tensor)
    assert twin.storage_offset() == 0
    assert twin.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
    if layout in DENSE:
        assert same_layout(twin, tensor)
    else:
        assert twin.is_contiguous()


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors_keep_their_quantizer(name: str, per_channel: bool) -> None:
    tensor = quantized(name, per_channel=per_channel)
    twin = carried(tensor)
    assert twin.qscheme() == tensor.qscheme()
    assert torch.equal(twin.int_repr(), tensor.int_repr())
    assert torch.equal(twin.dequantize(), tensor.dequantize())


def test_quantized_channels_last_keeps_its_layout() -> None:
    with quiet():
        values = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
        tensor = torch.quantize_per_tensor(values, 0.1, 0, torch.quint8)
    twin = carried(tensor)
    assert twin.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(twin.int_repr(), tensor.int_repr())


@pytest.mark.parametrize("shape", [(1, 1, 4, 4), (1, 3, 4, 1), (2, 1, 1, 1), (5, 1, 2, 3)])
def test_channels_last_survives_sizes_of_one(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape).to(memory_format=torch.channels_last)
    twin = carried(tensor)
    assert twin.is_contiguous(memory_format=torch.channels_last)
    assert twin.is_contiguous() == tensor.is_contiguous()
    assert twin.stride() == tensor.stride()


def test_conjugate_and_negative_bits_are_resolved() -> None:
    values = torch.tensor([[1 + 2j, 3 - 4j], [5j, -6 + 0j]])
    for tensor in (values.conj(), values.conj().t(), values.conj().imag, values.conj().imag[:, 0]):
        assert torch.equal(carried(tensor), tensor.resolve_conj().resolve_neg())


def test_a_wish_for_a_gradient_travels() -> None:
    parameter = torch.nn.Parameter(torch.randn(3, 2))
    twin = carried(parameter)
    assert twin.requires_grad
    assert twin.is_leaf
    assert type(twin) is torch.Tensor
    assert not carried(torch.randn(3)).requires_grad


def test_arrives_normal_within_inference_mode() -> None:
    with torch.inference_mode():
        twin = carried(torch.ones(3))
    assert not twin.is_inference()


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_strided_view_taken_up_at_any_byte(data: st.DataObject) -> None:
    dtype = DTYPES[data.draw(st.sampled_from(PLAIN))]
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    strides = tuple(data.draw(st.integers(0, 7)) for _ in shape)
    offset = data.draw(st.integers(0, 9))
    reach = [max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True)]
    base = filled((offset + sum(reach) + 1,), dtype, seed=data.draw(st.integers(0, 99)))
    tensor = base.as_strided(shape, strides, offset)
    cut = data.draw(st.integers(0, math.prod(shape) * dtype.itemsize))
    assert same(carried(tensor, cut=cut), tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base,
        lambda base: base[:, ::2],
        lambda base: base.t()[::3],
        lambda base: base[:, None, :].expand(-1, 3, -1),
        lambda base: base.reshape(-1)[1::2],
        lambda base: base.reshape(2, 2, -1)[:, 1],
    ],
)
def test_large_views_are_gathered_in_bounded_pieces(view) -> None:  # type: ignore[no-untyped-def]
    tensor = view(filled((700, 1200), torch.float32))
    for cut in (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 5):
        assert same(carried(tensor, cut=cut), tensor)


def test_elements_in_order_are_not_copied() -> None:
    tensor = torch.zeros(4, 4)
    for piece in chunks(tensor[1:3].t(), describe(tensor[1:3].t())):
        piece[0:4] = b"\x00\x00\x80\x3f"
    assert tensor[1, 0] == 1
    tensor_bytes(tensor)[-4:] = b"\x00\x00\x80\x3f"
    assert tensor[3, 3] == 1


def test_the_storage_can_still_be_resized_after_a_read() -> None:
    tensor = torch.ones(1000)
    assert sum(map(len, chunks(tensor, describe(tensor)))) == 4000
    tensor_bytes(tensor).release()
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(8000)


def test_a_storage_resized_during_a_read_is_noticed() -> None:
    tensor = filled((3 * CHUNK_BYTES,), torch.uint8)
    reading = chunks(tensor, describe(tensor))
    next(reading)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(TensorChanged, match="resized"):
        next(reading)


def test_a_byte_view_keeps_its_tensor_alive() -> None:
    tensor = torch.ones(8)
    gone = weakref.ref(tensor)
    view = tensor_bytes(tensor)
    del tensor
    gc.collect()
    assert gone() is not None
    assert view.tobytes() == b"\x00\x00\x80\x3f" * 8
    del view
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - DENSE))
def test_no_byte_view_of_what_is_not_in_order(layout: str) -> None:
    with pytest.raises(UnsupportedTensor, match="contiguous copy"):
        tensor_bytes(LAYOUTS[layout](torch.float32))


def test_no_byte_view_of_what_is_not_as_it_lies() -> None:
    with pytest.raises(UnsupportedTensor):
        tensor_bytes(torch.zeros(2, dtype=torch.complex64).conj())


@pytest.mark.parametrize(
    "tensor", [torch.ones(3), torch.ones(0), torch.ones(2, dtype=torch.bfloat16)]
)
def test_what_is_allocated_counts_as_written_once(tensor: torch.Tensor) -> None:
    meta = describe(tensor)
    there = torch.empty(meta.nbytes, dtype=torch.uint8).untyped_storage()
    assert writes_of(allocate(meta)) == writes_of(allocate(meta, there)) == NEW_WRITES


def test_too_large_an_allocation_is_an_error_of_ours() -> None:
    with pytest.raises(QuotaExceeded, match="memory"):
        allocate(TensorMeta(torch.uint8, (1 << 62,), (0,)))
