"""The lane that is always there: the stream on which the move was agreed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import anyio

from tensor_bridge.errors import TensorChanged
from tensor_bridge.memory import CHUNK_BYTES, Payload
from transport import BufferGone, DeadlineExceeded, Stream, StreamReset

__all__ = ["QuicLane"]

LEND_BYTES = 1 << 16
"""From this size on, memory is lent to the stream: below, a copy costs less than to wait for the
acknowledgement."""


class QuicLane:
    """Bytes in the stream itself, behind its messages.

    Args:
        stream: where the move was agreed on.
        stall_seconds: how long `CHUNK_BYTES` may take. So a peer can't hold memory or a token by
            sending a byte now and then: below 9 kB/s by default, a move fails.
    """

    name = "quic"

    def __init__(self, stream: Stream, *, stall_seconds: float) -> None:
        self._stream = stream
        self._stall_seconds = stall_seconds

    async def send(self, payload: Payload, moved: Callable[[int], object]) -> None:
        """Send `payload`: from where it lies if it can be, else gathered piece by piece.

        Raises:
            TensorChanged: its memory was resized or replaced meanwhile.
            DeadlineExceeded: no progress.
            MeshError: the peer or the stream is gone.
        """
        whole = payload.whole()
        try:
            with self._progress("send", moved) as progressed:
                if whole is not None and len(whole) >= LEND_BYTES:
                    await self._stream.send_lent(
                        whole, is_intact=payload.is_intact, moved=progressed
                    )
                    return
                for piece in payload.pieces():
                    await self._stream.send(piece)
                    progressed(len(piece))
        except BufferGone as error:
            raise TensorChanged(
                "reading of a tensor", why="its storage was resized meanwhile"
            ) from error
        except anyio.BrokenResourceError as error:
            raise StreamReset(
                "move of a tensor",
                peer=self._stream.peer,
                stage="send",
                why="the receiver ended the stream before the last byte",
            ) from error

    async def receive(self, room: memoryview, moved: Callable[[int], object]) -> None:
        """Fill `room`; bytes go from the packets they come in straight to their place.

        Raises:
            DeadlineExceeded: no progress.
            MeshError: the peer or the stream is gone.
        """
        with self._progress("receive", moved) as progressed:
            await self._stream.receive_into(room, progressed)

    @contextlib.contextmanager
    def _progress(
        self, stage: str, moved: Callable[[int], object]
    ) -> Iterator[Callable[[int], object]]:
        """Yield what counts bytes; raise when `CHUNK_BYTES` of them take too long."""
        with anyio.move_on_after(self._stall_seconds) as scope:
            missing = CHUNK_BYTES

            def progressed(count: int) -> None:
                nonlocal missing
                missing -= count
                if missing <= 0:
                    missing = CHUNK_BYTES
                    scope.deadline = anyio.current_time() + self._stall_seconds
                moved(count)

            yield progressed
        if scope.cancelled_caught:
            raise DeadlineExceeded(
                "move of a tensor",
                peer=self._stream.peer,
                stage=stage,
                after=self._stall_seconds,
                why=f"no progress of {CHUNK_BYTES} bytes",
                fix="Give it more time, or look whether the peer and the way to it are overloaded.",
            )
