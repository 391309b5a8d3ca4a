"""Refuses torch's object collectives where a group's options say so.

They pickle on one rank and unpickle on another, in torch's own code, with tensors of bytes between
them that a group can't tell from others. So it is torch's two functions that are told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mesh.collective import UnsupportedCollective
from mesh.distributed.group import ProcessGroupMesh

__all__ = ["refuse_objects"]


def refuse_objects() -> None:
    """From now on, refuse them in groups whose options forbid them; in others they go on."""
    for name in ("_object_to_tensor", "_tensor_to_object"):
        function = getattr(distributed_c10d, name)
        if not hasattr(function, "_mesh_asks"):
            setattr(distributed_c10d, name, _asking(function))


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def asking(first: Any, second: Any, group: Any = None) -> Any:
        used: Any = group or dist.group.WORLD
        if isinstance(used, ProcessGroupMesh) and used.options and not used.options.objects:
            raise UnsupportedCollective(
                "an object collective",
                why="it would unpickle what other ranks send, and the group's options refuse that",
                fix="Send tensors; or allow it with Options(objects=True), among ranks that may "
                "run code in each other.",
            )
        return function(first, second, group)

    asking._mesh_asks = True  # type: ignore[attr-defined]
    return asking
