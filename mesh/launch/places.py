"""Which rank a process is, as launchers and schedulers say it in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mesh.errors import PlaceError

__all__ = ["machines", "rank_and_size"]

_RANKS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, `mesh run`
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("JOB_COMPLETION_INDEX", "WORLD_SIZE"),  # an indexed job of Kubernetes
)

_MACHINES = (
    ("PET_NODE_RANK", "PET_NNODES"),  # Kubeflow's operator
    ("SLURM_NODEID", "SLURM_NNODES"),
    ("JOB_COMPLETION_INDEX", "PET_NNODES"),
)


def rank_and_size(
    given: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> tuple[int, int]:
    """Return rank and number of ranks, each from `given` or else from the environment.

    Raises:
        PlaceError: one is not known, is no number, or they don't go together.
    """
    rank = _number("rank", given)
    size = _number("world_size", given)
    for name, of in _RANKS:
        if rank is None and name in environment and (size is not None or of in environment):
            rank = _number(name, environment)
            size = _number(of, environment) if size is None else size
    if size is None:
        size = _number("WORLD_SIZE", environment)
    if rank is None or size is None:
        raise PlaceError(
            "rank and world size",
            why="neither the program nor the environment tells them",
            fix="Start it with `mesh run`, pass rank= and world_size=, or set RANK and WORLD_SIZE.",
        )
    if not 0 <= rank < size:
        raise PlaceError(f"rank {rank} of {size}", why=f"ranks are from 0 to {size - 1}")
    return rank, size


def machines(environment: Mapping[str, str] = os.environ) -> tuple[int | None, int | None]:
    """Return this machine's number and the number of machines, as far as a scheduler tells them.

    Raises:
        PlaceError: one is no number.
    """
    for name, of in _MACHINES:
        if of in environment:
            return _number(name, environment), _number(of, environment)
    return None, None


def _number(name: str, of: Mapping[str, str]) -> int | None:
    text = of.get(name)
    if text is None or text == "-1":  # torch's way to say that it is not known
        return None
    try:
        return int(text)
    except ValueError:
        raise PlaceError(f"{name}={text!r}", why="it is no number") from None
