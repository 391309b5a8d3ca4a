"""One session at the peer: frames of a client on one side, an executor on the other."""

from __future__ import annotations

import socket
from collections.abc import Callable

import anyio

from auth import MeshError, NodeId, PeerIdentity
from mesh.device import wire
from mesh.device.errors import SessionLost
from mesh.device.link import MAX_FRAME, Link
from mesh.device.server.executor import LENGTH, ExecutorLimits
from mesh.device.server.nursery import Executor
from mesh.tasks import helpers
from transport import ProtocolError, Stream

__all__ = ["ServerSession"]

QUEUED = 16
"""Batches that wait for the executor; who sends more waits."""

FAREWELL_SECONDS = 2.0
"""How long a session that ends waits for its client to take the last word."""


class ServerSession:
    """A session, from its first stream until it is closed, its executor ends, or its lease does.

    Args:
        owner: whose it is.
        executor: runs its operations.
        limits: of the executor.

    Attributes:
        detached_at: since when no stream carries it; None while one does.
        ended: set once it is over.
    """

    def __init__(self, owner: PeerIdentity, executor: Executor, limits: ExecutorLimits) -> None:
        self.owner = owner
        self.link = Link(self._take)
        self.detached_at: float | None = None
        self.ended = anyio.Event()
        self._executor = executor
        self._limits = limits
        self._stream: anyio.CancelScope | None = None
        self._scope = anyio.CancelScope()
        self._put, self._get = anyio.create_memory_object_stream[bytearray](QUEUED)

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
        finally:
            self._put.close()
            self._get.close()
            self._executor.kill()
            if self._stream is not None:
                self._stream.cancel()
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

    async def _take(self, payload: bytearray) -> None:
        if not payload:
            self.close()
            return
        try:
            await self._put.send(payload)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # it is over, which the last answer tells

    async def _feed(self) -> None:
        """Hand batches to the executor, each whole."""
        link = self._executor.link
        async for payload in self._get:
            await _send_all(link, LENGTH.pack(len(payload)))
            await _send_all(link, payload)

    async def _read_answers(self) -> None:
        """Pass answers on until the executor has ended."""
        link = self._executor.link
        try:
            while True:
                (length,) = LENGTH.unpack(await _receive(link, LENGTH.size))
                if length > MAX_FRAME:
                    raise ProtocolError("an answer of an executor", why="it is too long")
                await self.link.post(bytes(await _receive(link, length)))
        except (EOFError, OSError, MeshError):
            return

    async def _say_farewell(self) -> None:
        """Tell the client that the executor has ended, if it is there to be told."""
        with anyio.move_on_after(FAREWELL_SECONDS):
            await self._executor.ended.wait()
        error = SessionLost(
            "a session with a device",
            why=self._executor.why(self._limits),
            fix="Open the device again; its tensors are lost.",
        )
        await self.link.post(wire.failure(0, wire.Failure(error)))
        with anyio.move_on_after(FAREWELL_SECONDS):
            await self.link.delivered()


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
