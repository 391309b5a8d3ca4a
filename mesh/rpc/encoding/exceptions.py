"""How what a function raised reaches its caller: class, message, traceback, and at whose node.

Errors of the project's tree keep their class and their parts. So do Python's own exceptions, whose
class and message are all there is to them. Of any other the class is a name, and the caller gets a
`RemoteException`. Each carries the remote traceback as a note, which Python prints beneath its own.
"""

from __future__ import annotations

import builtins
import traceback

from auth import MeshError
from mesh.rpc.errors import RemoteException
from tensor_bridge.fields import Fields
from transport import CborValue, decode_error, encode_error

__all__ = ["decode_exception", "encode_exception"]

MAX_MESSAGE = 4096
"""Longest message, in characters; what is longer is cut."""

MAX_TRACEBACK = 16 * 1024
"""The same of a traceback, whose end tells most."""

MAX_NAME = 256

_PLAIN = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, Warning)
} | {"StopIteration": RuntimeError, "StopAsyncIteration": RuntimeError}
"""Python's own, which a message is enough for; the two that loops swallow come as another."""

_WITH_PARTS = ("UnicodeDecodeError", "UnicodeEncodeError", "UnicodeTranslateError")
for _name in (*_WITH_PARTS, "ExceptionGroup"):
    del _PLAIN[_name]  # made from more than a message


def encode_exception(error: BaseException) -> dict[str, CborValue]:
    """Return an exception as it travels."""
    kind = type(error)
    plain = _PLAIN.get(kind.__name__) is kind
    told = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    value: dict[str, CborValue] = {
        "type": kind.__name__ if plain else f"{kind.__module__}.{kind.__qualname__}"[-MAX_NAME:],
        "message": _text(_message(error))[:MAX_MESSAGE],
        "traceback": _text(told),
    }
    if isinstance(error, MeshError):
        value["mesh"] = encode_error(error)
    return value


def decode_exception(value: CborValue, *, peer: str, what: str) -> Exception:
    """Return the exception to raise for one that came from a peer.

    Args:
        value: as `encode_exception` writes it.
        peer: whose function raised it, for people.
        what: what was called.

    Raises:
        ProtocolError: `value` is no exception.
    """
    fields = Fields(value, "remote exception")
    name = fields.text("type", longest=MAX_NAME)
    message, told = fields.value("message"), fields.value("traceback")
    mesh = fields.value("mesh") if fields.has("mesh") else None
    fields.finish()
    if not isinstance(message, str) or not isinstance(told, str):
        raise fields.wrong("its message and traceback must be text")
    message, told = message[:MAX_MESSAGE], told[:MAX_TRACEBACK]
    error: Exception
    if mesh is not None:
        error = decode_error(mesh, peer=peer)
    elif name in _PLAIN:
        error = _PLAIN[name](message)
    else:
        raised = RemoteException(
            what, peer=peer, why=f"Original exception on remote side was {name}: {message}"
        )
        raised.type_name, raised.message, raised.remote_traceback = name, message, told
        error = raised
    error.add_note(f"Raised at {peer}, where the traceback was:\n{told.rstrip()}")
    return error


def _message(error: BaseException) -> str:
    try:
        # A KeyError's own text is its key's representation, which making one anew adds again.
        is_key = type(error) is KeyError and len(error.args) == 1
        return str(error.args[0] if is_key else error)
    except Exception as second:
        return f"(no message: its __str__ raised {type(second).__name__})"


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
