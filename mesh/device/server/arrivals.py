"""What comes into storages beside the operations: expected in their order, there when it is."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from auth import MeshError
from mesh.device.server.later import Later, Step

__all__ = ["Arrivals", "Come", "Place"]

Come: TypeAlias = int | MeshError | None
"""A descriptor of memory that begins with the bytes, why they don't come, or None for no bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where bytes that arrive belong.

    Attributes:
        handle: the storage.
        offset: where in it, in bytes.
        nbytes: how many.
    """

    handle: int
    offset: int
    nbytes: int


class Arrivals:
    """The arrivals of one session.

    Args:
        later: what waits for them.
        settle: puts what has come in its place. It raises nothing.
    """

    def __init__(self, later: Later, settle: Callable[[Place, Come], None]) -> None:
        self._later = later
        self._settle = settle
        self._places: dict[int, Place] = {}
        self._early: dict[int, Come] = {}
        """What has come before it was expected."""

    def expect(self, arrival: int, place: Place) -> None:
        """Have whatever touches the storage from now on wait until `arrival` has come."""
        self._later.do(Step(partial(self._expect, arrival, place), (), (place.handle,)))

    def come(self, arrival: int, come: Come) -> None:
        """Take what has come; a descriptor is closed once it is of no more use."""
        place = self._places.pop(arrival, None)
        if place is None:
            self._early[arrival] = come
            return
        self._finish(place, come)
        self._later.arrived(arrival)

    def _expect(self, arrival: int, place: Place) -> None:
        if arrival in self._early:
            self._finish(place, self._early.pop(arrival))
            return
        self._places[arrival] = place
        self._later.expect(arrival, place.handle)

    def _finish(self, place: Place, come: Come) -> None:
        try:
            self._settle(place, come)
        finally:
            if isinstance(come, int):
                os.close(come)
