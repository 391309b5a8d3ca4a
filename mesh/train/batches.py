"""Batches: trees of tensors whose first dimension counts examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch

__all__ = ["moved", "rows", "split"]


def rows(batch: Any) -> int:
    """Return how many examples a batch has.

    Raises:
        ValueError: its tensors differ in that, or there are none.
    """
    counts = {tensor.shape[0] if tensor.dim() else 0 for tensor in _tensors(batch)}
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


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch on `device`."""
    return _mapped(batch, lambda tensor: tensor.to(device))


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


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for item in batch.values():
            yield from _tensors(item)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from _tensors(item)
