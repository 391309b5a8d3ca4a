"""One QUIC connection between two nodes, without sockets or clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from aioquic.quic import events as quic_events

from auth import IdentityError, MeshError, NodeId, SocketAddress
from transport.protocol.aioquic_adapter import AdaptedConnection
from transport.protocol.batch import SendPart, Transmit
from transport.protocol.events import (
    ConnectionEnded,
    ConnectionIdIssued,
    ConnectionIdRetired,
    EndedBy,
    Event,
    HandshakeCompleted,
    PingAcknowledged,
    StreamChanged,
    StreamOpened,
    StreamsAvailable,
)
from transport.protocol.liveness import Liveness, Verdict
from transport.protocol.streams import StreamCore

__all__ = ["NOTHING_LISTENS", "ConnectionCore"]

NOTHING_LISTENS = "the host reports that nothing listens there"
"""How a handshake ends whose host reports the port closed."""

CERTIFICATE_REQUIRED = 0x100 + 116
"""CRYPTO_ERROR carrying the TLS alert certificate_required (RFC 9001 section 4.8)."""

MAX_REASON_BYTES = 256
"""Longest reason phrase sent: a close may have to fit thrice into a datagram of 1200 bytes, once
for each set of keys that the peer may have (RFC 9000 section 10.2.3)."""

LIVENESS_PROBE = 0
"""Number of the PINGs sent for liveness; the application's count from 1."""

Datagram = tuple[bytes, object]
"""UDP payload and the address it goes to."""


class ConnectionCore:
    """A connection as a state machine: datagrams and time in, datagrams and events out.

    Nothing of the peer's is reported before `HandshakeCompleted`, and that is reported only for a
    peer which proved a key: a listener closes on a dialer without a certificate.

    Args:
        quic: the QUIC state machine, its handshake begun (dialer) or about to be (listener).
        liveness: seconds of silence after which the peer is lost.
        send_buffer: bytes of one stream that may wait for acknowledgement.
        now: the current time.
    """

    def __init__(
        self, quic: AdaptedConnection, *, liveness: float, send_buffer: int, now: float
    ) -> None:
        self.quic = quic
        self.streams: dict[int, StreamCore] = {}
        self.peer: NodeId | None = None
        """The peer's node id, once proven."""
        self.ended: ConnectionEnded | None = None
        """How the connection ended, if it has."""
        self.bytes_sent = 0
        self.bytes_received = 0
        """UDP payload in each direction, whether or not it was any good."""

        self.events: deque[Event] = deque()
        """What happened and nobody has been told of, the oldest first."""

        self._liveness = Liveness(liveness, now)
        self._send_buffer = send_buffer
        self._blocked: set[int] = set()
        self._awaiting: dict[int, int] = {}
        self._stream_limit = 0
        self._next_peer_stream = 0 if not quic.is_client else 1
        self._close_datagrams: list[Datagram] = []
        self._close_provoked = 0
        self._resend_close = False
        self._wrote = False

    # -- facts

    @property
    def rtt(self) -> float | None:
        """Smoothed round-trip time in seconds, once measured."""
        return self.quic.rtt

    @property
    def datagram_size(self) -> int:
        """UDP payload of a full packet, in bytes: what the path is known to carry."""
        return self.quic.datagram_size

    @property
    def remote_address(self) -> SocketAddress | None:
        """Where datagrams go now; None before the first."""
        address = self.quic.get_peer_address()
        return None if address is None else (address[0], address[1])

    @property
    def peer_error(self) -> IdentityError | None:
        """Why the peer's certificate was refused, if it was."""
        return self.quic.peer_error

    @property
    def failure(self) -> MeshError | None:
        """Nothing but its two sides ends this connection."""
        return None

    # -- bytes and time

    def receive_datagram(self, data: bytes, address: object, now: float) -> None:
        """Take one UDP payload from `address`."""
        self.bytes_received += len(data)
        if self._close_datagrams:
            self._provoke_close()
            return
        heard = self.quic.last_heard
        self.quic.receive_datagram(data, address, now)
        self._received(heard, now)

    def receive_batch(
        self, data: bytearray, size: int, segment: int, address: object, now: float
    ) -> list[tuple[int, int]]:
        """Take the UDP payloads in ``data[:size]``, one in every `segment` bytes, from `address`.

        Returns the ranges of those that have to be routed and taken one by one.
        """
        if self._close_datagrams:
            self.bytes_received += size
            self._provoke_close()
            return []
        heard = self.quic.last_heard
        others = self.quic.receive_batch(data, size, segment, address, now)
        self.bytes_received += size - sum(stop - start for start, stop in others)
        self._received(heard, now)
        return others

    def handle_timer(self, now: float) -> None:
        """Do what is due at `now`."""
        due = self.quic.get_timer()
        if due is not None and due <= now:
            self.quic.handle_timer(now)
        if self.peer is not None and self.ended is None:
            verdict = self._liveness.check(now)
            if verdict is Verdict.PROBE:
                self.quic.send_ping(LIVENESS_PROBE)
            elif verdict is Verdict.LOST:
                silence = self._liveness.silence(now)
                self.abandon(
                    "the network reports its port closed or its host gone, and it is silent"
                    if self._liveness.is_suspect
                    else f"nothing heard for {silence:.1f} s"
                )
        self._collect()

    def next_deadline(self) -> float | None:
        """When `handle_timer` wants to be called; None when the connection has terminated."""
        due = None if self.is_terminated else self.quic.get_timer()
        if self.peer is None or self.ended is not None:
            return due
        return self._liveness.deadline if due is None else min(due, self._liveness.deadline)

    def control_to_send(self, now: float) -> list[Transmit]:
        """Return what has to leave now, before any `batch_to_send`."""
        if self._is_stillborn:
            return []
        if self._resend_close:
            self._resend_close = False
            out = self._close_datagrams
        elif self.ended is None and not self.quic.has_control(now):
            return []
        else:
            if self._wrote:
                self._wrote = False
                self.quic.acknowledge_with_data(now)
            out = self.quic.datagrams_to_send(now)
            if out and self.quic.is_ended:
                self._close_datagrams = out
        size = sum(len(data) for data, _ in out)
        if out is self._close_datagrams and self._amplifies(size):
            return []
        self.bytes_sent += size
        return [Transmit(data, len(data), address) for data, address in out]

    def probe_to_send(self, now: float) -> Transmit | None:
        """Return a datagram larger than the path is known to carry, if it is time for one."""
        if self.ended is not None or self.peer is None:
            return None
        probe = self.quic.write_probe(now)
        if probe is not None:
            self.bytes_sent += len(probe.data)
        return probe

    @property
    def has_stream_data(self) -> bool:
        """Whether some stream has data that was never sent, whatever holds it back."""
        return self.quic.has_stream_data

    def can_wait(self, now: float) -> bool:
        """Whether nothing has to leave at once: what has just come may still be answered first.

        A handshake may not wait. Whoever gives up as soon as it knows its peer would do so before
        the peer knows it, and be taken for a stranger.
        """
        return (
            self.ended is None
            and self.quic.is_confirmed
            and not self.quic.has_stream_data
            and not self.quic.is_acknowledgement_due(now)
        )

    def batch_to_send(self, now: float) -> Transmit | None:
        """Return the next batch of datagrams that may leave now, None if there is none.

        Between two batches others may have their turn: nothing is lost by asking later.
        """
        if self.ended is not None or self.peer is None:
            return None
        batch = self.quic.write_batch(now)
        if batch is not None:
            self._wrote = False
            self.bytes_sent += len(batch.data)
        return batch

    def datagrams_to_send(self, now: float) -> list[Datagram]:
        """Return all datagrams that may leave now, one by one, each with its address."""
        out = [(bytes(data), address) for data, _, address in self.control_to_send(now)]
        if (probe := self.probe_to_send(now)) is not None:
            out.append((bytes(probe.data), probe.address))
        while (batch := self.batch_to_send(now)) is not None:
            out += [
                (bytes(batch.data[start : start + batch.segment]), batch.address)
                for start in range(0, len(batch.data), batch.segment)
            ]
        return out

    def take_reset(self, data: bytes, now: float) -> bool:
        """Whether `data` is the peer's word that it does not know this connection any more.

        Then that is over, and nothing more is sent (RFC 9000 section 10.3.1).
        """
        if self.peer is None or self.ended is not None or not self.quic.is_stateless_reset(data):
            return False
        self.bytes_received += len(data)
        reason = "its node has started anew and does not know the connection any more"
        self.quic.drain(reason, now)
        self._end(ConnectionEnded(EndedBy.FORGOTTEN, 0, reason, is_application=False))
        return True

    def suspect(self, now: float) -> None:
        """The peer's host reported its port closed: ask at once, decide soon."""
        if self.peer is None:
            self.abandon(NOTHING_LISTENS)
        elif self.ended is None:
            self._liveness.suspect(now, 2 * self.quic.probe_timeout)

    # -- streams

    @property
    def can_open_stream(self) -> bool:
        """Whether the peer's limit leaves room for one more stream of ours."""
        return self.quic.streams_left > 0

    def open_stream(self) -> StreamCore:
        """Open a bidirectional stream. The peer learns of it with the first byte."""
        stream_id = self.quic.get_next_available_stream_id()
        self.quic.send_stream_data(stream_id, b"")
        stream = StreamCore(stream_id, self.quic.receive_part(stream_id))
        self.streams[stream_id] = stream
        return stream

    def room(self, stream: StreamCore) -> int:
        """Bytes that may be written to the stream now; 0 asks for a `StreamChanged` later."""
        room = self._send_buffer - self.quic.unacknowledged(stream.stream_id)
        if room <= 0:
            self._blocked.add(stream.stream_id)
            return 0
        return room

    def write(self, stream: StreamCore, data: bytes | memoryview, *, fin: bool = False) -> None:
        """Write what `room` allowed, and the end of the stream with `fin`."""
        self._wrote = True
        if fin:
            stream.fin_sent = True
        self.quic.send_stream_data(stream.stream_id, data, end_stream=fin)

    def lend(
        self, stream: StreamCore, view: memoryview, is_intact: Callable[[], bool], code: int
    ) -> SendPart:
        """Write `view` without a copy. It must not change until `unacknowledged` says so.

        Should `is_intact` deny that it is still there, the stream is reset with `code`. Returns
        what knows how much was acknowledged, also when the stream is over.
        """
        self._wrote = True
        return self.quic.lend_stream_data(stream.stream_id, view, is_intact, code)

    def take_back(self, stream: StreamCore) -> None:
        """Let go of the memory that was lent. The stream has to be reset then."""
        self._awaiting.pop(stream.stream_id, None)
        self.quic.take_back(stream.stream_id)

    def is_spoiled(self, stream: StreamCore) -> bool:
        """Whether the memory that was lent was gone before it was sent."""
        return self.quic.is_spoiled(stream.stream_id)

    def unacknowledged(self, stream: StreamCore, *, wake_below: int = 0) -> int:
        """Bytes written that the peer has not acknowledged; a `StreamChanged` tells of fewer."""
        left = self.quic.unacknowledged(stream.stream_id)
        if left > wake_below:
            self._awaiting[stream.stream_id] = wake_below
        return left

    def post(self, stream: StreamCore, target: memoryview) -> int:
        """Have the next bytes written straight to `target`; return how many were here already.

        `StreamChanged` tells when as much has come as `ReceivePart.wake_at` says, or all of it.
        """
        return self.quic.post(stream.incoming, target)

    def owes_credit(self, stream: StreamCore) -> bool:
        """Whether the peer should be told that it may send more."""
        return self.quic.owes_credit(stream.stream_id)

    def withdraw(self, stream: StreamCore) -> None:
        """Take the posted memory back. Unless it is full, the stream has to be reset."""
        self.quic.withdraw(stream.incoming)

    def consumed(self, stream: StreamCore, count: int) -> bool:
        """The application took `count` bytes. Return whether credit is due to the peer."""
        return self.quic.consume(stream.stream_id, count)

    def reset(self, stream: StreamCore, code: int) -> None:
        """Give up on both directions of the stream (RFC 9000 sections 19.4 and 19.5)."""
        if stream.local_reset is not None:
            return
        stream.local_reset = code
        self.quic.reset_stream(stream.stream_id, code)
        if not stream.receive_ended:
            self._stop(stream, code)

    def release(self, stream: StreamCore, code: int) -> None:
        """The application drops the stream: what was not read is thrown away, and credited."""
        if stream.released:
            return
        stream.released = True
        self._blocked.discard(stream.stream_id)
        self._awaiting.pop(stream.stream_id, None)
        self.quic.withdraw(stream.incoming)
        self.quic.discard(stream.incoming.drop())
        if not stream.send_ended:
            stream.local_reset = code
            self.quic.reset_stream(stream.stream_id, code)
        if stream.receive_ended:
            self._forget(stream)
        else:
            self._stop(stream, code)

    def is_flushed(self) -> bool:
        """Whether the peer has acknowledged everything that was written."""
        return self.quic.is_flushed()

    # -- the connection

    def admit(self, *, max_streams: int, connection_window: int) -> None:
        """The peer is authorized: lift the narrow limits it had until now."""
        self.quic.admit(max_streams=max_streams, connection_window=connection_window)

    def ping(self, uid: int) -> None:
        """Send a PING; `PingAcknowledged` reports its answer."""
        self.quic.send_ping(uid)

    def close(self, code: int, reason: str) -> None:
        """Close with an application code. What was not acknowledged is lost: flush before."""
        self._end(ConnectionEnded(EndedBy.LOCAL, code, reason, is_application=True))
        self.quic.close(error_code=code, reason_phrase=_cut(reason))

    def abandon(self, reason: str) -> None:
        """Give the peer up for lost."""
        self._end(ConnectionEnded(EndedBy.SILENCE, 0, reason, is_application=False))
        self.quic.close(reason_phrase=_cut(reason))

    @property
    def is_terminated(self) -> bool:
        """Whether the closing period is over and the connection can be forgotten."""
        if self.ended is None:
            return False
        return self._is_stillborn or self.quic.get_timer() is None

    # -- inside

    @property
    def _is_stillborn(self) -> bool:
        """Whether this is a listener that no authentic packet has reached."""
        return self.quic.last_heard is None and not self.quic.is_client

    def _amplifies(self, size: int) -> bool:
        """Whether to send `size` bytes more is too much for a host that may not have asked.

        Closing goes beside aioquic's own account of it (RFC 9000 section 8.1).
        """
        is_proven = self.quic.is_client or self.peer is not None
        return not is_proven and self.bytes_sent + size > 3 * self.bytes_received

    def _provoke_close(self) -> None:
        """Answer with the close again, ever more rarely (RFC 9000 section 10.2.1)."""
        self._close_provoked += 1
        self._resend_close = self._close_provoked & (self._close_provoked - 1) == 0

    def _received(self, heard: float | None, now: float) -> None:
        if self.quic.last_heard != heard:
            self._liveness.heard(now)
        self._collect()
        if self._is_stillborn:
            reason = "the datagram that should have begun it can't be decrypted"
            self._end(ConnectionEnded(EndedBy.SILENCE, 0, reason, is_application=False))

    def _collect(self) -> None:
        for stream_id in self.quic.take_changed():
            if (stream := self._stream(stream_id)) is not None:
                self._data_received(stream)
        while (event := self.quic.next_event()) is not None:
            self._translate(event)
        if self.ended is None and (end := self.quic.end_of_connection()) is not None:
            self._end(end)
        if self.ended is not None or self.peer is None:
            return
        if self._stream_limit < (limit := self.quic.stream_limit):
            self._stream_limit = limit
            self.events.append(StreamsAvailable())
        if self._blocked:
            for stream_id in [i for i in self._blocked if self._has_room(i)]:
                self._blocked.discard(stream_id)
                self.events.append(StreamChanged(stream_id))
        if self._awaiting:
            for stream_id, left in list(self._awaiting.items()):
                if self.quic.unacknowledged(stream_id) <= left or self.quic.is_reset(stream_id):
                    del self._awaiting[stream_id]
                    self.events.append(StreamChanged(stream_id))

    def _has_room(self, stream_id: int) -> bool:
        return self.quic.unacknowledged(stream_id) < self._send_buffer

    def _translate(self, event: quic_events.QuicEvent) -> None:
        match event:
            case quic_events.ConnectionIdIssued(connection_id=connection_id):
                self.events.append(ConnectionIdIssued(connection_id))
            case quic_events.ConnectionIdRetired(connection_id=connection_id):
                self.events.append(ConnectionIdRetired(connection_id))
            case _ if self.ended is not None:
                pass
            case quic_events.HandshakeCompleted(alpn_protocol=alpn):
                self._handshake_completed(alpn or "")
            case _ if self.peer is None:
                pass  # nothing of an unproven peer's gets further than this
            case quic_events.StreamDataReceived(stream_id=stream_id):
                if (stream := self._stream(stream_id)) is not None:
                    self._data_received(stream)
            case quic_events.StreamReset(stream_id=stream_id, error_code=code):
                if (stream := self._stream(stream_id)) is not None:
                    self._reset_received(stream, code)
            case quic_events.StopSendingReceived(stream_id=stream_id, error_code=code):
                # aioquic has answered with RESET_STREAM already (RFC 9000 section 3.5).
                if (stream := self._stream(stream_id)) is not None:
                    stream.remote_stop = code
                    self.events.append(StreamChanged(stream_id))
            case quic_events.PingAcknowledged(uid=uid) if uid != LIVENESS_PROBE:
                self.events.append(PingAcknowledged(uid))

    def _handshake_completed(self, alpn: str) -> None:
        peer = self.quic.peer_id
        if peer is None:
            reason = "a certificate with an Ed25519 key is required"
            self._end(ConnectionEnded(EndedBy.LOCAL, CERTIFICATE_REQUIRED, reason, False))
            self.quic.close(error_code=CERTIFICATE_REQUIRED, frame_type=0, reason_phrase=reason)
            return
        self.peer = peer
        self.events.append(HandshakeCompleted(peer, alpn))

    def _stream(self, stream_id: int) -> StreamCore | None:
        """Return the stream an event is about, None if it is over and forgotten.

        The first event of a stream may be any: its frames are reordered, and repeated when lost.
        Opening a stream opens those of lower number too (RFC 9000 section 2.1).
        """
        if not self.quic.is_local_stream(stream_id):
            while self._next_peer_stream <= stream_id:
                opened, self._next_peer_stream = self._next_peer_stream, self._next_peer_stream + 4
                self.streams[opened] = StreamCore(opened, self.quic.receive_part(opened))
                self.events.append(StreamOpened(opened))
        return self.streams.get(stream_id)

    def _data_received(self, stream: StreamCore) -> None:
        if stream.released:
            self.quic.discard(stream.incoming.drop())
            if stream.fin_received:
                self._forget(stream)
        else:
            self.events.append(StreamChanged(stream.stream_id))

    def _reset_received(self, stream: StreamCore, code: int) -> None:
        # Bytes that a reset cut off count against the window as if they had come.
        final_size = self.quic.received_total(stream.stream_id)
        if final_size is not None:
            self.quic.discard(final_size - stream.incoming.delivered)
        stream.remote_reset = code
        if stream.released:
            self._forget(stream)
        else:
            self.events.append(StreamChanged(stream.stream_id))

    def _stop(self, stream: StreamCore, code: int) -> None:
        # What was received is acknowledged first: whoever waits for that is not to take the end of
        # our interest for a loss.
        self._wrote = True
        if not self.quic.is_discarded(stream.stream_id):
            self.quic.stop_stream(stream.stream_id, code)

    def _forget(self, stream: StreamCore) -> None:
        self.streams.pop(stream.stream_id, None)

    def _end(self, end: ConnectionEnded) -> None:
        if self.ended is None:
            self.ended = end
            self._blocked.clear()
            self._awaiting.clear()
            self.quic.drop_streams()
            self.events.append(end)


def _cut(reason: str) -> str:
    """Return as much of `reason` as fits, and as UTF-8 can say."""
    return reason.encode(errors="replace")[:MAX_REASON_BYTES].decode(errors="ignore")
