"""Where peers may be reached, as far as one endpoint has been told or has found out."""

from __future__ import annotations

from collections import OrderedDict

from auth import NodeId, SocketAddress
from transport.addresses import canonical_address

__all__ = ["MAX_ADDRESSES", "MAX_PEERS", "Whereabouts"]

MAX_PEERS = 4096
"""Peers remembered; the one that nothing was heard of for longest is forgotten first."""

MAX_ADDRESSES = 16
"""Addresses remembered of one peer, the latest first."""


class Whereabouts:
    """Addresses by node id, and which of them worked last."""

    def __init__(self) -> None:
        self._known: OrderedDict[NodeId, tuple[SocketAddress, ...]] = OrderedDict()
        self._reached: dict[NodeId, SocketAddress] = {}

    def add(self, node_id: NodeId, addresses: tuple[SocketAddress, ...]) -> None:
        """Remember `addresses` of a node, before what was known of it."""
        merged = dict.fromkeys((*map(canonical_address, addresses), *self.of(node_id)))
        self._known[node_id] = tuple(merged)[:MAX_ADDRESSES]
        self._known.move_to_end(node_id)
        if len(self._known) > MAX_PEERS:
            forgotten, _ = self._known.popitem(last=False)
            self._reached.pop(forgotten, None)

    def reached(self, node_id: NodeId, address: SocketAddress) -> None:
        """Remember that there is a connection with the node at `address`."""
        self.add(node_id, (address,))
        self._reached[node_id] = address

    def of(self, node_id: NodeId) -> tuple[SocketAddress, ...]:
        """Return the addresses known of a node, the latest first."""
        return self._known.get(node_id, ())

    def to_dial(
        self, node_id: NodeId, addresses: tuple[SocketAddress, ...]
    ) -> tuple[SocketAddress, ...]:
        """Return `addresses` and those known, in the order in which to try them."""
        candidates = dict.fromkeys((*map(canonical_address, addresses), *self.of(node_id)))
        won = self._reached.get(node_id)
        if won in candidates:
            candidates = {won: None, **candidates}  # whatever is said elsewhere, it worked last
        return tuple(candidates)
