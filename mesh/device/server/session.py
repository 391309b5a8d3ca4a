"""One session at the peer: frames of a client on one side, an executor on the other."""

from __future__ import annotations

import dataclasses
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable

import anyio
import torch

from auth import MeshError, NodeId, PeerIdentity, Quotas
from mesh.device import wire
from mesh.device.errors import DeviceError, SessionLost
from mesh.device.handover import INTERNAL, Arrived, PutIn, Taken, TakeOut, decode_order
from mesh.device.link import MAX_FRAME, Link
from mesh.device.server.executor import LENGTH, ExecutorLimits
from mesh.device.server.nursery import Executor
from mesh.tasks import helpers
from tensor_bridge import CHUNK_BYTES, Reservation, TensorStore, allocate, tensor_bytes
from transport import LimitExceeded, ProtocolError, Stream

__all__ = ["ServerSession"]

QUEUED = 16
"""Batches that wait for the executor; who sends more waits."""

FAREWELL_SECONDS = 2.0
"""How long a session that ends waits for its client to take the last word."""

MAX_ARRIVALS = 256
"""Things that may have arrived for a session before it is their turn."""

_log = logging.getLogger("quicmesh.device")

_ANSWER = struct.Struct("<BQ")


@dataclasses.dataclass(slots=True)
class _TakingOut:
    """A tensor on its way from the executor into the store."""

    request: int
    reservation: Reservation
    tensor: torch.Tensor
    room: memoryview
    filled: int = 0


class ServerSession:
    """A session, from its first stream until it is closed, its executor ends, or its lease does.

    Args:
        owner: whose it is.
        executor: runs its operations.
        limits: of the executor.
        store: where tensors pass through on their way to and from other peers; None if this node
            moves none.
        quotas: of the owner, in the store.

    Attributes:
        detached_at: since when no stream carries it; None while one does.
        ended: set once it is over.
    """

    def __init__(
        self,
        owner: PeerIdentity,
        executor: Executor,
        limits: ExecutorLimits,
        store: TensorStore | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self.owner = owner
        self.link = Link(self._take)
        self.detached_at: float | None = None
        self.ended = anyio.Event()
        self._executor = executor
        self._limits = limits
        self._store = store
        self._quotas = quotas
        self._stream: anyio.CancelScope | None = None
        self._scope = anyio.CancelScope()
        self._queue: deque[bytes | bytearray] = deque()
        self._queue_changed = anyio.Event()
        self._taking: dict[int, _TakingOut] = {}
        self._arrived: dict[int, Arrived] = {}
        self._arrival = anyio.Event()

    @property
    def executor(self) -> Executor:
        """What runs its operations."""
        return self._executor

    @property
    def owners(self) -> set[NodeId]:
        """The program's key, and that of the machine it acts under."""
        return {self.owner.node_id, self.owner.machine_id}

    async def run(self, over: Callable[[], object]) -> None:
        """Serve until it is over; then call `over`."""
        try:
            with self._scope:
                async with helpers() as tasks:
                    tasks.start_soon(self._feed)
                    await self._read_answers()
                await self._say_farewell()
        except Exception:  # of one session's, and no reason to end the others
            _log.exception("a session with a device of %s failed", self.owner)
        finally:
            self._executor.kill()
            if self._stream is not None:
                self._stream.cancel()
            for taking in self._taking.values():
                taking.reservation.release()
            for arrived in self._arrived.values():
                self._drop(arrived)
            self.ended.set()
            over()

    async def carry(self, stream: Stream, received: int) -> None:
        """Carry it on a stream of its owner, instead of the one that did so far.

        Raises:
            MeshError: how the stream broke.
        """
        with anyio.CancelScope() as scope:
            former, self._stream = self._stream, scope
            if former is not None:
                former.cancel()
            self.detached_at = None
            try:
                await self.link.carry(stream, received)
            finally:
                if self._stream is scope:
                    self._stream = None
                    self.detached_at = anyio.current_time()

    def close(self) -> None:
        """End it now."""
        self._scope.cancel()

    def arrive(self, arrived: Arrived) -> None:
        """Take what its client says has arrived for it.

        Raises:
            LimitExceeded: too much has, and it was not the turn of any of it.
        """
        if len(self._arrived) >= MAX_ARRIVALS or arrived.arrival in self._arrived:
            raise LimitExceeded(
                "an arrival for a device", why=f"{len(self._arrived)} wait for their turn"
            )
        self._arrived[arrived.arrival] = arrived
        event, self._arrival = self._arrival, anyio.Event()
        event.set()

    # -- towards the executor

    async def _take(self, payload: bytearray) -> None:
        """Take a frame of the client's.

        It may be cancelled and called again with the same frame. What it has done until then does
        no harm if it is done again; a batch is queued without a wait after it.
        """
        order = decode_order(payload)
        if not payload:
            self.close()
        elif order is None:
            await self._enqueue(payload)
        elif isinstance(order, TakeOut):
            await self._take_out(order)
        else:
            await self._put_in(order)

    async def _enqueue(self, batch: bytes | bytearray) -> None:
        while len(self._queue) >= QUEUED:
            await self._queue_changed.wait()
        self._queue.append(batch)
        self._wake_queue()

    async def _feed(self) -> None:
        """Hand batches to the executor, each whole."""
        link = self._executor.link
        while True:
            while self._queue:
                batch = self._queue.popleft()
                self._wake_queue()
                await _send_all(link, LENGTH.pack(len(batch)))
                await _send_all(link, batch)
            await self._queue_changed.wait()

    def _wake_queue(self) -> None:
        event, self._queue_changed = self._queue_changed, anyio.Event()
        event.set()

    async def _take_out(self, order: TakeOut) -> None:
        if order.request not in self._taking:
            try:
                if self._store is None:
                    raise _no_store()
                owner, nbytes = self.owner.node_id, order.meta.nbytes
                reservation = self._store.reserve(owner, nbytes, self._quotas)
                tensor = allocate(order.meta)
            except MeshError as error:
                await self.link.post(wire.failure(order.request, wire.Failure(error)))
                return
            room = tensor_bytes(tensor) if nbytes else memoryview(bytearray())
            taking = _TakingOut(order.request, reservation, tensor, room)
            self._taking[order.request] = taking
        request = struct.pack(
            "<BQIQ", wire.ASK_KIND, order.request | INTERNAL, order.template, order.handle
        )
        await self._enqueue(request)

    async def _put_in(self, order: PutIn) -> None:
        while order.arrival not in self._arrived:
            await self._arrival.wait()
        arrived = self._arrived[order.arrival]
        try:
            if arrived.error is not None:
                raise arrived.error
            if self._store is None or arrived.object_id is None:
                raise _no_store()
            stored = self._store.owned(arrived.object_id, self.owner.node_id)
            data = tensor_bytes(stored.tensor) if stored.meta.nbytes else memoryview(b"")
            for start in range(0, len(data), CHUNK_BYTES):
                part = data[start : start + CHUNK_BYTES]
                await self._enqueue(wire.write(order.handle, start, part))
        except MeshError as error:
            await self._enqueue(wire.poison(order.handle, error))
        self._drop(arrived)
        del self._arrived[order.arrival]

    def _drop(self, arrived: Arrived) -> None:
        """Let go of an object that has arrived."""
        if self._store is not None and arrived.object_id is not None:
            try:
                stored = self._store.owned(arrived.object_id, self.owner.node_id)
                self._store.delete(stored.object_id)
            except MeshError:
                pass  # it has gone before

    # -- from the executor

    async def _read_answers(self) -> None:
        """Pass answers on until the executor has ended."""
        link = self._executor.link
        try:
            while True:
                (length,) = LENGTH.unpack(await _receive(link, LENGTH.size))
                if not _ANSWER.size <= length <= MAX_FRAME:
                    raise ProtocolError("an answer of an executor", why="it has no such length")
                answer = bytes(await _receive(link, length))
                _, request = _ANSWER.unpack_from(answer)
                if request & INTERNAL:
                    await self._take_part(request & ~INTERNAL, answer)
                else:
                    await self.link.post(answer)
        except (EOFError, OSError, MeshError):
            return

    async def _take_part(self, request: int, data: bytes) -> None:
        """Take a part of a tensor that was asked for here."""
        taking = self._taking.get(request)
        if taking is None:
            return  # its client asked under a number of ours, and gets nothing for it
        answer = wire.read_answer(memoryview(data), None)
        failed = answer.failure
        if failed is None and answer.data is not None:
            end = taking.filled + len(answer.data)
            if end <= len(taking.room):
                taking.room[taking.filled : end] = answer.data
                taking.filled = end
                if not answer.last:
                    return
            if end == len(taking.room):
                del self._taking[request]
                stored = taking.reservation.keep(taking.tensor)
                taken = Taken(stored.object_id, stored.version)
                await self.link.post(wire.answer(request, taken.encode()))
                return
        del self._taking[request]
        taking.reservation.release()
        if failed is None:
            error = DeviceError("a move from a device", why="the tensor is not what was announced")
            failed = wire.Failure(error)
        await self.link.post(wire.failure(request, failed))

    async def _say_farewell(self) -> None:
        """Tell the client that the executor has ended, if it is there to be told."""
        with anyio.move_on_after(FAREWELL_SECONDS):
            await self._executor.ended.wait()
        error = SessionLost(
            "a session with a device",
            why=self._executor.why(self._limits),
            fix="Open the device again; its tensors are lost.",
        )
        with anyio.move_on_after(FAREWELL_SECONDS):
            await self.link.post(wire.failure(0, wire.Failure(error)))
            await self.link.post(b"")  # the client leaves now, which ends this wait
            await self.link.delivered()


def _no_store() -> DeviceError:
    return DeviceError(
        "a move between devices",
        why="this node moves no tensors to or from other peers",
        fix="Offer its devices on a node that has the tensor service.",
    )


async def _send_all(link: socket.socket, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[link.send(view) :]
        except BlockingIOError:
            await anyio.wait_writable(link)
        except OSError:
            await anyio.sleep_forever()  # it has ended: whoever reads its answers sees to that


async def _receive(link: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        try:
            got = link.recv_into(view)
        except BlockingIOError:
            await anyio.wait_readable(link)
            continue
        if not got:
            raise EOFError
        view = view[got:]
    return data
