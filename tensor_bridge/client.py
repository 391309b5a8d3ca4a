"""The asking side: a peer's tensors as if they were at hand."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
import torch

from auth import MeshError, NodeId, PeerIdentity
from tensor_bridge.codec import TensorMeta, describe
from tensor_bridge.errors import NoSuchTensor, TensorChanged, UnsupportedTensor
from tensor_bridge.keeping import give, have_kept, take_back
from tensor_bridge.lanes import NO_LANES, Lanes, choose_lane, sealed_copy
from tensor_bridge.memory import Payload, allocate
from tensor_bridge.moves import (
    BROKEN,
    Landing,
    Meter,
    MoveLimits,
    ProgressCallback,
    deadline,
    persist,
    receive_message,
)
from tensor_bridge.reading import read_into
from tensor_bridge.serve_create import CREATE_CALL, CreateCall, check_creation, dense_meta
from tensor_bridge.serve_fetch import FetchService
from tensor_bridge.serve_put import PutService
from tensor_bridge.service import DELETE_CALL, INFO_CALL, LIST_CALL, MAP_CALL, MINT_CALL
from tensor_bridge.store import writes_of
from tensor_bridge.wire import (
    MAX_ADDRESSES,
    FetchOpen,
    ListCall,
    Listed,
    Listing,
    MapCall,
    MintCall,
    Minted,
    Moved,
    ObjectCall,
    PutAccepted,
    PutOpen,
    Sent,
    Stored,
    decode_fetch_answer,
)
from transport import CborValue, Connection, ServiceUnknown, Stream, Unreachable, parse_address

__all__ = ["TensorClient", "TensorRef"]

T = TypeVar("T")

MOVE_SECONDS = 600.0
"""Default deadline of a move."""

CALL_SECONDS = 30.0
"""Default deadline of a call that moves nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor at a node, known by its id there. It belongs to whoever put it.

    Attributes:
        node: where it is.
        object_id: what the node calls it, 32 hexadecimal digits.
        version: what its content was when this reference was made.
        meta: its type, shape and layout.
        name: what its owner calls it.
    """

    node: NodeId
    object_id: str
    version: int
    meta: TensorMeta
    name: str | None = None


class TensorClient:
    """Moves tensors to, from and between peers. Safe for many tasks of its event loop at once.

    Every move has a total deadline, takes broken streams up again where they broke, and leaves
    nothing behind when it is cancelled.

    After a broken link nothing is done twice. `put`, `copy_to` and `create` go on under the upload
    id they began with, so that a lost answer is given again; `get` and `delete` may be repeated as
    they are. A token whose answer was lost is for nobody but the target and for one read, and
    expires unused when another was minted. `info` and `list` change nothing and are not repeated.

    Args:
        connection: with the peer whose tensors these are.
        reconnect: makes a new connection with the same peer when the link broke, so that moves go
            on over it. Without, a broken link ends them.
        limits: ``stall`` is how long 256 KiB may take.
        lanes: the ways for bytes beside QUIC, of the connection's endpoint.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        reconnect: Callable[[], Awaitable[Connection]] | None = None,
        limits: MoveLimits | None = None,
        lanes: Lanes = NO_LANES,
    ) -> None:
        self._connection = connection
        self._lanes = lanes
        self._reconnect = reconnect
        self._stall_seconds = (limits or MoveLimits()).stall

    @property
    def peer(self) -> PeerIdentity:
        """Whose tensors these are."""
        return self._connection.peer

    async def put(
        self,
        tensor: torch.Tensor,
        *,
        name: str | None = None,
        shareable: bool = False,
        timeout: float = MOVE_SECONDS,
        progress: ProgressCallback | None = None,
    ) -> TensorRef:
        """Copy `tensor` to the peer and return a reference to it there.

        Args:
            tensor: any strided tensor on the CPU or a CUDA device, of any type in ``DTYPES``; see
                ``tensor_bridge.codec`` for what becomes of its layout. Only its own elements move.
            name: for people; at most 128 characters.
            shareable: have it lie, if the peer runs on this host, in memory that `get` hands over
                without a copy. This put takes longer for it: see
                ``tensor_bridge.lanes.shared.sealed``.
            timeout: seconds for all of it.
            progress: called with a `Progress` after each part.

        Raises:
            UnsupportedTensor: its elements are not plain bytes.
            QuotaExceeded: the peer has no room for it.
            TensorChanged: it was written to meanwhile.
            AccessDenied: the peer does not allow it.
            DeadlineExceeded: the time ran out, or nothing moved for too long.
            PeerLost: the peer vanished.
        """
        meta, writes = describe(tensor), writes_of(tensor)
        meter = Meter(meta.nbytes, progress)
        upload = secrets.token_hex(16)

        source, is_sealed, is_first = tensor, False, True

        def check() -> None:
            if writes_of(tensor) != writes:
                raise self._changed("put of a tensor", "it was written to while it was sent")

        async def attempt() -> Stored:
            nonlocal source, is_sealed, is_first
            connection = await self._connected()
            was_first, is_first = is_first, False
            if was_first and not shareable:
                kept = await have_kept(
                    connection,
                    self._lanes,
                    tensor,
                    meta,
                    upload=upload,
                    name=name,
                    check=check,
                    moved=meter.sent,
                )
                if kept is not None:
                    return kept
            offer = await self._lanes.offer(connection, meta.nbytes, sealed=shareable)
            if offer.brings_memory and not is_sealed:
                source, is_sealed = await sealed_copy(tensor, meta), True
            if was_first and is_sealed:
                kept = await give(
                    connection,
                    self._lanes,
                    source,
                    meta,
                    upload=upload,
                    name=name,
                    check=check,
                )
                if kept is not None:
                    meter.sent(meta.nbytes)
                    return kept
            order = PutOpen(upload, meta, name, offer.names).encode()
            async with await connection.open_stream(PutService.name, order) as stream:
                accepted = PutAccepted.decode(await stream.reply(), meta.nbytes)
                meter.resume(accepted.offset)
                lane = choose_lane(stream, offer, accepted.lane, stall_seconds=self._stall_seconds)
                await lane.send(Payload(source, meta, accepted.offset), meter.sent)
                check()
                await stream.send_message(Sent(writes).encode())
                return Stored.decode(await receive_message(stream))

        stored = await self._persist(attempt, "put of a tensor", timeout, lambda: meter.landed)
        return TensorRef(self.peer.node_id, stored.object_id, stored.version, meta, name)

    async def create(
        self,
        fill: str,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        name: str | None = None,
        timeout: float = MOVE_SECONDS,
    ) -> TensorRef:
        """Have the peer make a contiguous tensor and fill it; no payload travels.

        Args:
            fill: one of `FILLS`: ``"zeros"``, ``"ones"``, ``"rand"``, ``"randn"``, ``"arange"``.
            shape: sizes in elements.
            dtype: any type that torch has the fill for.
            seed: where the random fills start, on a generator of the tensor's own.
            name: for people; at most 128 characters.
            timeout: seconds for all of it.

        Raises:
            QuotaExceeded: the peer has no room for it.
            UnsupportedTensor: torch has no such fill, or not for `dtype`, or a size is none.
        """
        check_creation(fill, shape)
        meta = dense_meta(dtype, tuple(shape))
        call = CreateCall(secrets.token_hex(16), fill, meta, seed, name)

        async def attempt() -> Stored:
            connection = await self._connected()
            async with await connection.open_stream(
                CREATE_CALL, call.encode(), timeout=timeout
            ) as stream:
                return Stored.decode(await stream.reply())

        stored = await self._persist(attempt, "creation of a tensor", timeout, lambda: 0)
        return TensorRef(self.peer.node_id, stored.object_id, stored.version, meta, name)

    async def get(
        self,
        ref: TensorRef,
        *,
        copy: bool = True,
        timeout: float = MOVE_SECONDS,
        progress: ProgressCallback | None = None,
    ) -> torch.Tensor:
        """Return a copy of the tensor, on the CPU, allocated once. It must be this client's own.

        Args:
            ref: a tensor of this client's at this peer.
            copy: without, and if the tensor was put as `shareable`, the two share its memory until
                one of them writes to it, page by page; neither sees what the other writes. The
                storage can't be resized then.
            timeout: seconds for all of it.
            progress: called with a `Progress` after each part.

        Raises:
            NoSuchTensor: it is gone, or another's.
            TensorChanged: it was written to while it was read, or is not what `ref` describes.
            MeshError: as `put`.
        """
        self._check(ref)
        meter = Meter(ref.meta.nbytes, progress)
        if not copy and ref.meta.nbytes:
            with deadline(timeout, "get of a tensor", peer=self.peer, why="the peer is too slow"):
                mapped = await self._map(ref)
            if mapped is not None:
                meter.arrived(ref.meta.nbytes)
                return mapped
        landing = Landing(ref.meta, self._lanes.memory, meter.arrived)

        async def attempt() -> None:
            connection = await self._connected()
            if not landing.moved and await take_back(
                connection, self._lanes, ref.object_id, landing
            ):
                return
            await read_into(
                landing,
                connection,
                object_id=ref.object_id,
                lanes=self._lanes,
                stall_seconds=self._stall_seconds,
            )

        await self._persist(attempt, "get of a tensor", timeout, lambda: landing.moved)
        return landing.tensor

    async def copy_to(
        self,
        ref: TensorRef,
        target: TensorClient,
        *,
        name: str | None = None,
        timeout: float = MOVE_SECONDS,
        progress: ProgressCallback | None = None,
    ) -> TensorRef:
        """Have `target`'s peer fetch the tensor straight from here; return a reference to the copy.

        The peer of this client mints a token that lets the target, and nobody else, read the tensor
        once. No byte of it passes through this process. The copy belongs to this client.

        Args:
            ref: a tensor of this client's at this peer.
            target: a client of the node that is to have the copy.
            name: of the copy; default the tensor's own.
            timeout: seconds for all of it.
            progress: called with a `Progress` about four times a second.

        Raises:
            AccessDenied: the peer mints no such token, or the target does not fetch from this peer.
            TokenRefused: the tensor changed or went before the target came for it.
            Unreachable: the target can't reach this peer.
            MeshError: as `put`, of the target.
        """
        self._check(ref)
        audience = target.peer.node_id
        if audience == ref.node:
            raise UnsupportedTensor(
                "copy of a tensor", peer=target.peer, why="it is at that node already"
            )
        upload, meter = secrets.token_hex(16), Meter(ref.meta.nbytes, progress)

        async def attempt() -> Stored | MeshError:
            # A token for each try: whoever orders again must be allowed to again.
            async with self._minted(ref, audience) as (minted, lease):
                # Where it says it is, and where it was found, which may mean nothing far from here.
                addresses = (
                    *minted.addresses[: MAX_ADDRESSES - 1],
                    parse_address(self._connection.info.remote),
                )
                order = FetchOpen(
                    upload=upload,
                    source=ref.node,
                    addresses=tuple(dict.fromkeys(addresses)),
                    token=minted.token,
                    meta=minted.meta,
                    name=name or ref.name,
                )
                connection = await target._connected()
                stream = await connection.open_stream(FetchService.name, order.encode())
                async with stream:
                    meter.resume(Moved.decode(await stream.reply()).nbytes)
                    while True:
                        message = await receive_message(stream)
                        answer = decode_fetch_answer(message, peer=target.peer)
                        if isinstance(answer, Moved):
                            meter.arrived(answer.nbytes)
                            continue
                        if isinstance(answer, MeshError):
                            lease.reset()
                        return answer

        end = await target._persist(attempt, "copy of a tensor", timeout, lambda: meter.landed)
        if isinstance(end, MeshError):
            raise end
        meter.arrived(ref.meta.nbytes)
        return TensorRef(audience, end.object_id, end.version, ref.meta, name or ref.name)

    async def delete(self, ref: TensorRef, *, timeout: float = CALL_SECONDS) -> None:
        """Have the peer let go of a tensor of this client's.

        Raises:
            NoSuchTensor: it is gone already, or another's.
        """
        self._check(ref)
        has_asked = False

        async def attempt() -> None:
            nonlocal has_asked
            asked_before, has_asked = has_asked, True
            try:
                await self._call(DELETE_CALL, ObjectCall(ref.object_id).encode(), timeout)
            except NoSuchTensor:
                # No id is given twice: what is gone by now went with the try that had no answer.
                if not asked_before:
                    raise

        await self._persist(attempt, "deletion of a tensor", timeout, lambda: 0)

    async def info(self, object_id: str, *, timeout: float = CALL_SECONDS) -> TensorRef:
        """Return a reference, as of now, to a tensor of this client's at the peer.

        Raises:
            NoSuchTensor: there is none of that id, or it is another's.
        """
        answer = await self._call(INFO_CALL, ObjectCall(object_id).encode(), timeout)
        return self._ref(Listed.decode(answer))

    async def list(self, *, timeout: float = CALL_SECONDS) -> tuple[TensorRef, ...]:
        """Return references to this client's tensors at the peer, in order of their ids."""
        refs: list[TensorRef] = []
        page = Listing((), more=True)
        with deadline(timeout, "list of tensors", peer=self.peer, why="it has too many pages"):
            while page.more:
                after = refs[-1].object_id if refs else None
                answer = await self._call(LIST_CALL, ListCall(after).encode(), timeout)
                page = Listing.decode(answer)
                refs.extend(map(self._ref, page.objects))
        return tuple(refs)

    @contextlib.asynccontextmanager
    async def _minted(
        self, ref: TensorRef, audience: NodeId
    ) -> AsyncIterator[tuple[Minted, Stream]]:
        """Have a token minted; resetting the stream, or failing in the block, withdraws it."""
        connection = await self._connected()
        call = MintCall(ref.object_id, audience).encode()
        async with await connection.open_stream(MINT_CALL, call, timeout=CALL_SECONDS) as stream:
            minted = Minted.decode(await stream.reply())
            if minted.meta != ref.meta:
                raise self._changed("copy of a tensor", "it has another type or shape by now")
            yield minted, stream

    async def _map(self, ref: TensorRef) -> torch.Tensor | None:
        """Return the tensor in memory that the peer hands over, None if that is not to be had."""

        async def ask(move: int) -> bool:
            answer = await connection.call(MAP_CALL, MapCall(ref.object_id, move).encode())
            if answer is not None and Listed.decode(answer).meta != ref.meta:
                raise self._changed("get of a tensor", "it has another type or shape by now")
            return answer is not None

        try:
            connection = await self._connected()
            storage = await self._lanes.take_over(connection, ref.meta.nbytes, ask)
        except (*BROKEN, ServiceUnknown):
            return None  # it is copied, by whatever way there is now
        return None if storage is None else allocate(ref.meta, storage)

    async def _call(self, name: str, body: CborValue, timeout: float) -> CborValue:
        connection = await self._connected()
        return await connection.call(name, body, timeout=timeout)

    async def _connected(self) -> Connection:
        if not self._connection.is_open and self._reconnect is not None:
            self._connection = await self._reconnect()
        return self._connection

    async def _persist(
        self,
        attempt: Callable[[], Awaitable[T]],
        what: str,
        timeout: float,
        landed: Callable[[], int],
    ) -> T:
        began = anyio.current_time()
        try:
            with deadline(timeout, what, peer=self.peer, why="the time given for it ran out"):
                return await persist(
                    attempt,
                    landed=landed,
                    aftermath=(Unreachable,),
                    resumable=lambda: self._reconnect is not None or self._connection.is_open,
                )
        except MeshError as error:
            if error.after is not None:  # of all tries, and not of the last alone
                error.after = anyio.current_time() - began
            raise

    def _check(self, ref: TensorRef) -> None:
        if ref.node != self.peer.node_id:
            raise NoSuchTensor(
                f"use of a tensor at {ref.node.short}",
                peer=self.peer,
                why="this is a client of another node",
                fix="Use a client of the node that has the tensor.",
            )

    def _ref(self, listed: Listed) -> TensorRef:
        return TensorRef(
            self.peer.node_id, listed.object_id, listed.version, listed.meta, listed.name
        )

    def _changed(self, what: str, why: str) -> TensorChanged:
        return TensorChanged(
            what,
            peer=self.peer,
            why=why,
            fix="Let nobody write to it until the move is over, or move a copy.",
        )
