"""Writes batches of 1-RTT packets: acknowledgements, and stream data that was never sent.

Everything else a connection has to say (control frames, what was lost, handshakes, closing) stays
with aioquic's own packet code, and so does all of it while a batch can't be sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

from aioquic.quic.connection import QuicConnectionState
from aioquic.quic.crypto import CryptoContext
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.stream import QuicStream

from transport.protocol.batch.frames import (
    FULL_FRAME,
    FULL_FRAME_TYPE,
    VARINT_4,
    VARINT_8,
    WITH_FIN,
    WITH_LENGTH,
)
from transport.protocol.batch.scratch import Scratch
from transport.protocol.batch.sealing import MIN_PAYLOAD, Bytes, Keys, Sealer, seal_packet
from transport.protocol.batch.sending import SendPart
from transport.protocol.batch.sent import Handlers, SentPacket, SentPackets, SentRun, Transmit

if TYPE_CHECKING:
    from transport.protocol.batch.connection import BatchConnection

__all__ = ["BatchWriter", "keys_of"]

MAX_BATCH_BYTES = 1_040_000
MAX_BATCH_PACKETS = 128
"""What is made at once: half a millisecond's work."""

ACK = 0x02
PING = 0x01

MAX_STREAM_ID = (1 << 30) - 1
"""The largest that a full frame can name, in four bytes; others go in frames of any length."""

MAX_OVERHEAD = 128
"""More than a full packet has beside stream data, in bytes."""

MIN_FRAME_ROOM = 32
"""With less room in a packet no further frame is begun, in bytes."""

MAX_ACK_RANGES_SENT = 32
"""Older ones were in acknowledgements before."""

ACK_OF_ACK_EVERY = 8
"""Of packets that acknowledge ranges, every so many calls for an acknowledgement itself, so that
the ranges can be forgotten (RFC 9000 section 13.2.4)."""


_Ready: TypeAlias = tuple[QuicStream, SendPart]
"""A stream with something to send, and its sending part."""


class BatchWriter:
    """Writes the batches of one connection."""

    def __init__(self, quic: BatchConnection) -> None:
        self._quic = quic
        self._ready: dict[int, _Ready] = {}
        self._keys: Keys | None = None
        self._keys_of: object = None
        self._scratch = Scratch()

    @property
    def has_data(self) -> bool:
        """Whether some stream has data that was never sent, window or not."""
        return bool(self._ready)

    def offer(self, stream: QuicStream) -> None:
        """`stream` has data that was never sent."""
        assert stream.stream_id is not None
        self._ready[stream.stream_id] = stream, SendPart.of(stream)

    def can_write(self) -> bool:
        """Whether batches can be sent: the handshake is confirmed, the path is validated."""
        quic = self._quic
        return (
            quic._handshake_confirmed
            and quic._state is QuicConnectionState.CONNECTED
            and not quic._close_pending
            and quic._network_paths[0].is_validated
        )

    def hand_over(self) -> None:
        """Leave some of what was to be sent in batches to aioquic's packet code."""
        for stream_id, (_, sender) in list(self._ready.items()):
            sender.hand_over()
            if not sender.has_fresh:
                del self._ready[stream_id]

    def write(self, now: float) -> Transmit | None:
        """Return the next batch that may leave at `now`, None if there is none.

        It is good until the next one is asked for.
        Sets when pacing lets the next one leave, as upstream's `datagrams_to_send` does.
        """
        quic = self._quic
        space = quic.data_space
        is_ack_due = space.ack_at is not None and space.ack_at <= now
        count = self._allowance(now) if self._ready else 0
        if not is_ack_due and count <= 0:
            return None
        size = quic.datagram_size
        crypto = quic.data_crypto
        if crypto._update_key_requested:
            crypto._update_key("local_update")
        if count <= 1 and self._is_all_little():
            return self._write_packet(space, now, with_data=count > 0)
        room = self._scratch.get(max(count, 1) * size)
        batch = _Batch(quic, self._send_keys(crypto.send), room, now)
        prefix: list[bytes] = []
        handlers: Handlers = []
        if space.ack_at is not None:
            prefix.append(self._ack_frame(space, now, handlers))
        is_dry = count > 0
        while batch.packets < count:
            before = batch.packets
            if prefix or self._has_little():
                is_full = self._compose(batch, prefix, handlers)
                prefix, handlers = [], []
                if batch.packets > before and not is_full:
                    is_dry = not self._ready
                    break
            if batch.packets == before:
                self._fill(batch, count)
            if batch.packets == before and not self._compose(batch, [], []):
                is_dry = batch.packets == before or not self._ready
                break
        else:
            is_dry = count > 0 and not self._ready
        if prefix:
            batch.add(_payload(prefix), handlers, eliciting=False)
        if is_dry:
            self.ran_dry()
        return batch.finish()

    def _write_packet(self, space: Any, now: float, *, with_data: bool) -> Transmit | None:
        """Write one packet by itself: an acknowledgement, what streams have, or both."""
        quic = self._quic
        destination = quic._peer_cid.cid
        parts: list[bytes] = []
        handlers: Handlers = []
        if space.ack_at is not None:
            parts.append(self._ack_frame(space, now, handlers))
        has_data = False
        if with_data:
            room = quic.datagram_size - Sealer.overhead(destination) - sum(map(len, parts))
            before = len(parts)
            self._frames(parts, handlers, room)
            has_data = len(parts) > before
            if not has_data or not self._ready:
                self.ran_dry()
        if not parts:
            return None
        number = quic._packet_number
        keys = self._send_keys(quic.data_crypto.send)
        data = seal_packet(keys, destination, number, _payload(parts), spin=quic._spin_bit)
        quic._packet_number = number + 1
        _register(quic, SentPacket(number, now, len(data), has_data, handlers))
        _note_sent(quic, len(data), int(has_data), now)
        return Transmit(data, len(data), quic._network_paths[0].addr)

    def ran_dry(self) -> None:
        """Tell the congestion controller that there is nothing more to send."""
        ran_dry = getattr(self._quic._loss._cc, "ran_dry", None)
        if ran_dry is not None:
            ran_dry()

    def write_probe(self, size: int, now: float) -> Transmit | None:
        """Return one datagram of `size` bytes that says nothing: its fate does (RFC 8899)."""
        quic = self._quic
        keys = self._send_keys(quic.data_crypto.send)
        batch = _Batch(quic, keys, bytearray(size), now)
        payload = bytes((PING,)) + bytes(size - Sealer.overhead(quic._peer_cid.cid) - 1)
        batch.add_probe(payload, [(quic.on_probe_delivery, (size,))])
        return batch.finish()

    # -- how much

    def _allowance(self, now: float) -> int:
        """How many full packets window, pacing and the size of one batch allow."""
        quic = self._quic
        size = quic.datagram_size
        controller = quic._loss._cc
        room = controller.congestion_window - controller.bytes_in_flight
        if room < size:
            return 0
        pacer = quic.pacer
        paced = pacer.packets(now)
        if paced <= 0:
            quic._pacing_at = pacer.next_send_time(now)
            return 0
        waiting = sum(sender.backlog for _, sender in self._ready.values())
        worth = 1 + waiting // (size - MAX_OVERHEAD)  # room that nobody needs is not made
        return min(room // size, paced, worth, max(1, MAX_BATCH_BYTES // size), MAX_BATCH_PACKETS)

    def _credit(self, stream: QuicStream, sender: SendPart) -> int:
        """The offset up to which flow control lets the stream's data go."""
        quic = self._quic
        left = quic._remote_max_data - quic._remote_max_data_used
        return min(stream.max_stream_data_remote, sender.highest_offset + left)

    # -- packets

    def _fill(self, batch: _Batch, count: int) -> None:
        """Fill packets from the first stream that has enough for it."""
        room = batch.room - FULL_FRAME.size
        for stream, sender in self._sendable():
            position = sender.fresh
            limit = min(sender._buffer_stop, self._credit(stream, sender))
            full = min((limit - position) // room, count - batch.packets)
            assert stream.stream_id is not None
            if full <= 0 or stream.stream_id > MAX_STREAM_ID or not sender.can_read():
                continue
            base = stream.stream_id | VARINT_4
            last = position + full * room
            fin = last == sender._buffer_fin
            offsets = range(position | VARINT_8, last | VARINT_8, room)
            pack = FULL_FRAME.pack
            heads = [pack(FULL_FRAME_TYPE, base, offset) for offset in offsets]
            if fin:
                heads[-1] = pack(FULL_FRAME_TYPE | WITH_FIN, base, offsets[-1])
            payloads = list(zip(heads, _in_rooms(sender, position, last, room), strict=True))
            batch.add_frames(payloads, sender, position, room, fin=fin)
            self._took(stream, sender, last, fin=fin)
            return

    def _compose(self, batch: _Batch, parts: list[bytes], handlers: Handlers) -> bool:
        """Write one packet of whatever streams have, behind `parts`; return whether it is full."""
        before = len(parts)
        left = self._frames(parts, handlers, batch.room - sum(map(len, parts)))
        if not parts:
            return False
        batch.add(_payload(parts), handlers, eliciting=len(parts) > before)
        return left == 0

    def _frames(self, parts: list[bytes], handlers: Handlers, left: int) -> int:
        """Add frames of whatever streams have to `parts`, in `left` bytes; return what is left."""
        for stream, sender in self._sendable():
            assert stream.stream_id is not None
            start = sender.fresh
            head = _varint(stream.stream_id) + _varint(start)
            room = left - 1 - len(head)
            stop = min(sender._buffer_stop, self._credit(stream, sender), start + room)
            fin = stop == sender._buffer_fin
            if room < 0 or stop < start or (stop == start and not fin) or not sender.can_read():
                continue
            kind = FULL_FRAME_TYPE | fin
            length = b""
            if stop - start < room:
                # Others may follow, so that this one has to say where it ends.
                length = _varint(stop - start)
                if stop - start + len(length) > room:
                    stop -= len(length)
                    fin = False
                    kind = FULL_FRAME_TYPE
                    length = _varint(stop - start)
                kind |= WITH_LENGTH
            parts += (bytes((kind,)), head, length, bytes(sender.read(start, stop)))
            handlers.append((sender.on_data_delivery, (start, stop, fin)))
            left -= 1 + len(head) + len(length) + stop - start
            self._took(stream, sender, stop, fin=fin)
            if left < MIN_FRAME_ROOM:
                break
        return left

    def _sendable(self) -> list[_Ready]:
        """The streams that may send, those with little to send first, then whose turn it is."""
        size = self._quic.datagram_size
        little: list[_Ready] = []
        much: list[_Ready] = []
        for stream_id, ready in list(self._ready.items()):
            stream, sender = ready
            if not sender.has_fresh:
                del self._ready[stream_id]
            elif not stream.is_blocked:
                (little if sender.backlog < size else much).append(ready)
        return little + much

    def _has_little(self) -> bool:
        """Whether some stream has less to send than fills a packet: those go first."""
        size = self._quic.datagram_size
        return any(sender.backlog < size for _, sender in self._ready.values())

    def _is_all_little(self) -> bool:
        """Whether nothing waits that would fill a packet."""
        size = self._quic.datagram_size
        return all(sender.backlog < size for _, sender in self._ready.values())

    def _took(self, stream: QuicStream, sender: SendPart, stop: int, *, fin: bool) -> None:
        """Note what was taken of `stream`, and send it behind the others if it has more."""
        before = sender.highest_offset
        sender.sent(stop, fin=fin)
        self._quic._remote_max_data_used += sender.highest_offset - before
        assert stream.stream_id is not None
        self._ready.pop(stream.stream_id, None)
        if sender.has_fresh:
            self._ready[stream.stream_id] = stream, sender

    def _ack_frame(self, space: Any, now: float, handlers: Handlers) -> bytes:
        quic = self._quic
        delay = int((now - space.largest_received_time) * 1e6) >> quic._local_ack_delay_exponent
        handlers.append((quic._on_ack_delivery, (space, space.largest_received_packet)))
        space.ack_at = None
        ranges: RangeSet = space.ack_queue
        frame = encode_ack(ranges, max(0, delay))
        if len(ranges) > 1 and quic._packet_number % ACK_OF_ACK_EVERY == 0:
            quic._ping_pending.append(0)
        return frame

    def _send_keys(self, context: CryptoContext) -> Keys:
        if self._keys is None or self._keys_of is not context.aead:
            self._keys_of = context.aead
            self._keys = keys_of(context)
        return self._keys


class _Batch:
    """A batch in the making, registered with loss recovery packet by packet."""

    def __init__(self, quic: BatchConnection, keys: Keys, room: bytearray, now: float) -> None:
        self._quic = quic
        self._now = now
        self._size = quic.datagram_size
        destination = quic._peer_cid.cid
        self._sealer = Sealer(keys, destination, spin=quic._spin_bit, room=room)
        self.room = self._size - Sealer.overhead(destination)
        """Bytes of payload that one packet takes."""
        self.packets = 0
        self._eliciting = 0
        self._space = quic.data_space
        self._on_packet_sent = quic._loss._cc.on_packet_sent

    def add(self, payload: bytes, handlers: Handlers, *, eliciting: bool = True) -> None:
        """Seal one packet."""
        quic = self._quic
        number = quic._packet_number
        size = self._sealer.add(number, payload)
        quic._packet_number = number + 1
        self.packets += 1
        self._eliciting += eliciting
        _register(quic, SentPacket(number, self._now, size, eliciting, handlers))

    def add_frames(
        self,
        payloads: list[tuple[bytes, Bytes]],
        sender: SendPart,
        start: int,
        room: int,
        *,
        fin: bool,
    ) -> None:
        """Seal packets that are full of a stream's data from offset `start`, `room` bytes each."""
        quic = self._quic
        first, count = quic._packet_number, len(payloads)
        self._sealer.add_run(first, payloads)
        run = SentRun(self._now, self._size, first, count, sender, start, room, fin=fin)
        cast(SentPackets, self._space.sent_packets).add_run(run)
        quic._packet_number = first + count
        self.packets += count
        self._eliciting += count
        self._on_packet_sent(packet=run)  # type: ignore[arg-type]

    def add_probe(self, payload: bytes, handlers: Handlers) -> None:
        """Seal one packet whose loss says nothing about congestion."""
        number = self._quic._packet_number
        size = self._sealer.add(number, payload)
        self._quic._packet_number = number + 1
        packet = SentPacket(number, self._now, size, True, handlers)
        packet.in_flight = False
        self._space.sent_packets[number] = packet  # type: ignore[assignment]
        self.packets += 1
        self._eliciting += 1

    def finish(self) -> Transmit | None:
        """Return the batch, and let timers, pacing and path know of it."""
        if not self.packets:
            return None
        quic = self._quic
        data = self._sealer.finish()
        _note_sent(quic, len(data), self._eliciting, self._now)
        segment = self._size if self.packets > 1 else len(data)
        return Transmit(data, segment, quic._network_paths[0].addr)


def _in_rooms(sender: SendPart, position: int, last: int, room: int) -> list[Bytes]:
    """Return the data from offset `position` to `last`, by `room` bytes, copied only at seams."""
    out: list[Bytes] = []
    while position < last:
        first, piece = sender.piece_at(position)
        stop = min(last, position + (first + len(piece) - position) // room * room)
        if stop > position:
            out += [piece[at : at + room] for at in range(position - first, stop - first, room)]
        else:
            stop = position + room
            out.append(sender.read(position, stop))
        position = stop
    return out


def _payload(parts: list[bytes]) -> bytes:
    """Return the frames of a packet, with what padding it takes to be sealed."""
    payload = b"".join(parts)
    return payload if len(payload) >= MIN_PAYLOAD else payload.ljust(MIN_PAYLOAD, b"\0")


def _register(quic: BatchConnection, packet: SentPacket) -> None:
    """Have loss recovery, and congestion control if it counts, know of a packet."""
    quic.data_space.sent_packets[packet.packet_number] = packet  # type: ignore[assignment]
    if packet.in_flight:
        quic._loss._cc.on_packet_sent(packet=packet)  # type: ignore[arg-type]


def _note_sent(quic: BatchConnection, size: int, eliciting: int, now: float) -> None:
    """Let timers, pacing and path know of `size` bytes that leave.

    Of the packets in them, `eliciting` call for an acknowledgement.
    """
    quic._network_paths[0].bytes_sent += size
    if eliciting:
        quic.data_space.ack_eliciting_in_flight += eliciting
        quic._loss._time_of_last_sent_ack_eliciting_packet = now
        quic.pacer.took(size, now)
        if not quic._ack_eliciting_sent_since_receipt:
            quic.put_off_idle_timeout(now)
            quic._ack_eliciting_sent_since_receipt = True


def keys_of(context: CryptoContext) -> Keys:
    """Return the keys of one direction as `sealing` takes them."""
    assert context.aead is not None
    assert context.hp is not None
    is_chacha20 = context.hp._is_chacha20
    return Keys(
        aead=context.aead._aead,
        iv=context.aead._iv,
        mask=context.hp._mask if is_chacha20 else context.hp._encryptor.update,
        masks_one=is_chacha20,
        phase=context.key_phase,
    )


def encode_ack(received: RangeSet, delay: int) -> bytes:
    """Return an ACK frame for the newest of `received` (RFC 9000 section 19.3)."""
    newest_first = list(received)[: -MAX_ACK_RANGES_SENT - 1 : -1]
    newest = newest_first[0]
    out = [
        bytes((ACK,)),
        _varint(newest.stop - 1),
        _varint(delay),
        _varint(len(newest_first) - 1),
        _varint(len(newest) - 1),
    ]
    start = newest.start
    for older in newest_first[1:]:
        out.append(_varint(start - older.stop - 1))
        out.append(_varint(len(older) - 1))
        start = older.start
    return b"".join(out)


def _varint(value: int) -> bytes:
    """Encode an integer (RFC 9000 section 16)."""
    if value < 0x40:
        return value.to_bytes(1, "big")
    if value < 0x4000:
        return (value | 0x4000).to_bytes(2, "big")
    if value < 0x40000000:
        return (value | VARINT_4).to_bytes(4, "big")
    return (value | VARINT_8).to_bytes(8, "big")
