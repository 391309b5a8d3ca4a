"""Moves datagrams between a socket and the protocol half; keeps the one timer they share.

Seven tasks: one receives, one lets those whom that wakes go first, two keep the time, one sends
what the socket would not take at once, one goes on with connections that have more to send, one
watches for floods.
Everything else runs inline in whichever task has something to send, which is the shortest way from
a write to the wire. The work of one turn is bounded, so that the loop stays responsive under load.

Datagrams travel in batches, as far as the kernel can: what came from one peer at once is handled at
once, and a connection with much to send has one or two batches' time before others have theirs.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable

import anyio
import anyio.lowlevel

from auth import SocketAddress
from transport.deadlines import Deadlines
from transport.protocol import ConnectionCore, Demultiplexer, Reply
from transport.protocol.batch import Transmit
from transport.protocol.events import (
    ConnectionIdIssued,
    ConnectionIdRetired,
    Event,
)
from transport.protocol.turns import Turns
from transport.readiness import Alarm, Later, serve_readable
from transport.socket_filter import FloodGuard
from transport.udp import RECEIVE_ROOM, Received, UdpSocket

__all__ = ["Driver"]

RECEIVES_PER_TURN = 4
"""Batches, or single datagrams, taken from the socket before their answers are sent."""

TURN_SECONDS = 0.001
"""How long to go on taking datagrams, or sending those of one connection, in one turn. A batch
takes a third of it or more, a handshake alone five times as much."""

MAX_BACKLOG = 1024
"""Sends kept while the socket is full. More than that is congestion, and loss says so."""

_log = logging.getLogger("quicmesh.transport")

EventHandler = Callable[[ConnectionCore, Event], None]


class Driver:
    """The I/O of one endpoint.

    Args:
        sock: the bound socket; closed by `close`.
        demux: the table of its connections.
        guard: told of the time that strangers take.
        turns: told of the time that each connection takes.
        on_event: called with each event of each connection, in order.
        on_pumped: called after a connection was looked after.
    """

    def __init__(
        self,
        sock: UdpSocket,
        demux: Demultiplexer,
        guard: FloodGuard,
        turns: Turns,
        *,
        on_event: EventHandler,
        on_pumped: Callable[[ConnectionCore], None],
    ) -> None:
        self.socket = sock
        self.demux = demux
        self._guard = guard
        self._turns = turns
        self._on_event = on_event
        self._on_pumped = on_pumped
        self._pumping: set[ConnectionCore] = set()
        self._again: set[ConnectionCore] = set()
        self._waiting: dict[ConnectionCore, None] = {}
        self._later = Later(self._catch_up)
        self._heap: list[tuple[float, int, ConnectionCore]] = []
        self._due: dict[ConnectionCore, float] = {}
        self._order = itertools.count()
        self._alarm = Alarm(self._fire)
        self.deadlines = Deadlines()
        """Of those who wait for something of a connection's."""
        self._buffer = bytearray(RECEIVE_ROOM)
        self._busy: dict[ConnectionCore, None] = {}
        self._busier = anyio.Event()
        self._backlog: deque[Transmit] = deque(maxlen=MAX_BACKLOG)
        self._backlogged = anyio.Event()
        self._terminated = anyio.Event()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve_readable, self.socket.raw, self._take)
            tasks.start_soon(self._later.run)
            tasks.start_soon(self._alarm.run)
            tasks.start_soon(self.deadlines.run)
            tasks.start_soon(self._send_backlog)
            tasks.start_soon(self._send_more)
            tasks.start_soon(self._guard.run)

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
        self._waiting.pop(core, None)
        began = time.monotonic()
        try:
            try:
                self._flush(core)
            except Exception:
                _give_up(core)
            self._report(core)  # its end, where it has just been given up
        finally:
            self._pumping.discard(core)
            self._again.discard(core)
        self._charge(core, began)
        self._schedule(core)
        self._on_pumped(core)

    async def drain(self, seconds: float) -> None:
        """Wait until every connection's closing period is over, at most `seconds`."""
        with anyio.move_on_after(seconds):
            while self.demux.connections:
                await self._terminated.wait()

    # -- receiving

    def _take(self) -> bool:
        """Work on what waits for one turn, and send what it calls for; return if more may wait."""
        began = now = time.monotonic()
        touched: dict[ConnectionCore, None] = {}
        for count in range(1, RECEIVES_PER_TURN + 1):
            received = self.socket.receive_into(self._buffer)
            if received is None:
                break
            now = self._handle(received, touched, now)
            if not self.socket.has_more or not _leaves_time(now - began, count):
                break
        if self.socket.has_errors or not touched:
            self._take_errors()
        for core in touched:
            if core.can_wait(now):
                self._look(core)
            else:
                self.pump(core)
        more = self.socket.has_more
        self._turns.looked(now, more=more)
        self._guard.budget.looked(now, more=more)
        return more

    def _look(self, core: ConnectionCore) -> None:
        """Report what happened on `core`, and leave the rest to whom that wakes, or for later.

        Mostly there is an answer to send then, or the next request, and one look does for both.
        """
        self._pumping.add(core)
        try:
            try:
                self._report(core)
            except Exception:
                _give_up(core)
        finally:
            self._pumping.discard(core)
        self._waiting[core] = None
        if core in self._again:
            self.pump(core)
        else:
            self._later.set()

    def _catch_up(self) -> None:
        for core in list(self._waiting):
            self.pump(core)

    def _handle(self, received: Received, touched: dict[ConnectionCore, None], now: float) -> float:
        """Give datagrams to the connections they belong to; return the time."""
        size, segment, source = received
        core = self.demux.find(self._buffer, size)
        if core is None:
            others = [(at, min(at + segment, size)) for at in range(0, size or 1, segment or 1)]
        else:
            touched[core] = None
            others = []
            try:
                others = core.receive_batch(self._buffer, size, segment, source, now)
            except Exception:
                _give_up(core)
            now = self._charge(core, now)
            if not others:
                return now
        for start, stop in others:
            data = bytes(self._buffer[start:stop])
            target = self.demux.route(data, source, now)
            if isinstance(target, ConnectionCore):
                touched[target] = None
                try:
                    target.receive_datagram(data, source, now)
                except Exception:
                    _give_up(target)
            elif isinstance(target, Reply):
                self._send(Transmit(target.data, len(target.data), source))
            now = self._charge(target, now)
        return time.monotonic()

    def _charge(self, target: object, since: float) -> float:
        """Return the time; what has passed was spent on a stranger unless `target` is admitted."""
        now = time.monotonic()
        if isinstance(target, ConnectionCore) and not self.demux.is_stranger(target):
            self._guard.budget.spend(now - since, now, on_strangers=False)
            self._turns.spend(target, now - since)
        else:
            self._guard.spend(now - since, now)
        return now

    def _take_errors(self) -> None:
        now = time.monotonic()
        unreachable = set(self.socket.errors())
        for core in self.demux.connections if unreachable else ():
            address = core.quic.get_peer_address()
            if address is not None and (address[0], address[1]) in unreachable:
                try:
                    core.suspect(now)
                    core.handle_timer(now)
                except Exception:
                    _give_up(core)
                self.pump(core)

    # -- sending

    def _flush(self, core: ConnectionCore) -> None:
        while True:
            self._again.discard(core)
            self._report(core)
            now = time.monotonic()
            for transmit in core.control_to_send(now):
                self._send(transmit)
            self._send_batches(core, now)
            self._send_probe(core, now)
            self._report(core)
            if core not in self._again:
                break

    def _send_batches(self, core: ConnectionCore, now: float) -> None:
        if core in self._busy:
            return  # it has its turn in this round of the loop: two would be too long a time
        for count in itertools.count(1):
            transmit = None if self._backlog else core.batch_to_send(now)
            if transmit is None:
                break
            self._send(transmit)
            self._report_oversized(core, now)
            if not core.has_stream_data:
                return
            if not _leaves_time(time.monotonic() - now, count):
                break
        if transmit is not None or self._backlog:
            self._busy[core] = None
            self._busier.set()

    def _send_probe(self, core: ConnectionCore, now: float) -> None:
        while not self._backlog and (probe := core.probe_to_send(now)) is not None:
            self._send(probe)
            self._report_oversized(core, now)

    def _report_oversized(self, core: ConnectionCore, now: float) -> None:
        if self.socket.oversized:
            core.quic.refused(self.socket.oversized, now)
            self.socket.oversized = 0

    async def _send_more(self) -> None:
        """Give each connection that has more to send its turn, again and again."""
        while True:
            await self._busier.wait()
            self._busier = anyio.Event()
            while self._busy and not self._backlog:
                core = next(iter(self._busy))
                del self._busy[core]
                self.pump(core)
                await anyio.lowlevel.checkpoint()

    def _send(self, transmit: Transmit) -> None:
        data, segment, address = transmit
        taken = 0
        if not self._backlog:
            taken = self.socket.send_batch(data, segment, address)  # type: ignore[arg-type]
        if taken < len(data):
            self._backlog.append(Transmit(bytes(data[taken:]), segment, address))
            self._backlogged.set()

    async def _send_backlog(self) -> None:
        while True:
            await self._backlogged.wait()
            self._backlogged = anyio.Event()
            while self._backlog:
                await anyio.wait_writable(self.socket.raw)
                waiting = list(self._backlog)
                self._backlog.clear()
                for transmit in waiting:
                    self._send(transmit)
            self._busier.set()

    # -- events and time

    def _report(self, core: ConnectionCore) -> None:
        while core.events:
            match event := core.events.popleft():
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
            self._busy.pop(core, None)
            event, self._terminated = self._terminated, anyio.Event()
            event.set()
            return
        # Deadlines mostly move later: the old entry then fires, finds nothing due, and sets a new
        # one. Only an earlier deadline needs an entry of its own.
        if due < self._due.get(core, math.inf):
            self._due[core] = due
            heapq.heappush(self._heap, (due, next(self._order), core))
            self._alarm.set(due)

    def _fire(self) -> None:
        now = time.monotonic()
        due: list[ConnectionCore] = []
        heap = self._heap
        while heap and (heap[0][0] <= now or self._due.get(heap[0][2]) != heap[0][0]):
            at, _, core = heapq.heappop(heap)
            if self._due.get(core) == at:
                del self._due[core]
                due.append(core)
        if heap:
            self._alarm.set(heap[0][0])
        for core in due:
            deadline = core.next_deadline()
            if deadline is not None and deadline <= now:
                try:
                    core.handle_timer(now)
                except Exception:
                    _give_up(core)
                self.pump(core)
            elif core not in self._waiting:
                # One that waits is looked after in this turn, and given its new deadline then: now
                # it would be that of an acknowledgement which is about to leave.
                self._schedule(core)


def _leaves_time(taken: float, count: int) -> bool:
    """Whether one more fits into a turn, if `count` like it have taken so many seconds of it."""
    return taken / count * (count + 1) <= TURN_SECONDS


def _give_up(core: ConnectionCore) -> None:
    """Give up a connection that has just failed inside: its fault must not reach the others."""
    _log.exception("a connection failed inside and is given up")
    core.abandon("internal error")
