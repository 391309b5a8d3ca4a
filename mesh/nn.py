"""Modules of ``torch.nn`` at other workers, by the names of ``torch.distributed.nn``."""

from __future__ import annotations

from mesh.rpc.modules import RemoteModule

__all__ = ["RemoteModule"]
