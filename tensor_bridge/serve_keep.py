"""Calls about tensors that lie in blocks of their owners' (see `lanes.shared.blocks`)."""

from __future__ import annotations

from functools import partial

from tensor_bridge.arrivals import Arrivals
from tensor_bridge.lanes import Lanes
from tensor_bridge.serve_put import PutService
from tensor_bridge.serve_read import ReadService
from tensor_bridge.store import TensorStore
from tensor_bridge.wire import ObjectCall
from tensor_bridge.wire_blocks import Found, KeepCall, UndoCall
from transport import CborValue, Endpoint, Incoming

__all__ = ["FIND_CALL", "KEEP_CALL", "UNDO_CALL", "offer_blocks"]

KEEP_CALL = "tensor.keep"
UNDO_CALL = "tensor.undo"
FIND_CALL = "tensor.find"


def offer_blocks(endpoint: Endpoint, store: TensorStore, arrivals: Arrivals, lanes: Lanes) -> None:
    """Offer peers of this host to have their tensors stay in memory that they have made."""
    endpoint.register_call(KEEP_CALL, partial(_keep, arrivals, lanes), scope=PutService.scope)
    endpoint.register_call(UNDO_CALL, partial(_undo, arrivals), scope=PutService.scope)
    endpoint.register_call(FIND_CALL, partial(_find, store, lanes), scope=ReadService.scope)


async def _keep(arrivals: Arrivals, lanes: Lanes, incoming: Incoming) -> CborValue:
    """Make an object of what lies in a block; nothing is answered if there is no such block.

    Raises:
        QuotaExceeded: there is no room for it.
    """
    call = KeepCall.decode(incoming.value)
    async with arrivals.hold(
        incoming.peer.node_id,
        call.upload,
        call.meta,
        name=call.name,
        quotas=incoming.grant.quotas,
    ) as arrival:
        if arrival.landing is None:  # it has come already, and the answer was lost
            return arrival.keep().encode()
        loan = lanes.borrow(incoming.connection, call.block, call.lend, call.meta)
        return None if loan is None else arrival.keep_outside(loan).encode()


async def _undo(arrivals: Arrivals, incoming: Incoming) -> CborValue:
    arrivals.undo(incoming.peer.node_id, UndoCall.decode(incoming.value).upload)
    return None


async def _find(store: TensorStore, lanes: Lanes, incoming: Incoming) -> CborValue:
    """Say in which of the caller's blocks an object of its own lies; nothing, if in none."""
    call = ObjectCall.decode(incoming.value)
    stored = store.owned(call.object_id, incoming.peer.node_id)
    lend = lanes.lent_as(incoming.connection, stored.outside)
    return None if lend is None else Found(stored.meta, lend).encode()
