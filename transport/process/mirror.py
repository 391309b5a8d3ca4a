"""What the program knows of a connection whose packets another process moves, without I/O.

A mirror has the methods of `transport.protocol.ConnectionCore`, and each says something in records
and notes what follows from it: so much was written, so much may be. What the process says of the
connection is taken by `MirrorLink.take`. The parts of a stream that come in are put together as
ever, by `ReceivePart`: what comes is in order, and only who writes it differs.

Bytes that the application lends, or wants in memory of its own, cross in pieces of shared memory,
which are agreed on long before they are needed: a program that computes answers late. Where there
is no room, and for small amounts, they cross within records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from auth import IdentityError, MeshError, NodeId, SocketAddress
from transport.addresses import format_address, parse_address
from transport.cbor import decode as decode_cbor
from transport.codes import AppCode
from transport.errors import EndpointLost, ProtocolError
from transport.process.memory import SharedMemory
from transport.process.mirror_stream import Landing, Loan, MirrorStream, Piece
from transport.process.records import (
    ADMIT,
    FACTS,
    MAX_PAYLOAD,
    PLACE,
    Flag,
    Kind,
    Record,
    encode,
)
from transport.protocol import StreamCore
from transport.protocol.connection import MAX_REASON_BYTES
from transport.protocol.events import (
    ConnectionEnded,
    EndedBy,
    Event,
    HandshakeCompleted,
    PingAcknowledged,
    StreamChanged,
    StreamOpened,
    StreamsAvailable,
)

__all__ = ["MirrorLink"]

BULK_BYTES = 1 << 17
"""From this size on, bytes take shared memory: below, to send them costs less than to say where
they are."""

STREAM_BYTES = 64 << 20
"""Shared memory of one stream in one direction."""

FIRST_BYTES = 8 << 20
"""How much of it what is lent takes before the peer has acknowledged anything: one that takes
nothing has no more than that, and what a receive window holds."""

POSTED_PIECES = 2
"""In which a stream's bytes come: the process goes on with one, while the other is emptied."""

PIECE_BYTES = 2 << 20
"""What is lent goes into pieces of this size, one of which fills a third of a millisecond."""

FED_AT_ONCE = 2
"""Pieces filled in one turn of the event loop."""

OWED_PART = 4
"""The process learns of what was consumed once that is this part of a stream's window."""


class MirrorLink:
    """What the program knows of one connection.

    Args:
        number: what the two processes call it.
        outbound: whether this side dialled.
        send_buffer, stream_window, connection_window: as in `EndpointConfig`.
        memory: shared with the process; None where there is none.
        say: takes each record for the process; it leaves when the engine is asked to `pump`.
        give_later: takes pieces that are free once the process has done all that was said.
        go_on_later: has `go_on` called after what else there is to do now.
    """

    def __init__(
        self,
        number: int,
        *,
        outbound: bool,
        send_buffer: int,
        stream_window: int,
        connection_window: int,
        memory: SharedMemory | None,
        say: Callable[[bytes], None],
        give_later: Callable[[list[Piece]], None],
        go_on_later: Callable[[MirrorLink], None],
    ) -> None:
        self.number = number
        self.streams: dict[int, StreamCore] = {}
        self.peer: NodeId | None = None
        self.ended: ConnectionEnded | None = None
        self.peer_error: IdentityError | None = None
        self.failure: MeshError | None = None
        self.bytes_sent = self.bytes_received = 0
        self.rtt: float | None = None
        self.datagram_size = 1200
        self.remote_address: SocketAddress | None = None
        self._outbound = outbound
        self._send_buffer = send_buffer
        self._stream_owes = stream_window // OWED_PART
        self._link_owes = connection_window // (2 * OWED_PART)
        self._memory = memory
        self._say = say
        self._give_later = give_later
        self._go_on_later = go_on_later
        self._unfed: dict[int, MirrorStream] = {}
        self.events: deque[Event] = deque()
        """What happened and nobody has been told of, the oldest first."""

        self._stream_limit = 0
        self._opened = 0
        self._owed = 0
        self._debtors: dict[int, MirrorStream] = {}
        self._changes = 0
        self._flushed = 0
        self._asked = 0

    # -- the engine's side

    def take(self, record: Record) -> None:
        """Take what the process says of the connection.

        Raises:
            ProtocolError: it makes no sense.
        """
        if record.kind is Kind.FACTS:
            self._take_facts(record.payload)
        elif self.ended is not None:
            pass  # it was said before the process knew
        elif (handler := _STREAM_RECORDS.get(record.kind)) is not None:
            stream = self.streams.get(record.stream)
            if stream is not None:  # else it was dropped meanwhile
                handler(self, _mirrored(stream), record)
        else:
            self._take_of_link(record)

    def go_on(self) -> None:
        """Pass on more of what was lent."""
        unfed, self._unfed = self._unfed, {}
        for stream in unfed.values():
            if stream.loan is not None and self.ended is None:
                self._feed(stream, stream.loan)

    def fail(self, error: MeshError) -> None:
        """The process is gone, and the connection with it."""
        if self.ended is None:
            self.failure = error
            self._end(ConnectionEnded(EndedBy.SILENCE, 0, error.why or error.what, False))

    def _take_of_link(self, record: Record) -> None:
        match record.kind:
            case Kind.HANDSHAKE:
                peer, alpn = _list(record.payload, bytes, str)
                self.peer = NodeId(peer)
                self.events.append(HandshakeCompleted(self.peer, alpn))
            case Kind.OPENED:
                self.streams[record.stream] = MirrorStream(record.stream)
                self.events.append(StreamOpened(record.stream))
            case Kind.STREAMS:
                self._stream_limit = record.number
                self.events.append(StreamsAvailable())
            case Kind.PONG:
                self.events.append(PingAcknowledged(record.number))
            case Kind.FLUSHED:
                self._flushed = record.number
            case Kind.ENDED:
                self._take_end(record)
            case _:
                raise ProtocolError(
                    "the endpoint process", why=f"it says {record.kind.name} of a connection"
                )

    def _take_end(self, record: Record) -> None:
        by, reason, is_application, refused = _list(
            record.payload, str, str, bool, (list, type(None))
        )
        if refused is not None:
            why, fix = refused
            self.peer_error = IdentityError("proof of identity", why=why, fix=fix)
        if (by, record.number) == (EndedBy.LOCAL.value, AppCode.GONE):
            self.failure = EndpointLost(
                "the connection", why="this program did not go on, so that its peers gave it up"
            )
        self._end(ConnectionEnded(EndedBy(by), record.number, reason, is_application))

    def _take_facts(self, payload: memoryview) -> None:
        rtt, self.bytes_sent, self.bytes_received, self.datagram_size = FACTS.unpack_from(payload)
        self.rtt = None if rtt < 0 else rtt
        if text := str(payload[FACTS.size :], "ascii"):
            self.remote_address = parse_address(text)

    # -- streams

    @property
    def can_open_stream(self) -> bool:
        """Whether the peer's limit leaves room for one more stream of ours."""
        return self._opened < self._stream_limit

    def open_stream(self) -> StreamCore:
        """Open a stream: who opens which is a matter of counting (RFC 9000 section 2.1)."""
        stream = MirrorStream(4 * self._opened + (0 if self._outbound else 1))
        self._opened += 1
        self.streams[stream.stream_id] = stream
        self._tell(Kind.OPEN, stream)
        return stream

    def room(self, stream: StreamCore) -> int:
        """Bytes that may be written now; 0 asks for a `StreamChanged`."""
        stream = _mirrored(stream)
        room = self._send_buffer - (stream.written - stream.acked)
        if room <= 0:
            self._want(stream, self._send_buffer // 2)
            return 0
        return room

    def write(self, stream: StreamCore, data: bytes | memoryview, *, fin: bool = False) -> None:
        """Write what `room` allowed."""
        stream = _mirrored(stream)
        self._changes += 1
        self._write(stream, memoryview(data), fin=fin)
        stream.written += len(data)
        stream.fin_sent = stream.fin_sent or fin

    def lend(
        self, stream: StreamCore, view: memoryview, is_intact: Callable[[], bool], code: int
    ) -> Loan:
        """Write `view`, which is read for as long as not all of it has been copied, or was sent."""
        stream = _mirrored(stream)
        self._changes += 1
        loan = stream.loan = Loan(stream, view, is_intact, code)
        stream.written += len(view)
        self._feed(stream, loan)
        return loan

    def take_back(self, stream: StreamCore) -> None:
        """Let go of what was lent. The stream has to be reset then."""
        stream = _mirrored(stream)
        if stream.loan is not None:
            self._tell(Kind.TAKE_BACK, stream)
            self._give_later(stream.loan.drop())
            stream.loan = None

    def is_spoiled(self, stream: StreamCore) -> bool:
        """Whether the memory that was lent was gone before it was read."""
        loan = _mirrored(stream).loan
        return loan is not None and loan.is_spoiled

    def unacknowledged(self, stream: StreamCore, *, wake_below: int = 0) -> int:
        """Bytes that the peer has not acknowledged; a `StreamChanged` tells of fewer."""
        stream = _mirrored(stream)
        left = stream.written - stream.acked
        loan = stream.loan
        if left > wake_below and (loan is None or not loan.pieces):  # of pieces it tells by itself
            is_fed = loan is None or loan.fed == loan.stop
            self._want(stream, wake_below if is_fed else self._send_buffer // 2)
        return left

    def post(self, stream: StreamCore, target: memoryview) -> int:
        """Have the next bytes written to `target`; return how many were here already."""
        stream = _mirrored(stream)
        taken = stream.incoming.post(target)
        self._owe(stream, taken)
        if stream.incoming.posted >= BULK_BYTES and self._memory is not None:
            start = stream.incoming.delivered
            stream.landing = Landing(start, stream.incoming.target_stop)
            self._want_more(stream, stream.landing)
        return taken

    def owes_credit(self, stream: StreamCore) -> bool:
        """Whether the process should be told of something: after a `post`, always."""
        return True

    def withdraw(self, stream: StreamCore) -> None:
        """Take posted memory back. Unless it is full, the stream has to be reset."""
        stream = _mirrored(stream)
        stream.incoming.withdraw()
        self._drop_landing(stream)

    def consumed(self, stream: StreamCore, count: int) -> bool:
        """The application took `count` bytes. Return whether the process should be told."""
        return self._owe(_mirrored(stream), count)

    def reset(self, stream: StreamCore, code: int) -> None:
        """Give up on both directions of the stream."""
        if stream.local_reset is None:
            stream.local_reset = code
            self._changes += 1
            self._tell(Kind.RESET, stream, code)

    def release(self, stream: StreamCore, code: int) -> None:
        """The application drops the stream."""
        stream = _mirrored(stream)
        if stream.released:
            return
        stream.released = True
        self._changes += 1
        self._let_go(stream)
        stream.incoming.drop()
        if not stream.send_ended:
            stream.local_reset = code
        self._settle(stream)
        self._tell(Kind.RELEASE, stream, code)
        del self.streams[stream.stream_id]

    def is_flushed(self) -> bool:
        """Whether the peer has acknowledged everything, as the process says when it is asked."""
        if self.ended is not None or self._flushed == self._changes:
            return True
        if self._asked != self._changes:
            self._asked = self._changes
            self._say(encode(Kind.FLUSH, self.number, number=self._changes))
        return False

    # -- the connection

    def admit(self, *, max_streams: int, connection_window: int) -> None:
        """The peer is authorized: lift the narrow limits it had until now."""
        limits = ADMIT.pack(max_streams, connection_window)
        self._say(encode(Kind.ADMIT, self.number, payload=limits))

    def ping(self, uid: int) -> None:
        """Send a PING; `PingAcknowledged` reports its answer."""
        self._say(encode(Kind.PING, self.number, number=uid))

    def close(self, code: int, reason: str) -> None:
        """Close with an application code."""
        if self.ended is None:
            payload = reason.encode(errors="replace")[:MAX_REASON_BYTES]
            self._say(encode(Kind.CLOSE, self.number, number=code, payload=payload))
            self._end(ConnectionEnded(EndedBy.LOCAL, code, reason, is_application=True))

    # -- what the process says of a stream

    def _take_data(self, stream: MirrorStream, record: Record) -> None:
        part, landing = stream.incoming, stream.landing
        fin = bool(record.flags & Flag.FIN)
        self._changed(stream, part.place(record.number, bytes(record.payload), fin=fin))
        landed, part.landed = part.landed, 0
        self._owe(stream, landed)
        if landing is not None:
            assert self._memory is not None
            while landing.pieces and landing.pieces[0][1] <= part.delivered:
                # All that was wanted there had left before the process knew.
                self._memory.give(*landing.pieces.popleft()[2])
            landing.posted = max(landing.posted, part.delivered)
            self._want_more(stream, landing)

    def _take_landed(self, stream: MirrorStream, record: Record) -> None:
        part, landing, memory = stream.incoming, stream.landing, self._memory
        if landing is None or memory is None:
            return  # given up meanwhile
        changed = False
        while part.delivered < record.number and landing.pieces and part.target is not None:
            begin, end, piece = landing.pieces[0]
            at, stop = part.delivered, min(record.number, end)
            room = part.target[at - part.target_start : stop - part.target_start]
            memory.empty(piece[0] + at - begin, room)
            changed |= part.fill(at, stop, fin=False)
            if stop == end:
                landing.pieces.popleft()
                memory.give(*piece)
        part.landed = 0  # the process has told the peer of that
        self._want_more(stream, landing)
        self._changed(stream, changed)

    def _take_reset(self, stream: MirrorStream, record: Record) -> None:
        stream.incoming.withdraw()
        self._drop_landing(stream)
        stream.remote_reset = record.number
        self._changed(stream, True)

    def _take_stop(self, stream: MirrorStream, record: Record) -> None:
        stream.remote_stop = record.number
        self._changed(stream, True)

    def _take_acked(self, stream: MirrorStream, record: Record) -> None:
        stream.acked = max(stream.acked, min(record.number, stream.written))
        stream.wanted = None
        loan = stream.loan
        if loan is not None:
            loan.is_finished = loan.is_finished or bool(record.flags & Flag.FIN)
            while loan.pieces and loan.pieces[0][0] <= stream.acked:
                assert self._memory is not None
                self._memory.give(*loan.pieces.popleft()[1])
            self._feed(stream, loan)
        self._changed(stream, True)

    # -- inside

    def _feed(self, stream: MirrorStream, loan: Loan) -> None:
        """Pass on what was lent, as far as there is room for it."""
        memory = self._memory if loan.stop - loan.start >= BULK_BYTES else None
        for _ in range(FED_AT_ONCE):
            if loan.fed == loan.stop or loan.is_finished:
                break
            if not loan.is_intact():
                self._spoil(stream, loan)
                return
            left, at = loan.stop - loan.fed, loan.fed - loan.start
            size = min(left, PIECE_BYTES)
            place = None
            most = min(STREAM_BYTES, FIRST_BYTES + stream.acked)
            if memory is not None and loan.fed - stream.acked < most:
                place = memory.take(size)
            if place is not None:
                assert memory is not None
                memory.fill(place, loan.view[at : at + size])
                loan.fed += size
                loan.pieces.append((loan.fed, (place, size)))
                self._tell(Kind.LEND, stream, payload=PLACE.pack(place, size))
            elif loan.pieces:
                return  # there is room again once they are acknowledged
            else:
                room = self._send_buffer - (loan.fed - stream.acked)
                if room <= 0:
                    self._want(stream, self._send_buffer // 2)
                    return
                size = min(left, room)
                self._write(stream, loan.view[at : at + size])
                loan.fed += size
        if loan.fed == loan.stop:
            loan.forget_view()
        elif not loan.is_finished:
            self._unfed[stream.stream_id] = stream
            self._go_on_later(self)

    def _spoil(self, stream: MirrorStream, loan: Loan) -> None:
        self._tell(Kind.TAKE_BACK, stream)
        self._give_later(loan.drop())
        loan.is_spoiled = True
        self.reset(stream, loan.code)
        self._changed(stream, True)

    def _want_more(self, stream: MirrorStream, landing: Landing) -> None:
        """Have the next bytes come to shared memory, as far as there is room."""
        memory = self._memory
        assert memory is not None
        while landing.posted < landing.stop and len(landing.pieces) < POSTED_PIECES:
            size = min(landing.stop - landing.posted, STREAM_BYTES // POSTED_PIECES)
            place = memory.take(size)
            while place is None and size > BULK_BYTES:
                size = max(size // 4, BULK_BYTES)
                place = memory.take(size)
            if place is None:
                break
            landing.pieces.append((landing.posted, landing.posted + size, (place, size)))
            more = Flag.MORE if landing.posted + size < landing.stop else Flag.NONE
            self._tell(Kind.POST, stream, landing.posted, PLACE.pack(place, size), more)
            landing.posted += size
            landing.is_inline = False
        if not landing.pieces and landing.posted < landing.stop and not landing.is_inline:
            landing.is_inline = True
            self._tell(Kind.POST, stream, landing.posted, PLACE.pack(0, 0))

    def _write(self, stream: MirrorStream, data: memoryview, *, fin: bool = False) -> None:
        size = len(data)
        for at in range(0, size or 1, MAX_PAYLOAD):
            is_last = fin and at + MAX_PAYLOAD >= size
            flags = Flag.FIN if is_last else Flag.NONE
            self._tell(Kind.WRITE, stream, payload=data[at : at + MAX_PAYLOAD], flags=flags)

    def _want(self, stream: MirrorStream, below: int) -> None:
        if stream.wanted != below:
            stream.wanted = below
            self._tell(Kind.WANT, stream, below)

    def _owe(self, stream: MirrorStream, count: int) -> bool:
        """Note what was consumed; return whether the process should be told now."""
        if not count:
            return False
        stream.owed += count
        self._owed += count
        self._debtors[stream.stream_id] = stream
        if self._owed >= self._link_owes:
            for debtor in list(self._debtors.values()):
                self._pay(debtor)
        elif stream.owed >= self._stream_owes:
            self._pay(stream)
        else:
            return False
        return True

    def _pay(self, stream: MirrorStream) -> None:
        self._tell(Kind.CONSUMED, stream, stream.owed)
        self._settle(stream)

    def _settle(self, stream: MirrorStream) -> None:
        self._owed -= stream.owed
        stream.owed = 0
        self._debtors.pop(stream.stream_id, None)

    def _let_go(self, stream: MirrorStream) -> None:
        self.take_back(stream)
        stream.incoming.withdraw()
        self._drop_landing(stream)

    def _drop_landing(self, stream: MirrorStream) -> None:
        landing, stream.landing = stream.landing, None
        if landing is not None and landing.pieces:
            self._tell(Kind.WITHDRAW, stream)
            self._give_later([piece for _, _, piece in landing.pieces])

    def _end(self, end: ConnectionEnded) -> None:
        self.ended = end
        for stream in self.streams.values():
            self._let_go(_mirrored(stream))
        self._debtors.clear()
        self.events.append(end)

    def _changed(self, stream: StreamCore, changed: bool) -> None:
        if changed:
            self.events.append(StreamChanged(stream.stream_id))

    def _tell(
        self,
        kind: Kind,
        stream: StreamCore,
        number: int = 0,
        payload: bytes | memoryview = b"",
        flags: int = 0,
    ) -> None:
        self._say(encode(kind, self.number, stream.stream_id, number, payload, flags))

    def __repr__(self) -> str:
        where = "" if self.remote_address is None else f" to {format_address(self.remote_address)}"
        return f"<MirrorLink {self.number}{where}>"


_STREAM_RECORDS: dict[Kind, Callable[[MirrorLink, MirrorStream, Record], None]] = {
    Kind.DATA: MirrorLink._take_data,
    Kind.LANDED: MirrorLink._take_landed,
    Kind.RESET: MirrorLink._take_reset,
    Kind.STOP: MirrorLink._take_stop,
    Kind.ACKED: MirrorLink._take_acked,
}


def _mirrored(stream: StreamCore) -> MirrorStream:
    assert isinstance(stream, MirrorStream), "a stream of another engine"
    return stream


def _list(payload: memoryview, *kinds: type | tuple[type, ...]) -> list:  # type: ignore[type-arg]
    values = decode_cbor(bytes(payload), max_size=MAX_PAYLOAD)
    if (
        not isinstance(values, list)
        or len(values) != len(kinds)
        or not all(isinstance(value, kind) for value, kind in zip(values, kinds, strict=True))
    ):
        raise ProtocolError("the endpoint process", why="a record that is not as it should be")
    return values
