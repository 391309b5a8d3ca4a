"""What can be offered under which name: checked where it is registered, not when a peer asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from auth.grant import check_scopes
from transport.errors import TransportError
from transport.frames import MAX_SERVICE_NAME

if TYPE_CHECKING:
    from transport.services import AlpnHandler

__all__ = ["ProtocolTable", "check_alpn", "check_offer"]

MAX_ALPN = 255
"""Longest name of a protocol, in bytes (RFC 7301 section 3.1)."""

MAX_SHOWN = 64
"""Characters of a useless value that its error shows."""


class ProtocolTable:
    """Protocols of the app's own, by ALPN.

    Args:
        own: the mesh's, which serves itself and is first among the names.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._handlers: dict[str, AlpnHandler] = {}

    @property
    def names(self) -> list[str]:
        """What can be spoken here, as TLS is told of it."""
        return [self._own, *self._handlers]

    def register(self, alpn: str, handler: AlpnHandler) -> None:
        """Serve `alpn` by `handler`.

        Raises:
            TransportError: the name is taken or can't be one, or `handler` can't be called.
        """
        check_alpn("registering", alpn)
        _check_handler(f"registering ALPN {alpn!r}", handler)
        if alpn in self.names:
            raise TransportError(f"registering ALPN {alpn!r}", why="that name is taken")
        self._handlers[alpn] = handler

    def get(self, alpn: str) -> AlpnHandler | None:
        """Return what serves `alpn`, None for the mesh's and for others."""
        return self._handlers.get(alpn)


def check_offer(kind: str, name: object, handler: object, scope: object) -> None:
    """Return if peers can ask for `name`, `handler` can answer, and a grant can cover `scope`.

    Raises:
        TransportError: one of them can't be used; ``why`` says which, and what one looks like.
    """
    what = f"registering {kind} {_shown(name)}"
    if not isinstance(name, str) or not 0 < len(name) <= MAX_SERVICE_NAME:
        raise TransportError(what, why=f"a name is text of 1 to {MAX_SERVICE_NAME} characters")
    _check_handler(what, handler)
    try:
        check_scopes((scope,))
    except ValueError as error:
        raise TransportError(what, why=str(error)) from None


def check_alpn(doing: str, alpn: object) -> None:
    """Return if `alpn` can be the name of a protocol.

    Raises:
        TransportError: it can't.
    """
    if (
        not isinstance(alpn, str)
        or not 0 < len(alpn) <= MAX_ALPN
        or not (alpn.isascii() and alpn.isprintable())
    ):
        raise TransportError(
            f"{doing} ALPN {_shown(alpn)}",
            why=f"a name of a protocol is text of 1 to {MAX_ALPN} printable ASCII characters",
        )


def _check_handler(what: str, handler: object) -> None:
    if not callable(handler):
        raise TransportError(what, why=f"its handler, {_shown(handler)}, can't be called")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
