"""What a connection tells the driver, in the order in which it happened."""

from __future__ import annotations

import dataclasses
import enum
from typing import TypeAlias

from auth import NodeId

__all__ = [
    "ConnectionEnded",
    "ConnectionIdIssued",
    "ConnectionIdRetired",
    "EndedBy",
    "Event",
    "HandshakeCompleted",
    "PingAcknowledged",
    "StreamChanged",
    "StreamOpened",
    "StreamsAvailable",
]


class EndedBy(enum.Enum):
    """Who or what ended a connection."""

    LOCAL = "local"
    """We closed it."""
    REMOTE = "remote"
    """The peer closed it."""
    SILENCE = "silence"
    """Nothing was heard for the liveness bound, or the host reported the port closed."""
    FORGOTTEN = "forgotten"
    """The peer's node has started anew, and does not know the connection any more."""


@dataclasses.dataclass(frozen=True, slots=True)
class HandshakeCompleted:
    """TLS is done and the peer has proved `peer`'s key. Nothing of the peer's came before."""

    peer: NodeId
    alpn: str


@dataclasses.dataclass(frozen=True, slots=True)
class StreamOpened:
    """The peer opened a bidirectional stream."""

    stream_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class StreamChanged:
    """A stream became readable or writable, ended, was reset or stopped: look again."""

    stream_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class StreamsAvailable:
    """The peer lets us open more streams than before."""


@dataclasses.dataclass(frozen=True, slots=True)
class PingAcknowledged:
    """The PING numbered `uid` was acknowledged."""

    uid: int


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionIdIssued:
    """Datagrams to `connection_id` belong to this connection from now on."""

    connection_id: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionIdRetired:
    """Datagrams to `connection_id` no longer belong to this connection."""

    connection_id: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionEnded:
    """The connection is over for the application; no other event follows but retired ids.

    `code` is an application code when `is_application`, else a transport error code
    (RFC 9000 section 20.1; 0x100 + TLS alert for a failed handshake).
    """

    by: EndedBy
    code: int
    reason: str
    is_application: bool


Event: TypeAlias = (
    HandshakeCompleted
    | StreamOpened
    | StreamChanged
    | StreamsAvailable
    | PingAcknowledged
    | ConnectionIdIssued
    | ConnectionIdRetired
    | ConnectionEnded
)
