"""Collectives among ranks of one host, in memory that they share: no event loop, no network.

`Board` is the memory. The algorithms are called by those of `mesh.collective` in a group that has
one.
"""

from __future__ import annotations

from mesh.collective.host.board import Board
from mesh.collective.host.layout import MAX_PLACES, Layout
from mesh.collective.host.moving import (
    all_gather,
    all_to_all,
    barrier,
    broadcast,
    gather,
    scatter,
)
from mesh.collective.host.reducing import all_reduce, reduce, reduce_scatter

__all__ = [
    "MAX_PLACES",
    "Board",
    "Layout",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]
