"""The ways a tensor's bytes can take between two nodes.

Which tensor moves, from which offset, and that it may, is agreed on a QUIC stream by the services.
A lane carries what was agreed. It knows bytes, not tensors, and the services know no lane but the
one that `choose_lane` gives them: another way joins there.
"""

from __future__ import annotations

from tensor_bridge.lanes.choice import (
    NO_LANES,
    LaneConfig,
    Lanes,
    LaneStatus,
    Offer,
    choose_lane,
)
from tensor_bridge.lanes.lane import Lane
from tensor_bridge.lanes.local import LocalLane
from tensor_bridge.lanes.quic import QuicLane
from tensor_bridge.lanes.shared import (
    SealedLane,
    SharedLane,
    sealed_copy,
    sealed_descriptor,
    sealed_snapshot,
)
from tensor_bridge.lanes.shared.sealed import Writer, map_sealed, sealed_memory

__all__ = [
    "NO_LANES",
    "Lane",
    "LaneConfig",
    "LaneStatus",
    "Lanes",
    "LocalLane",
    "Offer",
    "QuicLane",
    "SealedLane",
    "SharedLane",
    "Writer",
    "choose_lane",
    "map_sealed",
    "sealed_copy",
    "sealed_descriptor",
    "sealed_memory",
    "sealed_snapshot",
]
