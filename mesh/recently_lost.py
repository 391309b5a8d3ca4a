"""Peers that were lost a moment ago, and may be starting anew."""

from __future__ import annotations

import time
from collections.abc import Callable

from auth import MeshError, NodeId
from transport import Connection, ConnectionClosed, PeerLost, Superseded

__all__ = ["FIRST_PAUSE", "LONGEST_PAUSE", "RETURN_SECONDS", "RecentlyLost"]

RETURN_SECONDS = 5.0
"""How long a lost peer has to come back before a dial fails at its first try: a program that is
started again by its supervisor is there by then."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 1.0
"""Seconds between two dials of such a peer."""

MAX_LOST = 1024
"""Lost peers remembered; the oldest are forgotten first."""


class RecentlyLost:
    """Who was lost, and when.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lost_at: dict[NodeId, float] = {}

    def left(self, connection: Connection, error: MeshError) -> None:
        """Note that a connection ended with `error`, if the peer may come back from that."""
        node_id = connection.peer.node_id
        is_closed = isinstance(error, ConnectionClosed) and not isinstance(error, Superseded)
        if isinstance(error, PeerLost) or (is_closed and not connection.was_ended_here):
            self._lost_at.pop(node_id, None)
            self._lost_at[node_id] = self._clock()
            if len(self._lost_at) > MAX_LOST:
                del self._lost_at[next(iter(self._lost_at))]

    def joined(self, node_id: NodeId) -> None:
        """Note that a peer is there."""
        self._lost_at.pop(node_id, None)

    def seconds_left(self, node_id: NodeId) -> float:
        """Return for how much longer a peer may be on its way back; 0 if it was not lost lately."""
        lost_at = self._lost_at.get(node_id)
        return 0.0 if lost_at is None else max(0.0, lost_at + RETURN_SECONDS - self._clock())
