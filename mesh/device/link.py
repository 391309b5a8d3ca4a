"""Frames in both directions that survive the streams they travel on.

Each frame has a number and is kept until the other side has said that it has come. When a stream
broke, the two sides tell each other on the next one how far they got and go on from there, so that
no frame is lost and none is taken twice::

    u32 length, u64 number of this frame, u64 number of the last frame that has come, payload

A frame without payload and number only says the latter. A numbered frame without payload is the
last: whoever sends it is done.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Awaitable, Callable

import anyio

from auth import MeshError
from mesh.errors import UnknownPeer
from mesh.tasks import helpers
from transport import (
    ConnectionClosed,
    DeadlineExceeded,
    IdentityInUse,
    PeerLost,
    ProtocolError,
    Stream,
    StreamReset,
    Unreachable,
)

__all__ = ["BROKEN", "Link"]

BROKEN = (
    *(PeerLost, ConnectionClosed, StreamReset, DeadlineExceeded),
    *(Unreachable, UnknownPeer, IdentityInUse),
)
"""How a stream breaks, or another can't be opened yet: nobody has given the session up. A peer that
still believes in a connection of before takes one from another address for a theft of the key."""

MAX_FRAME = (1 << 20) + 64
"""Bytes of a payload: a batch or an answer."""

WINDOW = 8 << 20
"""Bytes kept until the other side has them; who posts more waits."""

ACK_BYTES, ACK_FRAMES = 1 << 18, 32
"""What has come since the last word about it before a word is said for its own sake."""

_HEADER = struct.Struct("<IQQ")


class Link:
    """One end. Not for several threads: the event loop that carries it owns it.

    Args:
        take: is given each payload, in order and once; the next is read when it returns.

    Attributes:
        received: number of the last frame that has come.
        is_ended: whether the other side is done.
    """

    def __init__(self, take: Callable[[bytearray], Awaitable[None]]) -> None:
        self.received = 0
        self.is_ended = False
        self._take = take
        self._sent = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        """How many of the frames kept have been written to the present stream."""
        self._acknowledged = 0
        self._come_bytes = 0
        self._changed = anyio.Event()

    @property
    def backlog(self) -> int:
        """Bytes that the other side has not said to have."""
        return self._kept_bytes

    async def post(self, payload: bytes) -> None:
        """Have a payload delivered; return when it is in the window. Empty, it is the last."""
        while self._kept_bytes >= WINDOW:
            await self._change()
        self._sent += 1
        self._kept.append((self._sent, payload))
        self._kept_bytes += len(payload)
        self._wake()

    async def delivered(self) -> None:
        """Return once the other side has all that was posted."""
        while self._kept:
            await self._change()

    async def carry(self, stream: Stream, received: int) -> None:
        """Exchange frames on `stream` until the other side is done.

        Args:
            stream: past its opening.
            received: what the other side has said in it to have.

        Raises:
            ProtocolError: the other side has what was never sent, or breaks the form.
            MeshError: how the stream broke; `carry` can go on over another.
        """
        self._forget(received)
        self._next = 0
        self._acknowledged = self.received
        stream.timeout = math.inf  # a program may compute, or think, for hours
        failure: MeshError | None = None
        async with helpers() as tasks:

            async def write() -> None:
                nonlocal failure
                try:
                    await self._write(stream)
                except MeshError as error:
                    failure = error
                    tasks.cancel_scope.cancel()

            tasks.start_soon(write)
            await self._read(stream)
        if failure is not None:
            raise failure

    async def _read(self, stream: Stream) -> None:
        while not self.is_ended:
            try:
                head = await stream.receive_exactly(_HEADER.size)
            except ProtocolError as error:
                raise StreamReset(
                    "a session with a device", peer=stream.peer, why="the other side ended it"
                ) from error
            length, number, received = _HEADER.unpack(head)
            if length > MAX_FRAME:
                raise _bad(f"a frame of {length} bytes, and at most {MAX_FRAME} are accepted")
            payload = bytearray(length)
            if length:
                await stream.receive_into(memoryview(payload))
            self._forget(received)
            if number == 0 or number <= self.received:
                continue
            if number != self.received + 1:
                raise _bad("a frame is missing")
            await self._take(payload)
            self.received = number
            self._come_bytes += length
            self.is_ended = not length
            if self._owes_word():
                self._wake()

    async def _write(self, stream: Stream) -> None:
        while True:
            while self._next < len(self._kept):
                number, payload = self._kept[self._next]
                self._next += 1
                self._acknowledged, self._come_bytes = self.received, 0
                await stream.send(
                    b"".join((_HEADER.pack(len(payload), number, self.received), payload))
                )
            if self._owes_word():
                self._acknowledged, self._come_bytes = self.received, 0
                await stream.send(_HEADER.pack(0, 0, self.received))
                continue
            await self._change()

    def _owes_word(self) -> bool:
        frames = self.received - self._acknowledged
        return (
            frames >= ACK_FRAMES or self._come_bytes >= ACK_BYTES or (self.is_ended and frames > 0)
        )

    def _forget(self, received: int) -> None:
        """Let go of the frames up to `received`, which the other side has."""
        if received > self._sent:
            raise _bad("the other side has frames that were never sent")
        changed = False
        while self._kept and self._kept[0][0] <= received:
            _, payload = self._kept.popleft()
            self._kept_bytes -= len(payload)
            self._next = max(0, self._next - 1)
            changed = True
        if changed:
            self._wake()

    def _wake(self) -> None:
        event, self._changed = self._changed, anyio.Event()
        event.set()

    async def _change(self) -> None:
        await self._changed.wait()


def _bad(why: str) -> ProtocolError:
    return ProtocolError("a session with a device", why=why)
