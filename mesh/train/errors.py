"""The branch of the exception tree that belongs to training (its root is in ``auth.errors``).

    MeshError
    └── CheckpointError     a checkpoint that can't be written as asked, is none, or is of
                            something else

It is a `ValueError` too. What goes wrong between devices are the errors of `mesh.device` and
`mesh.collective`.
"""

from __future__ import annotations

from auth import MeshError

__all__ = ["CheckpointError"]


class CheckpointError(MeshError, ValueError):
    """A state can't be written, for what it holds, or read or loaded, for what it is."""

    code = "checkpoint"
