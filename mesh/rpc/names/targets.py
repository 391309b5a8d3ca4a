"""What a request asks for, and what functions are called by. Pure: no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

from mesh.rpc.errors import RpcError
from mesh.rpc.names.exposed import exposed_name
from mesh.rpc.names.operators import operator_name
from tensor_bridge.fields import Fields
from transport import CborValue

__all__ = ["ID_BYTES", "Target", "target_of"]

ID_BYTES = 16
"""Of references, of forks of them, and of messages with large tensors."""

MAX_NAME = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What is to be called.

    Attributes:
        kind: ``"function"``, ``"operator"``, ``"method"``, ``"fetch"``, ``"pickled"``, or, of
            distributed autograd, ``"gradients"`` or ``"backward"``.
        name: of the function, operator or method; empty for the others.
        key: the reference of a method, a fetch or a backward.
    """

    kind: str
    name: str = ""
    key: bytes = b""

    def encode(self) -> dict[str, CborValue]:
        """Return it as it travels."""
        value: dict[str, CborValue] = {"key": self.key} if self.key else {}
        value["kind"] = self.kind
        if self.name:
            value["name"] = self.name
        return value

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the target in `value`."""
        fields = Fields(value, "target of a call")
        kind = fields.text("kind", longest=16)
        if kind not in _KINDS:
            raise fields.wrong(f"{kind!r} is no kind of target")
        has_name, has_key = _KINDS[kind]
        name = fields.text("name", longest=MAX_NAME) if has_name else ""
        key = fields.data("key", shortest=ID_BYTES, longest=ID_BYTES) if has_key else b""
        fields.finish()
        return cls(kind, name, key)

    def __str__(self) -> str:
        if self.kind == "fetch":
            return "fetch of a reference"
        if self.kind == "pickled":
            return "call of a pickled function"
        if self.kind == "gradients":
            return "sending of gradients"
        if self.kind == "backward":
            return "backward from a reference"
        return f"call of {self.kind} {self.name!r}"


_KINDS = {
    "function": (True, False),
    "operator": (True, False),
    "method": (True, True),
    "fetch": (False, True),
    "pickled": (False, False),
    "gradients": (False, False),
    "backward": (False, True),
}


def target_of(function: Callable[..., Any] | str) -> Target:
    """Return what a function or operator is called by.

    Raises:
        RpcError: it has no name that a peer could know it by.
        TypeError: it can't be called.
    """
    if isinstance(function, str):
        kind = "operator" if function.startswith("torch.") else "function"
        return Target(kind, function)
    if not callable(function):
        raise TypeError("function should be callable.")
    operator = operator_name(function)
    if operator is not None:
        return Target("operator", operator)
    name = exposed_name(function)
    if name is None:
        raise RpcError(
            f"call of {function!r:.80}",
            why="it has no name that a peer could know it by: only functions and classes of a "
            "module's top level have one, and torch's operators that mesh.rpc lists",
            fix="Move it to the top level of a module, and expose it at the callee.",
        )
    return Target("function", name)
