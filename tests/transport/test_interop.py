"""The batches on the wire: with ourselves, with stock aioquic, and with an implementation apart.

Two ends in one process, on a virtual clock, over a network that loses, repeats, reorders and
corrupts; contents are compared by hash. ``qh3`` is a fork of aioquic in its interface alone: its
packets, cryptography and loss recovery are written in Rust.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pytest
import qh3.quic.configuration as qh3_configuration
import qh3.quic.connection as qh3_connection
from aioquic import tls
from aioquic.buffer import Buffer
from aioquic.quic.connection import QuicConnection
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import pull_quic_header
from aioquic.tls import CipherSuite

from auth import SecretKey
from tests.transport.pair import key
from transport.protocol.aioquic_adapter import (
    AdaptedConnection,
    client_configuration,
    server_configuration,
)

ALPN = "x"
WINDOW = 4 << 20
CLIENT, SERVER = ("192.0.2.1", 1), ("192.0.2.2", 2)


class Quic(Protocol):
    """What all three have in common: aioquic's interface without I/O."""

    def connect(self, addr: Any, now: float) -> None: ...
    def receive_datagram(self, data: bytes, addr: Any, now: float) -> None: ...
    def datagrams_to_send(self, now: float) -> list[tuple[bytes, Any]]: ...
    def get_timer(self) -> float | None: ...
    def handle_timer(self, now: float) -> None: ...
    def next_event(self) -> Any: ...
    def get_next_available_stream_id(self) -> int: ...
    def send_stream_data(self, stream_id: int, data: bytes, end_stream: bool = False) -> None: ...
    def request_key_update(self) -> None: ...


class End:
    """One end: what it sends on its stream, and what it has got."""

    def __init__(self, quic: Quic, address: tuple[str, int]) -> None:
        self.quic = quic
        self.address = address
        self.got: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self.is_connected = False
        self.closed: Any = None
        self.expected = 0
        """Bytes of the peer's stream, for which one of ours posts memory."""

    def write(self, data: bytes) -> int:
        """Send `data` and the end on a new stream, lent where we can."""
        stream_id = self.quic.get_next_available_stream_id()
        if isinstance(self.quic, AdaptedConnection):
            self.quic.send_stream_data(stream_id, b"")
            self.quic.lend_stream_data(stream_id, memoryview(data), lambda: True, 1)
            self.quic.send_stream_data(stream_id, b"", end_stream=True)
        else:
            self.quic.send_stream_data(stream_id, data, end_stream=True)
        return stream_id

    def receive(self, batch: list[bytes], source: tuple[str, int], now: float) -> None:
        if not isinstance(self.quic, AdaptedConnection):
            for data in batch:
                self.quic.receive_datagram(data, source, now)
            return
        buffer, segment = bytearray(b"".join(batch)), len(batch[0])
        for start, stop in self.quic.receive_batch(buffer, len(buffer), segment, source, now):
            self.quic.receive_datagram(bytes(buffer[start:stop]), source, now)

    def send(self, now: float) -> Iterator[tuple[bytes, tuple[str, int]]]:
        if isinstance(self.quic, qh3_connection.QuicConnection):
            yield from qh3_datagrams(self.quic, now)
            return
        if not isinstance(self.quic, AdaptedConnection):
            yield from self.quic.datagrams_to_send(now)
            return
        if self.quic.is_ended or self.quic.has_control(now):
            yield from self.quic.datagrams_to_send(now)
        while not self.quic.is_ended and (batch := self.quic.write_batch(now)) is not None:
            for start in range(0, len(batch.data), batch.segment):
                address: Any = batch.address
                yield bytes(batch.data[start : start + batch.segment]), address

    def collect(self) -> None:
        while (event := self.quic.next_event()) is not None:
            name = type(event).__name__
            if name == "HandshakeCompleted":
                self.is_connected = True
            elif name == "StreamDataReceived":
                if event.data:
                    self.got.setdefault(event.stream_id, bytearray()).extend(event.data)
                if event.end_stream:
                    self.ended.add(event.stream_id)
            elif name == "ConnectionTerminated":
                self.closed = event
        if isinstance(self.quic, AdaptedConnection):
            for stream_id in self.quic.take_changed():
                receiver = self.quic.receive_part(stream_id)
                if stream_id not in self.got:
                    self.got[stream_id] = bytearray(self.expected)
                    self.quic.post(receiver, memoryview(self.got[stream_id]))
                if receiver.is_whole:
                    self.quic.withdraw(receiver)
                    self.ended.add(stream_id)


def qh3_datagrams(quic: Any, now: float) -> Iterator[tuple[bytes, Any]]:
    """What its `datagrams_to_send` returns, and what it made before it failed.

    Where the limit against amplification leaves it little room, it raises and forgets the rest.
    """
    while quic._core is not None:
        try:
            transmit = quic._core.poll_transmit(now)
        except RuntimeError as error:
            assert "capacity exhausted" in str(error)  # noqa: PT017
            return
        if transmit is None:
            return
        yield transmit[0], transmit[1]


@dataclass(frozen=True)
class Faults:
    loss: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    corrupt: float = 0.0


FAULTS = {
    "clean": Faults(),
    "loss": Faults(loss=0.02),
    "reordering": Faults(late=0.1),
    "duplication": Faults(twice=0.1),
    "corruption": Faults(corrupt=0.02),
    "all": Faults(loss=0.01, twice=0.02, late=0.03, corrupt=0.01),
}


class Network:
    """Two ends, 5 ms apart, and what goes wrong between them. What travels together, arrives so."""

    def __init__(self, client: End, make_server: Callable[[bytes], End], faults: Faults) -> None:
        self.now = 100.0
        self.client = client
        self.server: End | None = None
        self._make_server = make_server
        self._faults = faults
        self._random = random.Random(3)
        self._order = itertools.count()
        self._flying: list[tuple[float, int, list[bytes], tuple[str, int]]] = []
        client.quic.connect(SERVER, now=self.now)
        self._pump(client)

    def run(self, until: Callable[[], bool], seconds: float = 120.0) -> bool:
        end = self.now + seconds
        while not until():
            timers = [e.quic.get_timer() for e in self._ends]
            due = min((timer for timer in timers if timer is not None), default=end)
            arrival = self._flying[0][0] if self._flying else end
            if min(due, arrival) >= end:
                return False
            if arrival <= due:
                self._arrive()
                continue
            self.now = max(self.now + 1e-6, due)
            for each in self._ends:
                timer = each.quic.get_timer()
                if timer is not None and timer <= self.now:
                    each.quic.handle_timer(self.now)
                    self._pump(each)
        return True

    @property
    def _ends(self) -> list[End]:
        return [self.client] + ([self.server] if self.server else [])

    def _arrive(self) -> None:
        at, _, batch, target = heapq.heappop(self._flying)
        self.now = max(self.now, at)
        if target == CLIENT:
            self.client.receive(batch, SERVER, self.now)
            self._pump(self.client)
            return
        if self.server is None:
            self.server = self._make_server(batch[0])
        self.server.receive(batch, CLIENT, self.now)
        self._pump(self.server)

    def _pump(self, end: End) -> None:
        end.collect()
        batch: list[bytes] = []
        for data, target in end.send(self.now):
            for copy in self._through(data):
                late = self._random.random() < self._faults.late
                if late or (
                    batch and (len(copy) > len(batch[0]) or len(batch[-1]) < len(batch[0]))
                ):
                    self._fly(batch, target[:2], 0.005)
                    batch = []
                if late:
                    self._fly([copy], target[:2], 0.005 + self._random.random() * 0.01)
                else:
                    batch.append(copy)
        self._fly(batch, SERVER if end is self.client else CLIENT, 0.005)
        end.collect()

    def _through(self, data: bytes) -> list[bytes]:
        faults, chance = self._faults, self._random.random
        if chance() < faults.loss:
            return []
        if chance() < faults.corrupt:
            spoiled = bytearray(data)
            spoiled[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
            return [bytes(spoiled)]
        return [data] * (2 if chance() < faults.twice else 1)

    def _fly(self, batch: list[bytes], target: tuple[str, int], delay: float) -> None:
        if batch:
            heapq.heappush(self._flying, (self.now + delay, next(self._order), batch, target))


# -- the three


def ours(suite: CipherSuite | None, original: bytes | None) -> Quic:
    windows = {"max_data": WINDOW, "max_stream_data": WINDOW, "idle": 60.0, "congestion": "rate"}
    if original is None:
        configuration = client_configuration(key(1), ALPN, **windows)  # type: ignore[arg-type]
        kwargs: dict[str, Any] = {"max_streams": 200}
    else:
        configuration = server_configuration(key(2), [ALPN], **windows)  # type: ignore[arg-type]
        kwargs = {"max_streams": 200, "original_destination_connection_id": original}
    if suite is not None:
        configuration.cipher_suites = [suite]
    return AdaptedConnection(configuration=configuration, expected_peer=None, **kwargs)


def stock(suite: CipherSuite | None, original: bytes | None) -> Quic:
    windows = {"max_data": WINDOW, "max_stream_data": WINDOW, "idle": 60.0, "congestion": "cubic"}
    if original is None:
        configuration = client_configuration(key(1), ALPN, **windows)  # type: ignore[arg-type]
        return QuicConnection(configuration=configuration)
    configuration = server_configuration(key(2), [ALPN], **windows)  # type: ignore[arg-type]
    return QuicConnection(configuration=configuration, original_destination_connection_id=original)


def qh3(suite: CipherSuite | None, original: bytes | None) -> Quic:
    from cryptography.hazmat.primitives import serialization

    from auth import certificate_for

    secret: SecretKey = key(1 if original is None else 2)
    configuration = qh3_configuration.QuicConfiguration(
        is_client=original is None,
        alpn_protocols=[ALPN],
        max_data=WINDOW,
        max_stream_data=WINDOW,
        verify_mode=0,
    )
    configuration.server_name = "localhost"
    configuration.signature_algorithms = [0x0807]  # ed25519, which it knows and does not offer
    configuration.load_cert_chain(
        certificate_for(secret).public_bytes(serialization.Encoding.PEM),
        secret.private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
    if original is None:
        quic: Quic = qh3_connection.QuicConnection(configuration=configuration)
    else:
        quic = qh3_connection.QuicConnection(
            configuration=configuration, original_destination_connection_id=original
        )
    return quic


KINDS = {"ours": ours, "stock": stock, "qh3": qh3}
PAIRS = [("ours", "ours"), ("ours", "stock"), ("stock", "ours"), ("ours", "qh3"), ("qh3", "ours")]


def network(client: str, server: str, faults: Faults, suite: CipherSuite | None) -> Network:
    def make_server(first: bytes) -> End:
        header = pull_quic_header(Buffer(data=first), host_cid_length=8)
        return End(KINDS[server](suite, header.destination_cid), SERVER)

    return Network(End(KINDS[client](suite, None), CLIENT), make_server, faults)


def digest(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


def transfer(world: Network, size: int, *, updates: int = 0) -> None:
    """Send `size` bytes each way at the same time, with key updates, and compare them."""
    assert world.run(lambda: world.client.is_connected and bool(world.server), 30)
    server = world.server
    assert server is not None
    assert world.run(lambda: server.is_connected, 30)
    world.run(lambda: False, 0.3)
    data = {end: random.Random(n).randbytes(size) for n, end in enumerate((world.client, server))}
    world.client.expected = server.expected = size
    here, there = world.client.write(data[world.client]), server.write(data[server])
    world._pump(world.client)
    world._pump(server)

    def is_done() -> bool:
        return here in server.ended and there in world.client.ended

    one_of_ours = next(end for end in world._ends if isinstance(end.quic, AdaptedConnection))
    quic = one_of_ours.quic
    assert isinstance(quic, AdaptedConnection)
    space = quic._spaces[tls.Epoch.ONE_RTT]
    for _ in range(updates):
        # A second update has to wait for an acknowledgement of the first (RFC 9001 section 6.1).
        first = quic._packet_number
        world.run(is_done, 0.02)
        world.run(lambda first=first: is_done() or space.largest_acked_packet > first)
        quic.request_key_update()
        world._pump(one_of_ours)
    assert world.run(is_done), (world.client.closed, server.closed)
    assert digest(server.got[here]) == digest(data[world.client])
    assert digest(world.client.got[there]) == digest(data[server])


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize(("client", "server"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_contents_arrive_whole_both_ways(client: str, server: str, faults: str) -> None:
    transfer(network(client, server, FAULTS[faults], None), 1_000_000)


@pytest.mark.parametrize("faults", ["clean", "all"])
@pytest.mark.parametrize(("client", "server"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_keys_change_in_the_middle(
    client: str, server: str, faults: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[str] = []
    update = CryptoPair._update_key

    def counted(pair: CryptoPair, trigger: str) -> None:
        changes.append(trigger)
        update(pair, trigger)

    monkeypatch.setattr(CryptoPair, "_update_key", counted)
    transfer(network(client, server, FAULTS[faults], None), 1_500_000, updates=2)
    assert "local_update" in changes
    assert "qh3" in (client, server) or "remote_update" in changes


@pytest.mark.parametrize("suite", list(CipherSuite)[:3], ids=lambda suite: suite.name)
@pytest.mark.parametrize(("client", "server"), PAIRS[:3], ids=["-".join(p) for p in PAIRS[:3]])
def test_every_cipher(client: str, server: str, suite: CipherSuite) -> None:
    world = network(client, server, FAULTS["all"], suite)
    transfer(world, 300_000, updates=1)
    if isinstance(world.client.quic, AdaptedConnection):
        assert world.client.quic._cryptos[tls.Epoch.ONE_RTT].send.cipher_suite is suite
