"""What every lane does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tensor_bridge.memory import Payload

__all__ = ["Lane", "Place"]


class Place(Protocol):
    """Where a move's bytes come to lie."""

    @property
    def nbytes(self) -> int:
        """How many are still to come."""
        ...

    @property
    def room(self) -> memoryview:
        """Memory for those that are still to come, allocated when this is first asked for."""
        ...

    def advance(self, nbytes: int) -> None:
        """Count `nbytes` more as landed."""
        ...

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """Take memory that holds all of them already, in place of allocating some."""
        ...


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

    async def receive(self, place: Place) -> None:
        """Have all that is still to come land in `place`, in order, part by part."""
        ...
