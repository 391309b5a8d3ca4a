"""The receiving side of a read: of a client that gets a tensor, of a node that fetches one."""

from __future__ import annotations

from tensor_bridge.errors import TensorChanged
from tensor_bridge.lanes import Lanes, choose_lane
from tensor_bridge.moves import Landing, receive_message
from tensor_bridge.serve_read import ReadService
from tensor_bridge.wire import ReadAccepted, ReadOpen, Received, Sent
from transport import Connection

__all__ = ["read_into"]


async def read_into(
    landing: Landing,
    connection: Connection,
    *,
    object_id: str | None = None,
    token: bytes | None = None,
    lanes: Lanes,
    stall_seconds: float,
    copy: bool = True,
) -> None:
    """Read what is still missing in `landing` from the peer of `connection`, and acknowledge it.

    Without `copy`, memory that the peer hands over may take the place of the landing's own.

    Raises:
        TensorChanged: the tensor at the peer is not, or no longer, what has landed so far.
        MeshError: the peer refused, or the link broke; in the latter case it can be called again.
    """
    offer = await lanes.offer(connection, landing.nbytes, sealed=not copy and not landing.moved)
    order = ReadOpen(object_id, token, landing.moved, landing.version, offer.names)
    stream = await connection.open_stream(ReadService.name, order.encode())
    # The landing at once: what comes by another lane may be here before the answer.
    async with stream:
        with offer.landing(stream):
            accepted = ReadAccepted.decode(await stream.reply())
            if accepted.meta != landing.meta:
                raise _changed("it has another type, shape or layout than announced", connection)
            landing.version = accepted.version
            lane = choose_lane(stream, offer, accepted.lane, stall_seconds=stall_seconds)
            await lane.receive(landing)
            if Sent.decode(await receive_message(stream)).version != accepted.version:
                raise _changed("it was written to while it was read", connection)
            await stream.send_message(Received(landing.meta.nbytes).encode())


def _changed(why: str, connection: Connection) -> TensorChanged:
    return TensorChanged(
        "read of a tensor",
        peer=connection.peer,
        why=why,
        fix="Let nobody write to it until the move is over, or move a copy.",
    )
