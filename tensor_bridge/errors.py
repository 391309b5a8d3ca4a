"""The tensor branch of the exception tree (its root is in ``auth.errors``).

    MeshError
    └── TensorError
        ├── UnsupportedTensor     a tensor whose elements are not plain bytes in memory
        ├── QuotaExceeded         a tensor that the receiver has no room for
        ├── NoSuchTensor          an object id that names nothing this peer may touch
        └── TensorChanged         a tensor that was written to or replaced while it moved

Deadlines raise ``transport.DeadlineExceeded``, lost peers ``transport.PeerLost``, malformed
messages ``transport.ProtocolError``, and refusals ``auth.AccessDenied`` or ``auth.TokenRefused``.
"""

from __future__ import annotations

from auth import MeshError

__all__ = [
    "NoSuchTensor",
    "QuotaExceeded",
    "TensorChanged",
    "TensorError",
    "UnsupportedTensor",
]


class TensorError(MeshError):
    """Something about a tensor, its place in a store, or its move failed."""

    code = "tensor"


class UnsupportedTensor(TensorError):
    """The tensor's elements are not plain bytes in memory: sparse, meta, nested, a wrapper."""

    code = "unsupported-tensor"
    exit_code = 2


class QuotaExceeded(TensorError):
    """The store has no room for the tensor: its owner's quota or the store's own is used up."""

    code = "quota-exceeded"


class NoSuchTensor(TensorError):
    """No tensor of that id, or none that this peer may touch: the two look the same."""

    code = "no-such-tensor"


class TensorChanged(TensorError):
    """The tensor was written to, resized or replaced while it was being read."""

    code = "tensor-changed"
