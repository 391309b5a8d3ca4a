"""QUIC between nodes that are public keys: endpoint, connections, streams. Knows no torch.

An `Endpoint` dials and listens on one UDP socket. Peers prove Ed25519 keys before anything of
theirs is looked at, an authorizer decides what each may do, and streams carry back-pressure in both
directions. ``transport.protocol`` is the pure half, without I/O or clock; the rest drives it on
anyio.
"""

from transport.addresses import PeerAddress, format_address, parse_address
from transport.backoff import Backoff
from transport.binding import parse_bind
from transport.carrier import NOT_NOW, Carrier, NotNow
from transport.cbor import CborValue
from transport.codes import AppCode, decode_error, encode_error
from transport.config import EndpointConfig
from transport.connection import MESH_ALPN, Connection, ConnectionInfo
from transport.endpoint import Endpoint
from transport.errors import (
    AddressError,
    AddressInUse,
    BufferGone,
    ConnectionClosed,
    ConnectTimeout,
    DeadlineExceeded,
    EndpointLost,
    IdentityInUse,
    LimitExceeded,
    PeerLost,
    ProtocolError,
    RemoteError,
    ServiceUnknown,
    StreamReset,
    Superseded,
    TransportError,
    Unreachable,
)
from transport.events import EndpointEvent, PeerJoined, PeerLeft, PeerRefused, PeerRevoked
from transport.protocol.newcomers import NewcomerRules, Rate
from transport.services import Incoming
from transport.stream import Stream

__distribution__ = "quicmesh"

__all__ = [
    # a node on the network
    "Endpoint",
    "EndpointConfig",
    "NewcomerRules",
    "Rate",
    "PeerAddress",
    "parse_address",
    "parse_bind",
    "format_address",
    # what it has with a peer
    "MESH_ALPN",
    "Carrier",
    "NOT_NOW",
    "NotNow",
    "Connection",
    "ConnectionInfo",
    "Stream",
    "Incoming",
    "CborValue",
    "Backoff",
    # what it observes
    "EndpointEvent",
    "PeerJoined",
    "PeerLeft",
    "PeerRefused",
    "PeerRevoked",
    # errors, and how they travel
    "AppCode",
    "encode_error",
    "decode_error",
    "TransportError",
    "AddressError",
    "AddressInUse",
    "BufferGone",
    "Unreachable",
    "ConnectTimeout",
    "IdentityInUse",
    "ConnectionClosed",
    "EndpointLost",
    "Superseded",
    "PeerLost",
    "ProtocolError",
    "StreamReset",
    "DeadlineExceeded",
    "LimitExceeded",
    "ServiceUnknown",
    "RemoteError",
]
