"""Finds the connection a datagram belongs to, and says how strangers are met.

What `aioquic.asyncio` did for its users and an endpoint of our own has to do itself: routing by
connection id (RFC 9000 section 5.2), version negotiation (section 6), Retry when many handshakes
are half-open (section 8.1.2), stateless resets (section 10.3), bounds on newcomers, and silence
towards everything else. Each answer to a stranger is smaller than what provoked it, so nothing here
amplifies.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.packet import (
    QuicHeader,
    QuicPacketType,
    QuicProtocolVersion,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.retry import QuicRetryTokenHandler

from transport.protocol.connection import ConnectionCore
from transport.protocol.connection_ids import ID_LENGTH
from transport.protocol.newcomers import NewcomerFilter, StrangerBudget, Verdict, prefix_of
from transport.protocol.stateless_reset import StatelessResets

__all__ = ["Demultiplexer", "Dropped", "Reply"]

MIN_ORIGINAL_ID_LENGTH = 8
"""A newcomer draws at least this long an id for us, so that no two draw the same (RFC 9000
section 7.2)."""

MIN_INITIAL_DATAGRAM = 1200
"""A datagram that may start a connection is at least this long (RFC 9000 section 14.1)."""

SUPPORTED_VERSIONS = [int(QuicProtocolVersion.VERSION_1), int(QuicProtocolVersion.VERSION_2)]

MAX_HALF_OPEN_DATAGRAMS = 512
"""Datagrams looked at of a connection that is not admitted: a handshake and the largest hello take
twenty, and one that drips byte by byte has some seconds for it."""

NO_TIME = "too busy for strangers"

Address = tuple[str, int]

_Host = tuple[str, bool]
"""Where newcomers come from, and whether they have proved it."""


@dataclasses.dataclass(slots=True)
class _HalfOpen:
    host: _Host
    datagrams: int = 0

    @property
    def is_over(self) -> bool:
        return self.datagrams > MAX_HALF_OPEN_DATAGRAMS


MakeListener = Callable[[bytes, bytes | None, Address, float], ConnectionCore]
"""Makes the core of an inbound connection out of the original destination connection id, the
source connection id of a Retry if there was one, the address and the time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """A datagram to send back; no state was made."""

    data: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Dropped:
    """The datagram leads nowhere."""

    reason: str


class Demultiplexer:
    """The table of connections of one socket.

    Args:
        make_listener: makes an inbound connection; None when strangers may not dial.
        max_connections: connections in all.
        max_half_open: inbound connections whose peer is not admitted yet: a complete handshake
            alone proves a key that anybody can make.
        max_half_open_per_host: the same, of one address (IPv6: one /64). Those that have proved
            their address with a Retry are counted apart, so that forged ones can't shut them out.
        retry_threshold: half-open connections above which newcomers get a Retry.
        new_connection_id: makes the id under which a Retry asks to be answered.
        newcomers: asked about every newcomer, before anything is kept of it.
        strangers: asked about every datagram that belongs to no connection, before all else.
        resets: answers datagrams of connections that are not known any more.
    """

    def __init__(
        self,
        *,
        make_listener: MakeListener | None,
        max_connections: int,
        max_half_open: int,
        max_half_open_per_host: int,
        retry_threshold: int,
        new_connection_id: Callable[[int], bytes],
        newcomers: NewcomerFilter | None = None,
        strangers: StrangerBudget | None = None,
        resets: StatelessResets | None = None,
    ) -> None:
        self.drops: Counter[str] = Counter()
        """How many datagrams were dropped, by reason."""
        self._make_listener = make_listener
        self._max_connections = max_connections
        self._max_half_open = max_half_open
        self._max_half_open_per_host = max_half_open_per_host
        self._retry_threshold = retry_threshold
        self._new_connection_id = new_connection_id
        self._newcomers = newcomers
        self._strangers = strangers
        self._resets = resets
        self._retry_tokens = QuicRetryTokenHandler()
        self._by_id: dict[bytes, ConnectionCore] = {}
        self._ids: dict[ConnectionCore, set[bytes]] = {}
        self._half_open: dict[ConnectionCore, _HalfOpen] = {}
        self._half_open_by_host: Counter[_Host] = Counter()

    @property
    def connections(self) -> list[ConnectionCore]:
        """Every connection that still owns an id, closing ones included."""
        return list(self._ids)

    @property
    def half_open(self) -> int:
        """Inbound connections whose peer is not admitted yet."""
        return len(self._half_open)

    @property
    def is_listening(self) -> bool:
        """Whether strangers may dial."""
        return self._make_listener is not None

    def ids_in_use(self) -> list[bytes]:
        """The id by which each open connection's peer calls it now."""
        over = {core for core, half_open in self._half_open.items() if half_open.is_over}
        return [core.quic.host_cid for core in self._ids if core.ended is None and core not in over]

    def is_stranger(self, core: ConnectionCore) -> bool:
        """Whether `core` is an inbound connection whose peer is not admitted yet."""
        return core in self._half_open

    def stop_listening(self) -> None:
        """Meet no more strangers."""
        self._make_listener = None

    # -- the table

    def add(self, core: ConnectionCore, *connection_ids: bytes) -> None:
        """Let datagrams to `connection_ids` reach `core`."""
        known = self._ids.setdefault(core, set())
        for connection_id in connection_ids:
            known.add(connection_id)
            self._by_id[connection_id] = core

    def retire(self, core: ConnectionCore, connection_id: bytes) -> None:
        """Datagrams to `connection_id` no longer belong to `core`."""
        if self._by_id.get(connection_id) is core:
            del self._by_id[connection_id]
            self._ids[core].discard(connection_id)

    def admitted(self, core: ConnectionCore) -> None:
        """The peer of `core` is authorized: it no longer counts as half-open."""
        half_open = self._half_open.pop(core, None)
        if half_open is not None:
            host = half_open.host
            self._half_open_by_host[host] -= 1
            if not self._half_open_by_host[host]:
                del self._half_open_by_host[host]

    def remove(self, core: ConnectionCore) -> None:
        """Forget `core` and all its ids."""
        self.admitted(core)
        for connection_id in self._ids.pop(core, ()):
            self._by_id.pop(connection_id, None)

    # -- datagrams

    def find(self, data: bytearray, size: int) -> ConnectionCore | None:
        """Return the connection that the datagram in ``data[:size]`` names in a short header.

        Those that are not admitted yet are found by `route` alone.
        """
        if size <= ID_LENGTH or data[0] & 0x80:
            return None
        core = self._by_id.get(bytes(data[1 : 1 + ID_LENGTH]))
        return None if core in self._half_open else core

    def route(self, data: bytes, address: Address, now: float) -> ConnectionCore | Reply | Dropped:
        """Return the connection `data` belongs to, perhaps a new one, or what to do instead."""
        if not data:
            return self._drop("empty")
        if not data[0] & 0x80:
            core = self._by_id.get(data[1 : 1 + ID_LENGTH])
            if core is not None:
                return self._let_through(core, now)
            return self._unknown(data, address, now) if self._has_time(now) else self._drop(NO_TIME)
        try:
            version, destination, source = _pull_invariants(data)
        except ValueError:
            return self._drop("not QUIC")
        core = self._by_id.get(destination)
        if core is not None:
            return self._let_through(core, now)
        if not self._has_time(now):
            return self._drop(NO_TIME)
        if self._make_listener is None:
            return self._drop("not listening")
        if self._newcomers is not None and self._newcomers.is_refused(address):
            return self._drop(Verdict.REFUSED.value)
        if len(data) < MIN_INITIAL_DATAGRAM:
            return self._drop("too small to start a connection")
        if version == QuicProtocolVersion.NEGOTIATION:
            return self._drop("version negotiation from a stranger")
        if version not in SUPPORTED_VERSIONS:
            return Reply(encode_quic_version_negotiation(destination, source, SUPPORTED_VERSIONS))
        return self._meet(data, address, now)

    def _unknown(
        self, data: bytes, address: Address, now: float
    ) -> ConnectionCore | Reply | Dropped:
        """Decide about a short header whose id belongs to no connection."""
        if self._resets is not None:
            if self._resets.may_look(len(data), now):
                for core in self._ids:
                    if core.remote_address == address and core.take_reset(data, now):
                        return core
            answer = self._resets.answer(data[1 : 1 + ID_LENGTH], len(data), now)
            if answer is not None:
                self.drops["unknown connection id"] += 1
                return Reply(answer)
        return self._drop("unknown connection id")

    def _meet(self, data: bytes, address: Address, now: float) -> ConnectionCore | Reply | Dropped:
        """Decide about a long header of our version that belongs to no connection."""
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=ID_LENGTH)
        except ValueError:
            return self._drop("not QUIC")
        if header.packet_type != QuicPacketType.INITIAL:
            return self._drop("unknown connection id")
        if len(header.destination_cid) < MIN_ORIGINAL_ID_LENGTH:
            return self._drop("connection id too short")
        if len(self._ids) >= self._max_connections:
            return self._drop("too many connections")
        if len(self._half_open) >= self._max_half_open:
            return self._drop("too many handshakes")
        return self._accept(header, address, now)

    def _accept(
        self, header: QuicHeader, address: Address, now: float
    ) -> ConnectionCore | Reply | Dropped:
        original, retried = header.destination_cid, None
        host = (prefix_of(address), bool(header.token))
        is_crowded = self._half_open_by_host[host] >= self._max_half_open_per_host
        if header.token:
            if is_crowded:
                return self._drop("too many handshakes from one host")
            try:
                original = self._retry_tokens.validate_token(
                    address=address,
                    destination_cid=header.destination_cid,
                    token=header.token,
                    now=now,
                )
            except ValueError:
                return self._drop("bad Retry token")
            retried = header.destination_cid
            if self._judge(address, now, proved=True) is not Verdict.WELCOME:
                return self._drop(Verdict.TOO_MANY.value)
        elif (
            is_crowded
            or len(self._half_open) >= self._retry_threshold
            or self._judge(address, now, proved=False) is Verdict.PROVE
        ):
            return Reply(self._encode_retry(header, address, now))
        assert self._make_listener is not None
        core = self._make_listener(original, retried, address, now)
        self.add(core, header.destination_cid, core.quic.host_cid)
        self._half_open[core] = _HalfOpen(host)
        self._half_open_by_host[host] += 1
        return core

    def _let_through(self, core: ConnectionCore, now: float) -> ConnectionCore | Dropped:
        half_open = self._half_open.get(core)
        if half_open is not None:
            half_open.datagrams += 1
            if half_open.is_over:
                in_time = self._has_time(now)
                return self._drop("too long a handshake" if in_time else NO_TIME)
        return core

    def _has_time(self, now: float) -> bool:
        return self._strangers is None or self._strangers.has_time(now)

    def _judge(self, address: Address, now: float, *, proved: bool) -> Verdict:
        if self._newcomers is None:
            return Verdict.WELCOME
        return self._newcomers.judge(address, now, proved=proved)

    def _encode_retry(self, header: QuicHeader, address: Address, now: float) -> bytes:
        assert header.version is not None
        source_cid = self._new_connection_id(ID_LENGTH)
        token = self._retry_tokens.create_token(
            address=address,
            original_destination_connection_id=header.destination_cid,
            retry_source_connection_id=source_cid,
            now=now,
        )
        return encode_quic_retry(
            version=header.version,
            source_cid=source_cid,
            destination_cid=header.source_cid,
            original_destination_cid=header.destination_cid,
            retry_token=token,
        )

    def _drop(self, reason: str) -> Dropped:
        self.drops[reason] += 1
        return Dropped(reason)


def _pull_invariants(data: bytes) -> tuple[int, bytes, bytes]:
    """Return version, destination and source id of a long header of any version (RFC 8999)."""
    buffer = Buffer(data=data)
    buffer.pull_uint8()
    version = buffer.pull_uint32()
    destination = buffer.pull_bytes(buffer.pull_uint8())
    return version, destination, buffer.pull_bytes(buffer.pull_uint8())
