"""The lane that is always there: the stream on which the move was agreed."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from tensor_bridge.errors import TensorChanged
from tensor_bridge.lanes.lane import Place
from tensor_bridge.lanes.stalls import Stalls
from tensor_bridge.memory import Payload
from transport import BufferGone, Stream, StreamReset

__all__ = ["QuicLane"]

LEND_BYTES = 1 << 16
"""From this size on, memory is lent to the stream: below, a copy costs less than to wait for the
acknowledgement."""


class QuicLane:
    """Bytes in the stream itself, behind its messages.

    Args:
        stream: where the move was agreed on.
        stall_seconds: how long `CHUNK_BYTES` may take.
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
        whole, stalls = payload.whole(), Stalls(self._stall_seconds, moved)
        try:
            with stalls.scope:
                if whole is not None and len(whole) >= LEND_BYTES:
                    await self._stream.send_lent(
                        whole, is_intact=payload.is_intact, moved=stalls.progressed
                    )
                    return
                for piece in payload.pieces():
                    await self._stream.send(piece)
                    stalls.progressed(len(piece))
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
        if stalls.scope.cancelled_caught:
            raise stalls.error(self._stream.peer, "send")

    async def receive(self, place: Place) -> None:
        """Fill the room; bytes go from the packets they come in straight to their place.

        Raises:
            DeadlineExceeded: no progress.
            MeshError: the peer or the stream is gone.
        """
        stalls = Stalls(self._stall_seconds, place.advance)
        with stalls.scope:
            await self._stream.receive_into(place.room, stalls.progressed)
        if stalls.scope.cancelled_caught:
            raise stalls.error(self._stream.peer, "receive")
