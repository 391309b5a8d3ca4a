"""What of a program peers may call, by name: nothing unless it is said.

A function or class is called by its module and qualified name, which both sides have where they
run the same code. The callee looks a name up among what it has exposed, and imports nothing for it.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from mesh.rpc.errors import NotExposed, RpcError

__all__ = ["Exposures", "expose", "exposed", "exposed_name", "exposures", "library"]

_Callable = TypeVar("_Callable", bound=Callable[..., Any])

MAX_NAME = 256
"""Longest name of a function, in characters."""


class Exposures:
    """What one program, or one node of it, exposes. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callables: dict[str, Callable[..., Any]] = {}
        self._modules: set[str] = set()

    def add(self, function: Callable[..., Any], name: str | None = None) -> None:
        """Expose a function, or a class with its public methods.

        Raises:
            RpcError: it has no name to be called by, such as a lambda, or the name is taken.
        """
        name = name or _name(function)
        if name is None or not 0 < len(name) <= MAX_NAME:
            raise RpcError(
                f"exposing of {function!r:.80}",
                why="it has no name that a caller could call it by",
                fix="Expose a function or class of a module's top level, or give it a name=.",
            )
        with self._lock:
            known = self._callables.setdefault(name, function)
            if known is not function and _name(known) != _name(function):
                raise RpcError(f"exposing of {function!r:.80}", why=f"{name!r} is {known!r:.80}")
            self._callables[name] = function

    def add_module(self, module: str) -> None:
        """Expose the public functions and classes that are defined in a module, also later ones."""
        with self._lock:
            self._modules.add(module)

    def has(self, name: str) -> bool:
        """Return whether a function or class of that name is exposed."""
        return self._find(name) is not None

    def callable(self, name: str) -> Callable[..., Any]:
        """Return the function or class of that name.

        Raises:
            NotExposed: there is none, or it is not exposed; the two look the same.
        """
        found = self._find(name)
        if found is None:
            raise NotExposed(
                f"call of {name!r:.80}",
                why="the callee exposes nothing of that name",
                fix="Expose it there: mesh.rpc.expose(__name__), or the decorator "
                "@mesh.rpc.exposed.",
            )
        return found

    def method(self, value: object, name: str) -> Callable[..., Any]:
        """Return a public method of an object of an exposed class.

        Raises:
            NotExposed: its class is not exposed, or has no such method.
        """
        kind = type(value)
        own = next((each for each in kind.mro() if self._has(each)), None)
        method = inspect.getattr_static(kind, name, None)
        # Looked up on the class: what an object was given as an attribute is its own affair.
        if (
            own is None
            or name.startswith("_")
            or not (inspect.isfunction(method) or isinstance(method, staticmethod | classmethod))
        ):
            raise NotExposed(
                f"call of method {name!r:.80} of a {kind.__qualname__}",
                why="the owner exposes no such method",
                fix="Expose the class there; methods that begin with '_' stay private.",
            )
        found: Callable[..., Any] = getattr(value, name)
        return found

    def _find(self, name: str) -> Callable[..., Any] | None:
        return self._callables.get(name) or self._of_module(name) or _library.get(name)

    def _has(self, kind: type) -> bool:
        name = _name(kind)
        return name is not None and (
            self._callables.get(name) is kind or self._of_module(name) is kind
        )

    def _of_module(self, name: str) -> Callable[..., Any] | None:
        module, _, path = name.rpartition(".")
        if module not in self._modules or path.startswith("_"):
            return None
        found = getattr(sys.modules.get(module), path, None)
        is_own = inspect.isfunction(inspect.unwrap(found)) if callable(found) else False
        if not (is_own or inspect.isclass(found)) or _name(found) != name:
            return None  # imported from elsewhere, or no function at all
        return found


exposures = Exposures()
"""What the program exposes at all its nodes."""


def expose(module: str) -> None:
    """Let peers call the public functions and classes that are defined in a module.

    The line ``mesh.rpc.expose(__name__)`` is what a program of ``torch.distributed.rpc`` adds.

    Args:
        module: its name, ``__name__``. What it has imported from elsewhere is not exposed.
    """
    exposures.add_module(module)


def exposed(function: _Callable) -> _Callable:
    """Let peers call a function, or make objects of a class and call their public methods."""
    exposures.add(function)
    return function


_library: dict[str, Callable[..., Any]] = {}


def library(function: _Callable) -> _Callable:
    """Let peers call a function of the library's own, which sees to what they may do with it."""
    _library[f"{function.__module__}.{function.__qualname__}"] = function
    return function


def exposed_name(function: Callable[..., Any]) -> str | None:
    """Return what a function or class of a module's top level is called by, None if it is none."""
    is_one = inspect.isfunction(inspect.unwrap(function)) or inspect.isclass(function)
    return _name(function) if is_one else None


def _name(function: object) -> str | None:
    module = getattr(function, "__module__", None)
    path = getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str):
        return None
    return None if "<" in path or "." in path else f"{module}.{path}"
