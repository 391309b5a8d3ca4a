"""Public names that load on first use (PEP 562), so that the command answers without torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping

__all__ = ["lazy_names"]


def lazy_names(
    module: str, sources: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a module.

    Args:
        module: its name.
        sources: for each public name the module to take it from; a name that ends the source's own
            name is that submodule itself.
    """
    space = vars(sys.modules[module])

    def load(name: str) -> object:
        # Called only for a name that the module does not have yet, so once for each.
        if name not in sources:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        source = sources[name]
        found = importlib.import_module(source)
        value = found if source == f"{module}.{name}" else getattr(found, name)
        space[name] = value
        return value

    def names() -> list[str]:
        return sorted({*space, *sources})

    return load, names
