"""The pair of sockets between a program and its endpoint process: records out, records in.

What is said in one turn of the event loop leaves in one packet, as far as it fits, and what has
come is taken some packets a turn. A side that is slow to listen is not waited for: what it should
hear is kept in order, and whoever has much to say asks first how much is kept (`is_full`).
"""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Callable

import anyio

from transport.process.records import MAX_PACKET, Record, decode
from transport.readiness import Later, serve_readable

__all__ = ["Channel"]

PACKETS_PER_TURN = 8
"""Packets taken before others on the event loop have their turn."""

SMALL_PACKET = MAX_PACKET // 2
"""A packet that is shorter had room for what would be in the next, had that been there."""

FULL_PACKETS = 8
"""With so many packets kept, what can wait should."""

SOCKET_BUFFER = 1 << 20
"""Asked of the kernel; it gives what its own limit allows."""


class Channel:
    """One end.

    Args:
        sock: the socket, of packets; closed by `close`.
        take: called with each record.
        taken: called after the records of one turn.
        before: called before a packet leaves, for what else it may carry.
        ended: called once, when nobody is at the other end any more.
        most_kept: bytes that are kept for the other side; one that has more said to it, and listens
            to none of it, is taken for gone.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        take: Callable[[Record], None],
        taken: Callable[[bool], None],
        before: Callable[[], None],
        ended: Callable[[], None],
        most_kept: float = math.inf,
    ) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        self.socket = sock
        self.is_over = False
        """Whether nobody is at the other end."""
        self._take = take
        self._taken = taken
        self._before = before
        self._ended = ended
        self._most_kept = most_kept
        self._kept = 0
        self._packet = bytearray()
        self._unsent: deque[bytearray] = deque()
        self._blocked = anyio.Event()
        self._over = anyio.Event()
        self._is_blocked = self._is_flushing = False
        self._later = Later(self.flush)
        self._room = memoryview(bytearray(MAX_PACKET))

    @property
    def is_full(self) -> bool:
        """Whether the other side has enough to listen to."""
        return len(self._unsent) >= FULL_PACKETS

    def add(self, record: bytes) -> None:
        """Say something, with the next packet that leaves."""
        if len(self._packet) + len(record) > MAX_PACKET:
            self._seal()
        self._packet += record

    def flush_later(self) -> None:
        """Have what was said leave at the end of this turn of the event loop."""
        if not self._is_flushing:
            self._later.set()

    def flush(self) -> None:
        """Send what was said, as far as there is room for it."""
        if not self._is_blocked:
            self._is_flushing = True
            try:
                self._before()
            finally:
                self._is_flushing = False
        self._seal()
        while self._unsent and not self.is_over and not self._is_blocked:
            try:
                self.socket.send(self._unsent[0])
            except BlockingIOError:
                self._is_blocked = True
                self._blocked.set()
            except OSError:
                self._end()
            else:
                self._kept -= len(self._unsent.popleft())
        if self._kept > self._most_kept:
            self._end()

    async def run(self) -> None:
        """Serve until nobody is at the other end, or cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._later.run)
            tasks.start_soon(self._send_rest)
            tasks.start_soon(serve_readable, self.socket, self._receive)
            await self._over.wait()
            tasks.cancel_scope.cancel()

    def end(self) -> None:
        """Take note that nobody is at the other end any more."""
        self._end()

    def close(self) -> None:
        """Close the socket."""
        self.is_over = True
        self.socket.close()

    def _seal(self) -> None:
        if self._packet:
            self._unsent.append(self._packet)
            self._kept += len(self._packet)
            self._packet = bytearray()

    async def _send_rest(self) -> None:
        while True:
            await self._blocked.wait()
            self._blocked = anyio.Event()
            await anyio.wait_writable(self.socket)
            self._is_blocked = False
            self.flush()

    def _receive(self) -> bool:
        size = MAX_PACKET
        for _ in range(PACKETS_PER_TURN):
            if size < SMALL_PACKET:
                # Mostly the last; to find out, with a call that lets another thread run, would take
                # until that has had its turn of five milliseconds.
                self._taken(False)
                return False
            if self.is_over:
                return False
            try:
                size = self.socket.recv_into(self._room)
            except BlockingIOError:
                self._taken(False)
                return False
            except OSError:
                size = 0
            if not size:
                self._end()
                return False
            for record in decode(self._room[:size]):
                self._take(record)
        self._taken(True)
        return True

    def _end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._unsent.clear()
            self._packet, self._kept = bytearray(), 0
            self._over.set()
            self._ended()
