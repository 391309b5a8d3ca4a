"""What every move has: progress, deadlines, and a way to go on after a broken link."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import anyio
import torch

from auth import MeshError
from tensor_bridge.codec import TensorMeta
from tensor_bridge.landing_memory import LandingMemory
from tensor_bridge.memory import allocate, tensor_bytes
from transport import (
    Backoff,
    CborValue,
    ConnectionClosed,
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
    Stream,
    StreamReset,
)
from transport.deadlines import seconds_of

__all__ = [
    "BROKEN",
    "INTERRUPTED",
    "Landing",
    "Meter",
    "MoveLimits",
    "Progress",
    "ProgressCallback",
    "deadline",
    "persist",
    "receive_message",
    "settle",
    "while_wanted",
]

T = TypeVar("T")

PATIENCE = 4.0
"""Seconds after a link broke, without a byte landing, until a move is given up. Longer than the
liveness bound, within which the other side may still believe in the link."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two tries."""

BROKEN = (StreamReset, PeerLost, ConnectionClosed)
"""How a link breaks under a move, as opposed to a peer that refuses it."""

INTERRUPTED = (PeerLost, ConnectionClosed, DeadlineExceeded)
"""How a move ends that its other side may want to take up again. Any other error of the stream says
that it has given up, or that there is nothing to go on with."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoveLimits:
    """Times, in seconds, that a node allows moves.

    Attributes:
        stall: for 256 KiB of progress; beyond, the move fails.
        resume: for an interrupted arrival to be taken up again before its memory is given back.
        total: for one stream of a move, however fast it goes.
        linger: for a peer without connection to come back before its tensors are deleted.
    """

    stall: float = 30.0
    resume: float = 30.0
    total: float = 3600.0
    linger: float = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far a move is.

    Attributes:
        moved: bytes that have left here, or have arrived, those before an interruption included.
        total: bytes in all.
        seconds: time since the move began.
    """

    moved: int
    total: int
    seconds: float


ProgressCallback = Callable[[Progress], object]
"""Called from the event loop after each part of a move; must not block."""


class Meter:
    """Counts a move's bytes over all its tries, and reports them."""

    def __init__(self, total: int, report: ProgressCallback | None) -> None:
        self.landed = 0
        """Bytes known to have arrived."""
        self._moved = 0
        self._total = total
        self._report = report
        self._began = anyio.current_time()

    def resume(self, offset: int) -> None:
        """Go on from `offset`, which the receiver has named."""
        self.landed = self._moved = offset

    def sent(self, nbytes: int) -> None:
        """Count bytes that have left, and may or may not arrive."""
        self._moved += nbytes
        self._tell()

    def arrived(self, moved: int) -> None:
        """Set how many bytes in all have arrived."""
        self.landed = self._moved = moved
        self._tell()

    def _tell(self) -> None:
        if self._report is not None:
            seconds = anyio.current_time() - self._began
            self._report(Progress(self._moved, self._total, seconds))


class Landing:
    """Memory that a tensor's bytes land in, allocated once and as late as can be; how many have.

    Args:
        meta: what lands.
        memory: where from.
        moved: told how many bytes have landed.

    Attributes:
        meta: what lands.
        moved: bytes that have landed, from the start and without a gap.
        version: the source's version that they are of, None before the first try.
    """

    def __init__(
        self,
        meta: TensorMeta,
        memory: LandingMemory,
        moved: Callable[[int], object] | None = None,
    ) -> None:
        self.meta = meta
        self.moved = 0
        self.version: int | None = None
        self._memory = memory
        self._tensor: torch.Tensor | None = None
        self._tell = moved

    @property
    def tensor(self) -> torch.Tensor:
        """Where it lands; its content is meaningless until the last byte.

        Raises:
            QuotaExceeded: it is allocated now, and this machine has no room for it.
        """
        if self._tensor is None:
            self._tensor = self._memory.allocate(self.meta)
        return self._tensor

    def allocate(self) -> None:
        """Have memory now. Raises as `tensor`."""
        self.room  # noqa: B018

    @property
    def nbytes(self) -> int:
        """How many bytes are still to come."""
        return self.meta.nbytes - self.moved

    @property
    def room(self) -> memoryview:
        """Memory for the bytes that are still to come. Raises as `tensor`."""
        return tensor_bytes(self.tensor)[self.moved :]

    def adopt(self, storage: torch.UntypedStorage) -> None:
        """Take memory that holds all of the bytes already, in place of what was allocated."""
        self._tensor = allocate(self.meta, storage)

    def advance(self, nbytes: int) -> None:
        """Count `nbytes` more as landed."""
        self.moved += nbytes
        if self._tell is not None:
            self._tell(self.moved)


@contextlib.contextmanager
def deadline(
    seconds: float, what: str, *, peer: object, stage: str | None = None, why: str
) -> Iterator[None]:
    """Raise `DeadlineExceeded` if the block takes longer than `seconds`, which somebody gives."""
    with anyio.move_on_after(seconds_of(seconds)) as scope:
        yield
    if scope.cancelled_caught:
        raise DeadlineExceeded(
            what,
            peer=peer,
            stage=stage,
            after=seconds,
            why=why,
            fix="Give it more time, or look whether the peer and the way to it are overloaded.",
        )


async def persist(
    attempt: Callable[[], Awaitable[T]],
    *,
    landed: Callable[[], int],
    aftermath: tuple[type[MeshError], ...] = (),
    resumable: Callable[[], bool] = lambda: True,
) -> T:
    """Run `attempt` until it returns, as often as the link breaks, as long as bytes land.

    Args:
        attempt: takes the move up where it is.
        landed: how many bytes have landed so far.
        aftermath: errors that count as a broken link too once the link has broken: what the other
            side may answer until it has noticed.
        resumable: whether there is a way to the other side, asked after each break.

    Raises:
        MeshError: what the last try raised, if it was no broken link, or if nothing has landed for
            `PATIENCE` since the link broke.
    """
    quiet_since: float | None = None
    backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
    while True:
        before = landed()
        try:
            return await attempt()
        except MeshError as error:
            broken = BROKEN if quiet_since is None else BROKEN + aftermath
            if not isinstance(error, broken) or not resumable():
                raise
            now = anyio.current_time()
            if quiet_since is None or landed() > before:
                quiet_since = now
                backoff.reset()
            elif now - quiet_since > PATIENCE:
                raise
        await anyio.sleep(backoff.pause())


async def receive_message(stream: Stream) -> CborValue:
    """Return the next message of `stream`, where one must come.

    Raises:
        StreamReset: the other side ended the stream instead.
    """
    try:
        return await stream.receive_message()
    except anyio.EndOfStream:
        raise StreamReset(
            "move of a tensor", peer=stream.peer, why="the other side ended the stream early"
        ) from None


async def settle(stream: Stream) -> None:
    """Wait until the other side has taken the last that was said to it.

    It ends its direction of the stream then. If it resets it instead, because it was cancelled
    meanwhile, nobody knows of what was said, and it is to be undone.

    Raises:
        MeshError: it has given up; or if of ``INTERRUPTED``, nobody can tell.
    """
    try:
        await stream.receive(1)
    except anyio.EndOfStream:
        return
    raise ProtocolError("the end of a move", peer=stream.peer, why="more came than it ends with")


@contextlib.contextmanager
def while_wanted(stream: Stream, what: str) -> Iterator[None]:
    """Cancel the block when the other side gives the stream up or is gone.

    Raises:
        StreamReset: it has given up.
        MeshError: how the connection ended.
    """
    with anyio.CancelScope() as scope:
        stream.on_abandoned(scope.cancel)
        try:
            yield
        finally:
            stream.on_abandoned(None)
    if scope.cancelled_caught:
        stream.connection.raise_if_closed(what, "work")
        raise StreamReset(what, peer=stream.peer, why="the peer gave it up")
