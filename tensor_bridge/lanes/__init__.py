"""The ways a tensor's bytes can take between two nodes.

Which tensor moves, from which offset, and that it may, is agreed on a QUIC stream by the services.
A lane carries what was agreed. It knows bytes, not tensors, and the services know no lane but the
one that `choose_lane` gives them: another way joins there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tensor_bridge.lanes.quic import QuicLane
from tensor_bridge.memory import Payload
from transport import Stream

__all__ = ["Lane", "QuicLane", "choose_lane"]


class Lane(Protocol):
    """One move's way, for one direction, from the offset that was agreed on to the end."""

    @property
    def name(self) -> str:
        """What ``mesh status`` calls it."""
        ...

    async def send(self, payload: Payload, moved: Callable[[int], object]) -> None:
        """Send all of `payload`, and tell `moved` how many bytes have left, part by part.

        At most a bounded amount is ahead of the receiver: one that sleeps stops the sender.

        Raises:
            TensorChanged: its memory was resized or replaced meanwhile.
        """
        ...

    async def receive(self, room: memoryview, moved: Callable[[int], object]) -> None:
        """Fill `room` in order, and tell `moved` the size of each part that has landed."""
        ...


def choose_lane(stream: Stream, *, stall_seconds: float) -> Lane:
    """Return the way for the bytes of the move that was agreed on `stream`.

    Args:
        stream: where it was agreed on; nothing else is sent or read there until the bytes are over.
        stall_seconds: how long 256 KiB may take.
    """
    return QuicLane(stream, stall_seconds=stall_seconds)
