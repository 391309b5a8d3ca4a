"""The branch of the exception tree that belongs to remote devices (its root is in ``auth.errors``).

    MeshError
    └── DeviceError             something about a device of a peer, or a tensor on it
        ├── OperationFailed     an operation failed there; raised where its result is wanted
        ├── SessionLost         the peer no longer has this program's tensors
        ├── DeviceBusy          more is queued than may be, and this thread can't wait for it
        └── UnsupportedOnDevice what remote devices can't do, with what to do instead

All are `RuntimeError` too, which is what programs written for torch's own devices catch. Quotas
raise ``tensor_bridge.QuotaExceeded``, lost peers ``transport.PeerLost``.
"""

from __future__ import annotations

from auth import MeshError

__all__ = [
    "DeviceBusy",
    "DeviceError",
    "OperationFailed",
    "SessionLost",
    "UnsupportedOnDevice",
]


class DeviceError(MeshError, RuntimeError):
    """Something about a device of a peer, or a tensor on it, failed."""

    code = "device"


class OperationFailed(DeviceError):
    """An operation failed at the peer. Raised where its result, or what was made of it, is read."""

    code = "device-operation"


class SessionLost(DeviceError):
    """The peer no longer has this program's tensors: it, or what ran the operations, has ended."""

    code = "device-session-lost"
    exit_code = 3


class DeviceBusy(DeviceError):
    """More is queued than may be, and the thread that called is the one that would send it."""

    code = "device-busy"


class UnsupportedOnDevice(DeviceError):
    """Remote devices can't do this."""

    code = "device-unsupported"
    exit_code = 2
