"""Which parameters a ``DistributedDataParallel`` reduces: its reducer reads and writes ``.grad``.

It does so from C++, where Python sees no hook, and once more when the engine's run ends. So modules
of that class are noted as they are made.
"""

from __future__ import annotations

import gc
import weakref

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["are_there", "reduced"]

_modules: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def are_there() -> bool:
    """Return whether any such module is alive."""
    return bool(_modules)


def reduced() -> set[int]:
    """Return the ids of the parameters of all such modules that are alive."""
    return {
        id(parameter)
        for module in tuple(_modules)
        for parameter in module.module.parameters()
        if parameter.requires_grad
    }


def _note(module: torch.nn.Module, name: str, _: object) -> None:
    if name == "module" and isinstance(module, DistributedDataParallel):
        _modules.add(module)


register_module_module_registration_hook(_note)
if torch.distributed.is_available() and torch.distributed.is_initialized():
    # Those that were made before this was imported.
    _modules.update(
        each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)
    )
