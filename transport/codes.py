"""Application error codes (RFC 9000 section 20.2) and how errors travel.

A code names the class of an error on RESET_STREAM, STOP_SENDING and CONNECTION_CLOSE frames, which
have no room for more. Where there is room (the reply frame of a stream, the reason phrase of a
close), the error travels whole, as `encode_error` writes it.
"""

from __future__ import annotations

import enum

from auth import AccessDenied, Denial, MeshError, TokenRefused
from transport.cbor import CborValue
from transport.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    IdentityInUse,
    LimitExceeded,
    PeerLost,
    ProtocolError,
    RemoteError,
    ServiceUnknown,
    StreamReset,
    Superseded,
)

__all__ = ["AppCode", "code_of", "decode_error", "encode_error", "error_of_code", "plain_text"]

MAX_TEXT = 512
"""Longest text of one part of an error on the wire, in characters."""


class AppCode(enum.IntEnum):
    """Why a stream or a connection was ended by the application."""

    NO_ERROR = 0x0
    CANCELLED = 0x1
    DENIED = 0x2
    TOKEN_REFUSED = 0x3
    PROTOCOL = 0x4
    DEADLINE = 0x5
    LIMIT = 0x6
    INTERNAL = 0x7
    SERVICE_UNKNOWN = 0x8
    LEFT = 0x9
    SUPERSEDED = 0xA
    IDENTITY_IN_USE = 0xB
    IDLE = 0xC
    GONE = 0xD


_CLASSES: dict[AppCode, type[MeshError]] = {
    AppCode.CANCELLED: StreamReset,
    AppCode.DENIED: AccessDenied,
    AppCode.TOKEN_REFUSED: TokenRefused,
    AppCode.PROTOCOL: ProtocolError,
    AppCode.DEADLINE: DeadlineExceeded,
    AppCode.LIMIT: LimitExceeded,
    AppCode.INTERNAL: RemoteError,
    AppCode.SERVICE_UNKNOWN: ServiceUnknown,
    AppCode.SUPERSEDED: Superseded,
    AppCode.IDENTITY_IN_USE: IdentityInUse,
    AppCode.GONE: PeerLost,
}

_WHY: dict[AppCode, str] = {
    AppCode.NO_ERROR: "closed",
    AppCode.CANCELLED: "the other side cancelled",
    AppCode.DENIED: "the other side refused",
    AppCode.TOKEN_REFUSED: "the other side does not accept the capability token",
    AppCode.PROTOCOL: "the other side found the bytes it got to break the protocol",
    AppCode.DEADLINE: "the other side's deadline passed",
    AppCode.LIMIT: "a bound of the other side was reached",
    AppCode.INTERNAL: "the other side's handler failed; its log says how",
    AppCode.SERVICE_UNKNOWN: "the other side offers no such service",
    AppCode.LEFT: "the peer left",
    AppCode.SUPERSEDED: "another connection has its place",
    AppCode.IDENTITY_IN_USE: "the same key is alive at another address",
    AppCode.IDLE: "nothing used it",
    AppCode.GONE: "its program has ended without a word",
}


def code_of(error: BaseException) -> AppCode:
    """Return the code under which `error` travels in a frame without room for text."""
    if not isinstance(error, Exception):  # cancellation, in whichever loop's dress
        return AppCode.CANCELLED
    # GONE is of a whole connection alone, and says it of whoever sends it.
    codes = {kind: code for code, kind in _CLASSES.items() if code is not AppCode.GONE}
    # The nearest class with a code: TokenRefused is an AccessDenied too.
    return next((codes[kind] for kind in type(error).mro() if kind in codes), AppCode.INTERNAL)


def error_of_code(code: int, what: str, *, peer: object, stage: str | None = None) -> MeshError:
    """Return the error that `code` stands for, about `what`. Unknown codes are resets."""
    try:
        known = AppCode(code)
    except ValueError:
        return StreamReset(what, peer=peer, stage=stage, why=f"the other side gave code {code:#x}")
    kind = _CLASSES.get(known, ConnectionClosed)
    return kind(what, peer=peer, stage=stage, why=_WHY[known])


def encode_error(error: BaseException) -> dict[str, CborValue]:
    """Return `error` as it travels. Only errors of the tree tell more than their class."""
    if not isinstance(error, MeshError):
        return {"code": RemoteError.code, "what": "the handler", "why": _WHY[AppCode.INTERNAL]}
    parts = {
        "code": error.code,
        "what": error.what,
        "stage": error.stage,
        "why": error.why,
        "fix": error.fix,
    }
    if isinstance(error, AccessDenied) and error.denial is not None:
        parts["denial"] = error.denial.code
    return {name: plain_text(text) for name, text in parts.items() if text is not None}


def decode_error(value: CborValue, *, peer: object, after: float | None = None) -> MeshError:
    """Return the error in `value`, of the class that its code names, as raised by `peer`."""
    if not isinstance(value, dict):
        return ProtocolError("a reply", peer=peer, why="its error is not a map")
    parts = {
        name: plain_text(text)
        for name in ("code", "what", "stage", "why", "fix")
        if isinstance(text := value.get(name), str) and text
    }
    kind = _kinds().get(parts.pop("code", ""), RemoteError)
    what = parts.pop("what", "a request")
    error = kind.__new__(kind)
    MeshError.__init__(error, what, peer=peer, after=after, **parts)
    if isinstance(error, AccessDenied) and isinstance(denial := value.get("denial"), str):
        try:
            error.denial = Denial(denial, (error.why or "")[:256])
        except ValueError:
            pass  # not a code: the class and the reason still say it
    return error


def plain_text(text: str) -> str:
    """Cut a text that crosses the wire, and blot out what would act on a terminal or forge a log.

    What UTF-8 can't say, such as an undecodable file name, goes too.
    """
    text = text[:MAX_TEXT]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


def _kinds() -> dict[str, type[MeshError]]:
    """Every class of the tree by its code; packages above add theirs by defining them."""
    kinds: dict[str, type[MeshError]] = {}
    pending: list[type[MeshError]] = [MeshError]
    while pending:
        kind = pending.pop()
        kinds.setdefault(kind.code, kind)
        pending.extend(kind.__subclasses__())
    return kinds
