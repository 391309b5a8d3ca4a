"""Makes names in torch's suites that stand for upstream's objects stand for the mesh's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["replace", "resolve"]

_PARTS = (
    "torch.distributed.rpc",
    "torch.distributed.autograd",
    "torch.distributed.nn",
    "torch.distributed.optim",
    "torch.testing._internal.dist_utils",
    "torch.testing._internal.distributed",
)
"""The modules whose names are looked at."""


def replace(names: Mapping[str, str]) -> None:
    """Replace objects by others, in the names of all loaded modules of torch's that may use them.

    Args:
        names: the dotted name of each object, and its stand-in's, ``module:attribute``.
    """
    by_id: dict[int, tuple[Any, Any]] = {}
    for old_name, new_name in names.items():
        old = resolve(old_name)
        by_id[id(old)] = (old, resolve(new_name))
    for name, module in tuple(sys.modules.items()):
        if not name.startswith(_PARTS):
            continue
        for attribute, value in tuple(vars(module).items()):
            old, new = by_id.get(id(value), (None, None))
            if old is not None and old is value:
                setattr(module, attribute, new)


def resolve(name: str) -> Any:
    """Return the object of a dotted name, or of ``module:attribute``."""
    if ":" in name:
        module, attribute = name.split(":")
    else:
        module, attribute = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), attribute)
