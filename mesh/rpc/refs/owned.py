"""What a node owns for others: the values of references, who holds them, and for how long. No I/O.

A reference lives as long as somebody holds a *fork* of it. Every fork is known to the owner before
whoever is to have it can know of it: a holder that passes a reference on tells the owner first, and
keeps its own fork until the owner has heard (so a parent outlives what its child needs). The new
fork is provisional until its holder confirms it; one that never does, because the message with the
reference was lost, lapses. A holder tells the owner when it lets go, again and again until it is
heard; one that has vanished is heard no more, and its forks go when its lease ends.

Whatever holders say may come late, twice, or in another order than it was said.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from auth import NodeId
from mesh.rpc.errors import RefLost
from mesh.rpc.names.targets import ID_BYTES
from mesh.rpc.tensors.sizes import nbytes_of
from mesh.rpc.wire import Fork
from transport import LimitExceeded

__all__ = ["Owned", "OwnerTable", "RefLimits", "RefRow", "new_id"]

MAX_FORGOTTEN = 8192
"""Forks that were dropped before they were known, or just then, and are remembered."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RefLimits:
    """How many references others may have here, and how long without a word; times in seconds.

    Attributes:
        max_refs: values held for others in all.
        max_forks_per_peer: forks that one peer may hold.
        confirm: how long a fork may stay unconfirmed.
        lease: how long a holder may be without a connection before its forks are dropped.
    """

    max_refs: int = 1 << 18
    max_forks_per_peer: int = 1 << 16
    confirm: float = 60.0
    lease: float = 30.0


class Owned:
    """A value that others may refer to, or one that is still to be computed.

    Attributes:
        ref: what it is called.
        outcome: the value, or why there is none; may be waited for in any thread.
        forks: who holds it, by fork; changed by the table alone.
        since: when it came to be, on the table's clock.
    """

    __slots__ = ("__weakref__", "forks", "outcome", "ref", "since")

    def __init__(self, ref: bytes, since: float) -> None:
        self.ref = ref
        self.outcome: Future[Any] = Future()
        self.forks: dict[bytes, NodeId] = {}
        self.since = since


@dataclasses.dataclass(frozen=True, slots=True)
class RefRow:
    """One reference, as a listing shows it.

    Attributes:
        ref: what it is called, in hexadecimal.
        kind: the type of its value, or why there is none yet.
        holders: who holds it.
        nbytes: memory that the tensors of its value keep, as far as they lie open in it.
        age: seconds since it came to be.
    """

    ref: str
    kind: str
    holders: tuple[NodeId, ...]
    nbytes: int
    age: float


class OwnerTable:
    """The references of one owner. Safe for many threads.

    Args:
        limits: bounds and times.
    """

    def __init__(self, limits: RefLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._owned: dict[bytes, Owned] = {}
        self._counts: dict[NodeId, int] = {}
        self._absent: dict[NodeId, float] = {}
        self._unconfirmed: dict[bytes, tuple[bytes, float, NodeId]] = {}
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        """Return how many values others hold."""
        return len(self._owned)

    def create(self, fork: Fork, holder: NodeId, now: float) -> Owned:
        """Begin a value that `holder` has ordered and is to hold.

        Raises:
            LimitExceeded: there are too many already.
            RefLost: the holder has let go of it meanwhile, or there is one of that name.
        """
        with self._lock:
            if fork.fork in self._forgotten or fork.ref in self._owned:
                raise _lost("its holder has let go of it already")
            owned = Owned(fork.ref, now)
            self._add(owned, fork.fork, holder, holder)
            return owned

    def adopt(self, owned: Owned, holder: NodeId, now: float) -> Fork:
        """Give `holder` a fork of a value of this node's own, for it to confirm.

        Raises:
            LimitExceeded: as `create`.
        """
        fork = Fork(owned.ref, new_id())
        with self._lock:
            self._add(owned, fork.fork, holder, holder)
            self._unconfirmed[fork.fork] = (fork.ref, now, holder)
        return fork

    def share(self, fork: Fork, holder: NodeId, by: NodeId, now: float) -> bool:
        """Record a fork that `by`, a holder, gives to `holder`; return whether it could.

        Until `holder` confirms it, who may not even know of it, it counts among those of `by`.

        Raises:
            LimitExceeded: as `create`.
        """
        with self._lock:
            owned = self._held(fork.ref, by)
            if owned is None:
                return False
            if fork.fork not in owned.forks and fork.fork not in self._forgotten:
                self._add(owned, fork.fork, holder, by)
                self._unconfirmed[fork.fork] = (fork.ref, now, by)
            return True

    def confirm(self, fork: Fork, by: NodeId) -> bool:
        """Record that a fork has come to its holder; return whether it is there."""
        with self._lock:
            has = self._has(fork, by)
            if has and fork.fork in self._unconfirmed:
                self._uncount(self._unconfirmed.pop(fork.fork)[2])
                self._counts[by] = self._counts.get(by, 0) + 1
            return has

    def drop(self, fork: Fork, by: NodeId) -> None:
        """Forget a fork that its holder, or who gave it without success, has let go of."""
        with self._lock:
            if self._has(fork, by):
                self._remove(fork.ref, fork.fork)
            self._forgotten[fork.fork] = None
            if len(self._forgotten) > MAX_FORGOTTEN:
                self._forgotten.popitem(last=False)

    def held(self, ref: bytes, by: NodeId) -> Owned:
        """Return a value that `by` holds.

        Raises:
            RefLost: it holds none of that name; whether there is one, it does not learn.
        """
        with self._lock:
            owned = self._held(ref, by)
        if owned is None:
            raise _lost("its owner knows of no such reference of this node's")
        return owned

    # -- who is there

    def left(self, node: NodeId, now: float) -> None:
        """Begin the lease of a holder whose connection is over."""
        with self._lock:
            if node in self._counts:
                self._absent.setdefault(node, now + self._limits.lease)

    def returned(self, node: NodeId) -> None:
        """End the lease of a holder that is there again."""
        with self._lock:
            self._absent.pop(node, None)

    def forget(self, node: NodeId) -> None:
        """Drop all forks of a holder, which has started anew or is not authorized any more."""
        with self._lock:
            self._forget(node)

    def lapse(self, now: float) -> float:
        """Drop what is over by now; return when to call this again, infinity if nothing waits."""
        with self._lock:
            for node in [each for each, end in self._absent.items() if end <= now]:
                self._forget(node)
            confirm = self._limits.confirm
            while self._unconfirmed:  # the oldest is the first
                fork, (ref, since, _) = next(iter(self._unconfirmed.items()))
                if since + confirm > now:
                    return min([since + confirm, *self._absent.values()])
                self._remove(ref, fork)
            return min(self._absent.values(), default=math.inf)

    def rows(self, now: float) -> tuple[RefRow, ...]:
        """Return every value that others hold."""
        with self._lock:
            everything = [
                (each, tuple(dict.fromkeys(each.forks.values()))) for each in self._owned.values()
            ]
        return tuple(
            RefRow(
                owned.ref.hex(),
                _kind(owned.outcome),
                holders,
                _nbytes(owned.outcome),
                max(0.0, now - owned.since),
            )
            for owned, holders in everything
        )

    def close(self) -> Iterable[Owned]:
        """Forget everything; return what was still there."""
        with self._lock:
            everything = tuple(self._owned.values())
            self._owned.clear()
            self._counts.clear()
            self._absent.clear()
            self._unconfirmed.clear()
            return everything

    # -- with the lock held

    def _add(self, owned: Owned, fork: bytes, holder: NodeId, payer: NodeId) -> None:
        count = self._counts.get(payer, 0)
        if owned.ref not in self._owned and len(self._owned) >= self._limits.max_refs:
            raise _full(f"{self._limits.max_refs} values are held for others already")
        if count >= self._limits.max_forks_per_peer:
            raise _full(f"{payer.short} has {count} references here already")
        self._owned[owned.ref] = owned
        owned.forks[fork] = holder
        self._counts[payer] = count + 1

    def _held(self, ref: bytes, by: NodeId) -> Owned | None:
        owned = self._owned.get(ref)
        if owned is None or by not in owned.forks.values():
            return None
        return owned

    def _has(self, fork: Fork, by: NodeId) -> bool:
        owned = self._owned.get(fork.ref)
        return owned is not None and owned.forks.get(fork.fork) == by

    def _remove(self, ref: bytes, fork: bytes) -> None:
        owned = self._owned[ref]
        holder = owned.forks.pop(fork)
        _, _, payer = self._unconfirmed.pop(fork, (ref, 0.0, holder))
        if not owned.forks:
            del self._owned[ref]
        self._uncount(payer)

    def _uncount(self, payer: NodeId) -> None:
        self._counts[payer] -= 1
        if not self._counts[payer]:
            del self._counts[payer]

    def _forget(self, node: NodeId) -> None:
        self._absent.pop(node, None)
        for owned in tuple(self._owned.values()):
            for fork, holder in tuple(owned.forks.items()):
                if holder == node:
                    self._remove(owned.ref, fork)


def new_id() -> bytes:
    """Return a name that nothing else has."""
    return secrets.token_bytes(ID_BYTES)


def _kind(outcome: Future[Any]) -> str:
    if not outcome.done() or outcome.cancelled():
        return "pending"
    error = outcome.exception()
    if error is not None:
        return f"failed: {type(error).__name__}"
    kind = type(outcome.result())
    return kind.__qualname__ if kind.__module__ == "builtins" else _full_name(kind)


def _nbytes(outcome: Future[Any]) -> int:
    if not outcome.done() or outcome.cancelled() or outcome.exception() is not None:
        return 0
    return nbytes_of(outcome.result())


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _lost(why: str) -> RefLost:
    return RefLost("use of a remote reference", why=why)


def _full(why: str) -> LimitExceeded:
    return LimitExceeded(
        "a remote reference", why=why, fix="Let go of references that are not needed any more."
    )
