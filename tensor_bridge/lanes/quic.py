"""The lane that is always there: the stream on which the move was agreed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import anyio

from tensor_bridge.memory import CHUNK_BYTES
from tensor_bridge.moves import deadline
from transport import Stream, StreamReset

__all__ = ["QuicLane"]


class QuicLane:
    """Bytes in the stream itself, behind its messages.

    Args:
        stream: where the move was agreed on.
        stall_seconds: how long one part of `CHUNK_BYTES` may take. So a peer can't hold memory or a
            token by sending a byte now and then: below 9 kB/s by default, a move fails.
    """

    name = "quic"

    def __init__(self, stream: Stream, *, stall_seconds: float) -> None:
        self._stream = stream
        self._stall_seconds = stall_seconds

    async def send(self, pieces: Iterator[memoryview], moved: Callable[[int], object]) -> None:
        """Send every piece; awaits the stream's credit, so that nothing piles up here.

        Raises:
            DeadlineExceeded: no progress.
            MeshError: the peer or the stream is gone.
        """
        for piece in pieces:
            with self._progress("send"):
                try:
                    await self._stream.send(piece)
                except anyio.BrokenResourceError as error:
                    raise StreamReset(
                        "move of a tensor",
                        peer=self._stream.peer,
                        stage="send",
                        why="the receiver ended the stream before the last byte",
                    ) from error
            moved(len(piece))

    async def receive(self, room: memoryview, moved: Callable[[int], object]) -> None:
        """Fill `room`; bytes go from the stream's receive buffer straight to their place.

        Raises:
            DeadlineExceeded: no progress.
            MeshError: the peer or the stream is gone.
        """
        for start in range(0, len(room), CHUNK_BYTES):
            part = room[start : start + CHUNK_BYTES]
            with self._progress("receive"):
                await self._stream.receive_into(part)
            moved(len(part))

    def _progress(self, stage: str) -> AbstractContextManager[None]:
        return deadline(
            self._stall_seconds,
            "move of a tensor",
            peer=self._stream.peer,
            stage=stage,
            why=f"no progress of {CHUNK_BYTES} bytes",
        )
