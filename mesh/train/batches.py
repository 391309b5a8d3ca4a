"""Batches: trees of tensors whose first dimension counts examples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch

__all__ = ["kind_of", "moved", "rows", "split", "tensors_of"]

_PLAIN = (bool, int, float, str, bytes, type(None))


def rows(batch: Any) -> int:
    """Return how many examples a batch has.

    Raises:
        ValueError: its tensors differ in that, or there are none.
    """
    counts = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_of(batch)}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            "a batch is tensors, in lists, tuples or dicts, with as many examples along the first "
            f"dimension of each; found {sorted(counts)}"
        )
    return int(counts.pop())


def split(batch: Any, count: int) -> list[tuple[int, Any]]:
    """Return `count` parts and how many examples each has: they differ by one, the first has most.

    Raises:
        ValueError: as `rows`.
    """
    total = rows(batch)
    bounds = [-(-total * part // count) for part in range(count + 1)]
    return [
        (stop - start, _mapped(batch, itemgetter(slice(start, stop))))
        for start, stop in pairwise(bounds)
    ]


def moved(batch: Any, device: torch.device, *, copy: bool = False) -> Any:
    """Return a batch on `device`; with `copy` in memory of its own."""
    return _mapped(batch, lambda tensor: tensor.to(device, copy=copy))


def kind_of(batch: Any) -> Hashable | None:
    """Return what batches have in common that differ in the elements of their tensors alone.

    Returns:
        None where it is not known of something in the batch whether that makes a difference.
    """
    if type(batch) is torch.Tensor and batch.layout is torch.strided and not batch.requires_grad:
        return (batch.dtype, batch.shape, batch.stride())
    if isinstance(batch, dict):
        kinds = [(name, kind_of(item)) for name, item in batch.items()]
        return None if any(kind is None for _, kind in kinds) else (type(batch), *kinds)
    if isinstance(batch, list | tuple):
        items = [kind_of(item) for item in batch]
        return None if None in items else (type(batch), *items)
    return (type(batch), batch) if isinstance(batch, _PLAIN) else None


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for item in batch.values():
            yield from tensors_of(item)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from tensors_of(item)


def _mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {name: _mapped(item, change) for name, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(item, change) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_mapped(item, change) for item in batch)
    return batch
