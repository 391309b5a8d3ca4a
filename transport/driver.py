"""Moves datagrams between a socket and the protocol half; keeps the one timer they share.

Three tasks at most: one receives, one sleeps until the earliest deadline, one sends what the socket
would not take at once. Everything else runs inline in whichever task has something to send, which
is the shortest way from a write to the wire. The work of one turn is bounded, so that the loop
stays responsive under load.

Bulk transfers will send and receive in batches: `UdpSocket.send`, `UdpSocket.receive`
and `Driver.pump` are the places where that path joins.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import anyio.lowlevel

from auth import SocketAddress
from transport.protocol import ConnectionCore, Demultiplexer, Reply
from transport.protocol.events import (
    ConnectionIdIssued,
    ConnectionIdRetired,
    Event,
)
from transport.udp import UdpSocket

__all__ = ["Driver"]

RECEIVE_BATCH = 32
"""Datagrams taken from the socket at once."""

SOON = 0.002
"""An entry of the timer closer than this, in seconds, is taken back when nothing is due then."""

TURN_SECONDS = 0.001
"""How long one turn may hold the event loop: 32 small packets take about that, and a handshake
alone takes several times as much."""

MAX_BACKLOG = 1024
"""Datagrams kept while the socket is full. More than that is congestion, and loss says so."""

_log = logging.getLogger("quicmesh.transport")

EventHandler = Callable[[ConnectionCore, Event], None]


class Driver:
    """The I/O of one endpoint.

    Args:
        sock: the bound socket; closed by `close`.
        demux: the table of its connections.
        on_event: called with each event of each connection, in order.
        on_pumped: called after a connection was looked after.
    """

    def __init__(
        self,
        sock: UdpSocket,
        demux: Demultiplexer,
        *,
        on_event: EventHandler,
        on_pumped: Callable[[ConnectionCore], None],
    ) -> None:
        self.socket = sock
        self.demux = demux
        self._on_event = on_event
        self._on_pumped = on_pumped
        self._pumping: set[ConnectionCore] = set()
        self._again: set[ConnectionCore] = set()
        self._heap: list[tuple[float, int, ConnectionCore]] = []
        self._due: dict[ConnectionCore, float] = {}
        self._order = itertools.count()
        self._timer_scope: anyio.CancelScope | None = None
        self._timer_at = math.inf
        self._backlog: deque[tuple[bytes, SocketAddress]] = deque(maxlen=MAX_BACKLOG)
        self._backlogged = anyio.Event()
        self._terminated = anyio.Event()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._receive)
            tasks.start_soon(self._keep_time)
            tasks.start_soon(self._send_backlog)

    def close(self) -> None:
        """Close the socket. `run` must have ended."""
        self.socket.close()

    def dial(self, core: ConnectionCore, address: SocketAddress) -> None:
        """Begin the handshake of an outbound connection."""
        self.demux.add(core, core.quic.host_cid)
        core.quic.connect(address, now=time.monotonic())
        self.pump(core)

    def pump(self, core: ConnectionCore) -> None:
        """Report what happened on `core`, send what it has to send, set its timer."""
        if core in self._pumping:
            self._again.add(core)  # an event's handler wrote something: one more round
            return
        self._pumping.add(core)
        try:
            with self._contain(core):
                self._flush(core)
            self._report(core)  # its end, where it has just been given up
        finally:
            self._pumping.discard(core)
            self._again.discard(core)
        self._schedule(core)
        self._on_pumped(core)

    async def drain(self, seconds: float) -> None:
        """Wait until every connection's closing period is over, at most `seconds`."""
        with anyio.move_on_after(seconds):
            while self.demux.connections:
                await self._terminated.wait()

    # -- receiving

    async def _receive(self) -> None:
        while True:
            await anyio.wait_readable(self.socket.raw)
            datagrams = deque(self.socket.receive(RECEIVE_BATCH))
            if self.socket.has_errors or not datagrams:
                self._take_errors()
            while datagrams:
                self._take(datagrams)
                if datagrams:
                    await anyio.lowlevel.checkpoint()

    def _take(self, datagrams: deque[tuple[bytes, SocketAddress]]) -> None:
        """Work on datagrams for one turn, and send what they call for."""
        now = began = time.monotonic()
        touched: dict[ConnectionCore, None] = {}
        while datagrams and now - began < TURN_SECONDS:
            data, source = datagrams.popleft()
            target = self.demux.route(data, source, now)
            if isinstance(target, ConnectionCore):
                touched[target] = None
                with self._contain(target):
                    target.receive_datagram(data, source, now)
            elif isinstance(target, Reply):
                self._send(target.data, source)
            now = time.monotonic()
        for core in touched:
            self.pump(core)

    def _take_errors(self) -> None:
        now = time.monotonic()
        unreachable = set(self.socket.errors())
        for core in self.demux.connections if unreachable else ():
            address = core.quic.get_peer_address()
            if address is not None and (address[0], address[1]) in unreachable:
                with self._contain(core):
                    core.suspect(now)
                    core.handle_timer(now)
                self.pump(core)

    # -- sending

    def _flush(self, core: ConnectionCore) -> None:
        while True:
            self._again.discard(core)
            self._report(core)
            for data, address in core.datagrams_to_send(time.monotonic()):
                self._send(data, address)  # type: ignore[arg-type]
            self._report(core)
            if core not in self._again:
                break

    @contextmanager
    def _contain(self, core: ConnectionCore) -> Iterator[None]:
        """Give up a connection that fails inside: its fault must not reach the others."""
        try:
            yield
        except Exception:
            _log.exception("a connection failed inside and is given up")
            core.abandon("internal error")

    def _send(self, data: bytes, address: SocketAddress) -> None:
        if self._backlog or not self.socket.send(data, address):
            self._backlog.append((data, address))
            self._backlogged.set()

    async def _send_backlog(self) -> None:
        while True:
            await self._backlogged.wait()
            self._backlogged = anyio.Event()
            while self._backlog:
                await anyio.wait_writable(self.socket.raw)
                while self._backlog and self.socket.send(*self._backlog[0]):
                    self._backlog.popleft()

    # -- events and time

    def _report(self, core: ConnectionCore) -> None:
        while (event := core.next_event()) is not None:
            match event:
                case ConnectionIdIssued(connection_id=connection_id):
                    self.demux.add(core, connection_id)
                case ConnectionIdRetired(connection_id=connection_id):
                    self.demux.retire(core, connection_id)
                case _:
                    self._on_event(core, event)

    def _schedule(self, core: ConnectionCore) -> None:
        due = core.next_deadline()
        if due is None or core.is_terminated:
            self._due.pop(core, None)
            self.demux.remove(core)
            event, self._terminated = self._terminated, anyio.Event()
            event.set()
            return
        # Deadlines mostly move later; the old entry then fires, finds nothing due, and sets a new
        # one. Only an earlier deadline needs an entry of its own, and one that takes the place of
        # an entry about to fire: an acknowledgement held back for 1 ms has mostly left by then.
        armed = self._due.get(core, math.inf)
        if due < armed or (due > armed and armed < time.monotonic() + SOON):
            self._due[core] = due
            heapq.heappush(self._heap, (due, next(self._order), core))
            self._arm()

    def _arm(self) -> None:
        """Set the timer to the earliest entry that still holds."""
        heap = self._heap
        while heap and self._due.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        earliest = heap[0][0] if heap else math.inf
        if earliest != self._timer_at:
            self._timer_at = earliest
            if self._timer_scope is not None:
                self._timer_scope.deadline = _loop_time(earliest)

    async def _keep_time(self) -> None:
        while True:
            self._arm()
            with anyio.CancelScope(deadline=_loop_time(self._timer_at)) as scope:
                self._timer_scope = scope
                await anyio.sleep_forever()
            self._timer_scope = None
            self._fire(time.monotonic())

    def _fire(self, now: float) -> None:
        due: list[ConnectionCore] = []
        while self._heap and self._heap[0][0] <= now:
            at, _, core = heapq.heappop(self._heap)
            if self._due.get(core) == at:
                del self._due[core]
                due.append(core)
        for core in due:
            deadline = core.next_deadline()
            if deadline is not None and deadline <= now:
                with self._contain(core):
                    core.handle_timer(now)
                self.pump(core)
            else:
                self._schedule(core)


def new_connection_id(length: int) -> bytes:
    """Return a random connection id."""
    return os.urandom(length)


def _loop_time(monotonic: float) -> float:
    """Convert a time of `time.monotonic` to the event loop's clock, which may count otherwise."""
    if monotonic == math.inf:
        return math.inf
    return anyio.current_time() + (monotonic - time.monotonic())
