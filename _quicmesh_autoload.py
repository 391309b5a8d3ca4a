"""Makes ``backend="mesh"`` known to torch at ``import torch``: its entry point ``torch.backends``.

Outside the packages: a program that imports `mesh` first imports torch from within it, and torch
then loads this. The standard library alone, next to no time, and no exception, which would break
every import of torch; `mesh` is imported when a process group is made.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

__all__ = ["load", "register"]

RENDEZVOUS = "MESH_RENDEZVOUS"
"""Environment variable with the URL that stands for ``env://``: `mesh run` sets it."""


def load() -> None:
    """Register, or leave torch as it is: what torch calls."""
    with contextlib.suppress(Exception):
        register()


def register() -> None:
    """Register the backend and its rendezvous, unless they are already."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    if "mesh" not in dist.Backend.backend_list:
        dist.Backend.register_backend("mesh", _create, extended_api=True, devices=["cpu"])
    # Of the module: torch.distributed has a function under its name.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    handlers.setdefault("mesh", _meet)
    if os.environ.get(RENDEZVOUS):
        handlers["env"] = _meet_by_environment


def _create(c10d: Any, pg_options: object | None) -> Any:
    from mesh.distributed.registration import create

    return create(c10d, pg_options)


def _meet(url: str, **settings: Any) -> Iterator[tuple[Any, int, int]]:
    from mesh.distributed.rendezvous import meet

    return meet(url, **settings)


def _meet_by_environment(url: str, **settings: Any) -> Iterator[tuple[Any, int, int]]:
    # What was added to env:// are rank and world size, where the program gave them.
    _, _, query = url.partition("?")
    where = os.environ[RENDEZVOUS]
    joint = "&" if "?" in where else "?"
    return _meet(f"{where}{joint}{query}" if query else where, **settings)
