"""Transport's branch of the exception tree (its root is in ``auth.errors``).

MeshError
└── TransportError
    ├── AddressError          an address that can't be used as written
    ├── AddressInUse          another socket holds the address to listen on
    ├── Unreachable           no address led to the peer; each is named with its own error
    │   └── ConnectTimeout    ... and the time ran out meanwhile
    ├── IdentityInUse         the same key is alive at another address
    ├── ConnectionClosed      one of the two sides closed the connection on purpose
    │   └── Superseded        ... for another connection with the same peer
    ├── EndpointLost          the process that moves this node's packets is gone
    ├── PeerLost              the peer vanished: killed, unplugged, or silent for too long
    ├── ProtocolError         bytes that break the protocol
    ├── StreamReset           the other side gave up on one stream
    ├── BufferGone            memory lent to a transfer was given back before it was sent
    ├── DeadlineExceeded      the time given for an operation ran out
    ├── LimitExceeded         a bound of this node or of the peer was reached
    ├── ServiceUnknown        the peer offers no such service
    └── RemoteError           the peer's handler failed
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from auth import MeshError

__all__ = [
    "AddressError",
    "AddressInUse",
    "BufferGone",
    "ConnectTimeout",
    "ConnectionClosed",
    "DeadlineExceeded",
    "EndpointLost",
    "IdentityInUse",
    "LimitExceeded",
    "PeerLost",
    "ProtocolError",
    "RemoteError",
    "ServiceUnknown",
    "StreamReset",
    "Superseded",
    "TransportError",
    "Unreachable",
]


class TransportError(MeshError):
    """Something between two nodes failed."""

    code: ClassVar[str] = "transport"


class AddressError(TransportError):
    """An address can't be used as written: malformed, port 0, a name where a literal is needed."""

    code = "address"
    exit_code = 2


class AddressInUse(TransportError):
    """Another socket holds the UDP address this node was told to listen on."""

    code = "address-in-use"


class Unreachable(TransportError):
    """No address led to the peer.

    ``attempts`` maps each address tried to what happened there; ``answered`` says whether something
    spoke at one of them and did not prove to be the peer, ``is_refused`` whether its host reports
    that nothing listens there, and no address is silent: the peer has ended.
    """

    code = "unreachable"
    exit_code = 3
    attempts: Mapping[str, str] = MappingProxyType({})
    answered: bool = False
    is_refused: bool = False


class ConnectTimeout(Unreachable):
    """The time to connect ran out. ``attempts`` and ``answered`` as in `Unreachable`."""

    code = "connect-timeout"


class IdentityInUse(TransportError):
    """The same key is alive at another address. A key belongs to one running node."""

    code = "identity-in-use"
    exit_code = 4


class ConnectionClosed(TransportError):
    """One of the two sides closed the connection on purpose."""

    code = "closed"
    exit_code = 3


class Superseded(ConnectionClosed):
    """Two nodes keep one connection: this one gave way to another with the same peer."""

    code = "superseded"


class EndpointLost(TransportError):
    """The process that moves this node's packets could not be started, or is gone."""

    code = "endpoint-lost"


class PeerLost(TransportError):
    """The peer vanished without a word: killed, unplugged, or silent beyond the liveness bound."""

    code = "peer-lost"
    exit_code = 3


class ProtocolError(TransportError):
    """The other side sent bytes that break the protocol."""

    code = "protocol"


class StreamReset(TransportError):
    """The other side gave up on one stream; the connection lives on."""

    code = "stream-reset"


class BufferGone(TransportError):
    """Memory that was lent to a transfer was given back, or replaced, before it was sent."""

    code = "buffer-gone"


class DeadlineExceeded(TransportError):
    """The time given for an operation ran out while the peer was still there."""

    code = "deadline"
    exit_code = 5


class LimitExceeded(TransportError):
    """A bound of this node or of the peer was reached."""

    code = "limit"


class ServiceUnknown(TransportError):
    """The peer offers no service or call of that name."""

    code = "service-unknown"


class RemoteError(TransportError):
    """The peer's handler failed in a way it did not name; its log has the details."""

    code = "remote"
