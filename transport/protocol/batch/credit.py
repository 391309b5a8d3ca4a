"""aioquic's connection with windows that move as the application consumes (RFC 9000 section 4).

Upstream doubles a window once half of it was *received*, which never stops a sender. And it looks
at every open stream for each packet: here those are looked at that something has happened to.
"""

from __future__ import annotations

from aioquic.buffer import Buffer  # type: ignore[attr-defined]
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import (
    CONNECTION_LIMIT_FRAME_CAPACITY,
    MAX_STREAM_DATA_FRAME_CAPACITY,
    Limit,
    NetworkAddress,
    QuicConnection,
    QuicConnectionError,
    QuicReceiveContext,
)
from aioquic.quic.packet import QuicErrorCode, QuicFrameType
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream

from transport.protocol.batch.aborts import AbortedStreams
from transport.protocol.batch.receiving import ReceivePart
from transport.protocol.batch.sending import SendPart

__all__ = ["POSTED_WINDOW", "CreditConnection"]

POSTED_WINDOW = 32 << 20
"""How far the peer may be ahead, in bytes, in memory that the application has posted: enough for
1 GB/s over 30 ms. What is posted is bounded by whoever allocated it."""


class CreditConnection(QuicConnection):
    """The streams of a connection, and how much of each either side may send.

    ``_concerned`` has the streams that aioquic's packet code may have something to say of, in the
    order in which they get their turn: whatever changes one of them puts it there, and whoever
    finds that there is nothing takes it out. ``_streams_queue``, upstream's, is filled from it.

    Args:
        max_streams: bidirectional streams the peer may open before `admit`.
    """

    def __init__(
        self,
        *,
        configuration: QuicConfiguration,
        max_streams: int,
        original_destination_connection_id: bytes | None,
        retry_source_connection_id: bytes | None,
    ) -> None:
        super().__init__(
            configuration=configuration,
            original_destination_connection_id=original_destination_connection_id,
            retry_source_connection_id=retry_source_connection_id,
        )
        self._connection_window = configuration.max_data
        self._connection_consumed = 0
        self._stream_window = configuration.max_stream_data
        self._posted: set[ReceivePart] = set()
        self._aborted = AbortedStreams()
        self._concerned: dict[int, None] = {}
        self._max_streams = max_streams
        _set_limit(self._local_max_streams_bidi, max_streams)
        # Unidirectional streams carry nothing in any protocol here.
        _set_limit(self._local_max_streams_uni, 0)

    # -- streams that something has happened to

    def is_local_stream(self, stream_id: int) -> bool:
        """Whether this side opened the stream (RFC 9000 section 2.1)."""
        return bool(stream_id & 1) != self._is_client

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, NetworkAddress]]:
        """As upstream, of the streams that are concerned, in their turn."""
        every, concerned = self._streams, self._concerned
        shown = {at: stream for at in concerned if (stream := every.get(at)) is not None}
        self._streams, self._streams_queue = dict(shown), list(shown.values())
        try:
            return super().datagrams_to_send(now)
        finally:
            for stream_id in shown.keys() - self._streams.keys():
                del every[stream_id]
            for stream in self._streams_queue:  # those that were served are the last now
                assert stream.stream_id is not None
                concerned.pop(stream.stream_id, None)
                concerned[stream.stream_id] = None
            self._streams, self._streams_queue = every, []

    def _streams_have_control(self) -> bool:
        """Whether there is something to say of a stream that batches don't say."""
        while self._concerned:
            stream_id = next(iter(self._concerned))
            stream = self._streams.get(stream_id)
            if stream is not None and self._has_control(stream):
                return True
            del self._concerned[stream_id]
        return False

    def _has_control(self, stream: QuicStream) -> bool:
        sender, receiver = stream.sender, stream.receiver
        if not sender.buffer_is_empty or sender.reset_pending or receiver.stop_pending:
            return True
        return not receiver.is_finished and bool(
            stream.max_stream_data_local != stream.max_stream_data_local_sent
            or self._stream_credit(stream)
        )

    def _discard_finished_streams(self, now: float) -> None:
        """Forget streams that are over, as upstream does only with a packet in its hands."""
        for stream_id in list(self._concerned):
            stream = self._streams.get(stream_id)
            if stream is not None and stream.is_finished:
                del self._streams[stream_id], self._concerned[stream_id]
                if self.is_local_stream(stream_id):
                    continue
                if _was_given_up(stream):
                    self._aborted.add()
                else:
                    self._local_max_streams_bidi.value += 1
        self._local_max_streams_bidi.value += self._aborted.replaced(now)

    def get_timer(self) -> float | None:
        """As upstream, and when the next streams may be opened in the place of aborted ones."""
        upstream, due = super().get_timer(), self._aborted.due
        return due if upstream is None else upstream if due is None else min(upstream, due)

    def handle_timer(self, now: float) -> None:
        """As upstream; what is given to the peer by time alone is sent with the next packet."""
        super().handle_timer(now)
        self._local_max_streams_bidi.value += self._aborted.replaced(now)

    def _handle_stop_sending_frame(
        self, context: QuicReceiveContext, frame_type: int, buf: Buffer
    ) -> None:
        start = buf.tell()
        stream_id = buf.pull_uint_var()
        buf.seek(start)
        super()._handle_stop_sending_frame(context, frame_type, buf)
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.sender.is_finished:
            SendPart.of(stream).was_stopped = True

    def _on_max_stream_data_delivery(self, delivery: QuicDeliveryState, stream: QuicStream) -> None:
        super()._on_max_stream_data_delivery(delivery, stream)
        ReceivePart.of(stream).note()

    # -- credit

    def admit(self, *, max_streams: int, connection_window: int) -> None:
        """Lift the narrow limits of a peer that is not yet authorized."""
        # The limit counts from the first stream, so that those already closed stay counted.
        self._local_max_streams_bidi.value += max(0, max_streams - self._max_streams)
        self._max_streams = max(max_streams, self._max_streams)
        self._connection_window = connection_window
        window_end = self._connection_consumed + connection_window
        self._local_max_data.value = max(self._local_max_data.value, window_end)

    def consume(self, stream_id: int, count: int) -> bool:
        """Note that the application took `count` bytes; return whether the peer should be told."""
        self.discard(count)
        self._concerned[stream_id] = None
        return self.owes_credit(stream_id)

    def owes_credit(self, stream_id: int) -> bool:
        """Whether the peer should be told that it may send more."""
        stream = self._streams.get(stream_id)
        if stream is not None and not stream.receiver.is_finished and self._stream_credit(stream):
            return True
        return bool(self._connection_credit())

    def discard(self, count: int) -> None:
        """Note that `count` bytes went nowhere: room for other streams, but not for theirs."""
        self._connection_consumed += count

    def received_total(self, stream_id: int) -> int | None:
        """The highest offset received on the stream, None once aioquic discarded it."""
        stream = self._streams.get(stream_id)
        return None if stream is None else stream.receiver.highest_offset

    def _connection_credit(self) -> int:
        """New MAX_DATA value if it is worth a frame: half a window has been consumed since."""
        window = self._connection_window
        if self._posted:
            posted = sum(receiver.posted for receiver in self._posted)
            window += min(posted, POSTED_WINDOW)
        target = self._connection_consumed + window
        return target if target - self._local_max_data.value >= window // 2 else 0

    def _stream_credit(self, stream: QuicStream) -> int:
        receiver = ReceivePart.of(stream)
        window = self._stream_window
        if receiver.target is not None:
            window += min(receiver.posted, POSTED_WINDOW)
        target = receiver.consumed + window
        return target if target - stream.max_stream_data_local >= window // 2 else 0

    def _check_flow(self, stream: QuicStream, stop: int) -> int:
        """Return how many bytes are new, if the peer was allowed to send them."""
        new = max(0, stop - stream.receiver.highest_offset)
        if stop > stream.max_stream_data_local:
            raise _flow_control_error("Over stream data limit")
        if self._local_max_data.used + new > self._local_max_data.value:
            raise _flow_control_error("Over connection data limit")
        return new

    def _settle(self, receiver: ReceivePart) -> None:
        """Credit what has come into memory of the application's own."""
        self._connection_consumed += receiver.landed
        receiver.landed = 0

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        self._local_max_data.value = self._connection_credit() or self._local_max_data.value
        self._write_limit(builder, self._local_max_data)
        streams = self._local_max_streams_bidi
        # MAX_STREAMS in batches: a frame once half of what was granted has been used up.
        if streams.sent - streams.used < streams.value - streams.sent:
            self._write_limit(builder, streams)

    def _write_limit(self, builder: QuicPacketBuilder, limit: Limit) -> None:
        if limit.value == limit.sent:
            return
        buffer = builder.start_frame(
            limit.frame_type,
            capacity=CONNECTION_LIMIT_FRAME_CAPACITY,
            handler=self._on_connection_limit_delivery,
            handler_args=(limit,),
        )
        buffer.push_uint_var(limit.value)
        limit.sent = limit.value
        if self._quic_logger is not None:
            assert builder.quic_logger_frames is not None
            builder.quic_logger_frames.append(
                self._quic_logger.encode_connection_limit_frame(limit.frame_type, limit.value)
            )

    def _write_stream_limits(
        self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream
    ) -> None:
        if stream.receiver.is_finished or not stream.max_stream_data_local:
            return
        assert stream.stream_id is not None
        credit = self._stream_credit(stream)
        stream.max_stream_data_local = credit or stream.max_stream_data_local
        if stream.max_stream_data_local == stream.max_stream_data_local_sent:
            return
        buffer = builder.start_frame(
            QuicFrameType.MAX_STREAM_DATA,
            capacity=MAX_STREAM_DATA_FRAME_CAPACITY,
            handler=self._on_max_stream_data_delivery,
            handler_args=(stream,),
        )
        buffer.push_uint_var(stream.stream_id)
        buffer.push_uint_var(stream.max_stream_data_local)
        stream.max_stream_data_local_sent = stream.max_stream_data_local
        if self._quic_logger is not None:
            assert builder.quic_logger_frames is not None
            builder.quic_logger_frames.append(
                self._quic_logger.encode_max_stream_data_frame(
                    stream.max_stream_data_local, stream.stream_id
                )
            )


def _was_given_up(stream: QuicStream) -> bool:
    """Whether the peer aborted a stream of its own before it was answered with a byte."""
    sender = SendPart.of(stream)
    return not sender.was_used and (ReceivePart.of(stream).was_reset or sender.was_stopped)


def _flow_control_error(reason: str) -> QuicConnectionError:
    return QuicConnectionError(QuicErrorCode.FLOW_CONTROL_ERROR, QuicFrameType.STREAM_BASE, reason)


def _set_limit(limit: Limit, value: int) -> None:
    limit.value = limit.sent = value
