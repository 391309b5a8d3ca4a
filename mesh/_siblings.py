"""Refuse to run beside a stranger that bears the name of one of the project's own packages.

``auth``, ``transport`` and ``tensor_bridge`` are short names, and a program's own ``auth.py`` comes
first on the path. Python would import it without a word and fail later, somewhere inside the mesh,
with an ``AttributeError`` that explains nothing. So ``import mesh`` looks before it leaps.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

__all__ = ["check_siblings"]

SIBLINGS = ("auth", "transport", "tensor_bridge")
"""The packages that are installed beside ``mesh``, in one directory."""


def check_siblings(here: Path | None = None) -> None:
    """Check that every sibling that ``import`` would find lies beside this package.

    Args:
        here: the directory of the package ``mesh``; by default the one this file lies in.

    Raises:
        ImportError: another package of that name comes first, or ours is not installed. The message
            names both files and says what to do.
    """
    root = (here or Path(__file__).parent).resolve().parent
    for name in SIBLINGS:
        ours = root / name / "__init__.py"
        found = _find(name)
        if found is None:
            raise ImportError(
                f"mesh needs its own package '{name}' at {ours}, and nothing of that name can be "
                "imported. Install it again: python -m pip install --force-reinstall quicmesh",
                name=name,
            )
        if found.resolve() != ours:
            raise ImportError(
                f"mesh needs its own package '{name}' at {ours}, but `import {name}` finds "
                f"{found}. {_remedy(name, found)}",
                name=name,
                path=str(found),
            )


def _find(name: str) -> Path | None:
    """Return the file, or for a namespace package the directory, that ``import name`` leads to."""
    loaded = sys.modules.get(name)
    spec = find_spec(name) if loaded is None else loaded.__spec__
    if spec is None:
        # A module that a program made by hand has no spec, and perhaps no file either.
        return None if loaded is None else Path(getattr(loaded, "__file__", None) or f"<{name}>")
    if spec.has_location and spec.origin is not None:
        return Path(spec.origin)
    places = list(spec.submodule_search_locations or ())
    return Path(places[0] if places else f"<{name}>")


def _remedy(name: str, found: Path) -> str:
    if {"site-packages", "dist-packages"} & set(found.parts):
        return (
            f"Another installed distribution brings a package '{name}': "
            "use a virtual environment without it."
        )
    return (
        "Rename that one, or start Python elsewhere: the directory of the script and PYTHONPATH "
        "come first on the path (`python -P` leaves the script's directory out)."
    )
