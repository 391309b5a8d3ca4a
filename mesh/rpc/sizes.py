"""How much memory a value keeps."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["nbytes_of"]


def nbytes_of(value: object) -> int:
    """Return how much memory the tensors of a value keep, as far as they lie open in it."""
    leaves = tree_leaves(value)
    for module in [leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)]:
        leaves += [*module.parameters(), *module.buffers()]
    storages = {
        storage.data_ptr(): storage.nbytes()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        for storage in (leaf.untyped_storage(),)
    }
    return sum(storages.values())
