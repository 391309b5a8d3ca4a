"""One move's bytes by way of shared memory, slot by slot."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterator

import anyio

from tensor_bridge.errors import TensorChanged
from tensor_bridge.lanes.shared.link import Landing, Link
from tensor_bridge.lanes.stalls import Stalls
from tensor_bridge.memory import Payload
from transport import AppCode, ConnectionClosed, ProtocolError, Stream, StreamReset

__all__ = ["SharedLane"]


class SharedLane:
    """The move that was agreed on a stream, over the link of that stream's connection.

    Whoever gives the move up says so on the stream. If it is the link that breaks, the move ends as
    if the connection had, so that it is taken up again, by then over QUIC.

    Args:
        stream: where the move was agreed on.
        link: the way between the two processes.
        landing: where the link keeps what comes; None for the sender.
        stall_seconds: how long `CHUNK_BYTES` may take.
    """

    name = "shared-memory"

    def __init__(
        self, stream: Stream, link: Link, landing: Landing | None, *, stall_seconds: float
    ) -> None:
        self._stream = stream
        self._link = link
        self._landing = landing
        self._stall_seconds = stall_seconds

    async def send(self, payload: Payload, moved: Callable[[int], object]) -> None:
        """Copy `payload` into the slots as they become free; return when the last is lent.

        Raises:
            TensorChanged: its memory was resized or replaced meanwhile.
            DeadlineExceeded: no progress.
            ConnectionClosed: the link is gone, or the connection.
            MeshError: the receiver has given up.
        """
        await self._attend("send", moved, functools.partial(self._send, payload))

    async def receive(self, room: memoryview, moved: Callable[[int], object]) -> None:
        """Copy what comes to its place, once, and give the slots back.

        Raises:
            DeadlineExceeded: no progress.
            ConnectionClosed: the link is gone, or the connection.
            MeshError: the sender has given up.
        """
        await self._attend("receive", moved, functools.partial(self._receive, room))

    async def _send(self, payload: Payload, moved: Callable[[int], object]) -> None:
        pieces = _pieces(payload, self._link.slot_bytes)
        await self._link.send(self._stream.stream_id, pieces, payload.nbytes, moved)

    async def _receive(self, room: memoryview, moved: Callable[[int], object]) -> None:
        assert self._landing is not None
        await self._landing.fill(room, moved)

    async def _attend(
        self,
        stage: str,
        moved: Callable[[int], object],
        work: Callable[[Callable[[int], object]], Awaitable[None]],
    ) -> None:
        """Do `work` unless it stalls, the link ends, or the other side leaves the stream."""
        stalls, is_abandoned = Stalls(self._stall_seconds, moved), False

        def abandoned() -> None:
            nonlocal is_abandoned
            is_abandoned = True
            stalls.scope.cancel()

        try:
            with stalls.scope, self._link.watched(stalls.scope.cancel):
                self._stream.on_abandoned(abandoned)
                try:
                    await work(stalls.progressed)
                finally:
                    self._stream.on_abandoned(None)
            if stalls.scope.cancelled_caught:
                self._stream.connection.raise_if_closed("move of a tensor", stage)
                self._link.look()
                if is_abandoned:
                    await self._raise_end(stage)
                if stage == "send" and self._link.is_starved:
                    self._link.end("it gives no slot back")
                raise stalls.error(self._stream.peer, stage)
        except ConnectionClosed:
            # What the other side is told then is no failure, but that the way is gone.
            self._stream.reset(AppCode.LEFT)
            raise

    async def _raise_end(self, stage: str) -> None:
        """Raise how the other side has ended the stream."""
        try:
            await self._stream.receive(1)
        except anyio.EndOfStream:
            raise StreamReset(
                "move of a tensor",
                peer=self._stream.peer,
                stage=stage,
                why="the other side ended the stream before the last byte",
            ) from None
        raise ProtocolError(
            "move of a tensor", peer=self._stream.peer, why="a message amid the bytes"
        )


def _pieces(payload: Payload, size: int) -> Iterator[memoryview]:
    """Cut a payload that lies in one span into parts of `size`; gather any other piece by piece."""
    whole = payload.whole()
    if whole is None:
        for piece in payload.pieces():
            yield from (piece[start : start + size] for start in range(0, len(piece), size))
        return
    for start in range(0, len(whole), size):
        if not payload.is_intact():
            raise TensorChanged("reading of a tensor", why="its storage was resized meanwhile")
        yield whole[start : start + size]
