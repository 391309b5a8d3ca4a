"""The command ``mesh``: a thin skin over the library and the running daemon."""

from __future__ import annotations

from mesh.cli.app import main

__all__ = ["main"]
