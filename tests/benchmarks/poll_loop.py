"""quicmesh's protocol half on a plain poll loop: what is left when there is no event loop.

No tasks, no endpoint, no admission: sockets and the state machine alone. What it gains over
quicmesh itself is what the event loop and the application's side of a stream cost.
"""

from __future__ import annotations

import math
import select
import time
from typing import Any

from auth import NodeId, SecretKey, SocketAddress
from tests.benchmarks.harness import SMALL, Pipe, Site, filled
from tests.benchmarks.ours import LIVENESS, limit_datagrams
from transport import EndpointConfig
from transport.protocol import ConnectionCore, Demultiplexer, Reply, StreamCore
from transport.protocol.aioquic_adapter import (
    AdaptedConnection,
    client_configuration,
    server_configuration,
)
from transport.protocol.connection_ids import ConnectionIds
from transport.protocol.events import (
    ConnectionEnded,
    ConnectionIdIssued,
    ConnectionIdRetired,
    Event,
    HandshakeCompleted,
    StreamChanged,
)
from transport.udp import RECEIVE_ROOM, UdpSocket

ALPN = "bench"
DEFAULTS = EndpointConfig()
STRANGER_WINDOW = 1 << 16
IDLE_SECONDS = 600.0
RECEIVES_PER_TURN = 4
BATCHES_PER_TURN = 2
HEADER = 8
"""Each stream begins with the length of what it carries."""


class PollLoop:
    """One contender, with the size of its datagrams, None: discovered."""

    most = math.inf
    spins = False

    def __init__(self, datagram: int | None = None) -> None:
        self._datagram = datagram

    def missing(self) -> str | None:
        return None

    def serve(self, pipe: Pipe, site: Site) -> None:
        limit_datagrams(self._datagram)
        end = _End(site)
        pipe.send((str(end.key.node_id), end.socket.address))
        served: dict[int, _Answer] = {}
        while True:
            end.step()
            for stream in end.take_changed():
                answer = served.get(stream.stream_id)
                if answer is None:
                    answer = served[stream.stream_id] = _Answer(end, stream)
                if answer.goes_on():
                    del served[stream.stream_id]

    def dial(self, pipe: Pipe, site: Site, where: Any) -> None:
        limit_datagrams(self._datagram)
        end = _End(site)
        end.connect(NodeId.parse(where[0]), where[1])
        while not end.is_admitted:
            end.step()
        pipe.send("ready")
        end.watch(pipe)
        while True:
            end.step()
            if pipe.poll():
                order, number = pipe.recv()
                if order == "small":
                    pipe.send([end.exchange(SMALL) for _ in range(number)])
                else:
                    pipe.send(end.exchange(filled(number)))


class _End:
    """One socket, the connections on it, and a loop that serves both."""

    def __init__(self, site: Site) -> None:
        self.key = SecretKey.generate()
        self.socket = UdpSocket(f"{site.address}:0")
        self.core: ConnectionCore | None = None
        """The latest connection."""
        self.is_admitted = False
        self._ids = ConnectionIds()
        self._demux = Demultiplexer(
            make_listener=self._make_listener,
            max_connections=DEFAULTS.max_connections,
            max_half_open=DEFAULTS.max_half_open,
            max_half_open_per_host=DEFAULTS.max_half_open_per_host,
            retry_threshold=DEFAULTS.retry_threshold,
            new_connection_id=self._ids.draw,
        )
        self._changed: dict[int, None] = {}
        self._buffer = bytearray(RECEIVE_ROOM)
        self._has_more = False
        self._poll = select.poll()
        self._poll.register(self.socket.raw, select.POLLIN)

    def watch(self, pipe: Pipe) -> None:
        """Let `step` return when an order has come, too."""
        self._poll.register(pipe, select.POLLIN)

    def connect(self, node_id: NodeId, address: SocketAddress) -> None:
        """Begin to dial."""
        quic = AdaptedConnection(
            configuration=client_configuration(
                self.key,
                ALPN,
                max_data=STRANGER_WINDOW,
                max_stream_data=DEFAULTS.stream_window,
                idle=IDLE_SECONDS,
                congestion=DEFAULTS.congestion_control,
            ),
            expected_peer=node_id,
            max_streams=0,
            new_connection_id=self._ids.draw,
        )
        core = self._core(quic)
        self._demux.add(core, quic.host_cid)
        quic.connect(address, now=time.monotonic())
        self.pump()

    def step(self) -> None:
        """Wait for something to do, and do it."""
        core = self.core
        due = None if core is None else core.next_deadline()
        now = time.monotonic()
        seconds = 1.0 if due is None else due - now
        # poll(2) counts in milliseconds: for less than one it is asked again and again.
        self._poll.poll(0 if self._has_more or seconds < 0.001 else int(seconds * 1000))
        self._receive()
        core = self.core
        if core is None:
            return
        now = time.monotonic()
        due = core.next_deadline()
        if due is not None and due <= now:
            core.handle_timer(now)
        self.pump()

    def pump(self) -> None:
        """Report what has happened, and send what may leave."""
        core = self.core
        assert core is not None
        self._report(core)
        now = time.monotonic()
        for data, segment, address in core.control_to_send(now):
            self._send(data, segment, address)
        batch = None
        for _ in range(BATCHES_PER_TURN):
            batch = core.batch_to_send(now)
            if batch is None:
                break
            self._send(*batch)
        self._has_more = batch is not None
        if (probe := core.probe_to_send(now)) is not None:
            self._send(*probe)
            if self.socket.oversized:
                core.quic.refused(self.socket.oversized, now)
                self.socket.oversized = 0
        self._report(core)

    def take_changed(self) -> list[StreamCore]:
        """Return the streams that something happened to since this was last asked."""
        changed, self._changed = self._changed, {}
        assert self.core is not None or not changed
        return [
            self.core.streams[stream_id]
            for stream_id in changed
            if self.core is not None and stream_id in self.core.streams
        ]

    def exchange(self, data: bytes | bytearray) -> float:
        """Send `data` on a stream of its own; return the seconds until all of the answer came."""
        core = self.core
        assert core is not None
        began = time.perf_counter()
        stream = core.open_stream()
        core.write(stream, len(data).to_bytes(HEADER, "big"))
        if len(data) == len(SMALL):
            core.write(stream, data, fin=True)
        else:
            core.lend(stream, memoryview(data), lambda: True, 0)
        self.pump()
        while not stream.receive_ended:
            self.step()
        core.consumed(stream, len(stream.incoming.take(HEADER + len(SMALL))))
        core.release(stream, 0)
        seconds = time.perf_counter() - began
        self._changed.clear()
        self.pump()
        return seconds

    def _receive(self) -> None:
        now = time.monotonic()
        for _ in range(RECEIVES_PER_TURN):
            received = self.socket.receive_into(self._buffer)
            if received is None:
                return
            size, segment, source = received
            core = self._demux.find(self._buffer, size)
            others = [(at, min(at + segment, size)) for at in range(0, size, segment)]
            if core is not None:
                others = core.receive_batch(self._buffer, size, segment, source, now)
            for start, stop in others:
                data = bytes(self._buffer[start:stop])
                target = self._demux.route(data, source, now)
                if isinstance(target, ConnectionCore):
                    target.receive_datagram(data, source, now)
                elif isinstance(target, Reply):
                    self._send(target.data, len(target.data), source)

    def _send(self, data: Any, segment: int, address: Any) -> None:
        while (taken := self.socket.send_batch(data, segment, address)) < len(data):
            select.select([], [self.socket.raw], [], 0.05)
            data = data[taken:]

    def _report(self, core: ConnectionCore) -> None:
        while core.events:
            self._handle(core, core.events.popleft())

    def _handle(self, core: ConnectionCore, event: Event) -> None:
        match event:
            case ConnectionIdIssued(connection_id=connection_id):
                self._demux.add(core, connection_id)
            case ConnectionIdRetired(connection_id=connection_id):
                self._demux.retire(core, connection_id)
            case HandshakeCompleted():
                self._demux.admitted(core)
                core.admit(
                    max_streams=DEFAULTS.max_streams, connection_window=DEFAULTS.connection_window
                )
                self.is_admitted = True
            case StreamChanged(stream_id=stream_id):
                self._changed[stream_id] = None
            case ConnectionEnded(reason=reason):
                raise EOFError(reason)

    def _make_listener(
        self, original: bytes, retried: bytes | None, address: SocketAddress, now: float
    ) -> ConnectionCore:
        quic = AdaptedConnection(
            configuration=server_configuration(
                self.key,
                [ALPN],
                max_data=STRANGER_WINDOW,
                max_stream_data=DEFAULTS.stream_window,
                idle=IDLE_SECONDS,
                congestion=DEFAULTS.congestion_control,
            ),
            expected_peer=None,
            max_streams=1,
            original_destination_connection_id=original,
            retry_source_connection_id=retried,
            new_connection_id=self._ids.draw,
        )
        return self._core(quic)

    def _core(self, quic: AdaptedConnection) -> ConnectionCore:
        self.core = ConnectionCore(
            quic, liveness=LIVENESS, send_buffer=DEFAULTS.send_buffer, now=time.monotonic()
        )
        return self.core


class _Answer:
    """One stream as the serving end sees it: what comes is put in its place, and answered."""

    def __init__(self, end: _End, stream: StreamCore) -> None:
        self._end = end
        self._stream = stream
        self._size: int | None = None
        self._goal = 0

    def goes_on(self) -> bool:
        """Do what can be done; return whether the stream is over."""
        core, stream = self._end.core, self._stream
        assert core is not None
        if self._size is None:
            if stream.buffered < HEADER:
                return False
            self._size = int.from_bytes(stream.incoming.take(HEADER), "big")
            core.consumed(stream, HEADER)
            if self._size != len(SMALL):
                self._goal = stream.incoming.consumed + self._size
                core.post(stream, memoryview(filled(self._size)))
                self._end.pump()
        if self._size == len(SMALL):
            if stream.buffered < len(SMALL):
                return False
            echo = stream.incoming.take(len(SMALL))
            core.consumed(stream, len(echo))
            core.write(stream, echo, fin=True)
        else:
            if stream.incoming.delivered < self._goal:
                return False
            core.withdraw(stream)
            core.write(stream, b"done", fin=True)
        core.release(stream, 0)
        self._end.pump()
        return True
