"""The branch of the exception tree that belongs to remote calls (its root is in ``auth.errors``).

    MeshError
    └── RpcError            a call could not be made, answered, or its result used
        ├── Unsendable      an argument or a result that does not travel; names its place
        ├── NotExposed      the callee offers no function of that name, or no such method
        ├── RpcTimeout      the time given for a call ran out
        ├── RefLost         a remote reference whose value is gone, or never came to be
        └── RemoteException the function raised what the caller has no class for
    └── ProtocolError
        └── PickleRefused   a pickle of a peer that is not granted ``rpc:pickle`` by name

All are ``RuntimeError`` too, which is what programs written for ``torch.distributed.rpc`` catch, as
are errors of the tree's other branches where a call raises them (`as_runtime_error`);
`Unsendable` is a ``TypeError`` as well, raised before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from auth import MeshError
from transport import DeadlineExceeded, ProtocolError

__all__ = [
    "NotExposed",
    "PickleRefused",
    "RefLost",
    "RemoteException",
    "RpcError",
    "RpcTimeout",
    "Unsendable",
    "as_runtime_error",
]


class RpcError(MeshError, RuntimeError):
    """A remote call could not be made, answered, or its result used."""

    code = "rpc"


class Unsendable(RpcError, TypeError):
    """An argument or a result does not travel; ``why`` names its place: ``args[1]['w']``."""

    code = "rpc-unsendable"
    exit_code = 2


class NotExposed(RpcError):
    """The callee offers no function of that name, or the object no such method, to this peer."""

    code = "rpc-not-exposed"


class RpcTimeout(RpcError, DeadlineExceeded):
    """The time given for a call ran out. The function may still run, or have run."""

    code = "rpc-timeout"
    exit_code = 5


class RefLost(RpcError):
    """The value of a remote reference is gone, or never came to be."""

    code = "rpc-ref-lost"


class PickleRefused(ProtocolError):
    """A peer sent a pickle and may not; its connection is closed, and nothing of it was read."""

    code = "pickle-refused"


class RemoteException(RpcError):
    """The function raised an exception that the caller has no class for.

    Attributes:
        type_name: the exception's class at the callee: ``"package.module.Name"``.
        message: its text.
        remote_traceback: where it was raised, as the callee printed it.
    """

    code = "rpc-raised"

    type_name: str = ""
    message: str = ""
    remote_traceback: str = ""


def as_runtime_error(error: MeshError) -> MeshError:
    """Return an error of the tree, of its class, which is a ``RuntimeError`` besides."""
    if isinstance(error, RuntimeError):
        return error
    made = _runtime_kind(type(error)).__new__(_runtime_kind(type(error)))
    made.args, made.__dict__ = error.args, error.__dict__
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made.with_traceback(error.__traceback__)


def _runtime_kind(kind: type[MeshError]) -> type[MeshError]:
    if kind not in _kinds:
        parts = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__reduce__": _reduce}
        _kinds[kind] = type(kind.__name__, (kind, RuntimeError), parts)
    return _kinds[kind]


_kinds: dict[type[MeshError], type[MeshError]] = {}


def _reduce(error: MeshError) -> tuple[Any, ...]:
    # By the class that there is a name for.
    remake, (kind, parts), state = MeshError.__reduce__(error)
    return _remake, (remake, kind.__bases__[0], parts), state


def _remake(remake: Callable[..., MeshError], kind: type[MeshError], parts: Any) -> MeshError:
    return as_runtime_error(remake(kind, parts))
