"""aioquic's connection with streams, windows and packets that batches can be made of."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from aioquic import tls
from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import (
    NetworkAddress,
    QuicConnectionError,
    QuicReceiveContext,
)
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicFrameType,
    pull_quic_transport_parameters,
)
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.stream import FinalSizeError, QuicStream

from transport.protocol.batch.credit import POSTED_WINDOW, CreditConnection
from transport.protocol.batch.reader import BatchReader
from transport.protocol.batch.receiving import ReceivePart
from transport.protocol.batch.sending import SendPart
from transport.protocol.batch.sent import SentPackets, Transmit
from transport.protocol.batch.tracing import trace_received, trace_sent
from transport.protocol.batch.window import ReceivedWindow
from transport.protocol.batch.writer import BatchWriter
from transport.protocol.congestion import MINIMUM_PACKETS
from transport.protocol.pacing import BatchPacer
from transport.protocol.path_mtu import BASE_SIZE, PathMtu

__all__ = ["BatchConnection"]

KEY_UPDATE_PACKETS = 1 << 22
"""Packets sent under one key. AES-GCM must not see more than 2^23 (RFC 9001 section 6.6)."""

LARGEST_UPSTREAM = 16000
"""What aioquic's packets can say the length of, in bytes: beyond 16383 it loses data silently."""

BULK_BYTES = 1 << 16
"""With this much to send it is worth finding out what size of datagrams the path carries."""

ACK_DELAY = 0.002
"""How long an acknowledgement may be held back, in seconds: it then often speaks for hundreds of
packets, or travels with an answer."""

BLACK_HOLE_TIMEOUTS = 3
"""Probe timeouts in a row after which larger datagrams than all paths carry are given up."""

IDLE_STEP = 0.01
"""The idle timeout is put off no more often than this, in seconds: it depends on the probe timeout,
which changes with each packet."""

MAX_RANGES = 256
"""Of an acknowledgement that aioquic reads; it searches all of them for each."""

MIN_GAPS = 16
BYTES_PER_GAP = 2048
"""Gaps in the data of one stream cost memory: as many are accepted as the loss of every second full
packet of a window leaves, and no more."""


class BatchConnection(CreditConnection):
    """`aioquic.quic.connection.QuicConnection` with a faster way beside its own packet code.

    Whatever a batch can't carry goes out by `datagrams_to_send`, and whatever a batch can't be read
    for comes in by `receive_datagram`, both upstream's.

    Args:
        max_streams: bidirectional streams the peer may open before `admit`.
    """

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        max_streams: int,
        original_destination_connection_id: bytes | None = None,
        retry_source_connection_id: bytes | None = None,
    ) -> None:
        super().__init__(
            configuration=configuration,
            max_streams=max_streams,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
        )
        self.last_heard: float | None = None
        """When the last authentic packet arrived."""
        self.pacer = BatchPacer(self._loss._cc, max_datagram_size=self._max_datagram_size)
        self._loss._pacer = self.pacer  # type: ignore[assignment]

        self._ack_delay = ACK_DELAY
        self._key_update_at = KEY_UPDATE_PACKETS
        self._idle_step_at = 0.0
        self._mtu = PathMtu()
        self.datagram_size = self._max_datagram_size
        """UDP payload of a full packet, in bytes: what the path is known to carry."""
        self._has_bulk = False
        self._changed: dict[int, None] = {}
        self.has_filled = False
        """Whether all memory posted for a stream was filled, and no acknowledgement has said so."""
        self._writer = BatchWriter(self)
        self._reader = BatchReader(self)

    # -- streams

    def unacknowledged(self, stream_id: int) -> int:
        """Bytes written to the stream that the peer has not acknowledged."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else SendPart.of(stream).unacknowledged

    def is_reset(self, stream_id: int) -> bool:
        """Whether nothing more of the stream's data will be sent, or known to be acknowledged."""
        stream = self._streams.get(stream_id)
        return stream is None or stream.sender._reset_error_code is not None

    def is_spoiled(self, stream_id: int) -> bool:
        """Whether memory that was lent to the stream was gone before it was sent."""
        stream = self._streams.get(stream_id)
        return stream is not None and SendPart.of(stream).is_spoiled

    def is_flushed(self) -> bool:
        """Whether the peer acknowledged all that was written, ends and resets included."""
        return all(
            stream.sender.is_finished
            or (
                (SendPart.of(stream).unacknowledged == 0 or SendPart.of(stream).is_dropped)
                and stream.sender._buffer_fin is None
                and stream.sender._reset_error_code is None
            )
            for stream in self._streams.values()
        )

    def is_discarded(self, stream_id: int) -> bool:
        """Whether aioquic has no state for the stream (any more)."""
        return stream_id not in self._streams

    @property
    def stream_limit(self) -> int:
        """Bidirectional streams the peer lets us open, counted from the first."""
        return self._remote_max_streams_bidi

    @property
    def streams_left(self) -> int:
        """Bidirectional streams the peer would still let us open."""
        return self.stream_limit - self._local_next_stream_id_bidi // 4

    def receive_part(self, stream_id: int) -> ReceivePart:
        """Return the receiving part of the stream; an empty one if the stream is gone."""
        stream = self._streams.get(stream_id)
        return ReceivePart(stream_id) if stream is None else ReceivePart.of(stream)

    def send_stream_data(
        self, stream_id: int, data: bytes | memoryview, end_stream: bool = False
    ) -> None:
        """As upstream, in batches where possible."""
        stream = self._get_or_create_stream_for_send(stream_id)
        SendPart.of(stream).write(data, end_stream)
        self._offer(stream)

    def lend_stream_data(
        self, stream_id: int, view: memoryview, is_intact: Callable[[], bool], code: int
    ) -> SendPart:
        """Send `view` without a copy, as `SendPart.lend`; return the part that knows its fate."""
        stream = self._get_or_create_stream_for_send(stream_id)
        sender = SendPart.of(stream)
        sender.lend(view, is_intact, code)
        self._offer(stream)
        return sender

    def _offer(self, stream: QuicStream) -> None:
        """Have what the stream has to send leave in batches."""
        self._has_bulk = self._has_bulk or SendPart.of(stream).backlog >= BULK_BYTES
        self._writer.offer(stream)

    def post(self, receiver: ReceivePart, target: memoryview) -> int:
        """Have the stream's next bytes written to `target`; return how many were there already."""
        taken = receiver.post(target)
        self.discard(taken)
        receiver.note()
        if receiver.posted:
            self._posted.add(receiver)
        return taken

    def withdraw(self, receiver: ReceivePart) -> None:
        """Take back the memory that was posted for the stream."""
        receiver.withdraw()
        self._posted.discard(receiver)

    def take_back(self, stream_id: int) -> None:
        """Let go of the memory that was lent to the stream, which can then only be reset."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            SendPart.of(stream).drop()

    def take_changed(self) -> list[int]:
        """Return the streams that the application should look at, each once."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def drop_streams(self) -> None:
        """The connection is over: let go of the memory that was lent and posted."""
        for receiver in list(self._posted):
            self.withdraw(receiver)
        for stream in self._streams.values():
            SendPart.of(stream).drop()

    # -- batches

    def acknowledge_with_data(self, now: float) -> None:
        """Let an acknowledgement that is still held back travel with the data that now leaves.

        Upstream lets it wait for its own packet: twice the packets where requests alternate.
        """
        space = self.data_space
        if space.ack_at is not None:
            space.ack_at = min(space.ack_at, now)

    def receive_batch(
        self, data: bytearray, size: int, segment: int, address: NetworkAddress, now: float
    ) -> list[tuple[int, int]]:
        """Take the datagrams in ``data[:size]``, one in every `segment` bytes.

        Returns the ranges of those that have to be taken by `receive_datagram`.
        """
        if self._reader.can_read(address):
            if self._quic_logger is not None:
                trace_received(self, self._quic_logger, data, size, segment)
            return self._reader.read(data, size, segment, now)
        return [(start, min(start + segment, size)) for start in range(0, size, segment)]

    def write_batch(self, now: float) -> Transmit | None:
        """Return the next datagrams that may leave, beside those of `datagrams_to_send`."""
        self._update_keys_in_time()
        if not self._writer.can_write():
            return None
        return self._traced(self._packet_number, self._writer.write(now))

    @property
    def has_stream_data(self) -> bool:
        """Whether some stream has data that no batch has carried yet."""
        return self._writer.has_data

    def write_probe(self, now: float) -> Transmit | None:
        """Return a datagram that shows whether the path carries one of its size, if one is due."""
        if not self._has_bulk or not self._writer.can_write():
            return None
        self._mtu.begin(now)
        size = self._mtu.next_probe(now)
        if size is None:
            return None
        self._mtu.sent(size)
        return self._traced(self._packet_number, self._writer.write_probe(size, now))

    def _traced(self, first: int, transmit: Transmit | None) -> Transmit | None:
        """Return packets that are about to leave, numbered from `first` on."""
        if transmit is not None and self._quic_logger is not None:
            trace_sent(self, self._quic_logger, transmit, first)
        return transmit

    def on_probe_delivery(self, delivery: QuicDeliveryState, size: int) -> None:
        """Learn of what became of a probe."""
        if delivery is QuicDeliveryState.LOST:
            self._mtu.lost(size)
        elif self._mtu.acknowledged(size):
            self._set_datagram_size(size)

    def refused(self, size: int, now: float) -> None:
        """This host can't send datagrams of `size` bytes on the way they go now."""
        if size > self.datagram_size:
            self._mtu.refused(size)
        elif size > BASE_SIZE:
            self._mtu.shrunk(now)
            self._set_datagram_size(BASE_SIZE)

    def _set_datagram_size(self, size: int) -> None:
        self.datagram_size = size
        self._max_datagram_size = min(size, LARGEST_UPSTREAM)
        self.pacer._max_datagram_size = size
        self._loss._cc._max_datagram_size = size  # type: ignore[attr-defined]
        least = MINIMUM_PACKETS * size
        self._loss._cc.congestion_window = max(self._loss._cc.congestion_window, least)

    def has_control(self, now: float) -> bool:
        """Whether there is something to send that only `datagrams_to_send` can."""
        if not self._writer.can_write():
            self._writer.hand_over()
            return True
        self._discard_finished_streams(now)
        self._pacing_at = None  # set again by what comes next, if it is held back
        path = self._network_paths[0]
        crypto = self._data_crypto_stream.sender
        streams = self._local_max_streams_bidi
        return bool(
            self._ping_pending
            or self._probe_pending
            or path.remote_challenges
            or self._handshake_done_pending
            or self._retire_connection_ids
            or self._streams_blocked_pending
            or self._datagrams_pending
            or not crypto.buffer_is_empty
            or len(self._network_paths) > 1
            or self._remote_preferred_address is not None
            or self._local_max_data.value != self._local_max_data.sent
            or self._connection_credit()
            or streams.sent - streams.used < streams.value - streams.sent
            or not all(map(_was_sent, self._host_cids))
            or self._streams_have_control()
        )

    def stream_received(
        self, stream: QuicStream, offset: int, data: memoryview, *, fin: bool
    ) -> None:
        """Take the bytes of one frame."""
        new = self._check_flow(stream, offset + len(data))
        try:
            changed = ReceivePart.of(stream).place(offset, data, fin=fin)
        except FinalSizeError as error:
            raise _final_size_error(error) from error
        self._received(stream, new, changed)

    def stream_filled(self, stream: QuicStream, start: int, stop: int, *, fin: bool) -> None:
        """Take note of bytes that were written straight to the memory posted for them."""
        new = self._check_flow(stream, stop)
        try:
            changed = ReceivePart.of(stream).fill(start, stop, fin=fin)
        except FinalSizeError as error:
            raise _final_size_error(error) from error
        self._received(stream, new, changed)

    def _received(self, stream: QuicStream, new: int, changed: bool) -> None:
        receiver = ReceivePart.of(stream)
        self._local_max_data.used += new
        self._settle(receiver)
        receiver.note()
        assert stream.stream_id is not None
        if changed:
            self._changed[stream.stream_id] = None
            if receiver.target is not None and not receiver.posted:
                self.has_filled = True
        if receiver.gaps > max(MIN_GAPS, self._gaps_allowed(receiver)):
            raise QuicConnectionError(
                QuicErrorCode.INTERNAL_ERROR,
                QuicFrameType.STREAM_BASE,
                "the stream's data has too many gaps",
            )

    def _gaps_allowed(self, receiver: ReceivePart) -> int:
        return (self._stream_window + min(receiver.posted, POSTED_WINDOW)) // BYTES_PER_GAP

    # -- overrides

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, NetworkAddress]]:
        """As upstream; asks for new keys in time."""
        self._update_keys_in_time()
        datagrams = super().datagrams_to_send(now)
        if not self._writer.has_data:
            self._writer.ran_dry()
        return datagrams

    def put_off_idle_timeout(self, now: float) -> None:
        """Let it count from `now` (RFC 9000 section 10.1), give or take `IDLE_STEP`."""
        if now >= self._idle_step_at:
            self._idle_step_at = now + IDLE_STEP
            self._close_at = now + self._idle_timeout()

    def _update_keys_in_time(self) -> None:
        if self._packet_number >= self._key_update_at:
            self._key_update_at = self._packet_number + KEY_UPDATE_PACKETS
            self.request_key_update()

    def _get_or_create_stream(self, frame_type: int, stream_id: int) -> QuicStream:
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = super()._get_or_create_stream(frame_type, stream_id)
            self._equip_streams()
        return stream

    def _get_or_create_stream_for_send(self, stream_id: int) -> QuicStream:
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = super()._get_or_create_stream_for_send(stream_id)
            self._equip_streams()
        return stream

    def _equip_streams(self) -> None:
        """Give the streams that were just opened, the newest of all, our own parts."""
        for stream in reversed(self._streams.values()):
            if isinstance(stream.receiver, ReceivePart):
                break
            assert stream.stream_id is not None
            stream.receiver = receiver = ReceivePart(stream.stream_id)
            stream.sender = sender = SendPart(stream.stream_id)
            receiver.concerned = sender.concerned = self._concerned
            receiver.note()
        self._streams_queue.clear()

    def _parse_transport_parameters(self, data: bytes, from_session_ticket: bool = False) -> None:
        super()._parse_transport_parameters(data, from_session_ticket)
        largest = pull_quic_transport_parameters(Buffer(data=data)).max_udp_payload_size
        if largest is not None:
            self._mtu = PathMtu(largest)

    def _handle_stream_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        start = buf.tell()
        stream_id = buf.pull_uint_var()
        buf.seek(start)
        super()._handle_stream_frame(context, frame_type, buf)
        self._received(self._streams[stream_id], 0, changed=False)

    def _handle_ack_frame(self, context: QuicReceiveContext, frame_type: int, buf: Buffer) -> None:
        start = buf.tell()
        for _ in range(2):
            buf.pull_uint_var()
        if buf.pull_uint_var() > MAX_RANGES:
            raise QuicConnectionError(
                QuicErrorCode.INTERNAL_ERROR, frame_type, "the acknowledgement has too many ranges"
            )
        buf.seek(start)
        super()._handle_ack_frame(context, frame_type, buf)

    def handle_timer(self, now: float) -> None:
        """As upstream; what was known of the path's size is doubted when nothing is heard."""
        super().handle_timer(now)
        if self._loss._pto_count >= BLACK_HOLE_TIMEOUTS:
            self.refused(self.datagram_size, now)

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        # Looked up once: to hash an epoch is a call of Python's, and there are dozens a packet.
        self.data_space = self._spaces[tls.Epoch.ONE_RTT]
        self.data_crypto = self._cryptos[tls.Epoch.ONE_RTT]
        self._data_crypto_stream = self._crypto_streams[tls.Epoch.ONE_RTT]
        self.data_space.received_packets = ReceivedWindow()  # type: ignore[assignment]
        self.data_space.sent_packets = SentPackets()  # type: ignore[assignment]


_was_sent = attrgetter("was_sent")


def _final_size_error(error: FinalSizeError) -> QuicConnectionError:
    return QuicConnectionError(
        QuicErrorCode.FINAL_SIZE_ERROR, QuicFrameType.STREAM_BASE, str(error)
    )
