"""The sending part of a stream, over memory that is its own or borrowed.

Upstream's copies every byte into one bytearray and again out of it for each frame. Here a stream's
data is a row of pieces, a borrowed one never copied, and what was never sent is kept apart from
what was lost: batches carry the one, aioquic's own packet code the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from aioquic.quic.packet import QuicStreamFrame
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.stream import QuicStream, QuicStreamSender

from transport.protocol.batch.ranges import Ranges

__all__ = ["SendPart"]

JOIN_BYTES = 16384
"""Small writes are joined into pieces up to this size."""

HAND_OVER_BYTES = 1 << 18
"""As much as aioquic's packet code needs to be kept busy until it is asked next."""


Bytes = bytes | bytearray | memoryview


class SendPart(QuicStreamSender):
    """`aioquic.quic.stream.QuicStreamSender` without its copies.

    ``[_buffer_start, _buffer_stop)`` is what the peer has not acknowledged, as upstream;
    ``[fresh, _buffer_stop)`` of it was never sent; ``_lost`` holds what was lost, and ``_early``
    what was acknowledged before bytes that precede it.
    """

    def __init__(self, stream_id: int) -> None:
        super().__init__(stream_id=stream_id, writable=True)
        self.fresh = 0
        """Offset of the first byte that was never sent."""
        self.fin_unsent = False
        """Whether the end was written and never sent."""
        self.is_spoiled = False
        """Whether memory that was lent was gone before it was sent."""
        self.concerned: dict[int, None] = {}
        """Where streams are noted of which there is something to say; its connection's."""
        self.was_stopped = False
        """Whether the peer has asked for an end before there was one (STOP_SENDING)."""
        self.is_dropped = False
        """Whether nothing more will be sent, for want of the memory."""
        self._loan: tuple[Callable[[], bool], int] | None = None
        self._pieces: deque[tuple[int, bytearray | memoryview]] = deque()
        self._lost = Ranges()
        self._early = Ranges()
        # Nothing of upstream's may look there unnoticed.
        del self._buffer, self._pending, self._acked

    @staticmethod
    def of(stream: QuicStream) -> SendPart:
        """Return the sending part of `stream`, which is one of ours."""
        part = stream.sender
        assert isinstance(part, SendPart)
        return part

    @property
    def was_used(self) -> bool:
        """Whether anything was ever written."""
        return self._buffer_stop > 0

    @property
    def has_fresh(self) -> bool:
        """Whether there is something that was never sent."""
        return self._reset_error_code is None and (
            self.fresh < self._buffer_stop or self.fin_unsent
        )

    @property
    def unacknowledged(self) -> int:
        """Bytes that the peer has not acknowledged; known after a reset too."""
        return self._buffer_stop - self._buffer_start

    @property
    def backlog(self) -> int:
        """Bytes that were never sent."""
        return self._buffer_stop - self.fresh

    @property
    def next_offset(self) -> int:
        """The offset of the next frame of `get_frame`."""
        return self._lost.first.start if len(self._lost) else self.fresh

    # -- writing

    def write(self, data: Bytes, end_stream: bool = False) -> None:
        """Append a copy of `data`."""
        self._check_writable()
        size = len(data)
        if size:
            last = self._pieces[-1][1] if self._pieces else None
            if isinstance(last, bytearray) and len(last) + size <= JOIN_BYTES:
                last += data
            else:
                self._pieces.append((self._buffer_stop, bytearray(data)))
            self._buffer_stop += size
        self._end(end_stream)

    def lend(self, view: memoryview, is_intact: Callable[[], bool], code: int) -> None:
        """Append `view` itself, which must stay as it is until it is acknowledged or dropped.

        `is_intact` is asked each time before it is read: once it says that the memory is gone, the
        stream is reset with `code`, and nothing more is read.
        """
        self._check_writable()
        if len(view):
            self._pieces.append((self._buffer_stop, view))
            self._buffer_stop += len(view)
            self._loan = is_intact, code

    def _check_writable(self) -> None:
        if self._buffer_fin is not None:
            raise RuntimeError("Cannot send data after FIN")
        if self._reset_error_code is not None:
            raise RuntimeError("Cannot send data after the stream was reset")

    def _end(self, end_stream: bool) -> None:
        if end_stream:
            self._buffer_fin = self._buffer_stop
            self.fin_unsent = True

    # -- sending

    def can_read(self) -> bool:
        """Whether what was lent is still there; if it is not, the stream is reset."""
        if self._loan is None or self._loan[0]():
            return True
        self.is_spoiled = True
        self.reset(self._loan[1])
        return False

    def read(self, start: int, stop: int) -> Bytes:
        """Return the bytes of ``[start, stop)``, without a copy where they lie in one piece."""
        parts = []
        for first, piece in self._pieces:
            if first >= stop:
                break
            if first + len(piece) > start:
                low, high = max(0, start - first), min(len(piece), stop - first)
                if high - low == stop - start and isinstance(piece, memoryview):
                    return piece[low:high]
                parts.append(bytes(piece[low:high]))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def piece_at(self, offset: int) -> tuple[int, memoryview | bytearray]:
        """Return the piece that holds `offset`, and the offset of its first byte."""
        for first, piece in self._pieces:
            if offset < first + len(piece):
                return first, piece
        raise IndexError(offset)

    def sent(self, stop: int, *, fin: bool) -> None:
        """Note that everything before `stop` has been sent, and the end with `fin`."""
        self.fresh = stop
        self.highest_offset = max(self.highest_offset, stop)
        if fin:
            self.fin_unsent = False

    def hand_over(self) -> None:
        """Leave some of what was never sent to `get_frame`, for when no batch can be sent."""
        if self._reset_error_code is not None or len(self._lost):
            return
        if self.fresh < self._buffer_stop:
            stop = min(self.fresh + HAND_OVER_BYTES, self._buffer_stop)
            self._lost.add(self.fresh, stop)
            self.fresh = stop
            self.buffer_is_empty = False
        if self.fin_unsent and self.fresh == self._buffer_stop:
            self.fin_unsent = False
            self._pending_eof = True
            self.buffer_is_empty = False
        self._note()

    def get_frame(self, max_size: int, max_offset: int | None = None) -> QuicStreamFrame | None:
        """As upstream, of what was lost or handed over."""
        assert self._reset_error_code is None, "cannot call get_frame() after reset()"
        if max_size < 0 or not self.can_read():
            return None
        if not len(self._lost):
            if self._pending_eof:
                self._pending_eof = False
                return QuicStreamFrame(fin=True, offset=self._buffer_fin or 0)
            self.buffer_is_empty = True
            return None
        lost = self._lost.first
        start, stop = lost.start, min(lost.stop, lost.start + max_size)
        if max_offset is not None:
            stop = min(stop, max_offset)
        if stop <= start:
            return None
        frame = QuicStreamFrame(data=bytes(self.read(start, stop)), offset=start)
        self._lost.cut(stop)
        self.highest_offset = max(self.highest_offset, stop)
        if self._buffer_fin == stop and not self.fin_unsent:
            frame.fin = True
            self._pending_eof = False
        return frame

    # -- what became of it

    def on_data_delivery(
        self, delivery: QuicDeliveryState, start: int, stop: int, fin: bool
    ) -> None:
        """As upstream; a piece is let go once all of it is acknowledged."""
        is_over = self._reset_error_code is not None or self.is_dropped
        if delivery is QuicDeliveryState.LOST:
            if is_over:
                return  # nothing is sent again
            self.buffer_is_empty = False
            if stop > start:
                self._lost.add(start, stop)
            self._pending_eof = self._pending_eof or fin
            self._note()
            return
        if start == self._buffer_start and not len(self._early):
            self._buffer_start = stop
            self._drop_acknowledged()
        elif stop > start:
            self._early.add(start, stop)
            if self._early.first.start <= self._buffer_start:
                self._buffer_start = self._early.shift().stop
                self._drop_acknowledged()
        self._acked_fin = self._acked_fin or fin
        if self._acked_fin and self._buffer_start == self._buffer_fin and not is_over:
            self.is_finished = True  # else only the acknowledgement of the reset counts
            self._note()

    def _drop_acknowledged(self) -> None:
        pieces = self._pieces
        while pieces and pieces[0][0] + len(pieces[0][1]) <= self._buffer_start:
            if isinstance(pieces.popleft()[1], memoryview):
                self._loan = None

    def reset(self, error_code: int) -> None:
        """As upstream; what was lent is let go at once."""
        super().reset(error_code)
        self._note()
        if self._reset_error_code is not None:
            self.drop()

    def on_reset_delivery(self, delivery: QuicDeliveryState) -> None:
        """As upstream."""
        super().on_reset_delivery(delivery)
        self._note()

    def _note(self) -> None:
        assert self._stream_id is not None
        self.concerned[self._stream_id] = None

    def drop(self) -> None:
        """Let go of all memory: nothing more of this stream will be sent but its reset."""
        self.is_dropped = True
        self.fresh = self._buffer_stop
        self.fin_unsent = self._pending_eof = False
        self._pieces.clear()
        self._loan = None
        self._lost.clear()
        self.buffer_is_empty = True
