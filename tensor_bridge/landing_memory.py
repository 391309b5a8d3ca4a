"""Memory that moves land in, used again: to have new memory costs more than to fill it.

The kernel clears memory as it is touched for the first time, which takes 43 ms for 64 MiB in pages
of 4 KiB, 18 ms in pages of 2 MiB, and 7 ms, the copy alone, when it was touched before. Whoever
moves tensors one after another has let go of one as the next comes: its memory is taken again.

The memory is torch's own and stays so. A block is a storage as `allocate` makes it, remembered for
some seconds; it is free when nothing refers to it but this memory, and then it may be taken for a
tensor that has exactly its size. Whoever has resized it, shared it or had NumPy look at it has
changed it for good: it is forgotten. So nothing runs when a tensor dies, in whatever thread that
is, and a tensor that was forgotten is one as any other.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import anyio
import torch

from tensor_bridge.codec import TensorMeta
from tensor_bridge.memory import allocate, new_storage

__all__ = ["KEEP_SECONDS", "LEAST_BYTES", "MOST_BYTES", "LandingMemory"]

LEAST_BYTES = 1 << 20
"""Smallest block that is remembered; below, torch's own allocator has memory that was touched."""

MOST_BYTES = 256 << 20
"""All that is remembered, in use or free: the most memory that is kept from the system."""

KEEP_SECONDS = 5.0
"""How long a block is remembered since it was given out: for the next step of a loop."""


Start: TypeAlias = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
"""Runs a task until whatever it is a method of, an endpoint, is closed."""


class _Block:
    """A storage that was given out."""

    __slots__ = ("nbytes", "storage", "until")

    def __init__(self, storage: torch.UntypedStorage, until: float) -> None:
        self.storage = storage
        self.nbytes = storage.nbytes()
        self.until = until

    def references(self) -> tuple[int, int, int]:
        """Return how many refer to it in torch, in Python, and weakly."""
        storage = self.storage
        return (
            torch._C._storage_Use_Count(storage._cdata),
            sys.getrefcount(storage),
            weakref.getweakrefcount(storage),
        )

    @property
    def is_free(self) -> bool:
        """Whether nobody has it any more, and nobody can get at it."""
        return self.references() == _NONE

    @property
    def is_as_it_was(self) -> bool:
        """Whether it can still be what a new storage is. To be asked of one that is free."""
        storage = self.storage
        return (
            storage.nbytes() == self.nbytes
            and storage.resizable()
            and not storage.is_shared()
            and not vars(storage)
        )


_NONE = _Block(new_storage(0), 0.0).references()
"""References to a block that are no one's."""


class LandingMemory:
    """The memory of one endpoint's moves. Used in its event loop.

    Args:
        start: starts the task that forgets in time. Without it, nothing is remembered.
    """

    def __init__(self, start: Start | None) -> None:
        self._start = start
        self._blocks: deque[_Block] = deque()
        """What is remembered; what was given out first is first."""
        self._is_watched = False

    @property
    def nbytes(self) -> int:
        """How much is remembered, in use or free."""
        return sum(block.nbytes for block in self._blocks)

    def allocate(self, meta: TensorMeta) -> torch.Tensor:
        """Return a tensor as `tensor_bridge.allocate` does, in memory that was used before if any.

        What lies there is an earlier tensor's: nobody is to see it who is not given all of it anew.

        Raises:
            QuotaExceeded: this machine has no room for it.
        """
        if self._start is None or not LEAST_BYTES <= meta.nbytes <= MOST_BYTES:
            return allocate(meta)
        self._forget_late(anyio.current_time())
        storage = self._take(meta.nbytes)
        tensor = allocate(meta, storage)
        self._remember(storage)
        return tensor

    def clear(self) -> None:
        """Forget everything: what is free is the system's again."""
        self._blocks.clear()

    def _take(self, nbytes: int) -> torch.UntypedStorage:
        for block in reversed(self._blocks):
            if block.nbytes == nbytes and block.is_free:
                self._blocks.remove(block)
                if block.is_as_it_was:
                    return block.storage
                break
        # Before there is more: it may be what is remembered that has used up the machine's memory.
        self._make_room(nbytes)
        return new_storage(nbytes)

    def _remember(self, storage: torch.UntypedStorage) -> None:
        self._make_room(storage.nbytes())
        self._blocks.append(_Block(storage, anyio.current_time() + KEEP_SECONDS))
        if not self._is_watched:
            assert self._start is not None
            try:
                self._start(self._watch)
            except RuntimeError:  # the endpoint is closed, and nothing is kept any more
                self.clear()
            else:
                self._is_watched = True

    def _make_room(self, nbytes: int) -> None:
        while self._blocks and self.nbytes + nbytes > MOST_BYTES:
            self._blocks.popleft()

    def _forget_late(self, now: float) -> None:
        while self._blocks and self._blocks[0].until <= now:
            self._blocks.popleft()

    async def _watch(self) -> None:
        try:
            while self._blocks:
                await anyio.sleep_until(self._blocks[0].until)
                self._forget_late(anyio.current_time())
        finally:
            self._is_watched = False
            self.clear()
