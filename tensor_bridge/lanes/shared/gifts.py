"""Sealed memory that the other end hands over before anybody here has asked for it.

It tells of it afterwards, on another way, and does so soon or not at all: what nobody has asked for
when more comes is let go of.
"""

from __future__ import annotations

import os

from tensor_bridge.lanes.shared.sealed import SealedMemory, map_sealed
from tensor_bridge.wire_blocks import FIRST_GIFT

__all__ = ["MAX_GIFTS", "Gifts"]

MAX_GIFTS = 32
"""Those that may wait to be asked for: each is a descriptor, and memory of the other end's."""


class Gifts:
    """The gifts of one link."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._descriptors)

    def add(self, move: int, descriptor: int) -> None:
        """Keep memory that has come, if it is a gift; the descriptor stays the caller's."""
        if move < FIRST_GIFT:
            return
        self._let_go(move)
        while len(self._descriptors) >= MAX_GIFTS:
            self._let_go(next(iter(self._descriptors)))
        self._descriptors[move] = os.dup(descriptor)

    def take(self, gift: int, nbytes: int) -> SealedMemory | None:
        """Return the memory that is called so; None if there is none.

        Raises:
            ProtocolError: it is not sealed, or has another size.
            OSError: it can't be mapped.
        """
        descriptor = self._descriptors.get(gift)
        if descriptor is None:
            return None
        try:
            memory = map_sealed(descriptor, nbytes)
            memory.keep(descriptor)
        finally:
            self._let_go(gift)
        return memory

    def close(self) -> None:
        """Let go of all of them."""
        for gift in tuple(self._descriptors):
            self._let_go(gift)

    def _let_go(self, gift: int) -> None:
        descriptor = self._descriptors.pop(gift, None)
        if descriptor is not None:
            os.close(descriptor)
