"""The tensors a node holds for itself and for others, within quotas.

A peer's tensor costs this node memory, so room is reserved before anything is allocated, against
the quota of the tensor's owner and that of the store. What the node's own program puts here is held
by reference: it costs no memory that is not the program's anyway, and counts only as an object.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

import torch

from auth import NodeId, Quotas
from tensor_bridge.codec import TensorMeta, describe
from tensor_bridge.errors import NoSuchTensor, QuotaExceeded

__all__ = ["Outside", "Reservation", "StoreLimits", "StoredTensor", "TensorStore", "writes_of"]

GIB = 1 << 30

OBJECT_ID_CHARACTERS = 32
"""Length of an object id: 128 random bits as hexadecimal text, too many to guess."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """How much a store holds. A peer's grant can lower its share, never raise it.

    Attributes:
        max_bytes: bytes reserved and held for peers in all.
        max_bytes_per_owner: the same for one peer.
        max_objects: objects in all, those held by reference included.
        max_objects_per_owner: the same for one owner.
    """

    max_bytes: int = 16 * GIB
    max_bytes_per_owner: int = 8 * GIB
    max_objects: int = 65536
    max_objects_per_owner: int = 16384


class Outside(Protocol):
    """A tensor in memory that its owner can still write to."""

    @property
    def nbytes(self) -> int:
        """How much memory is held for it."""
        ...

    @property
    def writes(self) -> int:
        """How often torch has written in place to `raw`, and to what `copied` returns."""
        ...

    @property
    def raw(self) -> torch.Tensor:
        """The tensor as it lies there, each byte of which is to be read once, and not believed."""
        ...

    def copied(self) -> torch.Tensor:
        """Return a copy, which is nobody's but the caller's."""
        ...


class StoredTensor:
    """One object of a store.

    Args:
        content: the tensor itself, or where it lies.

    Attributes:
        object_id: 32 hexadecimal digits.
        meta: its description when it was put.
        owner: the node it belongs to.
        name: what its owner calls it, for people.
        generation: counts what was ever put into the store; a part of `version`.
        outside: where it lies, if that is memory that its owner can still write to.
    """

    __slots__ = ("_tensor", "generation", "meta", "name", "object_id", "outside", "owner")

    def __init__(
        self,
        object_id: str,
        content: torch.Tensor | Outside,
        meta: TensorMeta,
        owner: NodeId,
        name: str | None,
        generation: int,
    ) -> None:
        self.object_id = object_id
        self.meta = meta
        self.owner = owner
        self.name = name
        self.generation = generation
        self._tensor: torch.Tensor | None = None
        self.outside: Outside | None = None
        if isinstance(content, torch.Tensor):
            self._tensor = content
        else:
            self.outside = content

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor itself; from the first look at it on, in memory of this process's own.

        Raises:
            QuotaExceeded: it has to be copied for that, and this machine has no room for it.
        """
        if self._tensor is None:
            assert self.outside is not None
            self._tensor, self.outside = self.outside.copied(), None
        return self._tensor

    @property
    def raw(self) -> torch.Tensor:
        """The tensor as it lies, wherever that is, for who sends its bytes on and looks at none."""
        return self.tensor if self.outside is None else self.outside.raw

    @property
    def version(self) -> int:
        """What changes when the object is replaced or torch writes to the tensor in place.

        The generation in the upper bits, ``tensor._version`` in the lower 32. Writes that torch
        does not count (through ``.data``, ``data_ptr``, or to inference tensors) don't show.
        """
        writes = writes_of(self.tensor) if self.outside is None else self.outside.writes
        return self.generation << 32 | writes & 0xFFFFFFFF


class Reservation:
    """Room in a store for one tensor. Leaving the ``with`` block gives back what was not kept."""

    def __init__(self, store: TensorStore, owner: NodeId, nbytes: int) -> None:
        self.owner = owner
        self.nbytes = nbytes
        self._store = store
        self._open = True

    def keep(self, tensor: torch.Tensor, *, name: str | None = None) -> StoredTensor:
        """Put `tensor`, which must have been allocated under this reservation, into the store."""
        return self._keep(tensor, describe(tensor), name)

    def keep_outside(
        self, content: Outside | torch.Tensor, meta: TensorMeta, *, name: str | None = None
    ) -> StoredTensor:
        """Put a tensor into the store that others allocated, at this reservation's expense."""
        return self._keep(content, meta, name)

    def _keep(
        self, content: torch.Tensor | Outside, meta: TensorMeta, name: str | None
    ) -> StoredTensor:
        if not self._open:
            raise RuntimeError("the reservation was used or released before")
        self._open = False
        return self._store._add(content, meta, self.owner, name, charged=self.nbytes)

    def release(self) -> None:
        """Give the room back unless it was kept or released before."""
        if self._open:
            self._open = False
            self._store._discharge(self.owner, self.nbytes)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class TensorStore:
    """Tensors by object id. Not for use by several threads at once: the endpoint's loop owns it."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self._objects: dict[str, StoredTensor] = {}
        self._charges: dict[str, int] = {}
        self._bytes: Counter[NodeId] = Counter()
        self._counts: Counter[NodeId] = Counter()
        self._generations = itertools.count(1)

    def put(
        self,
        tensor: torch.Tensor,
        *,
        owner: NodeId,
        name: str | None = None,
        object_id: str | None = None,
    ) -> StoredTensor:
        """Hold `tensor` by reference, under a new id or in place of the object `object_id`.

        Raises:
            UnsupportedTensor: the tensor can't be moved.
            QuotaExceeded: too many objects.
            NoSuchTensor: `object_id` names no object of this owner.
        """
        if object_id is None:
            meta = describe(tensor)
            self._count(owner, Quotas())
            return self._add(tensor, meta, owner, name, charged=0)
        replaced = self.owned(object_id, owner)
        stored = StoredTensor(
            object_id,
            tensor,
            describe(tensor),
            owner,
            name or replaced.name,
            next(self._generations),
        )
        self._bytes_back(owner, self._charges.pop(object_id))
        self._objects[object_id] = stored
        self._charges[object_id] = 0
        return stored

    def reserve(self, owner: NodeId, nbytes: int, quotas: Quotas | None = None) -> Reservation:
        """Set `nbytes` aside for a tensor of `owner`, before any of it is allocated.

        Raises:
            QuotaExceeded: there is no room within the store's limits and the owner's `quotas`.
        """
        quotas = quotas or Quotas()
        share = self.limits.max_bytes_per_owner
        if quotas.max_bytes is not None:
            share = min(share, quotas.max_bytes)
        room = min(share - self._bytes[owner], self.limits.max_bytes - self._bytes.total())
        if nbytes > room:
            raise QuotaExceeded(
                f"reservation of {nbytes} bytes",
                why=f"{max(room, 0)} bytes are left for tensors of {owner.short}",
                fix="Delete tensors that are not needed any more, or ask for a larger quota.",
            )
        self._count(owner, quotas)
        self._bytes[owner] += nbytes
        return Reservation(self, owner, nbytes)

    def get(self, object_id: str) -> StoredTensor:
        """Return the object.

        Raises:
            NoSuchTensor: there is none of that id.
        """
        try:
            return self._objects[object_id]
        except KeyError:
            raise _no_such(object_id) from None

    def owned(self, object_id: str, owner: NodeId) -> StoredTensor:
        """Return the object if it belongs to `owner`.

        Raises:
            NoSuchTensor: there is none of that id, or it is another's, which looks the same.
        """
        stored = self.get(object_id)
        if stored.owner != owner:
            raise _no_such(object_id)
        return stored

    def delete(self, object_id: str) -> None:
        """Let go of the object.

        Raises:
            NoSuchTensor: there is none of that id.
        """
        stored = self.get(object_id)
        del self._objects[object_id]
        self._discharge(stored.owner, self._charges.pop(object_id))

    def delete_owner(self, owner: NodeId) -> int:
        """Let go of every object of `owner`; return how many there were."""
        gone = [stored.object_id for stored in self.by_owner(owner)]
        for object_id in gone:
            self.delete(object_id)
        return len(gone)

    def by_owner(self, owner: NodeId) -> Iterator[StoredTensor]:
        """Yield the objects of `owner`, the oldest first."""
        return (stored for stored in tuple(self._objects.values()) if stored.owner == owner)

    def used(self, owner: NodeId | None = None) -> tuple[int, int]:
        """Return the bytes and the objects held and reserved, for `owner` or in all."""
        if owner is None:
            return self._bytes.total(), self._counts.total()
        return self._bytes[owner], self._counts[owner]

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, object_id: str) -> bool:
        return object_id in self._objects

    def _count(self, owner: NodeId, quotas: Quotas) -> None:
        share = self.limits.max_objects_per_owner
        if quotas.max_objects is not None:
            share = min(share, quotas.max_objects)
        if self._counts[owner] >= share or self._counts.total() >= self.limits.max_objects:
            raise QuotaExceeded(
                "reservation of an object",
                why=f"{owner.short} holds {self._counts[owner]}, this node {self._counts.total()}",
                fix="Delete tensors that are not needed any more, or ask for a larger quota.",
            )
        self._counts[owner] += 1

    def _add(
        self,
        content: torch.Tensor | Outside,
        meta: TensorMeta,
        owner: NodeId,
        name: str | None,
        *,
        charged: int,
    ) -> StoredTensor:
        stored = StoredTensor(
            secrets.token_hex(OBJECT_ID_CHARACTERS // 2),
            content,
            meta,
            owner,
            name,
            next(self._generations),
        )
        self._objects[stored.object_id] = stored
        self._charges[stored.object_id] = charged
        return stored

    def _discharge(self, owner: NodeId, nbytes: int) -> None:
        self._bytes_back(owner, nbytes)
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner]

    def _bytes_back(self, owner: NodeId, nbytes: int) -> None:
        self._bytes[owner] -= nbytes
        if not self._bytes[owner]:
            del self._bytes[owner]


def writes_of(tensor: torch.Tensor) -> int:
    """Return how often torch has written to `tensor` in place; 0 where it does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def _no_such(object_id: str) -> NoSuchTensor:
    return NoSuchTensor(
        f"look-up of object {object_id[:8]}",
        why="there is none of that id that belongs to you",
        fix="It may have been deleted, or have gone with its owner.",
    )
