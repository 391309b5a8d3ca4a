"""Large tensors into, out of and between devices: beside the operations, by the best lane.

Orders among the operations say where a move belongs in their order (`mesh.device.handover`); the
bytes go between the stores of nodes and this program as `tensor_bridge` moves them. Nobody waits
for a move but who reads what it brings, or has begun so many that they fill the memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread
import torch

from auth import MeshError
from mesh.device.client.session import Order, Request, Session
from mesh.device.errors import DeviceBusy, DeviceError, SessionLost
from mesh.device.handover import ARRIVED_CALL, Arrived, PutIn, Taken, TakeOut, transit_name
from mesh.device.link import BROKEN
from tensor_bridge import QuotaExceeded, TensorMeta, TensorRef, tensor_bytes
from tensor_bridge.copying import copy_now
from tensor_bridge.huge_pages import prefer
from tensor_bridge.lanes import sealed_snapshot
from transport import Backoff, CborValue

if TYPE_CHECKING:
    from mesh.node import Node
    from mesh.peer import Peer

__all__ = ["MOVE_BYTES", "Mover", "answered"]

MOVE_BYTES = 1 << 20
"""From this size on, a tensor goes beside the operations: it takes two round trips more to say so
than among them."""

REPORT_SECONDS = 30.0
"""How long the target has to take the word of what has arrived."""

DISCARD_SECONDS = 2.0
"""How long a move that has ended may take to clean up after itself."""

MAX_UNDERWAY, MAX_UNDERWAY_BYTES = 32, 256 << 20
"""Moves into a device, and their bytes, that are not over; who begins more waits."""

MAX_AHEAD = 4
"""How many times as many the loop's own thread, which can't wait, may begin."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two tries when the link has broken."""

ROOM_SECONDS, ROOM_PAUSE = 5.0, 0.01
"""How long an upload waits for others to leave the peer's store, and between two tries."""

AT_ONCE = 4
"""Uploads that share the way to a peer at a time."""

FAREWELL_SECONDS = 2.0
"""How long a peer that does not take what has arrived has to say what became of the session."""

_NOTHING = TensorMeta(torch.uint8, (0,), (0,))

_log = logging.getLogger("quicmesh.device")

_T = TypeVar("_T")


class Mover:
    """How one session takes part in moves. Made in its node's loop.

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
        self._turns = anyio.Semaphore(AT_ONCE)
        self._room = threading.Condition()
        self._count = 0
        self._nbytes = 0

    # -- for every thread

    def upload(self, source: torch.Tensor, meta: TensorMeta, handle: int, offset: int) -> None:
        """Bring a CPU tensor, as it is now, into a storage.

        Args:
            source: dense in memory.
            meta: what it is.
            handle: the storage.
            offset: where in it, in bytes.

        Raises:
            MeshError: as `Session.emit`, or this machine has no memory for a copy.
        """
        self._wait_for_room(meta.nbytes)
        snapshot = sealed_snapshot(source, meta)
        self._put_in(handle, offset, meta.nbytes, partial(self._send_up, snapshot))

    def bring(
        self,
        source: Mover,
        reading: int,
        taken: int,
        meta: TensorMeta,
        handle: int,
        offset: int,
    ) -> None:
        """Bring a tensor from a device of another peer into a storage, past this program.

        Args:
            source: where it comes from.
            reading: number of the template by which it is read there.
            taken: its storage there.
            meta: what it is.
            handle, offset: as `upload`.

        Raises:
            MeshError: as `Session.emit`.
        """
        self._wait_for_room(0)
        request = source._take_out(reading, taken, meta)
        self._put_in(handle, offset, meta.nbytes, partial(self._bring, source, request, meta))

    def download(
        self, reading: int, handle: int, meta: TensorMeta, target: torch.Tensor
    ) -> Request:
        """Ask for the elements of a tensor; return what to wait for until they are in `target`.

        Args:
            reading: number of the template by which it is read.
            handle: its storage.
            meta: what it is.
            target: a contiguous CPU tensor.

        Raises:
            MeshError: as `Session.emit`.
        """
        order = self._take_out(reading, handle, meta)
        landed, over = self._session.promise(order.what)
        self._spawn(partial(self._bring_down, order, meta, target, landed.future, over))
        return landed

    def _take_out(self, reading: int, handle: int, meta: TensorMeta) -> Request:
        return self._session.order(
            lambda key: Order(TakeOut(key, reading, handle, meta).encode()),
            f"move of a tensor of shape {meta.shape}",
        )

    def _put_in(
        self, handle: int, offset: int, nbytes: int, fetch: Callable[[], Awaitable[str]]
    ) -> None:
        arrival = self._session.next_id()
        with self._room:
            self._count += 1
            self._nbytes += nbytes
        try:
            request = self._session.order(
                lambda key: Order(PutIn(key, handle, offset, nbytes, arrival).encode()),
                "move into a device",
            )
        except BaseException:
            # The order may be on its way all the same, and what needs it must not wait for ever.
            self._spawn(partial(self._deliver, arrival, _interrupted))
            self._is_over(nbytes)
            raise
        request.future.add_done_callback(lambda _: self._is_over(nbytes))
        self._spawn(partial(self._deliver, arrival, fetch))

    def _spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        carrier = self._session.carrier
        assert carrier is not None
        carrier.spawn(task)  # type: ignore[arg-type]

    def _wait_for_room(self, nbytes: int) -> None:
        def has_room(times: int) -> bool:
            return self._count == 0 or (
                self._count < MAX_UNDERWAY * times
                and self._nbytes + nbytes <= MAX_UNDERWAY_BYTES * times
            )

        carrier = self._session.carrier
        assert carrier is not None
        with self._room:
            if not carrier.is_in_loop():
                self._room.wait_for(partial(has_room, 1))
            elif not has_room(MAX_AHEAD):
                raise DeviceBusy(
                    "a move to a device",
                    peer=self.peer.label,
                    why=f"{self._count} moves are under way, and this thread is the one that makes "
                    "them",
                    fix="Await mesh.device.synchronize_async(device) now and then, or compute in a "
                    "thread.",
                )

    def _is_over(self, nbytes: int) -> None:
        with self._room:
            self._count -= 1
            self._nbytes -= nbytes
            self._room.notify_all()

    # -- in the loop

    async def _deliver(self, arrival: int, fetch: Callable[[], Awaitable[str]]) -> None:
        """Tell the peer what `fetch` has had arrive there, or the error in its place."""
        object_id = None
        try:
            object_id = await fetch()
            arrived = Arrived(self.number, arrival, object_id)
        except MeshError as error:
            arrived = Arrived(self.number, arrival, error=error)
        except Exception as error:
            _log.exception("a move between devices failed")
            failed = DeviceError("a move between devices", why=f"{type(error).__name__} here")
            arrived = Arrived(self.number, arrival, error=failed)
        try:
            await _persist(lambda: self._report(arrived), self)
            object_id = None  # it is the session's now
        except MeshError as error:
            # A peer that has lost the session is about to say why, which ends this task.
            await anyio.sleep(FAREWELL_SECONDS)
            why = f"what was moved to it did not arrive: {error}"
            self._session.fail(SessionLost("a move between devices", peer=self.peer.label, why=why))
        finally:
            if object_id is not None:
                await self._discard(object_id)

    async def _discard(self, object_id: str) -> None:
        """Have the peer let go of what has arrived and is for nobody."""
        await self._delete(TensorRef(self.peer.node_id, object_id, 0, _NOTHING))

    async def _delete(self, held: TensorRef) -> None:
        """Have the peer let go of a tensor in its store; at the end of all, if it can be told."""
        try:
            await _persist(partial(self._let_go, held), self)
        except MeshError:
            _log.debug("a moved tensor was not deleted", exc_info=True)
        except BaseException:
            if self.node.endpoint.connection(self.peer.node_id) is not None:
                with (
                    anyio.move_on_after(DISCARD_SECONDS, shield=True),
                    contextlib.suppress(MeshError),
                ):
                    await self._let_go(held)
            raise

    async def _let_go(self, held: TensorRef) -> None:
        await (await self.peer.tensors()).delete(held)

    async def _send_up(self, snapshot: torch.Tensor) -> str:
        deadline = anyio.current_time() + ROOM_SECONDS
        while True:
            try:
                async with self._turns:
                    return await _persist(partial(self._put, snapshot), self)
            except QuotaExceeded:
                if self._count <= 1 or anyio.current_time() > deadline:
                    raise
                await anyio.sleep(ROOM_PAUSE)  # what was begun before it takes the room now

    async def _put(self, snapshot: torch.Tensor) -> str:
        there = await self.peer.tensors()
        ref = await there.put(snapshot, name=transit_name(self.number), shareable=True)
        return ref.object_id

    async def _bring(self, source: Mover, request: Request, meta: TensorMeta) -> str:
        held = await source._held(request, meta)

        async def copy() -> TensorRef:
            there, target = await source.peer.tensors(), await self.peer.tensors()
            return await there.copy_to(held, target, name=transit_name(self.number))

        try:
            return (await _persist(copy, source, self)).object_id
        finally:
            await source._delete(held)

    async def _bring_down(
        self,
        request: Request,
        meta: TensorMeta,
        target: torch.Tensor,
        landed: Future[CborValue],
        over: Callable[[], object],
    ) -> None:
        try:
            held = await self._held(request, meta)
            try:
                tensor = await _persist(partial(self._get, held), self)
                await anyio.to_thread.run_sync(_land, target, tensor)
                _settle(landed, None)
            finally:
                over()
                await self._delete(held)
        except MeshError as error:
            _settle(landed, error)
        except Exception as error:
            _log.exception("a move from a device failed")
            why = f"{type(error).__name__} here"
            _settle(landed, DeviceError("a move from a device", why=why))
        finally:
            over()
            _settle(landed, SessionLost("a move from a device", why="its node was closed"))

    async def _get(self, held: TensorRef) -> torch.Tensor:
        return await (await self.peer.tensors()).get(held, copy=False)

    async def _held(self, request: Request, meta: TensorMeta) -> TensorRef:
        """Wait until a tensor was taken out of the device into the store of its node."""
        taken = Taken.decode(await answered(request.future))
        return TensorRef(self.peer.node_id, taken.object_id, taken.version, meta)

    async def _report(self, arrived: Arrived) -> None:
        connection = await self.peer.connection()
        await connection.call(ARRIVED_CALL, arrived.encode(), timeout=REPORT_SECONDS)


def _land(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy to memory that mostly is new, and takes half as long in huge pages."""
    prefer(target.data_ptr(), target.nbytes)
    copy_now(tensor_bytes(target), tensor_bytes(tensor))


async def _persist(attempt: Callable[[], Awaitable[_T]], *movers: Mover) -> _T:
    """Try until it is done, as often as a link to a peer breaks, while there are the sessions.

    Raises:
        MeshError: what the last try raised.
    """
    backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
    while True:
        links = [mover.node.endpoint.connection(mover.peer.node_id) for mover in movers]
        try:
            return await attempt()
        except BROKEN:
            stand = all(link is not None and link.closed is None for link in links)
            if stand or any(mover._session.error is not None for mover in movers):
                raise
        await anyio.sleep(backoff.pause())


async def answered(future: Future[_T]) -> _T:
    """Wait in an event loop for what its own thread will bring.

    Raises:
        MeshError: what is brought instead.
    """
    done = anyio.Event()
    future.add_done_callback(lambda _: done.set())
    await done.wait()
    return future.result()


async def _interrupted() -> str:
    raise DeviceError("a move into a device", why="the call that began it was interrupted")


def _settle(future: Future[CborValue], error: MeshError | None) -> None:
    """Have whoever waits go on, unless it does already: all was lost."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
