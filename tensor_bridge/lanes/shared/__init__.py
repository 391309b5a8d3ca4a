"""Shared memory between two processes of one host: the lane, and how two nodes get to it.

Which bytes move, and whether they may, is agreed over QUIC as ever; they then go through memory
that the sender has made and the receiver has mapped. Nothing that lies there, or comes over the
Unix socket beside it, is believed: numbers are checked, and bytes are copied once and not looked at
before that.
"""

from __future__ import annotations

from tensor_bridge.lanes.shared.lane import (
    SealedLane,
    SharedLane,
    sealed_copy,
    sealed_descriptor,
    sealed_snapshot,
)
from tensor_bridge.lanes.shared.link import Link
from tensor_bridge.lanes.shared.sharing import Sharing
from tensor_bridge.lanes.shared.underway import Landing

__all__ = [
    "Landing",
    "Link",
    "SealedLane",
    "SharedLane",
    "Sharing",
    "sealed_copy",
    "sealed_descriptor",
    "sealed_snapshot",
]
