"""The receiving part of a stream: bytes go to the memory that waits for them, wherever they begin.

Upstream's puts a stream together in a buffer and hands out pieces of it. Here the application may
`post` the memory in which the next bytes are wanted: each frame is then written to its place in it,
in whatever order frames come. Without posted memory, bytes wait in order in pieces, and those that
came too early in a buffer which the stream's window bounds.
"""

from __future__ import annotations

from collections import deque

from aioquic.quic import events
from aioquic.quic.packet import QuicErrorCode, QuicStreamFrame
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.stream import FinalSizeError, QuicStream, QuicStreamReceiver

from transport.protocol.batch.ranges import Ranges

__all__ = ["ReceivePart"]

SMALL_PIECE = 512
"""Pieces up to this length are joined: apart, a window of single bytes would cost forty times its
size. In bytes."""

Bytes = bytes | bytearray | memoryview


class ReceivePart(QuicStreamReceiver):
    """`aioquic.quic.stream.QuicStreamReceiver` that writes to its final place.

    ``_buffer_start`` is the offset up to which everything has come, as upstream; ``_early`` what
    has come beyond it, and ``_buffer`` the bytes of that which lie beyond the posted memory.

    Attributes:
        is_whole: every byte up to the end has come, and no reset before.
        was_reset: the peer has given up sending.
        buffered: bytes that came in order and were not taken, posted memory aside.
        target_start, target_stop: the offsets between which memory is posted; equal: none is.
        landed: bytes that came in order into posted memory and were not yet credited to the peer.
        concerned: where streams are noted of which there is something to say; its connection's.
        held: bytes that were taken to be handed on, and that the application has not taken yet.
    """

    def __init__(self, stream_id: int) -> None:
        super().__init__(stream_id=stream_id, readable=True)
        self.buffered = 0
        self.landed = 0
        self.held = 0
        self.target_start = self.target_stop = 0
        self.target: memoryview | None = None
        self.is_whole = False
        self.was_reset = False
        self.concerned: dict[int, None] = {}
        self._is_torn = False
        self._early = Ranges()
        del self._ranges  # nothing of upstream's may look there
        self._wake_at = 0
        self._dropped = 0
        self._pieces: deque[bytes] = deque()
        self._head = 0

    @staticmethod
    def of(stream: QuicStream) -> ReceivePart:
        """Return the receiving part of `stream`, which is one of ours."""
        part = stream.receiver
        assert isinstance(part, ReceivePart)
        return part

    @property
    def delivered(self) -> int:
        """Bytes received in order since the stream began."""
        return self._buffer_start

    @property
    def consumed(self) -> int:
        """Bytes that the application has taken, or that came into memory of its own."""
        return self._buffer_start - self.buffered - self._dropped - self.held

    @property
    def posted(self) -> int:
        """Bytes of posted memory that are still to be filled."""
        return max(0, self.target_stop - self._buffer_start)

    @property
    def is_torn(self) -> bool:
        """Whether posted memory was taken back half full, so that bytes are only counted."""
        return self._is_torn

    @property
    def gaps(self) -> int:
        """Ranges that came before bytes that precede them."""
        return len(self._early)

    # -- the application's side

    def post(self, target: memoryview) -> int:
        """Take what is there into `target` and have the rest of it filled as bytes come.

        Returns how much was taken. While memory is posted, the application is woken as `wake_at`
        says, when `target` is full, and when the stream ends.
        """
        taken = self.take_into(target)
        if taken < len(target):
            self.target_start = self._buffer_start
            self.target_stop = self._buffer_start + len(target) - taken
            self.target = target[taken:]
            self._unstash(self.target)
            self._wake_at = self.target_stop
        return taken

    def wake_at(self, consumed: int) -> None:
        """Wake the application when `consumed` has come to this."""
        self._wake_at = min(consumed + self._dropped, self.target_stop)

    def withdraw(self) -> None:
        """Take the posted memory back. Unless it is full, the stream can then only be reset."""
        if self.posted:
            # What came early is partly in that memory: from now on bytes are only counted.
            self._is_torn = True
            self._buffer.clear()
        self.target = None
        self.target_start = self.target_stop = self._buffer_start

    def take(self, limit: int) -> bytes:
        """Remove and return at most `limit` buffered bytes; whole pieces where they fit."""
        count = min(limit, self.buffered)
        if count <= 0:
            return b""
        piece, stop = self._pieces[0], self._head + count
        if stop <= len(piece):  # no copy, if it is all of the piece
            data = piece[self._head : stop]
            self._advance(stop)
            self.buffered -= count
            return data
        out = bytearray(count)
        self.take_into(memoryview(out))
        return bytes(out)

    def take_into(self, target: memoryview) -> int:
        """Move buffered bytes into `target`, as many as fit; return how many."""
        done = 0
        room = len(target)
        while done < room and self._pieces:
            piece = self._pieces[0]
            count = min(len(piece) - self._head, room - done)
            target[done : done + count] = memoryview(piece)[self._head : self._head + count]
            done += count
            self._advance(self._head + count)
        self.buffered -= done
        return done

    def _advance(self, head: int) -> None:
        """The first piece was taken up to `head`."""
        self._head = head
        if head == len(self._pieces[0]):
            self._pieces.popleft()
            self._head = 0

    def drop(self) -> int:
        """Throw away what is buffered; return how much that was."""
        count = self.buffered
        self._dropped += count
        self._pieces.clear()
        self._head = 0
        self.buffered = 0
        return count

    # -- the network's side

    def handle_frame(self, frame: QuicStreamFrame) -> events.StreamDataReceived | None:
        """As upstream; the event carries no bytes, as these are in their place already."""
        if not self.place(frame.offset, frame.data, fin=frame.fin):
            return None
        return events.StreamDataReceived(
            data=b"", end_stream=self.is_finished, stream_id=self._stream_id or 0
        )

    def place(self, offset: int, data: Bytes, *, fin: bool) -> bool:
        """Put one frame's bytes in their place; return whether the application should look.

        Raises:
            FinalSizeError: the stream's end contradicts what was received (RFC 9000 section 4.5).
        """
        stop = offset + len(data)
        self._check_final_size(stop, fin)
        if self.is_finished:
            return False
        begin = self._buffer_start
        if offset <= begin:
            if stop > begin:
                self._deliver(data[begin - offset :] if offset < begin else data)
                self._deliver_early()
        elif data:
            self._early.add(offset, stop)
            self._put(offset, data)
        return self._progressed(begin)

    def fill(self, start: int, stop: int, *, fin: bool) -> bool:
        """Note that ``[start, stop)`` was written into the posted memory by the caller.

        All of it lies between `target_start` and `target_stop`. As `place` in all else.
        """
        self._check_final_size(stop, fin)
        if self.is_finished:
            return False
        begin = self._buffer_start
        if start <= begin:
            if stop > begin:
                self._land(stop)
                self._deliver_early()
        elif stop > start:
            self._early.add(start, stop)
        return self._progressed(begin)

    def handle_reset(self, *, final_size: int, error_code: int = 0) -> events.StreamReset | None:
        """As upstream; posted memory is let go."""
        event = super().handle_reset(final_size=final_size, error_code=error_code)
        if event is not None:
            self.was_reset = True
            self.withdraw()
            self.note()
        return event

    def stop(self, error_code: int = QuicErrorCode.NO_ERROR) -> None:
        """As upstream."""
        super().stop(error_code)
        self.note()

    def on_stop_sending_delivery(self, delivery: QuicDeliveryState) -> None:
        """As upstream."""
        super().on_stop_sending_delivery(delivery)
        self.note()

    def note(self) -> None:
        """Have the connection look if there is something to say of the stream."""
        assert self._stream_id is not None
        self.concerned[self._stream_id] = None

    def _check_final_size(self, stop: int, fin: bool) -> None:
        if self._final_size is not None:
            if stop > self._final_size:
                raise FinalSizeError("Data received beyond final size")
            if fin and stop != self._final_size:
                raise FinalSizeError("Cannot change final size")
        if fin:
            if stop < self.highest_offset:
                raise FinalSizeError("Data received beyond final size")
            self._final_size = stop
        if stop > self.highest_offset:
            self.highest_offset = stop

    def _progressed(self, begin: int) -> bool:
        if self._buffer_start == self._final_size:
            self.is_finished = self.is_whole = True
            return True
        if self._buffer_start == begin:
            return False
        if self.target is not None:
            return self._buffer_start >= self._wake_at
        return True

    def _deliver(self, data: Bytes) -> None:
        """Append bytes that continue the stream where it has come to."""
        start = self._buffer_start
        if self._is_torn:
            self._land(start + len(data))
            return
        if self.target is not None and start < self.target_stop:
            count = min(len(data), self.target_stop - start)
            self._write(start, data[:count])
            self._land(start + count)
            data = data[count:]
        if data:
            self._append(bytes(data))

    def _land(self, stop: int) -> None:
        self.landed += stop - self._buffer_start
        self._buffer_start = stop

    def _append(self, data: bytes) -> None:
        if self._pieces and len(self._pieces[-1]) + len(data) <= SMALL_PIECE:
            self._pieces[-1] += data
        else:
            self._pieces.append(data)
        self.buffered += len(data)
        if self._buffer:
            del self._buffer[: len(data)]
        self._buffer_start += len(data)

    def _deliver_early(self) -> None:
        """Deliver what had come before the bytes that were just delivered."""
        while len(self._early) and self._early.first.start <= self._buffer_start:
            stop = self._early.shift().stop
            if stop <= self._buffer_start:
                continue
            if self._is_torn:
                self._land(stop)
            elif self.target is not None and self._buffer_start < self.target_stop:
                self._land(min(stop, self.target_stop))
            if stop > self._buffer_start:
                self._append(bytes(self._buffer[: stop - self._buffer_start]))

    @property
    def _stash_start(self) -> int:
        """The offset of the first byte of ``_buffer``."""
        return max(self._buffer_start, self.target_stop)

    def _put(self, offset: int, data: Bytes) -> None:
        """Put bytes that came too early where they wait."""
        if self._is_torn:
            return
        if self.target is not None and offset < self.target_stop:
            count = min(len(data), self.target_stop - offset)
            self._write(offset, data[:count])
            offset, data = offset + count, data[count:]
        if data:
            position = offset - self._stash_start
            missing = position + len(data) - len(self._buffer)
            if missing > 0:
                self._buffer += bytes(missing)
            self._buffer[position : position + len(data)] = data

    def _write(self, offset: int, data: Bytes) -> None:
        assert self.target is not None
        position = offset - self.target_start
        self.target[position : position + len(data)] = data

    def _unstash(self, target: memoryview) -> None:
        """Move bytes that came early, and for which memory is posted now, to their place."""
        count = min(len(self._buffer), len(target))
        if count:
            target[:count] = memoryview(self._buffer)[:count]
            del self._buffer[:count]
