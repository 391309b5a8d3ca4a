"""One bidirectional stream as the application sees it, without I/O."""

from __future__ import annotations

from collections import deque

__all__ = ["StreamCore"]

SMALL_CHUNK = 512
"""Pieces up to this length are joined: apart, a window of single bytes would cost forty times its
size. In bytes."""


class StreamCore:
    """The receive buffer of a stream and the facts about its two ends.

    The buffer is bounded by the receive window, which moves only as `take` and `take_into` are
    called: the connection gives their results to `AdaptedConnection.consume`.
    """

    __slots__ = (
        "_chunks",
        "_head",
        "buffered",
        "delivered",
        "fin_received",
        "fin_sent",
        "local_reset",
        "released",
        "remote_reset",
        "remote_stop",
        "stream_id",
    )

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.buffered = 0
        """Bytes received and not yet taken."""
        self.delivered = 0
        """Bytes received in order since the stream began."""
        self.fin_received = False
        """The peer has finished sending (RFC 9000 section 3.2, 'Data Recvd')."""
        self.fin_sent = False
        """We have finished sending."""
        self.local_reset: int | None = None
        """The code with which we gave up, on either direction."""
        self.remote_reset: int | None = None
        """The code of the peer's RESET_STREAM: nothing more will arrive."""
        self.remote_stop: int | None = None
        """The code of the peer's STOP_SENDING: nothing more will be read there."""
        self.released = False
        """The application holds the stream no more; what still arrives is thrown away."""
        self._chunks: deque[bytes] = deque()
        self._head = 0

    @property
    def is_readable(self) -> bool:
        """Whether a read returns at once: data, end or reset."""
        return bool(self.buffered) or self.receive_ended

    @property
    def receive_ended(self) -> bool:
        """Whether nothing more will arrive."""
        return self.fin_received or self.remote_reset is not None

    @property
    def send_ended(self) -> bool:
        """Whether nothing more can be written."""
        return self.fin_sent or self.local_reset is not None or self.remote_stop is not None

    def feed(self, data: bytes, fin: bool) -> None:
        """Append what arrived, in order."""
        if data:
            if self._chunks and len(self._chunks[-1]) + len(data) <= SMALL_CHUNK:
                self._chunks[-1] += data
            else:
                self._chunks.append(data)
            self.buffered += len(data)
            self.delivered += len(data)
        self.fin_received = self.fin_received or fin

    def take(self, limit: int) -> bytes:
        """Remove and return at most `limit` buffered bytes; whole frames where they fit."""
        if not self.buffered or limit <= 0:
            return b""
        first = self._chunks[0]
        if self._head == 0 and len(first) <= limit and len(first) == self.buffered:
            self._chunks.popleft()
            self.buffered = 0
            return first
        out = bytearray(min(limit, self.buffered))
        self.take_into(memoryview(out))
        return bytes(out)

    def take_into(self, target: memoryview) -> int:
        """Move buffered bytes into `target`, as many as fit; return how many."""
        done = 0
        room = len(target)
        while done < room and self._chunks:
            chunk = self._chunks[0]
            count = min(len(chunk) - self._head, room - done)
            target[done : done + count] = memoryview(chunk)[self._head : self._head + count]
            done += count
            self._head += count
            if self._head == len(chunk):
                self._chunks.popleft()
                self._head = 0
        self.buffered -= done
        return done

    def drop(self) -> int:
        """Throw away what is buffered; return how much that was."""
        count = self.buffered
        self._chunks.clear()
        self._head = 0
        self.buffered = 0
        return count
