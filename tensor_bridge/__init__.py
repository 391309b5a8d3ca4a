"""Torch tensors as bytes, a store for them, and moves between nodes.

A `TensorClient` puts tensors to a peer, gets them back, and has them copied straight from one peer
to another under a capability token; a `TensorService` is the other end of each. Below them lie the
codec (what a tensor is, apart from its bytes), memory (its bytes where they lie), the store (room
within quotas) and the lanes (the ways bytes can take).
"""

from __future__ import annotations

from tensor_bridge.client import TensorClient, TensorRef
from tensor_bridge.codec import (
    DTYPES,
    Quantization,
    TensorMeta,
    decode_meta,
    describe,
    dtype_name,
    dtype_of,
    encode_meta,
)
from tensor_bridge.errors import (
    NoSuchTensor,
    QuotaExceeded,
    TensorChanged,
    TensorError,
    UnsupportedTensor,
)
from tensor_bridge.lanes import Lane, LaneConfig, Lanes, LaneStatus, QuicLane, SharedLane
from tensor_bridge.memory import CHUNK_BYTES, allocate, chunks, tensor_bytes
from tensor_bridge.moves import MoveLimits, Progress, ProgressCallback
from tensor_bridge.service import TensorService
from tensor_bridge.store import Reservation, StoredTensor, StoreLimits, TensorStore

__distribution__ = "quicmesh"

__all__ = [
    # what a tensor is
    "DTYPES",
    "TensorMeta",
    "Quantization",
    "describe",
    "encode_meta",
    "decode_meta",
    "dtype_name",
    "dtype_of",
    # its bytes
    "CHUNK_BYTES",
    "tensor_bytes",
    "chunks",
    "allocate",
    # where a node keeps them
    "TensorStore",
    "StoreLimits",
    "StoredTensor",
    "Reservation",
    # moves
    "TensorClient",
    "TensorRef",
    "TensorService",
    "MoveLimits",
    "Progress",
    "ProgressCallback",
    # the ways bytes take
    "Lane",
    "Lanes",
    "LaneConfig",
    "LaneStatus",
    "QuicLane",
    "SharedLane",
    # errors
    "TensorError",
    "UnsupportedTensor",
    "QuotaExceeded",
    "NoSuchTensor",
    "TensorChanged",
]
