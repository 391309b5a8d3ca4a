"""One session at the peer: frames of a client on one side, an executor on the other."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

import anyio
import anyio.abc
import torch

from auth import MeshError, NodeId, PeerIdentity, Quotas
from mesh.device import wire
from mesh.device.errors import DeviceError, SessionLost
from mesh.device.handover import (
    INTERNAL,
    Arrived,
    PutIn,
    Taken,
    TakeOut,
    decode_order,
    transit_name,
)
from mesh.device.link import MAX_FRAME, Link
from mesh.device.server import orders
from mesh.device.server.executor import LENGTH, ORDER, ExecutorLimits, Inlet
from mesh.device.server.nursery import Executor
from mesh.tasks import helpers
from tensor_bridge import Reservation, TensorMeta, TensorStore, allocate, tensor_bytes
from tensor_bridge.lanes import map_sealed, sealed_descriptor
from transport import LimitExceeded, ProtocolError, Stream

__all__ = ["ServerSession"]

QUEUED = 16
"""Batches that wait for the executor; who sends more waits."""

FAREWELL_SECONDS = 2.0
"""How long a session that ends waits for its client to take the last word."""

MAX_BEHIND = 1 << 20
"""Bytes of batches that an executor is given while it waits for an arrival; those of operations
that need it, it has to keep."""

MAX_ARRIVALS = 256
"""Things that may have arrived for a session before it is their turn, and that may be awaited."""

_log = logging.getLogger("quicmesh.device")

_ANSWER = struct.Struct("<BQ")


@dataclasses.dataclass(slots=True)
class _TakingOut:
    """A tensor on its way from the executor into the store."""

    meta: TensorMeta
    reservation: Reservation
    tensor: torch.Tensor | None = None
    filled: int = 0

    @property
    def room(self) -> memoryview:
        """Where its elements go, for an executor that has no memory to hand over."""
        if self.tensor is None:
            self.tensor = allocate(self.meta)
        return tensor_bytes(self.tensor) if self.meta.nbytes else memoryview(bytearray())


@dataclasses.dataclass(slots=True)
class _Frame:
    """What is sent to the executor, whole; a descriptor beside it is closed then."""

    data: bytes | bytearray
    is_order: bool = False
    descriptor: int | None = None

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class ServerSession:
    """A session, from its first stream until it is closed, its executor ends, or its lease does.

    Args:
        number: what its client calls it.
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
        number: bytes,
        owner: PeerIdentity,
        executor: Executor,
        limits: ExecutorLimits,
        store: TensorStore | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self.owner = owner
        self._number = number
        self._is_abandoned = False
        self._is_over = False
        """Whether the executor has ended, so that nothing is passed on to it any more."""
        self.link = Link(self._take)
        self.detached_at: float | None = None
        self.ended = anyio.Event()
        self._executor = executor
        self._limits = limits
        self._store = store
        self._quotas = quotas
        self._stream: anyio.CancelScope | None = None
        self._scope = anyio.CancelScope()
        self._tasks: anyio.abc.TaskGroup
        self._inlet = Inlet(executor.link)
        self._queue: deque[_Frame] = deque()
        self._urgent: deque[_Frame] = deque()
        """What goes before the queue: what the executor waits for."""
        self._queue_changed = anyio.Event()
        self._awaited: dict[int, PutIn] = {}
        self._behind = 0
        self._taking: dict[int, _TakingOut] = {}
        self._arrived: dict[int, Arrived] = {}
        self._placed: deque[int] = deque(maxlen=MAX_ARRIVALS)
        """Those that were the latest to be passed on."""

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
                async with helpers() as self._tasks:
                    self._tasks.start_soon(self._feed)
                    await self._read_answers()
                    self._is_over = True
                await self._say_farewell()
        except Exception:  # of one session's, and no reason to end the others
            _log.exception("a session with a device of %s failed", self.owner)
        finally:
            self._executor.kill()
            self._inlet.close()
            for frame in (*self._urgent, *self._queue):
                frame.close()
            if self._stream is not None:
                self._stream.cancel()
            for taking in self._taking.values():
                taking.reservation.release()
            self._drop_rest()
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

    def abandon(self) -> None:
        """End it now: its client is gone, and will not come back for anything."""
        self._is_abandoned = True
        self.close()

    def arrive(self, arrived: Arrived) -> None:
        """Take what its client says has arrived for it.

        Raises:
            LimitExceeded: too much has, and it was not the turn of any of it.
        """
        if arrived.arrival in self._arrived or arrived.arrival in self._placed:
            return  # told once more, since the link broke before the client heard of the first
        if len(self._arrived) >= MAX_ARRIVALS:
            raise LimitExceeded(
                "an arrival for a device", why=f"{len(self._arrived)} wait for their turn"
            )
        self._arrived[arrived.arrival] = arrived
        if arrived.arrival in self._awaited:
            self._begin_to_pass_on(arrived)

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
            await self._enqueue(_Frame(payload))
        elif isinstance(order, TakeOut):
            await self._take_out(order)
        else:
            await self._put_in(order)

    async def _enqueue(self, frame: _Frame) -> None:
        while len(self._queue) >= QUEUED:
            await self._queue_changed.wait()
        self._queue.append(frame)
        self._wake_queue()

    async def _feed(self) -> None:
        """Hand frames to the executor, each whole."""
        while True:
            while (frame := self._next_frame()) is not None:
                try:
                    await self._send(frame)
                finally:
                    frame.close()
            await self._queue_changed.wait()

    def _next_frame(self) -> _Frame | None:
        if self._urgent:
            return self._urgent.popleft()
        if not self._queue or (self._awaited and self._behind >= MAX_BEHIND):
            return None
        frame = self._queue.popleft()
        if self._awaited:
            self._behind += len(frame.data)
        self._wake_queue()
        return frame

    async def _send(self, frame: _Frame) -> None:
        link = self._executor.link
        length = LENGTH.pack(len(frame.data) | (ORDER if frame.is_order else 0))
        if frame.descriptor is None:
            await _send_all(link, length)
        else:
            await _send_beside(link, length, frame.descriptor)
        await _send_all(link, frame.data)

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
            except MeshError as error:
                await self.link.post(wire.failure(order.request, wire.Failure(error)))
                return
            self._taking[order.request] = _TakingOut(order.meta, reservation)
        hand = orders.Hand(order.request | INTERNAL, order.template, order.handle)
        await self._enqueue(_Frame(orders.encode(hand), is_order=True))

    async def _put_in(self, order: PutIn) -> None:
        if order.arrival in self._awaited or len(self._awaited) >= MAX_ARRIVALS:
            raise LimitExceeded(
                "a move into a device", why=f"{len(self._awaited)} are awaited already"
            )
        coming = orders.Await(order.arrival, order.handle, order.offset, order.nbytes)
        await self._enqueue(_Frame(orders.encode(coming), is_order=True))
        self._awaited[order.arrival] = order
        arrived = self._arrived.get(order.arrival)
        if arrived is not None:
            self._begin_to_pass_on(arrived)

    def _begin_to_pass_on(self, arrived: Arrived) -> None:
        if not self._is_over:  # its client is about to hear why
            self._tasks.start_soon(self._pass_on, arrived)

    async def _pass_on(self, arrived: Arrived) -> None:
        """Give the executor what has arrived and was awaited."""
        order = self._awaited[arrived.arrival]
        frame = await self._frame_of(arrived, order)
        self._urgent.append(frame)
        self._drop(arrived)
        del self._arrived[arrived.arrival]
        self._placed.append(arrived.arrival)
        del self._awaited[arrived.arrival]
        if not self._awaited:
            self._behind = 0
        self._wake_queue()
        await self.link.post(wire.answer(order.request, None))

    async def _frame_of(self, arrived: Arrived, order: PutIn) -> _Frame:
        try:
            if arrived.error is not None:
                raise arrived.error
            if self._store is None or arrived.object_id is None:
                raise _no_store()
            stored = self._store.owned(arrived.object_id, self.owner.node_id)
            if stored.meta.nbytes != order.nbytes:
                raise DeviceError(
                    "a move into a device",
                    why=f"{stored.meta.nbytes} bytes came where {order.nbytes} were awaited",
                )
            fill = orders.encode(orders.Fill(order.arrival, order.nbytes))
            descriptor = None
            if order.nbytes:
                descriptor = await sealed_descriptor(stored.raw, stored.meta)
            return _Frame(fill, is_order=True, descriptor=descriptor)
        except MeshError as error:
            failure = error
        except OSError as error:
            why = f"this node has no memory for it: {error.strerror}"
            failure = DeviceError("a move into a device", why=why)
        return _Frame(orders.encode(orders.Fail(order.arrival, failure)), is_order=True)

    def _drop(self, arrived: Arrived) -> None:
        """Let go of an object that has arrived."""
        if self._store is not None and arrived.object_id is not None:
            try:
                stored = self._store.owned(arrived.object_id, self.owner.node_id)
                self._store.delete(stored.object_id)
            except MeshError:
                pass  # it has gone before

    def _drop_rest(self) -> None:
        """Let go of what is in the store on its way here, and away if its client is gone."""
        for arrived in self._arrived.values():
            self._drop(arrived)
        names = {transit_name(self._number)}
        if self._is_abandoned:
            names.add(transit_name(self._number, out=True))
        if self._store is not None:
            for stored in tuple(self._store.by_owner(self.owner.node_id)):
                if stored.name in names:
                    self._store.delete(stored.object_id)

    # -- from the executor

    async def _read_answers(self) -> None:
        """Pass answers on until the executor has ended."""
        inlet = self._inlet
        try:
            while True:
                (length,) = LENGTH.unpack(await self._receive(LENGTH.size))
                if not _ANSWER.size <= length <= MAX_FRAME:
                    raise ProtocolError("an answer of an executor", why="it has no such length")
                answer = bytes(await self._receive(length))
                _, request = _ANSWER.unpack_from(answer)
                if request & INTERNAL:
                    await self._take_part(request & ~INTERNAL, answer)
                else:
                    await self.link.post(answer)
                inlet.close()
        except (EOFError, OSError, MeshError):
            return

    async def _receive(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            try:
                view = view[self._inlet.take(view) :]
            except BlockingIOError:
                await anyio.wait_readable(self._executor.link)
        return data

    async def _take_part(self, request: int, data: bytes) -> None:
        """Take a tensor that was asked for here, or a part of it."""
        taking = self._taking.get(request)
        if taking is None:
            return  # its client asked under a number of ours, and gets nothing for it
        answer = wire.read_answer(memoryview(data), None)
        failed = answer.failure
        if failed is None:
            try:
                if not _land(taking, answer, self._inlet.descriptors):
                    return
            except (MeshError, OSError) as error:
                why = str(error)
                failed = wire.Failure(DeviceError("a move from a device", why=why))
        del self._taking[request]
        if failed is None and taking.tensor is not None:
            name = transit_name(self._number, out=True)
            stored = taking.reservation.keep(taking.tensor, name=name)
            taken = Taken(stored.object_id, stored.version)
            await self.link.post(wire.answer(request, taken.encode()))
            return
        taking.reservation.release()
        assert failed is not None
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


async def _send_beside(link: socket.socket, data: bytes, descriptor: int) -> None:
    """Send a few bytes and a descriptor beside them."""
    while True:
        try:
            sent = socket.send_fds(link, [data], [descriptor])
            break
        except BlockingIOError:
            await anyio.wait_writable(link)
        except OSError:
            await anyio.sleep_forever()  # as above
    await _send_all(link, data[sent:])


def _land(taking: _TakingOut, answer: wire.Answer, descriptors: deque[int]) -> bool:
    """Have what an executor answers land; return whether that is all.

    Raises:
        MeshError, OSError: it is not what was announced.
    """
    nbytes = taking.meta.nbytes
    if answer.data is None:
        if not descriptors:
            raise DeviceError("a move from a device", why="no memory came with the answer")
        descriptor = descriptors.popleft()
        try:
            memory = map_sealed(descriptor, nbytes)
            memory.keep(descriptor)
        finally:
            os.close(descriptor)
        taking.tensor = allocate(taking.meta, memory.storage)
        return True
    end = taking.filled + len(answer.data)
    if end > nbytes or (answer.last and end < nbytes):
        raise DeviceError("a move from a device", why="the tensor is not what was announced")
    taking.room[taking.filled : end] = answer.data
    taking.filled = end
    return answer.last
