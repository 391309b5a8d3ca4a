"""The lane between two nodes of one process: one copy, from the one's memory to the other's.

That both are here is proved by what the handshake has proved already: the peer's boot id, drawn at
random by its endpoint and told to its peers alone, is that of an endpoint in this process. Where to
read from passes through a table of the process, under a key that the sender draws for the move and
tells on its stream; the receiver tells there how much it has read. The two may live in event loops
and threads of their own.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

import anyio
import anyio.lowlevel

from tensor_bridge.lanes.lane import Place
from tensor_bridge.lanes.stalls import Stalls
from tensor_bridge.memory import Payload
from tensor_bridge.moves import receive_message
from tensor_bridge.wire import LENT_KEY_BYTES, Lent, Moved
from transport import Connection, Endpoint, ProtocolError, Stream

__all__ = ["LocalLane", "is_here", "note"]

PIECE = 1 << 20
"""Bytes copied before others on the event loop have their turn: a fifth of a millisecond."""

MOST_UNTOLD = 64 << 20
"""The sender is told how far the receiver is after the first piece, then after twice as much more,
and so on up to this: a message takes as long as to copy megabytes."""


class LocalLane:
    """The move that was agreed on a stream between two nodes of this process.

    Args:
        stream: where the move was agreed on.
        stall_seconds: how long `CHUNK_BYTES` may take.
    """

    name = "in-process"

    def __init__(self, stream: Stream, *, stall_seconds: float) -> None:
        self._stream = stream
        self._stall_seconds = stall_seconds

    async def send(self, payload: Payload, moved: Callable[[int], object]) -> None:
        """Let the receiver read `payload`; return when it has read all of it.

        Raises:
            DeadlineExceeded: no progress.
            MeshError: the receiver has given up, or the connection is gone.
        """
        nbytes, read = payload.nbytes, 0
        if not nbytes:
            return
        key, loan = os.urandom(LENT_KEY_BYTES), _Loan(payload)
        stalls = Stalls(self._stall_seconds, moved)
        _loans[key] = loan
        try:
            with stalls.scope:
                await self._stream.send_message(Lent(key).encode())
                while read < nbytes:
                    before, read = read, Moved.decode(await receive_message(self._stream)).nbytes
                    if not before < read <= nbytes:
                        raise self._broken("it has read what is not there")
                    stalls.progressed(read - before)
        finally:
            del _loans[key]
            loan.end()
        if stalls.scope.cancelled_caught:
            raise stalls.error(self._stream.peer, "send")

    async def receive(self, place: Place) -> None:
        """Copy the sender's bytes to their place.

        Raises:
            TensorChanged: the sender's memory was resized or replaced meanwhile.
            DeadlineExceeded: no progress.
            MeshError: the sender has given up, or the connection is gone.
        """
        if not place.nbytes:
            return
        stalls = Stalls(self._stall_seconds, place.advance)
        with stalls.scope:
            await self._read(place, stalls.progressed)
        if stalls.scope.cancelled_caught:
            raise stalls.error(self._stream.peer, "receive")

    async def _read(self, place: Place, moved: Callable[[int], object]) -> None:
        loan = _loans.get(Lent.decode(await receive_message(self._stream)).key)
        nbytes, read, told, step = place.nbytes, 0, 0, PIECE
        if loan is not None and loan.nbytes != nbytes:
            raise self._broken("its memory is not as long as the move")
        room = place.room
        while read < nbytes:
            size = 0 if loan is None else loan.read_into(room[read:])
            if not size:  # it was given up there, which is about to be said
                await receive_message(self._stream)
                raise self._broken("memory that is not there")
            read += size
            moved(size)
            if read == nbytes or read - told >= step:
                await self._stream.send_message(Moved(read).encode())
                told, step = read, min(2 * step, MOST_UNTOLD)
            else:
                await anyio.lowlevel.checkpoint()

    def _broken(self, why: str) -> ProtocolError:
        return ProtocolError("move of a tensor", peer=self._stream.peer, why=why)


class _Loan:
    """A payload that another thread may read, until its owner says that it is over."""

    def __init__(self, payload: Payload) -> None:
        self.nbytes = payload.nbytes
        self._lock = threading.Lock()
        self._is_over = False
        self._pieces = payload.spans(PIECE)

    def read_into(self, room: memoryview) -> int:
        """Copy the next piece to the beginning of `room`; return its size, 0 if it is over.

        Raises:
            TensorChanged: its memory was resized or replaced meanwhile.
        """
        with self._lock:
            piece = None if self._is_over else next(self._pieces, None)
            if piece is None:
                return 0
            room[: len(piece)] = piece
            return len(piece)

    def end(self) -> None:
        """Have nothing of it read any more from here on."""
        with self._lock:
            self._is_over = True
            self._pieces.close()


_loans: dict[bytes, _Loan] = {}
"""What may be read, by the key that the sender tells the receiver."""

_endpoints: weakref.WeakValueDictionary[bytes, Endpoint] = weakref.WeakValueDictionary()
"""The endpoints of this process that take this lane, by their boot ids."""


def note(endpoint: Endpoint) -> None:
    """Take note that an endpoint is in this process, and takes this lane."""
    _endpoints[endpoint.boot] = endpoint


def is_here(connection: Connection) -> bool:
    """Whether the peer of `connection` is in this process, too, and takes this lane."""
    there = _endpoints.get(connection.remote_boot)
    return there is not None and there.node_id == connection.peer.node_id


def _forget() -> None:
    _endpoints.clear()  # they are in the process that this one was forked from
    _loans.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
