"""Makes ``backend="mesh"`` known to torch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from _quicmesh_autoload import register
from mesh.collective import UnsupportedCollective
from mesh.distributed.forming import form_group
from mesh.distributed.group import BACKEND, ProcessGroupMesh
from mesh.distributed.objects import refuse_objects
from mesh.distributed.options import Options, options_in_use
from mesh.distributed.program import program_options

__all__ = ["create", "register"]


def create(c10d: Any, pg_options: object | None) -> ProcessGroupMesh:
    """Make a process group; called by torch on each rank of it.

    Args:
        c10d: torch's ``_DistributedBackendOptions``: store, rank, size, timeout, name.
        pg_options: `Options`, or None for those in use.
    """
    options = _options(pg_options)
    if not options.objects:
        refuse_objects()
    exchange = form_group(
        options,
        c10d.store,
        group=c10d.group_id,
        rank=c10d.group_rank,
        size=c10d.group_size,
        timeout=c10d.timeout.total_seconds(),
    )
    return ProcessGroupMesh(exchange, c10d.store, c10d.timeout, options)


def _options(given: object | None) -> Options:
    if given is None:
        given = options_in_use() or _options_of_default_group() or program_options()
    if not isinstance(given, Options):
        raise UnsupportedCollective(
            f"a process group with backend '{BACKEND}'",
            why=f"pg_options is a {type(given).__name__}",
            fix="Pass pg_options=mesh.distributed.Options(node=...), or form the group in a block "
            "of mesh.distributed.use(node).",
        )
    return given


def _options_of_default_group() -> Options | None:
    default: object = dist.group.WORLD
    return default.options if isinstance(default, ProcessGroupMesh) else None
