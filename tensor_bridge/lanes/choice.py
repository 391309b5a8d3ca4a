"""Which lane a move takes: the opener of its stream offers those there are, the other side chooses.

The services pass on what was offered and chosen, by name, and know no lane but the one that
`choose_lane` gives them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import TypeVar

import anyio
import anyio.lowlevel
import torch

from tensor_bridge.codec import TensorMeta
from tensor_bridge.copying import copy_in_turns
from tensor_bridge.landing_memory import LandingMemory
from tensor_bridge.lanes.lane import Lane, Place
from tensor_bridge.lanes.local import LocalLane, is_here, note
from tensor_bridge.lanes.quic import QuicLane
from tensor_bridge.lanes.shared import Landing, Link, SealedLane, SharedLane, Sharing
from tensor_bridge.lanes.shared.blocks import Block, Loan
from tensor_bridge.lanes.shared.sealed import sealed_memory
from tensor_bridge.memory import Payload
from tensor_bridge.wire import FIRST_MOVE
from tensor_bridge.wire_blocks import FIRST_GIFT
from transport import Connection, Endpoint, ProtocolError, Stream

__all__ = ["NO_LANES", "LaneConfig", "LaneStatus", "Lanes", "Offer", "choose_lane"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaneConfig:
    """What a node's moves may take beside QUIC.

    Attributes:
        shared_memory: share memory with peers that run on the same host, under the same user and in
            the same namespaces. Off, all moves go over QUIC.
        in_process: copy from the memory of peers that are in this very process. Off, they are as
            any other of this host.
        shared_from: bytes of the smallest move that it is used for; smaller ones are faster among
            the messages that they come with.
        max_links: with how many peers at a time; each costs up to 8 MiB here and as much there.
    """

    shared_memory: bool = True
    in_process: bool = True
    shared_from: int = 64 << 10
    max_links: int = 32


@dataclasses.dataclass(frozen=True, slots=True)
class LaneStatus:
    """The lane that a large move with a peer takes, and why no faster one, if there is none."""

    name: str
    reason: str | None = None


class Offer:
    """The lanes that one move may take beside the stream itself.

    Args:
        link: the way through shared memory, if there is one.
        sealed: whether the memory itself may be handed over.
        is_here: whether the peer is in this process, and its memory at hand.
    """

    def __init__(
        self, link: Link | None = None, *, sealed: bool = False, is_here: bool = False
    ) -> None:
        self.link = link
        self._sealed = sealed
        self._is_here = is_here
        self._landing: Landing | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What to offer."""
        if self._is_here:
            return (LocalLane.name,)
        if self.link is None:
            return ()
        return (SealedLane.name, SharedLane.name) if self._sealed else (SharedLane.name,)

    @property
    def best(self) -> str | None:
        """What to choose; None for the stream itself."""
        return next(iter(self.names), None)

    @property
    def brings_memory(self) -> bool:
        """Whether what is best needs no memory to land in."""
        return self.best == SealedLane.name

    @contextlib.contextmanager
    def landing(self, stream: Stream) -> Iterator[None]:
        """Keep for the block what comes of the move before its receiver is ready.

        To be entered before the sender can know what was chosen, and left after the last byte.
        """
        if self.link is None:
            yield
            return
        with self.link.landing(stream.stream_id) as self._landing:
            yield

    def lane(self, stream: Stream, name: str, stall_seconds: float) -> Lane:
        """Return the lane of this name.

        Raises:
            ProtocolError: it was not offered.
        """
        if name in self.names and self._is_here:
            return LocalLane(stream, stall_seconds=stall_seconds)
        if self.link is None or name not in self.names:
            raise ProtocolError(
                "choice of a lane", peer=stream.peer, why=f"{name!r:.40} was not offered"
            )
        kind = SealedLane if name == SealedLane.name else SharedLane
        return kind(stream, self.link, self._landing, stall_seconds=stall_seconds)


class Lanes:
    """The lanes between an endpoint and its peers.

    Args:
        endpoint: whose peers they are. Without one, all moves go over QUIC.
        config: what to use.

    Attributes:
        memory: what comes by them, whichever it is, lands in it.
    """

    def __init__(self, endpoint: Endpoint | None, config: LaneConfig | None = None) -> None:
        self.config = config or LaneConfig()
        self.memory = LandingMemory(None if endpoint is None else endpoint.start_soon)
        self._moves = itertools.count()
        self._sharing: Sharing | None = None
        if endpoint is not None:
            if self._takes_local:
                note(endpoint)
            self._sharing = Sharing(
                endpoint, max_links=self.config.max_links, is_off=not self.config.shared_memory
            )

    async def offer(self, connection: Connection, nbytes: int, *, sealed: bool = False) -> Offer:
        """Return what to offer for a move of `nbytes`; the first large one asks the peer for it.

        With `sealed`, that the memory is handed over itself, too.
        """
        if self._sharing is None or nbytes < max(1, self.config.shared_from):
            return Offer()
        if not sealed and self._is_here(connection):
            return Offer(is_here=True)
        return Offer(await self._sharing.meet(connection), sealed=sealed)

    def answer(
        self, connection: Connection, offered: tuple[str, ...], *, sealed: bool = False
    ) -> Offer:
        """Return what there is here of what the peer has offered.

        The hand-over of memory only with `sealed`.
        """
        if LocalLane.name in offered and self._is_here(connection):
            return Offer(is_here=True)
        if self._sharing is None or SharedLane.name not in offered:
            return Offer()
        sealed = sealed and SealedLane.name in offered
        return Offer(self._sharing.link(connection), sealed=sealed)

    def hand_over(self, connection: Connection, payload: Payload, move: int) -> bool:
        """Hand the memory of a tensor over to the peer, who waits for it as `move`, if it can be.

        Raises:
            ConnectionClosed: the link with the peer ends now.
        """
        link = None if self._sharing is None else self._sharing.link(connection)
        descriptor = payload.sealed_by(sealed_memory)
        if link is None or descriptor is None:
            return False
        link.hand_over(descriptor, move)
        return True

    def give(self, connection: Connection, payload: Payload) -> int | None:
        """Hand the memory of a tensor over to the peer, if it can be; return what to call it then.

        Raises:
            ConnectionClosed: the link with the peer ends now.
        """
        gift = FIRST_GIFT + next(self._moves)
        return gift if self.hand_over(connection, payload, gift) else None

    def given(self, connection: Connection, gift: int, nbytes: int) -> torch.UntypedStorage | None:
        """Return memory of `nbytes` that the peer has handed over; None if it did not come.

        Raises:
            ConnectionClosed: the peer breaks the protocol; the link with it ends.
        """
        link = self._link(connection)
        if link is None:
            return None
        link.take_what_is_there()  # the memory came before the call, on another way
        memory = link.take_gift(gift, nbytes)
        return None if memory is None else memory.storage

    async def take_over(
        self, connection: Connection, nbytes: int, ask: Callable[[int], Awaitable[bool]]
    ) -> torch.UntypedStorage | None:
        """Return memory of `nbytes` that the peer hands over; None if it does not.

        Args:
            connection: with the peer.
            nbytes: its size.
            ask: asks the peer for it as the move of that number; whether it does so.

        Raises:
            ConnectionClosed: the link with the peer has ended.
            MeshError: what `ask` raises.
        """
        offer = await self.offer(connection, nbytes, sealed=True)
        if offer.link is None:
            return None
        move = FIRST_MOVE + next(self._moves)
        with offer.link.landing(move, nbytes) as landing:
            if not await ask(move):
                return None
            if not landing.has_sealed:
                offer.link.take_what_is_there()  # sent before the answer, on another way
            with anyio.CancelScope() as scope, offer.link.watched(scope.cancel):
                return (await landing.take_sealed(nbytes)).storage
        offer.link.check()
        return None

    # -- tensors that lie in blocks

    async def lend(
        self,
        connection: Connection,
        payload: Payload,
        moved: Callable[[int], object],
        ask: Callable[[int, int], Awaitable[T | None]],
    ) -> T | None:
        """Write a tensor to a block of ours and have the peer keep it there.

        Args:
            connection: with the peer.
            payload: all bytes of the tensor.
            moved: told of each part that was written.
            ask: asks the peer, by the number of the block and the name of its lending, what it
                makes of it; None if it does not keep it.

        Returns:
            What `ask` does; None if it did not come to that, for want of a block.

        Raises:
            TensorChanged: the tensor's memory was resized or replaced meanwhile.
            ConnectionClosed: the link with the peer has ended.
            MeshError: what `ask` raises.
        """
        link = self._link(connection)
        if link is None or payload.whole() is None:
            return None
        block = await _written(link, payload, moved)
        if block is None:
            return None
        lend = link.blocks.lend(block, payload.nbytes)
        try:
            kept = await ask(block.number, lend)
        except BaseException:
            link.blocks.drop(block)  # the peer may have it or not
            raise
        if kept is None:
            link.blocks.returned(lend)
        return kept

    @contextlib.asynccontextmanager
    async def lending(
        self, connection: Connection, payloads: Mapping[int, Payload]
    ) -> AsyncIterator[dict[int, tuple[int, int]]]:
        """Write tensors to blocks of ours, for the peer to copy them from there.

        The peer gives each back when it has it, which it has by the end of the context, or loses it
        soon. If the context is left by an error, nobody knows, and none is used again.

        Args:
            connection: with the peer.
            payloads: all bytes of each tensor, by some number of it.

        Yields:
            The number of the block and the name of its lending, by the tensor's number, of those
            that there was a block for.

        Raises:
            TensorChanged, ConnectionClosed: as `lend`.
        """
        link, lent = self._link(connection), dict[int, tuple[int, int]]()
        if link is None:
            yield lent
            return
        try:
            for number, payload in payloads.items():
                block = await _written(link, payload, _ignore)
                if block is not None:
                    lent[number] = block.number, link.blocks.lend(block, payload.nbytes)
            yield lent
        except BaseException:
            for _, lend in lent.values():
                link.blocks.drop_lent(lend)
            raise
        for _, lend in lent.values():
            link.blocks.due(lend)

    async def take_back(
        self,
        connection: Connection,
        place: Place,
        ask: Callable[[], Awaitable[int | None]],
    ) -> bool:
        """Read a tensor of ours that the peer keeps in a block; return whether it does.

        Args:
            connection: with the peer.
            place: where it comes to lie.
            ask: asks the peer for the name of the lending; None if the tensor is in no block.

        Raises:
            MeshError: what `ask` raises.
        """
        link, nbytes = self._link(connection), place.nbytes
        if link is None or not link.blocks.has_lent(nbytes):
            return False
        lend = await ask()
        block = None if lend is None else link.blocks.lent(lend)
        if block is None or block.length != nbytes:
            return False
        block.readers += 1
        try:
            await copy_in_turns(place.room, block.view[:nbytes], place.advance)
        finally:
            block.readers -= 1
        return True

    def borrow(
        self, connection: Connection, block: int, lend: int, meta: TensorMeta
    ) -> Loan | None:
        """Return the tensor that the peer has written to a block of its; None if there is none.

        Raises:
            ConnectionClosed: the peer breaks the protocol; the link with it ends.
        """
        link = self._link(connection)
        if link is None:
            return None
        link.take_what_is_there()  # the block came before the call, on another way
        with link.checking():
            return link.their_blocks.lend(block, lend, meta)

    async def borrowed(
        self, connection: Connection, block: int, lend: int, meta: TensorMeta
    ) -> Loan | None:
        """Return the same, also if much else comes before it, or the link; None if there is none.

        Raises:
            ConnectionClosed: as `borrow`.
        """
        if self._sharing is not None:
            await self._sharing.linked(connection)
        while (link := self._link(connection)) is not None:
            is_more = link.take_what_is_there()
            with link.checking():
                loan = link.their_blocks.lend(block, lend, meta)
            if loan is not None or not is_more:
                return loan
            await anyio.lowlevel.checkpoint()
        return None

    def lent_as(self, connection: Connection, content: object) -> int | None:
        """Return the name of the peer's lending that `content` is, if it is one."""
        link = self._link(connection)
        if link is None or not isinstance(content, Loan) or content.blocks is not link.their_blocks:
            return None
        return content.lend

    def _link(self, connection: Connection) -> Link | None:
        if self._sharing is None or self._is_here(connection):
            return None
        return self._sharing.link(connection)

    # -- what there is

    async def meet(self, connection: Connection) -> None:
        """Have it found out now what there is with the peer, and not by the first large move."""
        if self._sharing is not None:
            await self._sharing.meet(connection)

    def status(self, connection: Connection) -> LaneStatus:
        """Return which lane a large move with the peer takes, as far as that is known."""
        if self._sharing is None:
            return LaneStatus(QuicLane.name)
        if self._is_here(connection):
            return LaneStatus(LocalLane.name)
        if self._sharing.link(connection) is not None:
            return LaneStatus(SharedLane.name)
        why = self._sharing.why_not(connection)
        return LaneStatus(QuicLane.name, why or "no move was large enough so far to ask for more")

    @property
    def _takes_local(self) -> bool:
        return self.config.shared_memory and self.config.in_process

    def _is_here(self, connection: Connection) -> bool:
        return self._takes_local and is_here(connection)


async def _written(link: Link, payload: Payload, moved: Callable[[int], object]) -> Block | None:
    """Write a tensor to a block, and return that; None if there is none. Raises as `Lanes.lend`."""
    link.take_what_is_there()
    block = link.blocks.take(payload.nbytes)
    if block is None:
        return None
    room = block.view[: payload.nbytes]
    try:
        whole = payload.whole()
        if whole is None:
            await _gather(room, payload, moved)
        else:
            fresh = block.nbytes if block.is_fresh else 0
            await copy_in_turns(room, whole, moved, is_intact=payload.is_intact, fresh=fresh)
        link.check()
    except BaseException:
        link.blocks.drop(block)
        raise
    return block


async def _gather(target: memoryview, payload: Payload, moved: Callable[[int], object]) -> None:
    """Copy what does not lie in one span."""
    start = 0
    for piece in payload.pieces():
        target[start : start + len(piece)] = piece
        start += len(piece)
        moved(len(piece))
        await anyio.lowlevel.checkpoint()


def _ignore(_: int) -> None:
    """Progress that nobody waits for."""


NO_LANES = Lanes(None)
"""Everything goes over QUIC."""


def choose_lane(
    stream: Stream, offer: Offer | None = None, name: str | None = None, *, stall_seconds: float
) -> Lane:
    """Return the way for the bytes of the move that was agreed on `stream`.

    Args:
        stream: where it was agreed on; nothing else is sent or read there until the bytes are over.
        offer: what one side offered, or what the other found of that.
        name: what was chosen of it; None for the stream itself.
        stall_seconds: how long 256 KiB may take.

    Raises:
        ProtocolError: that was not offered.
    """
    if offer is None or name is None:
        return QuicLane(stream, stall_seconds=stall_seconds)
    return offer.lane(stream, name, stall_seconds)
