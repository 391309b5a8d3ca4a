"""Tensors to move: every element type, every way to lie in memory, and bit-exact comparison."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from tensor_bridge import DTYPES

__all__ = [
    "DENSE",
    "LAYOUTS",
    "PLAIN",
    "QUANTIZED",
    "bits",
    "filled",
    "quantized",
    "quiet",
    "same",
    "same_layout",
]

QUANTIZED = ("qint8", "quint8", "qint32")
PLAIN = tuple(name for name in DTYPES if name not in QUANTIZED)


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a contiguous tensor whose bytes are random, NaNs with payloads among them."""
    random = torch.Generator().manual_seed(seed)
    raw = torch.empty(shape, dtype=torch.uint8).numel() * dtype.itemsize
    data = torch.randint(0, 256, (raw,), dtype=torch.uint8, generator=random)
    if dtype is torch.bool:
        data %= 2
    with quiet():
        tensor = torch.empty(0, dtype=dtype)
    return tensor.set_(data.untyped_storage(), 0, shape, _rows(shape))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements of `tensor` in row order, by a way of its own."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    alias = torch.empty(0, dtype=torch.uint8)
    size = tensor.dtype.itemsize
    strides = (*(stride * size for stride in tensor.stride()), 1)
    shape = (*tensor.shape, size)
    alias.set_(tensor.untyped_storage(), tensor.storage_offset() * size, shape, strides)
    return alias.contiguous()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether the two have the same type, shape and bits."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.requires_grad == right.requires_grad
        and torch.equal(bits(left), bits(right))
    )


def same_layout(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether the strides agree wherever they mean something."""
    pairs = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all(size == 1 or mine == theirs for size, mine, theirs in pairs)


def quiet() -> warnings.catch_warnings[list[warnings.WarningMessage]]:
    """Silence torch about element types that it calls experimental or deprecated."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def quantized(name: str, *, per_channel: bool) -> torch.Tensor:
    """Return a quantized tensor of shape (3, 4, 5)."""
    dtype = DTYPES[name]
    values = torch.linspace(-3, 3, 60).reshape(3, 4, 5)
    with quiet():
        if not per_channel:
            return torch.quantize_per_tensor(values, 0.05, 3, dtype)
        scales = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
        return torch.quantize_per_channel(values, scales, torch.tensor([0, 1, 2, 3]), 1, dtype)


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _diagonal(dtype: torch.dtype) -> torch.Tensor:
    return filled((6, 6), dtype, 7).diagonal()


LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "contiguous": lambda dtype: filled((3, 4, 5), dtype),
    "scalar": lambda dtype: filled((), dtype),
    "scalar of a row": lambda dtype: filled((5,), dtype)[3],
    "empty": lambda dtype: filled((1, 0, 2), dtype),
    "no dimension has size but one": lambda dtype: filled((1, 1, 1), dtype),
    "transposed": lambda dtype: filled((4, 6), dtype).t(),
    "permuted": lambda dtype: filled((2, 3, 4), dtype).permute(2, 0, 1),
    "channels_last": lambda dtype: filled((2, 4, 5, 3), dtype).permute(0, 3, 1, 2),
    "offset": lambda dtype: filled((10, 3), dtype)[4:9],
    "column": lambda dtype: filled((6, 5), dtype)[:, 2],
    "every second": lambda dtype: filled((9, 4), dtype)[::2, 1::2],
    "expanded": lambda dtype: filled((3, 1), dtype).expand(3, 7),
    "expanded scalar": lambda dtype: filled((), dtype).expand(2, 3),
    "overlapping": lambda dtype: filled((12,), dtype).unfold(0, 4, 2),
    "diagonal": _diagonal,
}
"""How a tensor can lie in memory; each returns a tensor of the element type it is given."""

DENSE = frozenset(
    {
        *("contiguous", "scalar", "scalar of a row", "empty", "no dimension has size but one"),
        *("transposed", "permuted", "channels_last", "offset"),
    }
)
"""The layouts that fill one span of memory, and so arrive with the strides they left with."""
