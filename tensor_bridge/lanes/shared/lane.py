"""One move's bytes by way of shared memory, slot by slot."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import torch

from tensor_bridge.codec import TensorMeta
from tensor_bridge.copying import copy_in_turns
from tensor_bridge.errors import TensorChanged
from tensor_bridge.lanes.lane import Place
from tensor_bridge.lanes.shared.link import Link
from tensor_bridge.lanes.shared.sealed import Writer, kept_memory, sealed_memory
from tensor_bridge.lanes.shared.underway import Landing
from tensor_bridge.lanes.stalls import Stalls
from tensor_bridge.memory import Payload, allocate
from transport import AppCode, ConnectionClosed, ProtocolError, Stream, StreamReset

__all__ = ["SealedLane", "SharedLane", "sealed_copy", "sealed_descriptor", "sealed_snapshot"]


PIECE = 1 << 20
"""Bytes written before others on the event loop have their turn: about half a millisecond."""

_log = logging.getLogger("quicmesh.tensors")


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

    async def receive(self, place: Place) -> None:
        """Copy what comes to its place, once, and give the slots back.

        Raises:
            DeadlineExceeded: no progress.
            ConnectionClosed: the link is gone, or the connection.
            MeshError: the sender has given up.
        """
        await self._attend("receive", place.advance, functools.partial(self._receive, place))

    async def _send(self, payload: Payload, moved: Callable[[int], object]) -> None:
        parts = payload.spans(self._link.slot_bytes)
        await self._link.send(self._stream.stream_id, parts, payload.nbytes, moved)

    async def _receive(self, place: Place, moved: Callable[[int], object]) -> None:
        assert self._landing is not None
        await self._landing.fill(place.room, moved)

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


class SealedLane(SharedLane):
    """The move of a tensor that is sealed memory and nothing else: its descriptor is handed over.

    Takes the arguments of `SharedLane`.
    """

    name = "sealed-memory"

    async def _send(self, payload: Payload, moved: Callable[[int], object]) -> None:
        # As it was when this was agreed on: what is written to it meanwhile does not show.
        descriptor = payload.sealed_by(kept_memory)
        if descriptor is None:
            raise TensorChanged("hand-over of a tensor", why="its memory was replaced meanwhile")
        self._link.hand_over(descriptor, self._stream.stream_id)
        moved(payload.nbytes)

    async def _receive(self, place: Place, moved: Callable[[int], object]) -> None:
        assert self._landing is not None
        nbytes = place.nbytes
        memory = await self._landing.take_sealed(nbytes)
        place.adopt(memory.storage)
        moved(nbytes)


async def sealed_copy(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return a copy of `tensor` in sealed memory, which `SealedLane` can hand over.

    It is `tensor` itself if that is in such memory, or if there is none to be had.

    Raises:
        TensorChanged: its memory was resized or replaced meanwhile.
    """
    payload = Payload(tensor, meta)
    if payload.sealed_by(sealed_memory) is not None:
        return tensor
    try:
        with contextlib.closing(Writer(meta.nbytes)) as writer:
            await _write(writer, payload)
            return allocate(meta, writer.seal().storage)
    except OSError as error:
        _log.warning("no memory to hand over: %s", error.strerror)
        return tensor


async def sealed_descriptor(tensor: torch.Tensor, meta: TensorMeta) -> int:
    """Return a descriptor, the caller's to close, of sealed memory with the bytes of `tensor`.

    Raises:
        TensorChanged: its memory was resized or replaced meanwhile.
        OSError: the system has no such memory, or no more.
    """
    payload = Payload(tensor, meta)
    there = payload.sealed_by(sealed_memory)
    if there is not None:
        return os.dup(there)
    with contextlib.closing(Writer(meta.nbytes)) as writer:
        await _write(writer, payload)
        return writer.give()


async def _write(writer: Writer, payload: Payload) -> None:
    whole = payload.whole()
    if whole is not None:
        with writer.mapped() as room:
            await copy_in_turns(
                room, whole, lambda _: None, is_intact=payload.is_intact, fresh=len(room)
            )
        return
    for piece in payload.spans(PIECE):
        writer.write(piece)
        await anyio.lowlevel.checkpoint()


def sealed_snapshot(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return a copy of `tensor`, in sealed memory if there is any; for threads, which may block.

    Raises:
        QuotaExceeded: this machine has no room for it.
    """
    payload = Payload(tensor, meta)
    whole = payload.whole()
    with (
        contextlib.suppress(OSError, AttributeError),
        contextlib.closing(Writer(meta.nbytes)) as writer,
    ):
        if whole is not None:
            writer.fill(whole)
        else:
            for piece in payload.pieces():
                writer.write(piece)
        return allocate(meta, writer.seal().storage)
    return allocate(meta).copy_(tensor.detach())
