"""Moves from a device of one peer to a device of another, of which no element passes here."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import anyio

from auth import MeshError
from mesh.device.client.session import Request, Session
from mesh.device.errors import DeviceError, SessionLost
from mesh.device.handover import ARRIVED_CALL, Arrived, Taken
from tensor_bridge import TensorClient, TensorMeta, TensorRef
from transport import CborValue

if TYPE_CHECKING:
    from concurrent.futures import Future

    from mesh.node import Node
    from mesh.peer import Peer

__all__ = ["Mover", "answered"]

REPORT_SECONDS = 30.0
"""How long the target has to take the word of what has arrived."""

_log = logging.getLogger("quicmesh.device")


class Mover:
    """How one session takes part in moves. Made and used in its node's loop.

    Args:
        node: this program's.
        peer: the session's.
        session: whose devices.
        number: what its peer knows it by.
    """

    def __init__(self, node: Node, peer: Peer, session: Session, number: bytes) -> None:
        self.node = node
        self.peer = peer
        self.number = number
        self._session = session

    async def bring(self, source: Mover, request: Request, meta: TensorMeta, arrival: int) -> None:
        """Bring a tensor from another peer, or the error in its place. Raises nothing of its own.

        Args:
            source: where it comes from.
            request: by which that peer was asked to take it out of the device.
            meta: what it is.
            arrival: what the target waits for.
        """
        try:
            object_id = await self._bring(source, request, meta)
            arrived = Arrived(self.number, arrival, object_id)
        except MeshError as error:
            arrived = Arrived(self.number, arrival, error=error)
        except Exception as error:
            _log.exception("a move between devices failed")
            failed = DeviceError("a move between devices", why=f"{type(error).__name__} here")
            arrived = Arrived(self.number, arrival, error=failed)
        try:
            await self._persist(lambda: self._report(arrived))
        except MeshError as error:
            why = f"what was moved to it did not arrive: {error}"
            self._session.fail(SessionLost("a move between devices", peer=self.peer.label, why=why))

    async def _bring(self, source: Mover, request: Request, meta: TensorMeta) -> str:
        taken = Taken.decode(await answered(request.future))
        held = TensorRef(source.peer.node_id, taken.object_id, taken.version, meta)
        there: TensorClient = await source.peer.tensors()
        try:
            copy = await there.copy_to(held, await self.peer.tensors())
        finally:
            with anyio.move_on_after(REPORT_SECONDS, shield=True):
                try:
                    await there.delete(held)
                except MeshError:
                    _log.debug("a moved tensor was not deleted", exc_info=True)
        return copy.object_id

    async def _report(self, arrived: Arrived) -> None:
        connection = await self.peer.connection()
        await connection.call(ARRIVED_CALL, arrived.encode(), timeout=REPORT_SECONDS)

    async def _persist(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Try twice: the link may break, and the peer would wait without end."""
        try:
            await attempt()
        except (SessionLost, DeviceError):
            raise
        except MeshError:
            await attempt()


async def answered(future: Future[CborValue]) -> CborValue:
    """Wait in an event loop for what its own thread will bring.

    Raises:
        MeshError: what is brought instead.
    """
    done = anyio.Event()
    future.add_done_callback(lambda _: done.set())
    await done.wait()
    return future.result()
