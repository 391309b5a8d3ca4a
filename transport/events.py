"""What an endpoint tells its observers, as it happens."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

from auth import MeshError, NodeId, SocketAddress

if TYPE_CHECKING:
    from transport.connection import Connection

__all__ = ["EndpointEvent", "PeerJoined", "PeerLeft", "PeerRefused", "PeerRevoked"]


@dataclasses.dataclass(frozen=True, slots=True)
class PeerJoined:
    """A connection is authenticated and authorized."""

    connection: Connection


@dataclasses.dataclass(frozen=True, slots=True)
class PeerLeft:
    """A connection that had joined is over; `error` says how."""

    connection: Connection
    error: MeshError


@dataclasses.dataclass(frozen=True, slots=True)
class PeerRefused:
    """An inbound connection got no further; `node_id` is None where no key was proven."""

    address: SocketAddress
    node_id: NodeId | None
    error: MeshError


@dataclasses.dataclass(frozen=True, slots=True)
class PeerRevoked:
    """A node, and programs that it answers for, may do nothing here any more.

    Its connections are closed by now, if it had any; what is kept for it should go.
    """

    node_id: NodeId
    reason: str


EndpointEvent: TypeAlias = PeerJoined | PeerLeft | PeerRefused | PeerRevoked
