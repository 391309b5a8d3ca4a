"""The tensors of a message on their way: small ones in it, large ones each on its own stream."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

import anyio
import torch

from auth import Grant, MeshError, NodeId
from mesh.rpc.tensors.placement import own_device
from mesh.rpc.wire import PART_SERVICE, Beside, PartAccepted, PartOpen, Request
from tensor_bridge import QuotaExceeded, TensorMeta, describe
from tensor_bridge.lanes import Lanes, choose_lane
from tensor_bridge.lanes.choice import Offer
from tensor_bridge.memory import Payload, copied, filled
from tensor_bridge.moves import Landing, settle
from transport import CborValue, Connection, Stream

__all__ = [
    "Room",
    "beside",
    "fetch_part",
    "lending",
    "send_part",
    "serve_receive",
    "serve_send",
    "together",
    "with_parts",
]

INLINE_BYTES = 32 * 1024
"""Largest tensor that stands in the message itself: for less, a move of its own costs more."""

INLINE_TOTAL = 256 * 1024
"""All of those of one message."""

MOST_LENT = 16 << 20
"""Longest tensor that is put into shared memory of its own: to copy more takes so long that round
trips don't show, and slots, which both ends copy at the same time, take as long and little memory.
"""

STALL_SECONDS = 30.0
"""How long 256 KiB of a large tensor may take."""

PART_GRACE = 0.5
"""Seconds that a call has to say why a part of it was refused."""

GIB = 1 << 30


class Room:
    """How many bytes peers may have here at a time: arguments, answers, and values they refer to.

    Safe for many threads.

    Args:
        max_bytes: of all peers.
        max_bytes_per_peer: of one, unless its grant says less.
    """

    def __init__(self, max_bytes: int = 16 * GIB, max_bytes_per_peer: int = 8 * GIB) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_per_peer = max_bytes_per_peer
        self._lock = threading.RLock()  # a finalizer may give back amid anything
        self._used: dict[NodeId, int] = {}

    @property
    def used(self) -> int:
        """Bytes that are held for all."""
        with self._lock:
            return sum(self._used.values())

    def take(self, peer: NodeId, grant: Grant | None, nbytes: int) -> None:
        """Keep room for `nbytes`, until they are given back.

        Raises:
            QuotaExceeded: there is none.
        """
        granted = None if grant is None else grant.quotas.max_bytes
        bound = min(self._max_bytes_per_peer, math.inf if granted is None else granted)
        with self._lock:
            mine = self._used.get(peer, 0) + nbytes
            if nbytes and (mine > bound or self.used + nbytes > self._max_bytes):
                raise QuotaExceeded(
                    f"keeping of {nbytes} bytes of a call",
                    why=f"at most {bound} at a time are granted, of {self._max_bytes} for all",
                    fix="Make fewer calls at a time, and let go of references.",
                )
            self._used[peer] = mine

    def give(self, peer: NodeId, nbytes: int) -> None:
        """Take `nbytes` back."""
        with self._lock:
            self._used[peer] = left = self._used.get(peer, 0) - nbytes
            if not left:
                del self._used[peer]

    @contextlib.contextmanager
    def hold(self, peer: NodeId, grant: Grant | None, nbytes: int) -> Iterator[None]:
        """Keep room for `nbytes` for the block. Raises as `take`."""
        self.take(peer, grant, nbytes)
        try:
            yield
        finally:
            self.give(peer, nbytes)


def beside(
    tensors: Sequence[torch.Tensor], place: Callable[[torch.device], str | None] = own_device
) -> Beside:
    """Return what a message says of its tensors, with the content of the small ones.

    Args:
        tensors: strided ones on the CPU or a CUDA device.
        place: what to say of the device of each; of answers, what it is called here.

    Raises:
        UnsupportedTensor: the elements of one are not plain bytes.
    """
    metas: list[TensorMeta] = []
    inline: list[bytes | None] = []
    devices = tuple(place(tensor.device) for tensor in tensors)
    room = INLINE_TOTAL
    for tensor in tensors:
        meta = describe(tensor)
        metas.append(meta)
        if meta.nbytes <= min(room, INLINE_BYTES):
            inline.append(copied(tensor, meta))
            room -= meta.nbytes
        else:
            inline.append(None)
    return Beside(tuple(metas), tuple(inline), devices)


async def send_part(
    connection: Connection, lanes: Lanes, key: bytes, number: int, tensor: torch.Tensor
) -> None:
    """Send one large tensor of a request, and return once the peer has all of it.

    Raises:
        TensorChanged: it was resized meanwhile.
        MeshError: the peer expects no such part, or is gone.
    """
    meta = describe(tensor)
    offer = await lanes.offer(connection, meta.nbytes)
    order = PartOpen(key, number, False, offer.names)
    async with await connection.open_stream(PART_SERVICE, order.encode()) as stream:
        accepted = PartAccepted.decode(await stream.reply())
        way = choose_lane(stream, offer, accepted.lane, stall_seconds=STALL_SECONDS)
        await way.send(Payload(tensor, meta), _ignore)
        await stream.send_eof()
        await settle(stream)


@contextlib.asynccontextmanager
async def lending(
    connection: Connection, lanes: Lanes, request: Request, tensors: Sequence[torch.Tensor]
) -> AsyncIterator[Request]:
    """Have large tensors of a request, which is made in the block, lie in shared memory.

    What comes on a stream takes two round trips; to copy it from where it lies, none. Those longer
    than `MOST_LENT` take a stream all the same.

    Yields:
        The request, and what of it lies there.

    Raises:
        MeshError: as `send_part`.
    """
    metas = request.beside.metas
    apart = [n for n in request.beside.apart if metas[n].nbytes <= MOST_LENT]
    payloads = {number: Payload(tensors[number], metas[number]) for number in apart}
    async with lanes.lending(connection, payloads) as lent:
        yield dataclasses.replace(request, lent=lent) if lent else request


async def with_parts(
    connection: Connection,
    lanes: Lanes,
    request: Request,
    tensors: Sequence[torch.Tensor],
    ask: Callable[[], Awaitable[CborValue]],
) -> CborValue:
    """Make a request by `ask`, send its large tensors meanwhile, and return what it is answered.

    Raises:
        MeshError: what `ask` raises, or why a part could not be sent, if that says nothing.
    """
    if not request.on_streams:
        return await ask()
    failed: MeshError | None = None
    answers: list[CborValue] = []
    async with anyio.create_task_group() as tasks:

        async def send(number: int) -> None:
            nonlocal failed
            try:
                await send_part(connection, lanes, request.key, number, tensors[number])
            except MeshError as error:
                failed = failed or error
                await anyio.sleep(PART_GRACE)  # for the call to say why
                tasks.cancel_scope.cancel()

        for number in request.on_streams:
            tasks.start_soon(send, number)
        try:
            answers.append(await ask())
        except MeshError as error:
            failed = error
        tasks.cancel_scope.cancel()
    if not answers:
        assert failed is not None
        raise failed
    return answers[0]


async def fetch_part(
    connection: Connection, lanes: Lanes, key: bytes, number: int, meta: TensorMeta
) -> torch.Tensor:
    """Return one large tensor of an answer, allocated once.

    Raises:
        QuotaExceeded: this machine has not so much memory.
        MeshError: the peer has no such part, or is gone.
    """
    landing = Landing(meta, lanes.memory)
    landing.allocate()
    offer = await lanes.offer(connection, meta.nbytes)
    order = PartOpen(key, number, True, offer.names)
    stream = await connection.open_stream(PART_SERVICE, order.encode())
    # The landing at once: what comes by another lane may be here before the answer.
    async with stream:
        with offer.landing(stream):
            accepted = PartAccepted.decode(await stream.reply())
            way = choose_lane(stream, offer, accepted.lane, stall_seconds=STALL_SECONDS)
            await way.receive(landing)
    return landing.tensor


async def serve_send(stream: Stream, offer: Offer, tensor: torch.Tensor) -> None:
    """Send one large tensor of an answer on the stream that a peer has opened for it."""
    with offer.landing(stream):
        await stream.send_reply(PartAccepted(offer.best).encode())
        way = choose_lane(stream, offer, offer.best, stall_seconds=STALL_SECONDS)
        await way.send(Payload(tensor, describe(tensor)), _ignore)
        await settle(stream)


async def serve_receive(stream: Stream, offer: Offer, landing: Landing) -> None:
    """Take one large tensor of a request on the stream that a peer has opened for it."""
    with offer.landing(stream):
        await stream.send_reply(PartAccepted(offer.best).encode())
        way = choose_lane(stream, offer, offer.best, stall_seconds=STALL_SECONDS)
        await way.receive(landing)
        await settle(stream)


def together(what: Beside, parts: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """Return all tensors of a message in order: those in it, and those that came apart."""
    return [
        parts[number] if data is None else filled(meta, data)
        for number, (meta, data) in enumerate(zip(what.metas, what.inline, strict=True))
    ]


def _ignore(_: int) -> None:
    """Progress that nobody waits for."""
