"""Copies of a model on other devices, and tensors of several models that have to agree."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from mesh.device.groups.context import DistributedContext

__all__ = ["average_buffers", "replicate"]


def replicate(context: DistributedContext, model: nn.Module) -> list[nn.Module]:
    """Move a model to the first device, and return it with a copy on each other one.

    Its elements go to the first device, and from there to the others, not through this process.
    """
    blank = copy.deepcopy(model)
    first = model.to(context.devices[0])
    others = [copy.deepcopy(blank).to_empty(device=device) for device in context.devices[1:]]
    models = [first, *others]
    if len(models) > 1:
        _agree(context, [_tensors(each) for each in models])
    return models


def average_buffers(context: DistributedContext, models: Sequence[nn.Module]) -> None:
    """Have the buffers of all models be the same.

    Those of numbers with fractions, such as a normalization's running statistics, become their
    means; all others those of the first model.
    """
    if len(models) < 2:
        return
    with torch.no_grad():
        tables = [list(model.buffers()) for model in models]
        fractions = [each for each in range(len(tables[0])) if tables[0][each].is_floating_point()]
        for positions in _by_dtype(tables[0], fractions):
            flats = [_flat([table[each] for each in positions]) for table in tables]
            averaged = context.all_reduce(flats, "mean").resolve()
            for table, flat in zip(tables, averaged, strict=True):
                _unflatten(flat, [table[each] for each in positions])
        rest = [each for each in range(len(tables[0])) if each not in fractions]
        _agree(context, [[table[each] for each in rest] for table in tables])


def _agree(context: DistributedContext, tables: Sequence[Sequence[torch.Tensor]]) -> None:
    """Have tensors of all devices be those of the first."""
    first = tables[0]
    with torch.no_grad():
        for positions in _by_dtype(first, range(len(first))):
            sent = context.broadcast(_flat([first[each] for each in positions])).resolve()
            for table, flat in list(zip(tables, sent, strict=True))[1:]:
                _unflatten(flat, [table[each] for each in positions])


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _by_dtype(tensors: Sequence[torch.Tensor], positions: Sequence[int]) -> list[list[int]]:
    found: dict[torch.dtype, list[int]] = {}
    for position in positions:
        found.setdefault(tensors[position].dtype, []).append(position)
    return list(found.values())


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
