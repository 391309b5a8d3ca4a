"""Two or more protocol halves in one thread under a virtual clock, on a seeded network in memory.

`World` owns the clock and the network. A `Host` has an address, a `Demultiplexer` and connections,
and does what the driver does, in the same order. An `End` is one host's side of a connection with a
small application on it: it writes what it was given as room allows, and reads what comes.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
import random
from collections import Counter
from collections.abc import Callable

from aioquic.quic.configuration import QuicConfiguration

from auth import NodeId, SecretKey
from transport.protocol import ConnectionCore, Demultiplexer, Reply, StreamCore
from transport.protocol.aioquic_adapter import (
    AdaptedConnection,
    client_configuration,
    server_configuration,
)
from transport.protocol.connection_ids import ConnectionIds
from transport.protocol.events import (
    ConnectionIdIssued,
    ConnectionIdRetired,
    Event,
    HandshakeCompleted,
    StreamChanged,
    StreamOpened,
)
from transport.protocol.stateless_reset import StatelessResets

Address = tuple[str, int]

ALPN = "mesh/1"
KIB = 1 << 10
MIB = 1 << 20

MAX_STEPS = 200_000
"""A world that does this much for one condition is stuck in a loop."""


@functools.cache
def key(number: int) -> SecretKey:
    """The same few keys each time: making one costs more than many a test."""
    return SecretKey.from_bytes(number.to_bytes(32, "big"))


@dataclasses.dataclass
class Link:
    """What happens to datagrams on their way. Probabilities, and seconds."""

    delay: float = 0.01
    jitter: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0


@dataclasses.dataclass
class Settings:
    """What an endpoint's configuration would say."""

    liveness: float = 3.0
    send_buffer: int = 1 * MIB
    stream_window: int = 256 * KIB
    stranger_window: int = 16 * KIB
    connection_window: int = 1 * MIB
    max_streams: int = 128
    max_connections: int = 1024
    max_half_open: int = 128
    max_half_open_per_host: int = 32
    retry_threshold: int = 32
    listen: bool = True
    admit: bool = True
    """Whether a peer is authorized as soon as its handshake is complete."""


class World:
    """The clock, the network, and the hosts on it."""

    def __init__(self, seed: int = 0, link: Link | None = None) -> None:
        self.now = 100.0
        self.link = link or Link()
        self.hosts: dict[Address, Host] = {}
        self.tap: Callable[[bytes, Address, Address], bytes | None] = lambda data, *_: data
        """Sees each datagram first; returns what travels on, None for nothing."""
        self.sent: Counter[tuple[Address, Address]] = Counter()
        """UDP payload bytes, by source and target, as sent."""
        self._random = random.Random(seed)
        self._flying: list[tuple[float, int, bytes, Address, Address]] = []
        self._order = 0

    def host(self, number: int, settings: Settings | None = None) -> Host:
        """Make a host with a key and an address of its own."""
        address = (f"10.0.{number >> 8}.{number & 255}", 4433)
        return Host(self, key(number), address, settings or Settings())

    def send(self, data: bytes, source: Address, target: Address) -> None:
        """Let a datagram fly."""
        self.sent[source, target] += len(data)
        seen = self.tap(data, source, target)
        if seen is None:
            return
        link, draw = self.link, self._random.random
        for _ in range(2 if draw() < link.duplicate else 1):
            if draw() < link.loss:
                continue
            copy = seen
            if draw() < link.corrupt:
                at = self._random.randrange(len(seen))
                copy = (
                    seen[:at] + bytes([seen[at] ^ self._random.randrange(1, 256)]) + seen[at + 1 :]
                )
            self._order += 1
            arrival = self.now + link.delay + draw() * link.jitter
            heapq.heappush(self._flying, (arrival, self._order, copy, source, target))

    def run(self, until: Callable[[], object] = lambda: False, seconds: float = 30.0) -> bool:
        """Let time pass until the condition holds; return whether it does before `seconds` did."""
        end = self.now + seconds
        for _ in range(MAX_STEPS):
            if until():
                return True
            due = min((host.next_deadline() for host in self.hosts.values()), default=math.inf)
            arrival = self._flying[0][0] if self._flying else math.inf
            if min(due, arrival) > end:
                self.now = end
                return bool(until())
            if arrival <= due:
                _, _, data, source, target = heapq.heappop(self._flying)
                self.now = max(self.now, arrival)
                if target in self.hosts:
                    self.hosts[target].receive(data, source)
            else:
                # Real clocks never stand still, and sums of times are rounded.
                self.now = max(self.now + 1e-9, due)
                for host in list(self.hosts.values()):
                    host.keep_time()
        raise AssertionError("the world is busy and gets nowhere")


class Host:
    """One endpoint, as far as its protocol half goes."""

    def __init__(
        self, world: World, secret: SecretKey, address: Address, settings: Settings
    ) -> None:
        self.world = world
        self.key = secret
        self.address = address
        self.settings = settings
        self.ids = ConnectionIds()
        self.resets = StatelessResets(secret, address[1])
        self.ends: dict[ConnectionCore, End] = {}
        """Every connection it ever had, in the order in which they came."""
        self.demux = Demultiplexer(
            make_listener=self._make_listener if settings.listen else None,
            max_connections=settings.max_connections,
            max_half_open=settings.max_half_open,
            max_half_open_per_host=settings.max_half_open_per_host,
            retry_threshold=settings.retry_threshold,
            new_connection_id=self.ids.draw,
            resets=self.resets,
        )
        world.hosts[address] = self

    @property
    def end(self) -> End:
        """Its latest connection."""
        return list(self.ends.values())[-1]

    def dial(
        self,
        target: Host,
        *,
        expect: NodeId | None = None,
        alpn: str = ALPN,
        configure: Callable[[QuicConfiguration], object] = lambda _: None,
        kind: type[AdaptedConnection] = AdaptedConnection,
    ) -> End:
        """Begin a connection to `target`; `configure` may spoil its configuration before."""
        settings = self.settings
        configuration = client_configuration(
            self.key,
            alpn,
            max_data=settings.stranger_window,
            max_stream_data=settings.stream_window,
            idle=60.0,
            congestion="cubic",
        )
        configure(configuration)
        quic = kind(
            configuration=configuration,
            expected_peer=expect or target.key.node_id,
            max_streams=0,
            new_connection_id=self.ids.draw,
            reset_token=self.resets.token,
        )
        end = self._end(quic, outbound=True)
        self.demux.add(end.core, quic.host_cid)
        quic.connect(target.address, now=self.world.now)
        self.pump(end)
        return end

    def move(self, address: Address) -> None:
        """Get another address, as behind a NAT that forgot us."""
        del self.world.hosts[self.address]
        self.address = address
        self.world.hosts[address] = self

    def receive(self, data: bytes, source: Address) -> None:
        """Take a datagram from the network."""
        target = self.demux.route(data, source, self.world.now)
        if isinstance(target, ConnectionCore):
            target.receive_datagram(data, source, self.world.now)
            self.pump(self.ends[target])
        elif isinstance(target, Reply):
            self.world.send(target.data, self.address, source)

    def next_deadline(self) -> float:
        """When `keep_time` wants to be called."""
        dues = [core.next_deadline() for core in self.demux.connections]
        return min((due for due in dues if due is not None), default=math.inf)

    def keep_time(self) -> None:
        """Do what is due."""
        for core in self.demux.connections:
            due = core.next_deadline()
            if due is not None and due <= self.world.now:
                core.handle_timer(self.world.now)
                self.pump(self.ends[core])

    def pump(self, end: End) -> None:
        """Report events, send what there is to send, forget a connection that is over."""
        core = end.core
        while True:
            end.again = False
            self._report(end)
            for data, address in core.datagrams_to_send(self.world.now):
                self.world.send(data, self.address, address)
            self._report(end)
            if not end.again:
                break
        if core.next_deadline() is None or core.is_terminated:
            self.demux.remove(core)

    def _report(self, end: End) -> None:
        while end.core.events:
            match event := end.core.events.popleft():
                case ConnectionIdIssued(connection_id=connection_id):
                    self.demux.add(end.core, connection_id)
                case ConnectionIdRetired(connection_id=connection_id):
                    self.demux.retire(end.core, connection_id)
                case _:
                    end.handle(event)

    def _make_listener(
        self, original: bytes, retried: bytes | None, address: Address, now: float
    ) -> ConnectionCore:
        settings = self.settings
        quic = AdaptedConnection(
            configuration=server_configuration(
                self.key,
                [ALPN, "app/1"],
                max_data=settings.stranger_window,
                max_stream_data=settings.stream_window,
                idle=60.0,
                congestion="cubic",
            ),
            expected_peer=None,
            max_streams=1,
            original_destination_connection_id=original,
            retry_source_connection_id=retried,
            new_connection_id=self.ids.draw,
            reset_token=self.resets.token,
        )
        return self._end(quic, outbound=False).core

    def _end(self, quic: AdaptedConnection, *, outbound: bool) -> End:
        settings = self.settings
        core = ConnectionCore(
            quic,
            liveness=settings.liveness,
            send_buffer=settings.send_buffer,
            now=self.world.now,
        )
        end = self.ends[core] = End(self, core, outbound=outbound)
        return end


class End:
    """One side of a connection, with an application that reads eagerly unless told otherwise."""

    def __init__(self, host: Host, core: ConnectionCore, *, outbound: bool) -> None:
        self.host = host
        self.core = core
        self.outbound = outbound
        self.events: list[Event] = []
        self.opened: list[int] = []
        """The peer's streams, in the order in which they were reported."""
        self.inbox: dict[int, bytearray] = {}
        self.outbox: dict[int, tuple[bytes, bool]] = {}
        """What is still to be written to a stream, and whether its end follows."""
        self.reads = True
        self.echoes = False
        """Whether a stream that was read to its end is answered with what it said, and released."""
        self.again = False

    @property
    def handshake(self) -> HandshakeCompleted | None:
        """Who proved to be there."""
        found = [event for event in self.events if isinstance(event, HandshakeCompleted)]
        return found[0] if found else None

    def handle(self, event: Event) -> None:
        """Take an event."""
        self.events.append(event)
        match event:
            case HandshakeCompleted():
                if self.host.settings.admit:
                    self.host.demux.admitted(self.core)
                    self.admit()
                    self.again = True
            case StreamOpened(stream_id=stream_id):
                self.opened.append(stream_id)
            case StreamChanged(stream_id=stream_id):
                stream = self.core.streams.get(stream_id)
                if stream is not None and not stream.released:
                    self._look(stream)

    def admit(self) -> None:
        """Lift the stranger's limits."""
        settings = self.host.settings
        self.core.admit(
            max_streams=settings.max_streams, connection_window=settings.connection_window
        )

    def pump(self) -> None:
        """Let the host look after the connection."""
        self.host.pump(self)

    def open(self, data: bytes = b"", *, fin: bool = True) -> StreamCore:
        """Open a stream, write `data`, and end it with `fin`."""
        stream = self.core.open_stream()
        self.write(stream, data, fin=fin)
        return stream

    def write(self, stream: StreamCore, data: bytes, *, fin: bool = False) -> None:
        """Write `data` after what waits already, as room allows."""
        waiting, _ = self.outbox.get(stream.stream_id, (b"", False))
        self.outbox[stream.stream_id] = (waiting + data, fin)
        self._write(stream)
        self.pump()

    def read(self, stream: StreamCore, limit: int = 1 << 30) -> bytes:
        """Take what has come, and give the credit back."""
        data = stream.incoming.take(limit)
        self.inbox.setdefault(stream.stream_id, bytearray()).extend(data)
        self.again = self.core.consumed(stream, len(data)) or self.again
        return data

    def release(self, stream: StreamCore, code: int = 0) -> None:
        """Drop a stream."""
        self.outbox.pop(stream.stream_id, None)
        self.core.release(stream, code)
        self.pump()

    def _look(self, stream: StreamCore) -> None:
        self._write(stream)
        if not self.reads:
            return
        self.read(stream)
        if self.echoes and stream.receive_ended and not stream.buffered:
            if not stream.send_ended:
                self.outbox[stream.stream_id] = (bytes(self.inbox.pop(stream.stream_id)), True)
                self._write(stream)
            if stream.send_ended:
                self.core.release(stream, 0)
            self.again = True

    def _write(self, stream: StreamCore) -> None:
        data, fin = self.outbox.pop(stream.stream_id, (b"", False))
        if stream.send_ended or not (data or fin):
            return
        room = self.core.room(stream)
        part, rest = data[:room], data[room:]
        if part or (fin and not rest):
            self.core.write(stream, part, fin=fin and not rest)
            self.again = True
        if rest:
            self.outbox[stream.stream_id] = (rest, fin)


def connect(
    world: World, client: Settings | None = None, server: Settings | None = None
) -> tuple[End, End]:
    """Return the two ends of a new connection between two new hosts, handshake complete."""
    here, there = world.host(1, client), world.host(2, server)
    dialer = here.dial(there)
    assert world.run(lambda: there.ends and dialer.handshake and there.end.handshake)
    world.run(seconds=0.2)
    return dialer, there.end
