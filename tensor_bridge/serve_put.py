"""The service to which a peer puts a tensor: room first, then bytes, then an object."""

from __future__ import annotations

from tensor_bridge.arrivals import Arrivals
from tensor_bridge.lanes import Lanes, choose_lane
from tensor_bridge.moves import MoveLimits, deadline, receive_message, settle
from tensor_bridge.wire import PutAccepted, PutOpen, Sent
from transport import Incoming

__all__ = ["PutService"]


class PutService:
    """Serves ``tensor.put``: `PutOpen` in, `PutAccepted` out, bytes and `Sent` in, `Stored` out."""

    name = "tensor.put"
    scope = "tensor:put"

    def __init__(self, arrivals: Arrivals, limits: MoveLimits, lanes: Lanes) -> None:
        self._arrivals = arrivals
        self._limits = limits
        self._lanes = lanes

    async def serve(self, incoming: Incoming) -> None:
        """Take one tensor; it becomes the peer's own.

        Raises:
            QuotaExceeded: before anything is allocated.
            DeadlineExceeded: too slow; what has landed waits a while to be taken up again.
        """
        order = PutOpen.decode(incoming.value)
        owner, stream = incoming.peer.node_id, incoming.stream
        async with self._arrivals.hold(
            owner, order.upload, order.meta, name=order.name, quotas=incoming.grant.quotas
        ) as arrival:
            offer = self._lanes.answer(
                incoming.connection, order.lanes, sealed=arrival.moved == 0 != order.meta.nbytes
            )
            if arrival.landing is not None and not offer.brings_memory:
                arrival.landing.allocate()  # before anything is answered
            with (
                deadline(
                    self._limits.total, "put of a tensor", peer=incoming.peer, why="it is too slow"
                ),
                offer.landing(stream),
            ):
                await stream.send_reply(PutAccepted(arrival.moved, offer.best).encode())
                if arrival.landing is not None:
                    lane = choose_lane(stream, offer, offer.best, stall_seconds=self._limits.stall)
                    await lane.receive(arrival.landing)
                Sent.decode(await receive_message(stream))
            await stream.send_message(arrival.keep().encode())
            await settle(stream)
