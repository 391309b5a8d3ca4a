"""One move's bytes over a link: on their way in, and on their way out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from tensor_bridge.lanes.shared.protocol import Arrivals
from tensor_bridge.lanes.shared.sealed import SealedMemory, map_sealed
from transport import ProtocolError

if TYPE_CHECKING:
    from tensor_bridge.lanes.shared.link import Link

__all__ = ["BYTES_A_TURN", "Landing", "Sending"]

BYTES_A_TURN = 4 << 20
"""Bytes copied before others on the event loop have their turn: some 0.6 ms of work."""


class Landing:
    """One move's bytes on their way in. Made by `Link.landing`."""

    def __init__(self, link: Link, sealed_bytes: int | None = None) -> None:
        self.arrivals = Arrivals()
        self._link = link
        self._room = memoryview(b"")
        self._moved: Callable[[int], object] | None = None
        self._over = anyio.Event()
        self._error: Exception | None = None
        self._sealed: SealedMemory | None = None
        self._sealed_bytes = sealed_bytes
        self._descriptor: int | None = None
        """Of sealed memory that came before anybody has said what it has to be."""

    @property
    def has_sealed(self) -> bool:
        """Whether the memory that `take_sealed` would wait for is here, and mapped."""
        return self._sealed is not None

    async def take_sealed(self, nbytes: int) -> SealedMemory:
        """Wait for memory that holds all of the move's `nbytes`, and return it.

        Raises:
            ConnectionClosed: the link has ended.
        """
        self._sealed_bytes = nbytes
        if self._descriptor is not None:
            with self._link.checking():
                self._map(self._descriptor)
            self.close()
        if self._sealed is None:
            await self._over.wait()
        self._link.check()
        memory, self._sealed = self._sealed, None
        assert memory is not None
        return memory

    def hand(self, descriptor: int) -> None:
        """Take the memory that has come for the move.

        Raises:
            ProtocolError: it is not as it must be, or not the first.
        """
        if self._descriptor is not None or self._over.is_set():
            raise ProtocolError("shared memory", why="memory for a move that has some")
        if self._sealed_bytes is None:
            self._descriptor = os.dup(descriptor)
        else:
            self._map(descriptor)

    def _map(self, descriptor: int) -> None:
        assert self._sealed_bytes is not None
        self._sealed = map_sealed(descriptor, self._sealed_bytes)
        self._sealed.keep(descriptor)
        self._over.set()

    def close(self) -> None:
        """Let go of what nobody has taken."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    async def fill(self, room: memoryview, moved: Callable[[int], object]) -> None:
        """Fill `room` with what has come and what comes, and tell `moved` of each part.

        Raises:
            ConnectionClosed: the link has ended, or ends now: more has come than there is room.
            Exception: what `moved` has raised.
        """
        with self._link.checking():
            self.arrivals.open(len(room))
        self._room, self._moved = room, moved
        try:
            while self.copy(BYTES_A_TURN) >= BYTES_A_TURN:
                await anyio.lowlevel.checkpoint()
            if len(self._room) and self._error is None:
                await self._over.wait()
        finally:
            self._room, self._moved = memoryview(b""), None
        if self._error is not None:
            raise self._error

    def copy(self, most: int) -> int:
        """Copy what has come to its place if that is known yet, up to about `most` bytes.

        Called as packets come, by whoever takes them: to wake the move for each of its slots would
        take about as long as to copy them. Returns how many bytes it were.
        """
        done = 0
        if self._moved is None or self._error is not None:
            return done
        try:
            while done < most and (message := self.arrivals.next()) is not None:
                self._link.copy_out(message, self._room[: message.length])
                self._room = self._room[message.length :]
                done += message.length
                self._moved(message.length)
        except Exception as error:
            self._error = error
            self._over.set()
        if not len(self._room):
            self._over.set()
        return done


class Sending:
    """One move's bytes on their way out, slot by slot.

    Args:
        move: what it is called.
        pieces: the bytes, in parts of at most a slot; what asking for them raises, ends it.
        nbytes: how many they are.
        moved: told of each part that has left.
    """

    def __init__(
        self,
        move: int,
        pieces: Iterator[memoryview],
        nbytes: int,
        moved: Callable[[int], object],
    ) -> None:
        self.move = move
        self.left = nbytes
        self.over = anyio.Event()
        self.error: Exception | None = None
        self._pieces = pieces
        self._moved = moved

    def send_next(self, send: Callable[[memoryview, int], object]) -> int:
        """Send one part; return its size, 0 if that has failed."""
        try:
            piece = next(self._pieces)
            send(piece, self.move)
            self.left -= len(piece)
            self._moved(len(piece))
        except Exception as error:
            self.error = error
            self.left = 0
            return 0
        return len(piece)
