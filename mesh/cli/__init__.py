"""The command ``mesh``: a thin skin over the library and the running daemon."""

from __future__ import annotations

from mesh.cli.signals import leave_on_interrupt

__all__ = ["main"]


def main() -> None:
    """Run the command with the arguments of the process, and exit with its code."""
    leave_on_interrupt()
    from mesh.cli.app import app  # after that: it takes a while to import

    app(prog_name="mesh")
