"""A machine's peer daemon: what ``mesh up`` runs, and how the command talks to it."""

from __future__ import annotations

from mesh.daemon.control import control
from mesh.daemon.join import join_without_daemon
from mesh.daemon.serve import Daemon

__all__ = ["Daemon", "control", "join_without_daemon"]
