"""What every lane does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tensor_bridge.memory import Payload

__all__ = ["Lane"]


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
