"""Tensors on their way into a store: room reserved, memory allocated, bytes landing.

An arrival outlives the stream that brings it. When a link breaks, what has landed stays for a
while, and the same peer may go on from there under the same upload id. When the last answer is
lost, asking again under that id finds the finished object instead of making another.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import anyio
import torch

from auth import MeshError, NodeId, Quotas
from tensor_bridge.codec import TensorMeta
from tensor_bridge.errors import NoSuchTensor
from tensor_bridge.landing_memory import LandingMemory
from tensor_bridge.moves import INTERRUPTED, Landing
from tensor_bridge.store import Outside, Reservation, TensorStore
from tensor_bridge.wire import Stored
from transport import ProtocolError

__all__ = ["Arrival", "Arrivals"]

MAX_FINISHED = 4096
"""Finished arrivals remembered for a peer that lost the answer; the oldest are forgotten first."""


class Arrival:
    """One tensor on its way in.

    Attributes:
        meta: what was announced.
        landing: its memory; None once the tensor is an object of the store.
    """

    def __init__(
        self,
        meta: TensorMeta,
        reservation: Reservation,
        name: str | None,
        memory: LandingMemory,
    ) -> None:
        self.meta = meta
        self.landing: Landing | None = Landing(meta, memory)
        self._stored: Stored | None = None
        self._reservation = reservation
        self._name = name
        self._turn = anyio.Lock()
        self._holder: anyio.CancelScope | None = None
        self._left_at: float | None = None
        self._is_useless = False

    @property
    def moved(self) -> int:
        """How many bytes have landed."""
        return self.meta.nbytes if self.landing is None else self.landing.moved

    def keep(self) -> Stored:
        """Put the tensor into the store, now that every byte has landed; return what it is there.

        From then on the store alone holds the tensor: deleting it there frees its memory.
        """
        if self.landing is not None:
            stored = self._reservation.keep(self.landing.tensor, name=self._name)
            self._stored = Stored.of(stored)
            self.landing = None
        assert self._stored is not None
        return self._stored

    def keep_outside(self, content: Outside | torch.Tensor) -> Stored:
        """Do the same with a tensor that need not land, for it lies somewhere already."""
        stored = self._reservation.keep_outside(content, self.meta, name=self._name)
        self._stored, self.landing = Stored.of(stored), None
        return self._stored

    def failed(self, error: MeshError) -> None:
        """Have the arrival forgotten when it is let go of, unless what failed may be mended."""
        self._is_useless = not isinstance(error, INTERRUPTED)


class Arrivals:
    """The arrivals of one node, by owner and upload id.

    Args:
        store: where finished tensors go.
        resume_seconds: how long an interrupted or a finished arrival is remembered.
        memory: what tensors land in; by default new memory each time.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        store: TensorStore,
        *,
        resume_seconds: float,
        memory: LandingMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._resume_seconds = resume_seconds
        self._memory = memory or LandingMemory(None)
        self._clock = clock
        self._coming: dict[_Key, Arrival] = {}
        self._finished: OrderedDict[_Key, Arrival] = OrderedDict()
        self._undone: OrderedDict[_Key, float] = OrderedDict()
        """When what was given up before it came: it may come yet, on another way."""
        self._closed = False

    @contextlib.asynccontextmanager
    async def hold(
        self,
        owner: NodeId,
        upload: str,
        meta: TensorMeta,
        *,
        name: str | None = None,
        quotas: Quotas | None = None,
    ) -> AsyncIterator[Arrival]:
        """Begin an arrival, or take it up again, and hold it for the block.

        A later try by the same owner takes it over: the block of the one before is cancelled, and
        what follows it runs. If the link breaks under the block, the arrival stays to be taken up
        again; if the other side gives up, it goes at once, and so does the object of the store that
        it may have become.

        Raises:
            QuotaExceeded: there is no room; nothing was allocated.
            ProtocolError: the upload id is of another tensor.
            NoSuchTensor: it had arrived, and was deleted since.
        """
        key = (owner, upload)
        arrival = await self._take(key, meta, name, quotas)
        try:
            if arrival.landing is None:
                self._store.owned(arrival.keep().object_id, owner)
            with anyio.CancelScope() as arrival._holder:
                try:
                    yield arrival
                except MeshError as error:
                    arrival.failed(error)
                    raise
        finally:
            arrival._holder = None
            arrival._left_at = self._clock()
            arrival._turn.release()
            if arrival.landing is None:
                if arrival._is_useless:
                    self._undo(key, arrival)
                else:
                    self._remember(key, arrival)
            elif arrival._is_useless or self._closed:
                self._drop(key)

    def expire(self, now: float) -> None:
        """Forget what nobody has held for `resume_seconds`."""
        oldest = now - self._resume_seconds
        for key, arrival in tuple(self._coming.items()):
            if arrival._left_at is not None and arrival._left_at <= oldest:
                self._drop(key)
        while self._finished:
            arrival = next(iter(self._finished.values()))
            if arrival._left_at is None or arrival._left_at > oldest:
                break
            self._finished.popitem(last=False)
        while self._undone and next(iter(self._undone.values())) <= oldest:
            self._undone.popitem(last=False)

    def keep_outside(
        self,
        owner: NodeId,
        upload: str,
        meta: TensorMeta,
        content: Outside | torch.Tensor,
        *,
        name: str | None = None,
        quotas: Quotas | None = None,
    ) -> Stored | None:
        """Have an arrival begin and end at once; None if there is one of that upload id, or was.

        Raises:
            QuotaExceeded: there is no room for all of the memory that it lies in.
        """
        key = (owner, upload)
        if self._closed or key in self._undone or self._find(key) is not None:
            return None
        arrival = self._begin(key, meta, name, quotas, nbytes=content.nbytes)
        arrival._left_at = self._clock()
        arrival._turn.release()
        stored = arrival.keep_outside(content)
        self._remember(key, arrival)
        return stored

    def undo(self, owner: NodeId, upload: str) -> None:
        """Forget an arrival, and the object that it may have become; its owner gave it up.

        One that is not here yet is not to be kept outside any more when it comes.
        """
        key = (owner, upload)
        arrival = self._find(key)
        if arrival is None:
            self._undone[key] = self._clock()
            if len(self._undone) > MAX_FINISHED:
                self._undone.popitem(last=False)
            return
        if arrival._holder is not None:
            arrival._is_useless = True
            arrival._holder.cancel()
        elif arrival.landing is None:
            self._undo(key, arrival)
        else:
            self._drop(key)

    def drop_owner(self, owner: NodeId) -> None:
        """Forget every arrival of `owner` that nobody holds."""
        for key, arrival in tuple(self._coming.items()):
            if key[0] == owner and arrival._left_at is not None:
                self._drop(key)

    def close(self) -> None:
        """Forget everything: at once what nobody holds, the rest as it is let go of."""
        self._closed = True
        self._finished.clear()
        self._undone.clear()
        for key, arrival in tuple(self._coming.items()):
            if arrival._left_at is not None:
                self._drop(key)

    def __len__(self) -> int:
        """Return how many tensors are on their way."""
        return len(self._coming)

    async def _take(
        self, key: _Key, meta: TensorMeta, name: str | None, quotas: Quotas | None
    ) -> Arrival:
        while True:
            arrival = self._find(key)
            if arrival is None:
                return self._begin(key, meta, name, quotas)
            if arrival.meta != meta:
                raise ProtocolError("arrival of a tensor", why="the upload id is of another tensor")
            if arrival._holder is not None:
                arrival._holder.cancel()
            await arrival._turn.acquire()
            if self._find(key) is arrival:
                arrival._left_at = None
                return arrival
            arrival._turn.release()  # whoever held it has dropped it

    def _find(self, key: _Key) -> Arrival | None:
        return self._coming.get(key) or self._finished.get(key)

    def _begin(
        self,
        key: _Key,
        meta: TensorMeta,
        name: str | None,
        quotas: Quotas | None,
        *,
        nbytes: int | None = None,
    ) -> Arrival:
        """Reserve room for a tensor's bytes, or for `nbytes` of memory that it lies in."""
        reservation = self._store.reserve(key[0], meta.nbytes if nbytes is None else nbytes, quotas)
        try:
            arrival = Arrival(meta, reservation, name, self._memory)
        except BaseException:
            reservation.release()
            raise
        # Without waiting: a task that was cancelled in between would leave it to nobody.
        arrival._turn.acquire_nowait()
        self._coming[key] = arrival
        return arrival

    def _remember(self, key: _Key, arrival: Arrival) -> None:
        self._coming.pop(key, None)
        self._finished.pop(key, None)
        self._finished[key] = arrival
        if len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)

    def _undo(self, key: _Key, arrival: Arrival) -> None:
        """Delete what has become of an arrival, of which nobody knows."""
        self._coming.pop(key, None)
        self._finished.pop(key, None)
        with contextlib.suppress(NoSuchTensor):
            self._store.delete(arrival.keep().object_id)

    def _drop(self, key: _Key) -> None:
        arrival = self._coming.pop(key, None)
        if arrival is not None:
            arrival._reservation.release()


_Key: TypeAlias = tuple[NodeId, str]
