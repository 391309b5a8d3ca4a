"""Makes ``backend="mesh"`` known to torch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mesh.collective import UnsupportedCollective
from mesh.distributed.forming import form_group
from mesh.distributed.group import BACKEND, ProcessGroupMesh
from mesh.distributed.options import Options, options_in_use

__all__ = ["register"]


def register() -> None:
    """Register the backend, unless it is already. Importing `mesh.distributed` does it."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(c10d: Any, pg_options: object | None) -> ProcessGroupMesh:
    """Make a process group; called by torch on each rank of it.

    Args:
        c10d: torch's ``_DistributedBackendOptions``: store, rank, size, timeout, name.
        pg_options: `Options`, or None for those in use.
    """
    options = _options(pg_options)
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
        given = options_in_use() or _options_of_default_group()
    if not isinstance(given, Options):
        raise UnsupportedCollective(
            f"a process group with backend '{BACKEND}'",
            why="no node was given" if given is None else f"pg_options is a {type(given).__name__}",
            fix="Pass pg_options=mesh.distributed.Options(node=...), or form the group in a block "
            "of mesh.distributed.use(node).",
        )
    return given


def _options_of_default_group() -> Options | None:
    default: object = dist.group.WORLD
    return default.options if isinstance(default, ProcessGroupMesh) else None
