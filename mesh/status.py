"""How far it got with each peer, in words that tell one failure from another.

A peer that is seen and can't be used is the commonest trouble of a mesh. So the state says which
step was the last that worked, and the reason why the next one did not.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import TYPE_CHECKING

from auth import AccessDenied, IdentityError, MeshError, NodeId, SocketAddress
from transport import CborValue, Connection, format_address
from transport.errors import IdentityInUse, ProtocolError, Unreachable

if TYPE_CHECKING:
    from tensor_bridge import LaneStatus

__all__ = ["PeerState", "PeerStatus", "state_after"]


class PeerState(StrEnum):
    """The last step that worked with a peer."""

    DISCOVERED = "discovered"
    """Its key is known, and perhaps addresses; none was tried yet, or none answered."""

    REACHABLE = "reachable"
    """Something answers at an address, and did not prove to be this peer."""

    AUTHENTICATED = "authenticated"
    """It proved its key; the connection ended, or failed on the way to a session."""

    AUTHORIZED = "authorized"
    """A session is open: at least one of the two may use the other."""

    REFUSED = "refused"
    """It proved its key and refused this node; the reason is the one it gave."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """One peer. What belongs to an open session is None without one.

    `machine` is the machine that answers for a program, None for a machine itself. `path` is the
    remote address in use and `outbound` says who dialled. `may_use_this` says whether the peer may
    use this node, and `this_may_use` whether this node may use the peer, None where that shows only
    when it tries: a peer tells whom it admits by welcoming its dial. `rtt` and `age` are seconds,
    the byte counts are UDP payload. `lane` is what large tensors take to and from the peer and
    `lane_reason` why nothing faster, both None where this node moves none.
    """

    node_id: NodeId
    petname: str | None = None
    machine: NodeId | None = None
    state: PeerState
    reason: str | None = None
    addresses: tuple[SocketAddress, ...] = ()
    path: str | None = None
    outbound: bool | None = None
    may_use_this: bool | None = None
    this_may_use: bool | None = None
    rtt: float | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None
    streams: int | None = None
    age: float | None = None
    lane: str | None = None
    lane_reason: str | None = None

    def with_session(self, connection: Connection, lane: LaneStatus | None) -> PeerStatus:
        """Return the same peer with what its open connection tells, and its lane."""
        identity, info = connection.peer, connection.info
        return dataclasses.replace(
            self,
            machine=None if identity.delegation is None else identity.machine_id,
            state=PeerState.AUTHORIZED,
            reason=None,
            path=info.remote,
            outbound=connection.outbound,
            may_use_this=connection.grant is not None,
            this_may_use=True if connection.outbound else None,
            rtt=info.rtt,
            bytes_sent=info.bytes_sent,
            bytes_received=info.bytes_received,
            streams=info.streams,
            age=info.age,
            lane=None if lane is None else lane.name,
            lane_reason=None if lane is None else lane.reason,
        )

    def as_message(self) -> dict[str, CborValue]:
        """Return the form for the wire and for ``--json``."""
        message: dict[str, CborValue] = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        message["node_id"] = str(self.node_id)
        message["short"] = self.node_id.short
        message["machine"] = None if self.machine is None else str(self.machine)
        message["state"] = str(self.state)
        message["addresses"] = [format_address(address) for address in self.addresses]
        return message


def state_after(error: MeshError) -> tuple[PeerState, str]:
    """Return the state that a failed dial leaves a peer in, and the reason in words."""
    reason = error.why or error.what
    match error:
        case AccessDenied() | IdentityInUse():
            return PeerState.REFUSED, reason
        case Unreachable(answered=False):
            return PeerState.DISCOVERED, reason
        case Unreachable() | IdentityError() | ProtocolError():
            return PeerState.REACHABLE, reason
        case _:
            return PeerState.AUTHENTICATED, reason
