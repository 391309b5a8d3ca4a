"""How much memory a value keeps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

__all__ = ["nbytes_of"]

_COMPRESSED_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def nbytes_of(value: object) -> int:
    """Return how much memory tensors, texts and bytes of a value keep, if they lie open in it."""
    leaves = tree_leaves(value)
    for module in [leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)]:
        leaves += [*module.parameters(), *module.buffers()]
    storages: dict[int, int] = {}
    others = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            for part in _parts(leaf):
                storage = part.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(leaf, str | bytes | bytearray):
            others += len(leaf)
    return sum(storages.values()) + others


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with storages that a tensor consists of; none for one without memory."""
    if is_lazy(tensor):
        return
    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        plain = tensor.detach()
        yield from (plain._indices(), plain._values())
    elif tensor.layout in _COMPRESSED_BY_ROWS:
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values().detach())
    elif tensor.layout in _COMPRESSED_BY_COLUMNS:
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values().detach())
