"""Reads batches of 1-RTT packets: acknowledgements and stream data here, the rest by aioquic.

A packet that is in any way out of the ordinary (another path, connection id or key phase) is left
to aioquic's `receive_datagram` as it is, and a frame of another kind to its `_payload_received`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioquic import tls
from aioquic.quic.connection import (
    END_STATES,
    QuicConnectionError,
    QuicConnectionState,
    QuicReceiveContext,
)
from aioquic.quic.packet import QuicFrameType
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import MAX_ACK_RANGES
from aioquic.quic.stream import QuicStream, StreamFinishedError
from cryptography.exceptions import InvalidTag

from transport.protocol.batch.acknowledging import acknowledge_runs
from transport.protocol.batch.frames import (
    FULL_FRAME,
    FULL_FRAME_TYPE,
    STREAM,
    VARINT_4,
    VARINT_8,
    WITH_FIN,
    WITH_LENGTH,
    WITH_OFFSET,
)
from transport.protocol.batch.landing import LEAST, Expected, data_room, land_packets
from transport.protocol.batch.receiving import ReceivePart
from transport.protocol.batch.scratch import Scratch
from transport.protocol.batch.sealing import Keys, Opened, open_packet, open_packets
from transport.protocol.batch.writer import keys_of

if TYPE_CHECKING:
    from transport.protocol.batch.connection import BatchConnection

__all__ = ["BatchReader"]

PADDING, PING, ACK = 0x00, 0x01, 0x02
UINT_VAR_MAX = (1 << 62) - 1

MAX_RANGES_READ = 256
"""Older ranges of an acknowledgement are not looked at: a peer could make that as dear as it likes,
and what is not believed to have come is sent again."""

LEADING = 2
"""Packets of a batch that are looked at one by one to learn which transfer goes on with the next:
behind an acknowledgement comes the first that is full of data."""

MAX_RUNS = 4
"""Runs of packets that are looked for in one batch, which is put together of two or three."""

ACK_AFTER_PACKETS = 200
ACK_AFTER_BYTES = 1_000_000
"""An acknowledgement leaves after so much, however little time has passed. One costs either end as
much as fifty packets do; a window holds two of them, and more (RFC 9000 section 13.2.2)."""

ACK_AFTER_SHARE = 4
LEAST_ACK_AFTER = 16
"""At first sooner, after a fourth of all packets that have come: a window that is still small grows
with each acknowledgement, and its sender waits for it."""


class BatchReader:
    """Reads the batches of one connection."""

    def __init__(self, quic: BatchConnection) -> None:
        self._quic = quic
        self._keys: Keys | None = None
        self._keys_of: object = None
        self._unacknowledged = 0
        self._unacknowledged_bytes = 0
        self._scratch = Scratch()

    def can_read(self, address: object) -> bool:
        """Whether batches from `address` can be read here at all."""
        quic = self._quic
        return (
            quic._handshake_confirmed
            and quic._state is QuicConnectionState.CONNECTED
            and not quic._close_pending
            and quic._network_paths[0].addr == address
        )

    def read(self, data: bytearray, size: int, segment: int, now: float) -> list[tuple[int, int]]:
        """Take the datagrams in the first `size` bytes of `data`, one in every `segment` bytes.

        Returns the ranges of those which have to be taken the ordinary way.
        """
        quic = self._quic
        packets = _Packets(quic, now)
        others: list[tuple[int, int]] = []
        heard = False
        try:
            at = 0
            if size <= segment:
                heard = self._open_one(packets, data, 0, size, others)
                at = size
            for _ in range(MAX_RUNS):
                stop = min(at + LEADING * segment, size)
                while at < stop and packets.expected() is None:
                    heard |= self._open(packets, data, at, min(at + segment, size), segment, others)
                    at += segment
                if at >= size or packets.expected() is None:
                    break
                begin, at = at, self._land(packets, data, at, size, segment, others)
                # Where a run ends there is another packet; where none lands, among the next few.
                stop = min(at + (1 if at > begin else 2 * LEAST) * segment, size)
                self._open(packets, data, at, stop, segment, others)
                at = stop
            heard |= self._open(packets, data, at, size, segment, others)
            packets.finish()
        except QuicConnectionError as error:
            heard = True
            quic.close(
                error_code=error.error_code,
                frame_type=error.frame_type or QuicFrameType.PADDING,
                reason_phrase=error.reason_phrase,
            )
        if not heard:
            return others
        quic.last_heard = now
        quic._network_paths[0].bytes_received += size
        if quic._state in END_STATES or quic._close_pending:
            return []
        quic.put_off_idle_timeout(now)
        quic._ack_eliciting_sent_since_receipt = False
        if packets.eliciting:
            self._hold_acknowledgement(packets.eliciting, size, now)
        return others

    def _land(
        self,
        packets: _Packets,
        data: bytearray,
        start: int,
        stop: int,
        segment: int,
        others: list[tuple[int, int]],
    ) -> int:
        """Take packets from `start` on that go on with a transfer; return where they end.

        Where another is among them, such as one that has an acknowledgement in front of its data,
        none lands, since all data behind it is shifted: then half of them are tried.
        """
        host_cid, size = self._quic.host_cid, stop - start
        expected = packets.expected() if size >= LEAST * segment else None
        while expected is not None and size >= LEAST * segment:
            view = memoryview(data)[start : start + size]
            landed = land_packets(self._receive_keys(), view, segment, host_cid, expected)
            if landed:
                self._open(packets, data, start, start + landed.start * segment, segment, others)
                packets.take_landed(expected, landed, data_room(segment, host_cid))
                return start + landed.stop * segment
            size = size // (2 * segment) * segment
        return start

    def _open(
        self,
        packets: _Packets,
        data: bytearray,
        start: int,
        stop: int,
        segment: int,
        others: list[tuple[int, int]],
    ) -> bool:
        """Take the packets in ``data[start:stop]``; return whether there was an authentic one."""
        if start >= stop:
            return False
        if stop - start <= segment:
            return self._open_one(packets, data, start, stop, others)
        part = data if not start else data[start:stop]
        plain = self._scratch.get(stop - start)
        opened, rest = open_packets(
            self._receive_keys(),
            part,
            stop - start,
            segment,
            self._quic.host_cid,
            packets.next_number,
            memoryview(plain),
        )
        others += [(start + begin, start + end) for begin, end in rest]
        packets.take_all(opened, plain)
        return bool(opened)

    def _open_one(
        self,
        packets: _Packets,
        data: bytearray,
        start: int,
        stop: int,
        others: list[tuple[int, int]],
    ) -> bool:
        """Take one packet, as `_open`."""
        packet = bytes(memoryview(data)[start:stop])
        try:
            opened = open_packet(
                self._receive_keys(), packet, self._quic.host_cid, packets.next_number
            )
        except InvalidTag:
            return False
        if opened is None:
            others.append((start, stop))
            return False
        number, payload = opened
        packets.take_all([(number, 0, len(payload))], payload)
        return True

    def _hold_acknowledgement(self, count: int, nbytes: int, now: float) -> None:
        quic = self._quic
        space = quic.data_space
        if space.ack_at is None:
            self._unacknowledged = self._unacknowledged_bytes = 0
            space.ack_at = now + quic._ack_delay
        self._unacknowledged += count
        self._unacknowledged_bytes += nbytes
        enough = max(LEAST_ACK_AFTER, space.largest_received_packet // ACK_AFTER_SHARE)
        # Who has sent the last of what was wanted waits to hear of it.
        if (
            self._unacknowledged >= min(enough, ACK_AFTER_PACKETS)
            or self._unacknowledged_bytes >= ACK_AFTER_BYTES
            or quic.has_filled
        ):
            space.ack_at = min(space.ack_at, now)
            quic.has_filled = False

    def _receive_keys(self) -> Keys:
        context = self._quic.data_crypto.recv
        if self._keys is None or self._keys_of is not context.aead:
            self._keys_of = context.aead
            self._keys = keys_of(context)
        return self._keys


class _Packets:
    """The packets of one batch. Runs of packet numbers, and of a stream's bytes, count as one."""

    def __init__(self, quic: BatchConnection, now: float) -> None:
        self.eliciting = 0
        self._quic = quic
        self._plain: bytes | bytearray = b""
        self._now = now
        self._space = quic.data_space
        self._first = 0
        self._last = -1
        self._stream: QuicStream | None = None
        self._stream_id = -1
        self._start = self._stop = 0
        self._fin = False

    @property
    def next_number(self) -> int:
        """The packet number expected next."""
        return max(self._space.expected_packet_number, self._last + 1)

    def expected(self) -> Expected | None:
        """What comes next if the transfer that the last packet was of goes on undisturbed.

        None if it was of none, or other data has come already where its next would land.
        """
        stream, last = self._stream, self._last
        if stream is None or self._fin or last < self._first:
            return None
        receiver = ReceivePart.of(stream)
        # What lies in front of the next data has to have come just now, and not once more: what has
        # been delivered may be looked at, and may go on behind it.
        if (
            last < self._space.largest_received_packet
            or self._start < receiver.delivered
            or self._stop - self._start < FULL_FRAME.size
            or receiver.target is None
            or receiver.is_finished
            or receiver.gaps
        ):
            return None
        front = self._stop - FULL_FRAME.size - receiver.target_start
        return Expected(last + 1, self._stream_id, self._stop, receiver.target[front:])

    def take_landed(self, expected: Expected, landed: range, room: int) -> None:
        """Take packets that have landed in their place; `room` bytes of data in each."""
        start = expected.offset + landed.start * room
        first = expected.number + landed.start
        if first != self._last + 1 or self._last < self._first:
            self._note_run()
            self._first = first
        if self._stream is None or self._stream_id != expected.stream_id or self._stop != start:
            self._end_run()
            self._stream = self._quic._streams.get(expected.stream_id)
            self._stream_id, self._start = expected.stream_id, start
        self._last = expected.number + landed.stop - 1
        self._stop = expected.offset + landed.stop * room
        self.eliciting += len(landed)

    def take_all(self, opened: list[Opened], plain: bytes | bytearray) -> None:
        """Take packets, in this order, whose payloads are in `plain`."""
        self._plain = plain
        for number, start, stop in opened:
            self._take(number, start, stop)

    def _take(self, number: int, start: int, stop: int) -> None:
        """Take the packet `number`, whose payload is ``plain[start:stop]``."""
        if number != self._last + 1 or self._last < self._first:
            self._note_run()
            if number in self._space.received_packets:
                return
            self._first = number
        elif (
            # A run that goes on among packets already seen: each has to be looked up.
            number <= self._space.largest_received_packet and number in self._space.received_packets
        ):
            return
        plain = self._plain
        kind = plain[start]
        if (
            kind & ~WITH_FIN == FULL_FRAME_TYPE
            and stop - start > FULL_FRAME.size
            and plain[start + 1] >> 6 == 2
            and plain[start + 5] >> 6 == 3
        ):
            _, stream_id, offset = FULL_FRAME.unpack_from(plain, start)
            self._full_frame(
                kind, stream_id - VARINT_4, offset - VARINT_8, start + FULL_FRAME.size, stop
            )
            self.eliciting += 1
        elif self._frames(start, stop):
            self.eliciting += 1
        # Only now: a packet whose frames are refused must not be acknowledged.
        self._last = number

    def finish(self) -> None:
        """Nothing more comes."""
        self._end_run()
        self._note_run()

    # -- packet numbers

    def _note_run(self) -> None:
        first, last, space = self._first, self._last, self._space
        if last < first:
            return
        if last > space.largest_received_packet:
            space.largest_received_packet = last
            space.largest_received_time = self._now
            space.expected_packet_number = last + 1
        space.ack_queue.add(first, last + 1)
        window = space.received_packets
        window.add_run(first, last)  # type: ignore[attr-defined]
        if len(space.ack_queue) > MAX_ACK_RANGES:
            space.ack_queue.shift()
        self._first, self._last = last + 1, last

    # -- frames

    def _full_frame(self, kind: int, stream_id: int, offset: int, start: int, stop: int) -> None:
        end = offset + stop - start
        if stream_id != self._stream_id or self._fin:
            self._end_run()
            self._stream = self._find(kind, stream_id)
            self._stream_id = stream_id
            self._start = self._stop = offset
        elif offset != self._stop:
            self._flush()
            self._start = self._stop = offset
        stream = self._stream
        if stream is None:
            return
        receiver = ReceivePart.of(stream)
        at = offset - receiver.target_start
        # What has been delivered may be looked at, and is not written once more.
        is_ahead = offset >= receiver.delivered and end <= receiver.target_stop
        if is_ahead and receiver.target is not None and not receiver.is_finished:
            # The peer may not have been allowed this much, and is told so at the end of the run.
            receiver.target[at : at + stop - start] = memoryview(self._plain)[start:stop]
            self._stop = end
            self._fin = bool(kind & WITH_FIN)
        else:
            self._flush()
            data = memoryview(self._plain)[start:stop]
            self._quic.stream_received(stream, offset, data, fin=bool(kind & WITH_FIN))
            self._start = self._stop = end

    def _end_run(self) -> None:
        """What comes next is not known to go on where the run of a stream's bytes has ended."""
        self._flush()
        self._stream = None
        self._stream_id = -1

    def _flush(self) -> None:
        """Tell the stream what was written to its memory."""
        start, stop, fin = self._start, self._stop, self._fin
        self._start, self._fin = stop, False
        if self._stream is not None and (stop > start or fin):
            self._quic.stream_filled(self._stream, start, stop, fin=fin)

    def _find(self, kind: int, stream_id: int) -> QuicStream | None:
        quic = self._quic
        stream = quic._streams.get(stream_id)
        if stream is not None:  # of bidirectional ones, as all are
            return stream
        quic._assert_stream_can_receive(kind, stream_id)
        try:
            return quic._get_or_create_stream(kind, stream_id)
        except StreamFinishedError:
            return None

    def _place(self, kind: int, stream_id: int, offset: int, data: memoryview) -> None:
        stream = self._find(kind, stream_id)
        if stream is not None:
            self._quic.stream_received(stream, offset, data, fin=bool(kind & WITH_FIN))

    def _frames(self, start: int, stop: int) -> bool:
        """Handle all frames of a packet; return whether it calls for an acknowledgement."""
        self._end_run()
        if start == stop:
            return self._other(start, stop)
        plain = self._plain
        eliciting = False
        at = start
        while at < stop:
            kind = plain[at]
            if kind == ACK:
                after = self._acknowledgement(at + 1, stop)
                if after is None:
                    return self._other(at, stop) or eliciting
                at = after
            elif kind & ~(WITH_OFFSET | WITH_LENGTH | WITH_FIN) == STREAM:
                after = self._stream_frame(kind, at + 1, stop)
                if after is None:
                    return self._other(at, stop) or eliciting
                at = after
                eliciting = True
            elif kind == PADDING:
                at += 1
            else:
                return self._other(at, stop) or eliciting
        return eliciting

    def _other(self, start: int, stop: int) -> bool:
        """Leave the frames from `start` on to aioquic."""
        quic = self._quic
        context = QuicReceiveContext(
            epoch=tls.Epoch.ONE_RTT,
            host_cid=quic.host_cid,
            network_path=quic._network_paths[0],
            quic_logger_frames=[],  # `tracing` has told of them
            time=self._now,
            version=quic._version,
        )
        is_eliciting, _ = quic._payload_received(context, bytes(self._plain[start:stop]))
        return is_eliciting

    def _stream_frame(self, kind: int, at: int, stop: int) -> int | None:
        """Handle one STREAM frame; return where it ends, None if it does not."""
        plain = self._plain
        stream_id, at = _varint(plain, at, stop)
        offset = 0
        if kind & WITH_OFFSET:
            offset, at = _varint(plain, at, stop)
        length = stop - at
        if kind & WITH_LENGTH:
            length, at = _varint(plain, at, stop)
        if at > stop or at + length > stop or offset + length > UINT_VAR_MAX:
            return None
        self._place(kind, stream_id, offset, memoryview(plain)[at : at + length])
        return at + length

    def _acknowledgement(self, at: int, stop: int) -> int | None:
        """Handle one ACK frame; return where it ends, None if it is malformed."""
        plain, quic = self._plain, self._quic
        newest, at = _varint(plain, at, stop)
        delay, at = _varint(plain, at, stop)
        count, at = _varint(plain, at, stop)
        length, at = _varint(plain, at, stop)
        start, end = newest - length, newest + 1
        acknowledged = RangeSet()
        for number in range(count + 1):
            if number:
                if at >= stop:
                    return None
                gap, at = _varint(plain, at, stop)
                length, at = _varint(plain, at, stop)
                end = start - gap - 1
                start = end - length - 1
            if at > stop or start < 0:
                return None
            if number < MAX_RANGES_READ:  # from the newest down, each goes before the others
                acknowledged.add(start, end)
        loss = quic._loss
        loss.peer_completed_address_validation = True
        acknowledge_runs(loss, self._space, acknowledged, self._now)
        loss.on_ack_received(
            ack_rangeset=acknowledged,
            ack_delay=(delay << quic._remote_ack_delay_exponent) / 1e6,
            now=self._now,
            space=self._space,
        )
        return at


def _varint(data: bytes | bytearray, at: int, stop: int) -> tuple[int, int]:
    """Decode an integer (RFC 9000 section 16); return it, and where it ends.

    One that is cut off ends beyond `stop`.
    """
    if at >= stop:
        return 0, stop + 1
    first = data[at]
    if first < 0x40:
        return first, at + 1
    end = at + (1 << (first >> 6))
    value = int.from_bytes(data[at:end], "big")
    return value & ((1 << (8 * (end - at) - 2)) - 1), end
