"""What can be offered under which name: checked where it is registered, not when a peer asks."""

from __future__ import annotations

from auth.grant import check_scopes
from transport.errors import TransportError
from transport.frames import MAX_SERVICE_NAME

__all__ = ["check_alpn", "check_handler", "check_offer"]

MAX_ALPN = 255
"""Longest name of a protocol, in bytes (RFC 7301 section 3.1)."""

MAX_SHOWN = 64
"""Characters of a useless value that its error shows."""


def check_offer(kind: str, name: object, handler: object, scope: object) -> None:
    """Return if peers can ask for `name`, `handler` can answer, and a grant can cover `scope`.

    Raises:
        TransportError: one of them can't be used; ``why`` says which, and what one looks like.
    """
    what = f"registering {kind} {_shown(name)}"
    if not isinstance(name, str) or not 0 < len(name) <= MAX_SERVICE_NAME:
        raise TransportError(what, why=f"a name is text of 1 to {MAX_SERVICE_NAME} characters")
    check_handler(what, handler)
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


def check_handler(what: str, handler: object) -> None:
    """Return if `handler` can be called.

    Raises:
        TransportError: it can't.
    """
    if not callable(handler):
        raise TransportError(what, why=f"its handler, {_shown(handler)}, can't be called")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
