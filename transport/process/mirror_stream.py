"""What the program knows of one stream whose packets another process moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from transport.protocol import StreamCore
from transport.protocol.batch import ReceivePart

__all__ = ["Landing", "Loan", "MirrorStream", "Piece"]

Piece: TypeAlias = tuple[int, int]
"""Where a piece of shared memory begins, and its size."""


class MirrorStream(StreamCore):
    """What the program knows of one stream."""

    __slots__ = ("acked", "landing", "loan", "owed", "wanted", "written")

    def __init__(self, stream_id: int) -> None:
        super().__init__(stream_id, ReceivePart(stream_id))
        self.written = 0
        self.acked = 0
        """Bytes that the peer has acknowledged, as far as the process has told."""
        self.wanted: int | None = None
        """With how many unacknowledged bytes the process is to tell."""
        self.owed = 0
        """Bytes that were consumed, and that the process has not been told of."""
        self.loan: Loan | None = None
        self.landing: Landing | None = None


class Loan:
    """Memory that was lent to a stream, on its way into pieces of shared memory."""

    def __init__(
        self,
        stream: MirrorStream,
        view: memoryview,
        is_intact: Callable[[], bool],
        code: int,
    ) -> None:
        self.view = view
        self.is_intact = is_intact
        self.code = code
        self.start = stream.written
        self.stop = stream.written + len(view)
        self.fed = self.start
        self.pieces: deque[tuple[int, Piece]] = deque()
        """Those in use, each with the offset where it ends."""
        self.is_spoiled = False
        self.is_finished = False
        self._stream = stream

    @property
    def unacknowledged(self) -> int:
        """Bytes written to the stream that the peer has not acknowledged."""
        return self._stream.written - self._stream.acked

    def drop(self) -> list[Piece]:
        """Let go of the memory; return the pieces that the process may still read."""
        pieces = [piece for _, piece in self.pieces]
        self.pieces.clear()
        self.fed = self.stop
        self.forget_view()
        return pieces

    def forget_view(self) -> None:
        """Let go of the memory, all of which has been read, or will not be."""
        self.view = memoryview(b"")
        self.is_intact = _is_intact


class Landing:
    """Pieces of shared memory that are to be filled with a stream's next bytes."""

    def __init__(self, posted: int, stop: int) -> None:
        self.posted = posted
        """The offset up to which there are pieces."""
        self.stop = stop
        self.pieces: deque[tuple[int, int, Piece]] = deque()
        """Each with the offsets where it begins and ends."""
        self.is_inline = False
        """Whether bytes come in records meanwhile, as there was no room."""


def _is_intact() -> bool:
    return True
