"""Calls about tensors that lie in memory of their owners' making (see `lanes.shared`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from tensor_bridge.arrivals import Arrivals
from tensor_bridge.errors import QuotaExceeded
from tensor_bridge.lanes import Lanes
from tensor_bridge.memory import allocate
from tensor_bridge.serve_put import PutService
from tensor_bridge.serve_read import ReadService
from tensor_bridge.store import TensorStore
from tensor_bridge.wire import ObjectCall
from tensor_bridge.wire_blocks import Found, GiveCall, KeepCall, UndoCall
from transport import CborValue, Endpoint, Incoming

__all__ = ["FIND_CALL", "GIVE_CALL", "KEEP_CALL", "UNDO_CALL", "offer_blocks"]

KEEP_CALL = "tensor.keep"
GIVE_CALL = "tensor.give"
UNDO_CALL = "tensor.undo"
FIND_CALL = "tensor.find"


def offer_blocks(endpoint: Endpoint, store: TensorStore, arrivals: Arrivals, lanes: Lanes) -> None:
    """Offer peers of this host to have their tensors stay in memory that they have made."""
    for name, answer, scope in (
        (KEEP_CALL, partial(_keep, arrivals, lanes), PutService.scope),
        (GIVE_CALL, partial(_give, arrivals, lanes), PutService.scope),
        (UNDO_CALL, partial(_undo, arrivals), PutService.scope),
        (FIND_CALL, partial(_find, store, lanes), ReadService.scope),
    ):
        endpoint.register_call(name, partial(_answer, answer), scope=scope, prompt=answer)


async def _answer(answer: Callable[[Incoming], CborValue], incoming: Incoming) -> CborValue:
    return answer(incoming)


def _keep(arrivals: Arrivals, lanes: Lanes, incoming: Incoming) -> CborValue:
    """Make an object of what lies in a block; nothing is answered if that can't be done.

    Where there is no room for all of the block, there may be for the tensor.
    """
    call = KeepCall.decode(incoming.value)
    loan = lanes.borrow(incoming.connection, call.block, call.lend, call.meta)
    if loan is None:
        return None
    kept = None
    with contextlib.suppress(QuotaExceeded):
        kept = arrivals.keep_outside(
            incoming.peer.node_id,
            call.upload,
            call.meta,
            loan,
            name=call.name,
            quotas=incoming.grant.quotas,
        )
    return None if kept is None else kept.encode()


def _give(arrivals: Arrivals, lanes: Lanes, incoming: Incoming) -> CborValue:
    """Make an object of memory that was handed over; nothing is answered if that did not come.

    Raises:
        QuotaExceeded: there is no room for it.
    """
    call = GiveCall.decode(incoming.value)
    storage = lanes.given(incoming.connection, call.gift, call.meta.nbytes)
    if storage is None:
        return None
    kept = arrivals.keep_outside(
        incoming.peer.node_id,
        call.upload,
        call.meta,
        allocate(call.meta, storage),
        name=call.name,
        quotas=incoming.grant.quotas,
    )
    return None if kept is None else kept.encode()


def _undo(arrivals: Arrivals, incoming: Incoming) -> CborValue:
    arrivals.undo(incoming.peer.node_id, UndoCall.decode(incoming.value).upload)
    return None


def _find(store: TensorStore, lanes: Lanes, incoming: Incoming) -> CborValue:
    """Say in which of the caller's blocks an object of its own lies; nothing, if in none."""
    call = ObjectCall.decode(incoming.value)
    stored = store.owned(call.object_id, incoming.peer.node_id)
    lend = lanes.lent_as(incoming.connection, stored.outside)
    return None if lend is None else Found(stored.meta, lend).encode()
