"""The version of the installed distribution."""

from __future__ import annotations

from importlib import metadata

__all__ = ["version"]


def version() -> str:
    """Return the version, or ``"unknown"`` where the packages run without being installed."""
    try:
        return metadata.version("quicmesh")
    except metadata.PackageNotFoundError:
        return "unknown"
