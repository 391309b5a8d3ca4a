"""The whole exception tree, and the branch of it that belongs to nodes and the command.

Everything this project raises on purpose is a `MeshError` and says what failed, with which peer, at
which stage, after how long, why, and what to do. The number is the exit status of the ``mesh``
command when the error ends it.

    MeshError                        1
    ├── IdentityError                2  a key, id, ticket or invite that can't be used as given
    │   ├── KeyFileError             2  key file: missing, readable by others, or not a key
    │   └── TicketError              2  ticket or invite text: truncated, altered, of another kind
    ├── AccessDenied                 4  an authorizer said no, or failed, which counts as no
    │   └── TokenRefused             4  a capability token that does not permit this, here, now
    ├── TransportError               1  something between two nodes failed
    │   ├── AddressError             2  an address that can't be used as written
    │   ├── AddressInUse             1  another socket holds the address to listen on
    │   ├── Unreachable              3  no address led to the peer; each is named with its own error
    │   │   └── ConnectTimeout       3  ... and the time ran out meanwhile
    │   ├── IdentityInUse            4  the same key is alive at another address
    │   ├── ConnectionClosed         3  one of the two sides closed the connection on purpose
    │   │   └── Superseded           3  ... for another connection with the same peer
    │   ├── PeerLost                 3  the peer vanished: killed, unplugged, or silent for too long
    │   ├── ProtocolError            1  bytes that break the protocol
    │   │   └── PickleRefused        1  a pickle of a peer that may not send any
    │   ├── StreamReset              1  the other side gave up on one stream
    │   ├── BufferGone               1  memory lent to a transfer was given back before it was sent
    │   ├── DeadlineExceeded         5  the time given for an operation ran out
    │   ├── EndpointLost             1  the process that moves this node's packets is gone
    │   ├── LimitExceeded            1  a bound of this node or of the peer was reached
    │   ├── ServiceUnknown           1  the peer offers no such service
    │   └── RemoteError              1  the peer's handler failed
    ├── TensorError                  1  a tensor, its place in a store, or its move
    │   ├── UnsupportedTensor        2  a tensor whose elements are not plain bytes in memory
    │   ├── QuotaExceeded            1  a tensor that the receiver has no room for
    │   ├── NoSuchTensor             1  an object id that names nothing this peer may touch
    │   └── TensorChanged            1  a tensor that was written to or replaced while it moved
    ├── CollectiveError              1  an operation of a group failed, and with it the group
    │   ├── CollectiveTimeout        5  its deadline passed; names the ranks that are still awaited
    │   ├── CollectiveMismatch       2  two ranks called different things; names both sides
    │   ├── RankLost                 3  the connection to a rank broke
    │   ├── RankLeft                 3  a rank left the group while it was still needed
    │   ├── RankFailed               1  an operation raised on another rank
    │   └── GroupAborted             1  the group was aborted, here or on another rank
    ├── UnsupportedCollective        2  a type, layout, device or reduction that can't be done
    ├── RpcError                     1  a remote call could not be made, answered, or used
    │   ├── Unsendable               2  an argument or a result that does not travel
    │   ├── NotExposed               1  the callee offers no function of that name
    │   ├── RpcTimeout               5  the time given for a call ran out
    │   ├── RefLost                  1  a remote reference whose value is gone
    │   ├── RemoteException          1  the function raised what the caller has no class for
    │   ├── ContextGone              1  an autograd context that has ended, or never was
    │   └── BackwardError            1  a backward across nodes failed; names the node
    ├── DeviceError                  1  a device of a peer, or a tensor on it
    │   ├── OperationFailed          1  an operation failed there; raised where its result is read
    │   ├── SessionLost              3  the peer no longer has this program's tensors
    │   ├── DeviceBusy               1  more is queued than may be, and this thread can't wait
    │   └── UnsupportedOnDevice      2  what remote devices can't do
    ├── CheckpointError              1  a checkpoint that can't be written as asked, or is none
    └── NodeError                    1  a node can't do what was asked of it
        ├── HomeError                1  the state directory can't be used
        ├── NotRunning               3  no daemon runs in this home
        ├── PlaceError               2  a rank, or a number of them, that is unknown or can't be
        └── UnknownPeer              3  a peer that nothing is known about, or no address of it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from auth.errors import (
    AccessDenied,
    IdentityError,
    KeyFileError,
    MeshError,
    TicketError,
    TokenRefused,
)
from mesh._lazy import lazy_names

if TYPE_CHECKING:
    from mesh.autograd.errors import BackwardError, ContextGone
    from mesh.collective.errors import (
        CollectiveError,
        CollectiveMismatch,
        CollectiveTimeout,
        GroupAborted,
        RankFailed,
        RankLeft,
        RankLost,
        UnsupportedCollective,
    )
    from mesh.device.errors import (
        DeviceBusy,
        DeviceError,
        OperationFailed,
        SessionLost,
        UnsupportedOnDevice,
    )
    from mesh.rpc.errors import (
        NotExposed,
        PickleRefused,
        RefLost,
        RemoteException,
        RpcError,
        RpcTimeout,
        Unsendable,
    )
    from mesh.train.errors import CheckpointError
    from tensor_bridge.errors import (
        NoSuchTensor,
        QuotaExceeded,
        TensorChanged,
        TensorError,
        UnsupportedTensor,
    )
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

__all__ = [
    "AccessDenied",
    "AddressError",
    "AddressInUse",
    "BackwardError",
    "BufferGone",
    "CheckpointError",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ConnectionClosed",
    "ConnectTimeout",
    "ContextGone",
    "DeadlineExceeded",
    "DeviceBusy",
    "DeviceError",
    "EndpointLost",
    "GroupAborted",
    "HomeError",
    "IdentityError",
    "IdentityInUse",
    "KeyFileError",
    "LimitExceeded",
    "MeshError",
    "NodeError",
    "NoSuchTensor",
    "NotExposed",
    "NotRunning",
    "OperationFailed",
    "PeerLost",
    "PickleRefused",
    "PlaceError",
    "ProtocolError",
    "QuotaExceeded",
    "RankFailed",
    "RankLeft",
    "RankLost",
    "RefLost",
    "RemoteError",
    "RemoteException",
    "RpcError",
    "RpcTimeout",
    "ServiceUnknown",
    "SessionLost",
    "StreamReset",
    "Superseded",
    "TensorChanged",
    "TensorError",
    "TicketError",
    "TokenRefused",
    "TransportError",
    "UnknownPeer",
    "Unreachable",
    "Unsendable",
    "UnsupportedCollective",
    "UnsupportedOnDevice",
    "UnsupportedTensor",
]


class NodeError(MeshError):
    """A node can't do what was asked of it, in the state it is in."""

    code = "node"


class HomeError(NodeError):
    """The state directory can't be used: no key yet, open to others, or a file in it is broken."""

    code = "home"


class NotRunning(NodeError):
    """No daemon runs in this home."""

    code = "not-running"
    exit_code = 3


class PlaceError(NodeError, ValueError):
    """A rank, or a number of ranks or machines, is not known, or can't be."""

    code = "place"
    exit_code = 2


class UnknownPeer(NodeError):
    """Nothing is known about the peer, or its key is known and no address of it."""

    code = "unknown-peer"
    exit_code = 3


if not TYPE_CHECKING:  # The branches below this package, without waiting for torch.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            **dict.fromkeys(
                (
                    "AddressError",
                    "AddressInUse",
                    "BufferGone",
                    "ConnectionClosed",
                    "ConnectTimeout",
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
                ),
                "transport.errors",
            ),
            **dict.fromkeys(
                (
                    "NoSuchTensor",
                    "QuotaExceeded",
                    "TensorChanged",
                    "TensorError",
                    "UnsupportedTensor",
                ),
                "tensor_bridge.errors",
            ),
            **dict.fromkeys(
                (
                    "CollectiveError",
                    "CollectiveMismatch",
                    "CollectiveTimeout",
                    "GroupAborted",
                    "RankFailed",
                    "RankLeft",
                    "RankLost",
                    "UnsupportedCollective",
                ),
                "mesh.collective.errors",
            ),
            **dict.fromkeys(
                (
                    "DeviceBusy",
                    "DeviceError",
                    "OperationFailed",
                    "SessionLost",
                    "UnsupportedOnDevice",
                ),
                "mesh.device.errors",
            ),
            "BackwardError": "mesh.autograd.errors",
            "CheckpointError": "mesh.train.errors",
            "ContextGone": "mesh.autograd.errors",
            **dict.fromkeys(
                (
                    "NotExposed",
                    "PickleRefused",
                    "RefLost",
                    "RemoteException",
                    "RpcError",
                    "RpcTimeout",
                    "Unsendable",
                ),
                "mesh.rpc.errors",
            ),
        },
    )
