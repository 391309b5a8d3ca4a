"""Types of a program's own that travel by value: dataclasses, named tuples, enumerations.

Both sides register them, under the same name. A value is rebuilt by the class's own constructor,
which may check what it is given; nothing is set behind its back.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from mesh.rpc.errors import NotExposed, RpcError
from transport import ProtocolError

__all__ = ["TypeTable", "register_type", "registered_types"]

_Type = TypeVar("_Type", bound=type)

MAX_NAME = 256
"""Longest name, in characters."""


class TypeTable:
    """Types by name. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[type, str] = {}
        self._types: dict[str, type] = {}
        self._made: dict[type, tuple[tuple[str, ...], Callable[..., Any]]] = {}

    def add(self, kind: type, name: str | None = None) -> None:
        """Let values of exactly this type travel.

        Args:
            kind: a dataclass, a named tuple, or an `enum.Enum`.
            name: what both sides call it; by default its module and qualified name.

        Raises:
            RpcError: it is none of the three, or the name is taken by another type.
        """
        if _sort(kind) is None:
            raise RpcError(
                f"registering of {kind!r:.80}",
                why="it is no dataclass, no named tuple and no enumeration",
                fix="Send its parts, or a remote reference to it.",
            )
        name = name or f"{kind.__module__}.{kind.__qualname__}"
        if not 0 < len(name) <= MAX_NAME:
            raise RpcError(
                f"registering of {kind!r:.80}", why=f"its name is not 1 to {MAX_NAME} long"
            )
        with self._lock:
            known = self._types.get(name)
            # The same text of source may be run again, as in a notebook.
            if known is not None and known is not kind and known.__module__ != kind.__module__:
                raise RpcError(f"registering of {kind!r:.80}", why=f"{name!r} is {known!r:.80}")
            self._types[name] = kind
            self._names[kind] = name

    def add_made(
        self, kind: type, name: str, fields: tuple[str, ...], make: Callable[..., Any]
    ) -> None:
        """Let values of a type of the library's own travel.

        Args:
            kind: the type.
            name: what both sides call it.
            fields: the attributes that travel.
            make: makes a value of them, which are what the peer says.
        """
        with self._lock:
            self._made[kind] = (fields, make)
            self._types[name] = kind
            self._names[kind] = name

    def name_of(self, kind: type) -> str | None:
        """Return what a type is called, None if its values don't travel."""
        return self._names.get(kind)

    def member_of(self, value: Any) -> str | None:
        """Return the name of an enumeration's member, None if `value` is a record."""
        return value.name if isinstance(value, enum.Enum) else None

    def fields_of(self, value: Any) -> dict[str, Any]:
        """Return what a record's constructor is to be given."""
        kind = type(value)
        if kind in self._made:
            return {name: getattr(value, name) for name in self._made[kind][0]}
        if dataclasses.is_dataclass(kind):
            return {name: getattr(value, name) for name in _fields(kind)}
        return dict(zip(kind._fields, value, strict=True))

    def record(self, name: str, fields: dict[str, Any]) -> Any:
        """Return the record of that type.

        Raises:
            NotExposed: no type of that name is registered here.
            ProtocolError: it has other fields, or its constructor refuses them.
        """
        kind = self._find(name)
        names, make = self._made.get(kind) or (_fields(kind), kind)
        if issubclass(kind, enum.Enum) or tuple(fields) != names:
            raise ProtocolError("reading of a value", why=f"{name!r:.80} has other fields here")
        try:
            return make(**fields)
        except (Exception, SystemExit) as error:
            raise ProtocolError(
                "reading of a value", why=f"{name!r:.80} refuses its fields: {error!s:.120}"
            ) from error

    def member(self, name: str, member: str) -> enum.Enum:
        """Return the member of an enumeration. Raises as `record`."""
        kind = self._find(name)
        if not issubclass(kind, enum.Enum) or member not in kind.__members__:
            raise ProtocolError("reading of a value", why=f"{name!r:.80} has no {member!r:.40}")
        found: enum.Enum = kind[member]
        return found

    def _find(self, name: str) -> Any:
        kind = self._types.get(name)
        if kind is None:
            raise NotExposed(
                "reading of a value",
                why=f"type {name!r:.80} is not registered at the reader",
                fix="Register it there, too: mesh.rpc.register_type.",
            )
        return kind


registered_types = TypeTable()
"""The program's types."""


def register_type(kind: _Type) -> _Type:
    """Let values of a dataclass, named tuple or enumeration travel; usable as a decorator."""
    registered_types.add(kind)
    return kind


def _sort(kind: object) -> str | None:
    if not isinstance(kind, type):
        return None
    if issubclass(kind, enum.Enum):
        return "enum"
    if dataclasses.is_dataclass(kind):
        return "dataclass"
    return "named tuple" if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def _fields(kind: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.init)
    return tuple(kind._fields)
