"""The lane's own way between two processes: a Unix socket, a pool in each direction, many moves.

Moves come and go on it; it lasts for as long as the QUIC connection that it belongs to, or until
the other end breaks the protocol or is gone. Then every move on it is told at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import anyio
import anyio.lowlevel

from auth import PeerIdentity
from tensor_bridge.lanes.shared.pool import Pool, make_pool, map_pool
from tensor_bridge.lanes.shared.protocol import (
    MAX_SLOTS,
    Arrivals,
    FilledMessage,
    GivenMessage,
    IncomingSlots,
    OutgoingSlots,
    PoolMessage,
    decode_message,
)
from tensor_bridge.lanes.shared.sockets import is_hung_up, send_packet, take_packet
from transport import ConnectionClosed, ProtocolError

__all__ = ["SLOTS", "SLOT_BYTES", "Landing", "Link"]

SLOT_BYTES = 1 << 20
"""Copied in about 0.15 ms; in slots of a quarter of it, the rate is a quarter less."""

SLOTS = 8
"""So many that neither end waits for the other to be given a turn; more are no faster."""

BYTES_A_TURN = 4 << 20
"""Bytes copied before others on the event loop have their turn: some 0.6 ms of work."""

MAX_UNSENT = SLOTS + MAX_SLOTS + 1
"""Packets that wait until the socket has room for them."""

PACKETS_A_TURN = 16
"""Packets taken before others on the event loop have their turn."""

_log = logging.getLogger("quicmesh.tensors")


class Landing:
    """One move's bytes on their way in."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self._came = anyio.Event()

    def wake(self) -> None:
        """Something has come."""
        self._came.set()

    async def wait(self) -> None:
        """Wait until something has come since the last time that this was waited for."""
        await self._came.wait()
        self._came = anyio.Event()


class Link:
    """What two processes have between them. Used in one event loop, by many moves at once.

    Args:
        sock: connected to the other process, who has proved itself; the link closes it.
        peer: who is there.
        process: its process id.
    """

    def __init__(self, sock: socket.socket, peer: PeerIdentity, process: int) -> None:
        self.peer = peer
        self.process = process
        """Its process id, as the kernel tells it."""
        self.why_ended: str | None = None
        """Why it can't be used any more; None while it can."""
        self._sock = sock
        self._scope = anyio.CancelScope()
        self._ours: Pool | None = None
        self.slot_bytes = SLOT_BYTES
        self._outgoing = OutgoingSlots(SLOTS)
        self._free = anyio.Semaphore(SLOTS, fast_acquire=True)
        self._theirs: Pool | None = None
        self._incoming: IncomingSlots | None = None
        self._landings: dict[int, Landing] = {}
        self._unsent: deque[bytes] = deque()
        self._stuck = anyio.Event()
        self._watchers: set[Callable[[], object]] = set()
        self._handled = 0
        _links.add(self)

    # -- life

    async def run(self) -> None:
        """Take what comes, until the link has ended; then nothing of it is left."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._send_on)
                    await self._take_on()
        finally:
            self.end("this node is closing")
            self._close()

    def end(self, why: str) -> None:
        """End the link: its moves fail at once, and `run` returns. May be repeated."""
        if self.why_ended is None:
            self.why_ended = why
            with contextlib.suppress(OSError):
                # So that the other end knows before anything that the moves here say of it by QUIC.
                self._sock.shutdown(socket.SHUT_RDWR)
            self._scope.cancel()
            for tell in tuple(self._watchers):
                tell()

    def look(self) -> None:
        """Return if the link can be used, and the other end is still there.

        Raises:
            ConnectionClosed: as `check`.
        """
        if self.why_ended is None and is_hung_up(self._sock):
            self.end(_GONE)
        self.check()

    def check(self) -> None:
        """Return if the link has not ended.

        Raises:
            ConnectionClosed: it has; a move goes on by another way.
        """
        if self.why_ended is not None:
            raise ConnectionClosed(
                "move of a tensor",
                peer=self.peer,
                stage="shared memory",
                why=f"the memory shared with it is given up: {self.why_ended}",
                fix="Try again: it goes over QUIC then.",
            )

    @contextlib.contextmanager
    def watched(self, tell: Callable[[], object]) -> Iterator[None]:
        """Have `tell` called if the link ends during the block."""
        self._watchers.add(tell)
        try:
            yield
        finally:
            self._watchers.discard(tell)

    def forget_in_child(self) -> None:
        """Close, in a forked child, what it has inherited: the link is the parent's."""
        self.why_ended = "it belongs to the process that this one was forked from"
        self._watchers.clear()
        self._close()

    # -- sending

    async def take_slot(self) -> int:
        """Wait for a free slot, in turn with the other moves, and take it.

        Raises:
            ConnectionClosed: the link has ended, or has no memory.
        """
        self.check()
        if self._ours is None:
            self._ours = self._make_pool()
        await self.turn()
        await self._free.acquire()
        return self._outgoing.take()

    async def turn(self) -> None:
        """Let others on the event loop have their turn, once in `BYTES_A_TURN`."""
        self._handled += self.slot_bytes
        if self._handled >= BYTES_A_TURN:
            self._handled = 0
            await anyio.lowlevel.checkpoint()

    def send(self, slot: int, data: memoryview, move: int) -> None:
        """Copy `data` into a slot that was taken, and lend it to the other end.

        Raises:
            ConnectionClosed: the link has ended meanwhile; the slot is still to be put back.
        """
        self.check()
        assert self._ours is not None
        self._ours.fill(slot, data)
        self._outgoing.lend(slot)
        self._post(FilledMessage(slot, len(data), move).encode())

    def put_back(self, slot: int) -> None:
        """Let go of a slot that was taken."""
        self._outgoing.put_back(slot)
        self._free.release()

    @property
    def is_starved(self) -> bool:
        """Whether the other end has every slot."""
        return self._outgoing.lent == SLOTS

    # -- receiving

    @contextlib.contextmanager
    def landing(self, move: int) -> Iterator[Landing]:
        """Have what comes of `move` kept for the block; what is left then goes nowhere."""
        landing = self._landings[move] = Landing()
        try:
            yield landing
        finally:
            self._landings.pop(move, None)
            while (message := landing.arrivals.next()) is not None:
                self._give(message.slot)

    def copy_out(self, message: FilledMessage, target: memoryview) -> None:
        """Fill `target`, which is as long, with what has come, and give the slot back.

        Raises:
            ConnectionClosed: the link has ended meanwhile.
        """
        self.check()
        assert self._theirs is not None
        self._theirs.copy_out(message.slot, target)
        self._give(message.slot)

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """End the link if the block finds that the other end breaks the protocol."""
        try:
            yield
        except ProtocolError as error:
            _log.warning("shared memory with %s is given up: %s", self.peer, error)
            self.end(error.why or "it breaks the protocol")
            self.check()

    # -- inside

    async def _take_on(self) -> None:
        while True:
            await anyio.wait_readable(self._sock)
            try:
                for _ in range(PACKETS_A_TURN):
                    self._take_packet()
            except BlockingIOError:
                continue
            except ProtocolError as error:
                _log.warning("shared memory with %s is given up: %s", self.peer, error)
                self.end(error.why or "it breaks the protocol")
            except OSError as error:
                self.end(error.strerror or _GONE)
            # Others have their turn; and if the link has ended, it ends here.
            await anyio.lowlevel.checkpoint()

    def _take_packet(self) -> None:
        if self._incoming is not None:
            # Descriptors that a packet brings now, the kernel closes.
            data, descriptor = self._sock.recv(_LONGEST), None
            self._take(data, descriptor)
        else:
            with take_packet(self._sock) as (data, descriptor):
                self._take(data, descriptor)

    def _take(self, data: bytes, descriptor: int | None) -> None:
        if not data:
            raise ConnectionResetError(0, _GONE)
        message = decode_message(data)
        if (descriptor is not None) != isinstance(message, PoolMessage):
            raise ProtocolError("shared memory", why="a pool and a descriptor come together")
        match message:
            case PoolMessage(slot_bytes=slot_bytes):
                assert descriptor is not None
                self._theirs = map_pool(descriptor, slot_bytes)
                self._incoming = IncomingSlots(self._theirs.count, slot_bytes)
            case FilledMessage():
                self._arrived(message)
            case GivenMessage(slot=slot):
                self._outgoing.given(slot)
                self._free.release()

    def _arrived(self, message: FilledMessage) -> None:
        if self._incoming is None:
            raise ProtocolError("shared memory", why="a slot of no pool")
        self._incoming.arrived(message)
        landing = self._landings.get(message.move)
        if landing is None:
            self._give(message.slot)  # the move was given up here
        else:
            landing.arrivals.add(message)
            landing.wake()

    def _give(self, slot: int) -> None:
        if self._incoming is not None and self.why_ended is None:
            self._incoming.given(slot)
            self._post(GivenMessage(slot).encode())

    def _make_pool(self) -> Pool:
        try:
            pool, descriptor = make_pool(SLOTS, self.slot_bytes)
        except OSError as error:
            self.end(f"this node has no memory to share: {error.strerror}")
            self.check()
            raise
        try:
            send_packet(self._sock, PoolMessage(self.slot_bytes).encode(), descriptor)
        except OSError as error:
            pool.close()
            self.end(error.strerror or _GONE)
            self.check()
            raise
        finally:
            os.close(descriptor)
        return pool

    def _post(self, packet: bytes) -> None:
        """Send a packet, now or as soon as there is room for it.

        Those that wait are bounded for an end that keeps to the protocol: by its slots and by ours.
        """
        if self.why_ended is not None:
            return
        if not self._unsent:
            try:
                self._sock.send(packet, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                self._stuck.set()
            except OSError as error:
                self.end(error.strerror or _GONE)
                return
        self._unsent.append(packet)
        if len(self._unsent) > MAX_UNSENT:
            self.end("it takes nothing")

    async def _send_on(self) -> None:
        """Send what had to wait, when there is room."""
        while True:
            await self._stuck.wait()
            self._stuck = anyio.Event()
            while self._unsent:
                await anyio.wait_writable(self._sock)
                unsent, self._unsent = self._unsent, deque()
                for packet in unsent:
                    self._post(packet)

    def _close(self) -> None:
        self._sock.close()
        for pool in (self._ours, self._theirs):
            if pool is not None:
                pool.close()
        self._unsent.clear()


_GONE = "the process at the other end has closed it"

_LONGEST = 64
"""Longer packets than any there is, for them to show as such."""

_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _forget_all() -> None:
    for link in tuple(_links):
        link.forget_in_child()


if hasattr(os, "register_at_fork"):
    # A child would keep the socket open: the other end would not learn that this process died.
    os.register_at_fork(after_in_child=_forget_all)
