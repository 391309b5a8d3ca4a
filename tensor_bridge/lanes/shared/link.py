"""The lane's own way between two processes: a Unix socket, a pool in each direction, many moves.

Moves come and go on it; it lasts for as long as the QUIC connection that it belongs to, or until
the other end breaks the protocol or is gone. Then every move on it is told at once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import anyio
import anyio.lowlevel

from auth import PeerIdentity
from tensor_bridge.lanes.shared.blocks import OwnBlocks, TheirBlocks
from tensor_bridge.lanes.shared.calls import RINGS, Calls, Serve, make_rings, take_rings
from tensor_bridge.lanes.shared.gifts import Gifts
from tensor_bridge.lanes.shared.pool import Pool, make_pool, map_pool
from tensor_bridge.lanes.shared.protocol import (
    MAX_BLOCKS,
    MAX_SLOTS,
    BlockMessage,
    FilledMessage,
    ForgottenMessage,
    GivenMessage,
    IncomingSlots,
    OutgoingSlots,
    PoolMessage,
    ReturnedMessage,
    RingsMessage,
    SealedMessage,
    decode_message,
)
from tensor_bridge.lanes.shared.sealed import SealedMemory
from tensor_bridge.lanes.shared.sockets import is_hung_up, send_packet, take_packet
from tensor_bridge.lanes.shared.underway import BYTES_A_TURN, Landing, Sending
from transport import ConnectionClosed, ProtocolError
from transport.readiness import serve_readable

__all__ = ["SLOTS", "SLOT_BYTES", "Link"]

SLOT_BYTES = 1 << 21
"""Copied in about 0.3 ms; in slots of half of it, copies take a tenth more of the processor."""

SLOTS = 4
"""So many that neither end waits for the other to be given a turn; more are no faster."""

MAX_UNSENT = SLOTS + MAX_SLOTS + 2 * MAX_BLOCKS + 1
"""Packets that wait until the socket has room for them."""

PACKETS_A_TURN = 16
"""Packets taken before others on the event loop have their turn."""

FORGET_SECONDS = 1.0
"""Between two looks for blocks that lay free for too long."""

_log = logging.getLogger("quicmesh.tensors")


class Link:
    """What two processes have between them. Used in one event loop, by many moves at once.

    Args:
        sock: connected to the other process, who has proved itself; the link closes it.
        peer: who is there.
        process: its process id.
        serve: serves calls of the peer; without it, calls don't go by the link.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: PeerIdentity,
        process: int,
        serve: Serve | None = None,
    ) -> None:
        self.peer = peer
        self.process = process
        """Its process id, as the kernel tells it."""
        self.why_ended: str | None = None
        """Why it can't be used any more; None while it can."""
        self.calls: Calls | None = None
        """The calls between the two, once they go by the link."""
        self._serve = serve
        self._rings: list[int] = []
        self._sock = sock
        self._scope = anyio.CancelScope()
        self._ours: Pool | None = None
        self.slot_bytes = SLOT_BYTES
        self._outgoing = OutgoingSlots(SLOTS)
        self._sendings: deque[Sending] = deque()
        """Moves that have more to send; whose turn is next is first."""
        self._theirs: Pool | None = None
        self._incoming: IncomingSlots | None = None
        self._landings: dict[int, Landing] = {}
        self._gifts = Gifts()
        self._unsent: deque[bytes] = deque()
        self._stuck = anyio.Event()
        self._watchers: set[Callable[[], object]] = set()
        self.blocks = OwnBlocks(self._send_memory, self._post)
        """Memory that tensors lie in at the other end."""
        self.their_blocks = TheirBlocks(self._post)
        """The same of the other end's."""
        _links.add(self)

    # -- life

    async def run(self) -> None:
        """Take what comes, until the link has ended; then nothing of it is left."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    self._tasks = tasks
                    tasks.start_soon(self._send_on)
                    tasks.start_soon(self._forget_late)
                    if self.calls is not None:
                        tasks.start_soon(self._run_calls, self.calls)
                    with contextlib.suppress(ConnectionClosed):
                        await serve_readable(self._sock, self._turn)
                    tasks.cancel_scope.cancel()
        finally:
            self.end("this node is closing")
            self._close()

    def offer_calls(self) -> None:
        """Make what calls go by, and give it to the other end. One of the two does, before `run`.

        Without memory for it, calls take streams as ever.
        """
        assert self._serve is not None
        try:
            self.calls, descriptors = make_rings(self.peer, self._serve)
        except OSError as error:
            _log.warning("no memory for calls of %s: %s", self.peer, error.strerror)
            return
        try:
            for part, descriptor in enumerate(descriptors):
                send_packet(self._sock, RingsMessage(part).encode(), descriptor)
        except OSError as error:
            self.end(error.strerror or _GONE)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

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

    def take_what_is_there(self) -> bool:
        """Take packets now that have come already, as far as one turn goes; whether there is more.

        Raises:
            ConnectionClosed: the link has ended.
        """
        return self._turn()

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
        if self.calls is not None:
            self.calls.release()
            self.calls = None
        self._close()

    # -- sending

    async def send(
        self,
        move: int,
        pieces: Iterator[memoryview],
        nbytes: int,
        moved: Callable[[int], object],
    ) -> None:
        """Copy `pieces` into slots as they become free, in turn with the other moves.

        Returns when the last is lent.

        Args:
            move: what the move is called.
            pieces: parts of at most `slot_bytes`.
            nbytes: how many bytes they are in all.
            moved: told of each part.

        Raises:
            ConnectionClosed: the link has ended, or has no memory.
            Exception: what asking for a part, or `moved`, has raised.
        """
        self.check()
        if not nbytes:  # all of it had landed before the link broke, and the answer was lost
            return
        if self._ours is None:
            self._ours = self._make_pool()
        sending = Sending(move, pieces, nbytes, moved)
        self._sendings.append(sending)
        try:
            while not sending.over.is_set() and self._fill() >= BYTES_A_TURN:
                await anyio.lowlevel.checkpoint()
            await sending.over.wait()
        finally:
            with contextlib.suppress(ValueError):
                self._sendings.remove(sending)
        if sending.error is not None:
            raise sending.error

    def hand_over(self, descriptor: int, move: int) -> None:
        """Give the other end a descriptor of memory that holds all bytes of a move.

        Raises:
            ConnectionClosed: the link has ended, or takes nothing now.
        """
        self.check()
        try:
            send_packet(self._sock, SealedMessage(move).encode(), descriptor)
        except OSError as error:
            self.end(error.strerror or _GONE)
            self.check()

    def lend(self, data: memoryview, move: int) -> None:
        """Copy `data` into a free slot, and lend it to the other end.

        Raises:
            ConnectionClosed: the link has ended meanwhile.
        """
        self.check()
        assert self._ours is not None
        slot = self._outgoing.take()
        try:
            self._ours.fill(slot, data)
        except BaseException:
            self._outgoing.put_back(slot)
            raise
        self._outgoing.lend(slot)
        self._post(FilledMessage(slot, len(data), move).encode())

    def _fill(self) -> int:
        """Fill free slots, those of each move in turn, up to `BYTES_A_TURN`; return the bytes."""
        done = 0
        while self._sendings and self._outgoing.free and done < BYTES_A_TURN:
            sending = self._sendings.popleft()
            done += sending.send_next(self.lend)
            if sending.left:
                self._sendings.append(sending)
            else:
                sending.over.set()
        return done

    @property
    def is_starved(self) -> bool:
        """Whether the other end has every slot."""
        return self._outgoing.lent == SLOTS

    # -- receiving

    @contextlib.contextmanager
    def landing(self, move: int, sealed_bytes: int | None = None) -> Iterator[Landing]:
        """Have what comes of `move` kept for the block; what is left then goes nowhere.

        Who knows before that sealed memory is to come, and of what size, has it mapped as it comes,
        while its sender still writes the answer about it.
        """
        landing = self._landings[move] = Landing(self, sealed_bytes)
        try:
            yield landing
        finally:
            self._landings.pop(move, None)
            landing.close()
            while (message := landing.arrivals.next()) is not None:
                self._give(message.slot)

    def take_gift(self, gift: int, nbytes: int) -> SealedMemory | None:
        """Return memory of `nbytes` that the other end has handed over; None if it did not come.

        Raises:
            ConnectionClosed: it is not as it must be, and the link ends.
        """
        with self.checking():
            return self._gifts.take(gift, nbytes)

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

    def _turn(self) -> bool:
        """Take packets, copy what they tell of, fill what they give; return whether there is more.

        Raises:
            ConnectionClosed: the link has ended.
        """
        self.check()
        done = 0
        try:
            for _ in range(PACKETS_A_TURN):
                done += self._take_packet()
                if done >= BYTES_A_TURN:
                    break
        except BlockingIOError:
            return self._fill() >= BYTES_A_TURN
        except ProtocolError as error:
            _log.warning("shared memory with %s is given up: %s", self.peer, error)
            self.end(error.why or "it breaks the protocol")
        except OSError as error:
            self.end(error.strerror or _GONE)
        self.check()
        self._fill()
        return True

    def _take_packet(self) -> int:
        """Take one packet; return how many bytes were copied for it."""
        with take_packet(self._sock) as (data, descriptor):
            return self._take(data, descriptor)

    def _take(self, data: bytes, descriptor: int | None) -> int:
        if not data:
            raise ConnectionResetError(0, _GONE)
        message = decode_message(data)
        if (descriptor is not None) != isinstance(
            message, PoolMessage | SealedMessage | RingsMessage | BlockMessage
        ):
            raise ProtocolError("shared memory", why="memory and a descriptor come together")
        match message:
            case PoolMessage(slot_bytes=slot_bytes):
                assert descriptor is not None
                if self._theirs is not None:
                    raise ProtocolError("shared memory", why="a second pool")
                self._theirs = map_pool(descriptor, slot_bytes)
                self._incoming = IncomingSlots(self._theirs.count, slot_bytes)
            case FilledMessage():
                return self._arrived(message)
            case GivenMessage(slot=slot):
                self._outgoing.given(slot)
            case SealedMessage(move=move):
                assert descriptor is not None
                if move in self._landings:
                    self._landings[move].hand(descriptor)
                else:  # unless it is a gift, it was given up here
                    self._gifts.add(move, descriptor)
            case RingsMessage(part=part):
                assert descriptor is not None
                self._take_ring(part, descriptor)
            case BlockMessage(number=number):
                assert descriptor is not None
                self.their_blocks.add(number, descriptor)
            case ReturnedMessage(lend=lend):
                self.blocks.returned(lend)
            case ForgottenMessage(number=number):
                self.their_blocks.forget(number)
        return 0

    def _take_ring(self, part: int, descriptor: int) -> None:
        if self._serve is None or self.calls is not None or part != len(self._rings):
            raise ProtocolError("shared memory", why="rings that nobody waits for")
        self._rings.append(os.dup(descriptor))
        if len(self._rings) == RINGS:
            self.calls = take_rings(self._rings, self.peer, self._serve)
            self._close_rings()
            self._tasks.start_soon(self._run_calls, self.calls)

    async def _run_calls(self, calls: Calls) -> None:
        with self.checking():
            await calls.run()

    def _arrived(self, message: FilledMessage) -> int:
        if self._incoming is None:
            raise ProtocolError("shared memory", why="a slot of no pool")
        self._incoming.arrived(message)
        landing = self._landings.get(message.move)
        if landing is None:
            self._give(message.slot)  # the move was given up here
            return 0
        landing.arrivals.add(message)
        return landing.copy(BYTES_A_TURN)

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

    def _send_memory(self, packet: bytes, descriptor: int) -> None:
        """Send a packet with a descriptor at once.

        Raises:
            OSError: there is no room for it, or others wait that come before it.
        """
        if self._unsent:
            raise BlockingIOError(errno.EAGAIN, "others wait")
        send_packet(self._sock, packet, descriptor)

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

    async def _forget_late(self) -> None:
        """Forget blocks that lay free for long, and tell of lendings that other threads ended."""
        while True:
            await anyio.sleep(FORGET_SECONDS)
            self.blocks.expire(time.monotonic())
            self.their_blocks.flush()

    def _close_rings(self) -> None:
        while self._rings:
            os.close(self._rings.pop())

    def _close(self) -> None:
        self._sock.close()
        self._close_rings()
        if self.calls is not None:
            self.calls.close()
        for pool in (self._ours, self._theirs):
            if pool is not None:
                pool.close()
        for landing in self._landings.values():
            landing.close()
        self._gifts.close()
        self.blocks.close()
        self.their_blocks.close()
        self._unsent.clear()


_GONE = "the process at the other end has closed it"

_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _forget_all() -> None:
    for link in tuple(_links):
        link.forget_in_child()


if hasattr(os, "register_at_fork"):
    # A child would keep the socket open: the other end would not learn that this process died.
    os.register_at_fork(after_in_child=_forget_all)
