"""What the end of a connection is to those who wait on it: an error of the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from auth import MeshError
from transport.codes import error_of_code
from transport.errors import PeerLost, ProtocolError
from transport.protocol.events import ConnectionEnded, EndedBy

if TYPE_CHECKING:
    from transport.engine import Link

__all__ = ["error_of_end"]


def error_of_end(link: Link, end: ConnectionEnded, who: str) -> MeshError:
    """Return the error that says how the connection of `link` with `who` has ended."""
    failure, refused = link.failure, link.peer_error
    if failure is not None:
        return type(failure)("connection", peer=who, why=failure.why, fix=failure.fix)
    if refused is not None:
        return type(refused)(
            "connection", peer=who, stage="handshake", why=refused.why, fix=refused.fix
        )
    if end.by is EndedBy.SILENCE:
        return PeerLost(
            "connection", peer=who, why=end.reason, fix="Is the peer's process still running?"
        )
    if end.by is EndedBy.FORGOTTEN:
        return PeerLost(
            "connection", peer=who, why=end.reason, fix="Connect again: the peer is there."
        )
    if not end.is_application and end.code:
        return ProtocolError(
            "connection",
            peer=who,
            stage="handshake" if link.peer is None else None,
            why=f"{end.reason or 'QUIC error'} (code {end.code:#x})",
        )
    error = error_of_code(end.code, "connection", peer=who)
    if end.reason:
        error.why = end.reason
    elif end.by is EndedBy.LOCAL:
        error.why = "closed here"
    return error
