"""Where what lies in the memory that the ranks of one host share. Offsets, and nothing else.

::

    for each place   a line of 64 bytes: the counter of its rounds, and whether it has left
                     a line of 64 bytes: the flag that says it sleeps
    for each place   two headers, of even and of odd rounds
    for each place   two boxes, of even and of odd rounds

A *place* is a rank's number among those of its host. All of a place's but the flag of another is
written by it alone.
"""

from __future__ import annotations

import dataclasses

from mesh.collective.host.header import header_bytes

__all__ = ["BOX_BYTES", "MAX_PLACES", "Layout"]

BOX_BYTES = 4 << 20
"""What a rank shows the others in one round: much beside what a round costs, and the more so where
ranks wait for processors."""

SEGMENT_BYTES = 64 << 20
"""Boxes are smaller where those of all ranks would be more than this. Untouched ones cost none."""

MAX_PLACES = 256
"""Ranks that share memory: as many descriptors, for each of them, are two."""

PAGE = 4096
_LINE = 64
_WORD = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The layout for a number of ranks, the same wherever it is computed.

    Attributes:
        size: number of ranks.
        box_bytes: the size of a box.
        header_bytes: the size of a header.
        nbytes: the size of it all.
    """

    size: int
    box_bytes: int
    header_bytes: int
    nbytes: int
    headers: int
    boxes: int

    @classmethod
    def of(cls, size: int, box_bytes: int = BOX_BYTES) -> Layout:
        """Return the layout for `size` ranks."""
        box = max(PAGE, min(box_bytes, SEGMENT_BYTES // (2 * size)) // PAGE * PAGE)
        header = _up(header_bytes(size), _LINE)
        headers = 2 * _LINE * size
        boxes = _up(headers + 2 * size * header, PAGE)
        return cls(size, box, header, boxes + 2 * size * box, headers, boxes)

    def counter(self, place: int) -> int:
        """Return the index, in words of 8 bytes, of a place's counter."""
        return 2 * _LINE // _WORD * place

    def left(self, place: int) -> int:
        """Return the index of the word that says whether a place has left."""
        return self.counter(place) + 1

    def flag(self, place: int) -> int:
        """Return the index of the word that says whether a place sleeps."""
        return self.counter(place) + _LINE // _WORD

    def header(self, place: int, parity: int) -> int:
        """Return the offset of a header."""
        return self.headers + (2 * place + parity) * self.header_bytes

    def box(self, place: int, parity: int) -> int:
        """Return the offset of a box."""
        return self.boxes + (2 * place + parity) * self.box_bytes

    def lane_bytes(self) -> int:
        """Return the size of a part of a box, where it has one for each rank."""
        return self.box_bytes // self.size // _LINE * _LINE


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
