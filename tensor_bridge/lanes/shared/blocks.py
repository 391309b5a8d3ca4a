"""Memory that a tensor is written to once, by its sender, and then lies in at the receiver's.

A copy into memory that was touched before is the least that a move can cost. Slots (see `pool`)
take two, one at either end, which on two processors is as long as one and a half. A block has room
for a tensor: its owner writes the tensor there and lends it, the receiver keeps the tensor there as
an object of its owner's, and gives the block back when the object is gone. Its owner reads it back
from there.

The owner can still write to a block while it is lent: it would change its own object. Whoever
else wants the tensor, the receiver's own program first of all, gets a copy made at once (`Loan`),
and the receiver looks at no byte of it before. A block serves one pair, in one direction, and is
not used again when the link between the two has ended: the object may lie there on.

New memory costs twice as much to write to as old (see `huge_pages`), so that a block that lies free
is used again for a tensor that needs most of it, and forgotten when none came for `KEEP_SECONDS`.
Bounded for each pair on both sides, and for all of a process; a peer's are at the expense of the
quota of who made them, all of each.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable

import torch

from tensor_bridge.codec import TensorMeta
from tensor_bridge.copying import copy_now
from tensor_bridge.huge_pages import HUGE_PAGE
from tensor_bridge.lanes.shared.mapping import Mapped, map_memory
from tensor_bridge.lanes.shared.pool import anonymous_memory, check_memory, seal_size
from tensor_bridge.lanes.shared.protocol import (
    MAX_BLOCKS,
    BlockMessage,
    ForgottenMessage,
    ReturnedMessage,
)
from tensor_bridge.memory import NEW_WRITES, allocate, tensor_bytes
from tensor_bridge.wire_blocks import MAX_BLOCK
from transport import ProtocolError

__all__ = [
    "KEEP_SECONDS",
    "LEAST_BYTES",
    "MOST_BYTES",
    "Block",
    "Loan",
    "OwnBlocks",
    "TheirBlocks",
    "room_for",
]

LEAST_BYTES = 1 << 20
"""Smallest tensor that takes one: below, slots are as fast."""

MOST_BYTES = 512 << 20
"""All blocks of one pair in one direction, lent or free."""

MOST_IN_ALL = 1 << 30
"""All blocks that this process has made."""

KEEP_SECONDS = 5.0
"""How long a block lies free: for the next step of a loop."""

MOST_SPARE = 4
"""A block takes a tensor again that leaves no more of it unused than one part in so many of the
tensor's size, and a page."""

WHOLE_FROM = 4 * HUGE_PAGE
"""Bytes from which on a block is whole huge pages; below, too much of the last would be unused."""


def room_for(nbytes: int) -> int:
    """Return the size of a new block for a tensor of `nbytes`."""
    page = HUGE_PAGE if nbytes >= WHOLE_FROM else mmap.PAGESIZE
    return -(-nbytes // page) * page


class Block:
    """One block that was made here.

    Attributes:
        number: what the link calls it.
        view: its memory.
        lend: which lending it is in the hands of the other end by; None while it is here.
        length: how many bytes of it that lending is.
        readers: how many copy from it here; until they are done it is not written to.
        is_fresh: whether its memory was not touched so far.
    """

    def __init__(self, number: int, memory: Mapped) -> None:
        self.number = number
        self.view = memoryview(memory).cast("B")
        self.nbytes = len(self.view)
        self.lend: int | None = None
        self.length = 0
        self.readers = 0
        self.is_fresh = True
        self.free_since: float | None = None
        self.due_since: float | None = None
        """Since when the other end has no use for it any more, while it is lent."""


class OwnBlocks:
    """The blocks that this end makes.

    Args:
        send: sends a packet, with a descriptor, at once or not at all.
        post: sends a packet as soon as can be.
    """

    def __init__(self, send: Callable[[bytes, int], None], post: Callable[[bytes], None]) -> None:
        self._send = send
        self._post = post
        self._blocks: dict[int, Block] = {}
        # None again soon: a call that was given up may still name what is forgotten.
        self._numbers = itertools.cycle(range(MAX_BLOCK + 1))
        self._lends = 0
        self._is_closed = False
        with _adding:
            _all.add(self)

    @property
    def nbytes(self) -> int:
        """How much they are, lent or free."""
        return sum(block.nbytes for block in tuple(self._blocks.values()))

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, nbytes: int) -> Block | None:
        """Return a block for so many bytes, to be written to; None if there is none to be had."""
        if self._is_closed or not LEAST_BYTES <= nbytes <= MOST_BYTES:
            return None
        most = room_for(nbytes + nbytes // MOST_SPARE)
        fitting = [block for block in self._free() if nbytes <= block.nbytes <= most]
        if fitting:
            block = min(fitting, key=lambda block: block.nbytes)
            block.free_since = None
            return block
        room = room_for(nbytes)
        return self._make(room) if self._make_room(room) else None

    def lend(self, block: Block, nbytes: int) -> int:
        """Return what to call this lending of the first `nbytes` of a block."""
        block.is_fresh, block.length, block.due_since = False, nbytes, None
        self._lends += 1
        block.lend = self._lends
        return self._lends

    def drop(self, block: Block) -> None:
        """Use a block no more: nobody knows whether the other end has it."""
        if self._blocks.pop(block.number, None) is not None:
            self._post(ForgottenMessage(block.number).encode())

    def drop_lent(self, lend: int) -> None:
        """Use the block no more that is lent by this name, if it was not given back already."""
        block = self.lent(lend)
        if block is not None:
            self.drop(block)

    def returned(self, lend: int) -> None:
        """Take back a block that the other end gives; one that was dropped meanwhile is gone."""
        block = self.lent(lend)
        if block is not None:
            block.lend, block.free_since = None, time.monotonic()

    def due(self, lend: int) -> None:
        """Wait no longer than for a free one for the block lent by this name to be given back."""
        block = self.lent(lend)
        if block is not None:
            block.due_since = time.monotonic()

    def lent(self, lend: int) -> Block | None:
        """Return the block that is lent by this name."""
        for block in self._blocks.values():
            if block.lend == lend:
                return block
        return None

    def has_lent(self, nbytes: int) -> bool:
        """Whether the other end has so many bytes of a block."""
        return any(
            block.lend is not None and block.length == nbytes for block in self._blocks.values()
        )

    def expire(self, now: float) -> None:
        """Forget what was free, or due, for too long."""
        for block in tuple(self._blocks.values()):
            since = block.free_since if block.lend is None else block.due_since
            if since is not None and now - since >= KEEP_SECONDS:
                self.drop(block)

    def close(self) -> None:
        """Forget everything; what is being copied to or from lasts until that is done."""
        self._is_closed = True
        self._blocks.clear()

    def _free(self) -> list[Block]:
        """Return the blocks that nobody uses, the longest free first."""
        free = [it for it in self._blocks.values() if it.free_since is not None and not it.readers]
        return sorted(free, key=lambda block: block.free_since or 0.0)

    def _make_room(self, nbytes: int) -> bool:
        """Forget free blocks until there is room for one more; return whether there is."""
        free = self._free()
        if self.nbytes - sum(block.nbytes for block in free) + nbytes > MOST_BYTES:
            return False
        while not self._has_room(nbytes):
            if not free:
                return False
            self.drop(free.pop(0))
        return True

    def _has_room(self, nbytes: int) -> bool:
        with _adding:
            in_all = sum(each.nbytes for each in tuple(_all))
        return (
            len(self._blocks) < MAX_BLOCKS
            and self.nbytes + nbytes <= MOST_BYTES
            and in_all + nbytes <= MOST_IN_ALL
        )

    def _make(self, nbytes: int) -> Block | None:
        number = next(it for it in self._numbers if it not in self._blocks)
        try:
            descriptor = anonymous_memory()
            try:
                os.ftruncate(descriptor, nbytes)
                seal_size(descriptor)
                block = Block(number, map_memory(descriptor, nbytes, mmap.MAP_SHARED))
                self._send(BlockMessage(block.number).encode(), descriptor)
            finally:
                os.close(descriptor)
        except OSError:  # no memory for it, or no room in the socket: slots will do
            return None
        self._blocks[block.number] = block
        return block


_all: weakref.WeakSet[OwnBlocks] = weakref.WeakSet()

_adding = threading.Lock()
"""Held while there may come one more, of an event loop in another thread."""


class _Theirs:
    """One block of the other end's."""

    def __init__(self, memory: Mapped, nbytes: int) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.is_lent = False


class TheirBlocks:
    """The blocks that the other end has made, and lends.

    Args:
        post: sends a packet as soon as can be. Called in the thread that made this.
    """

    def __init__(self, post: Callable[[bytes], None]) -> None:
        self._post = post
        self._thread = threading.get_ident()
        self._blocks: dict[int, _Theirs] = {}
        self._late: list[int] = []
        """Lendings that ended in another thread, and are not told of yet."""

    def add(self, number: int, descriptor: int) -> None:
        """Take a block; the descriptor stays the caller's.

        Raises:
            ProtocolError: it is no such memory, or there are more than may be.
            OSError: it can't be mapped.
        """
        nbytes = check_memory(descriptor)
        there = sum(block.nbytes for block in self._blocks.values())
        if number in self._blocks or len(self._blocks) >= MAX_BLOCKS:
            raise _broken("a block of a number that is taken, or too many")
        if not LEAST_BYTES <= nbytes <= MOST_BYTES - there:
            raise _broken(f"a block of {nbytes} bytes")
        memory = map_memory(descriptor, nbytes, mmap.MAP_SHARED, writable=False)
        self._blocks[number] = _Theirs(memory, nbytes)

    def forget(self, number: int) -> None:
        """Use a block no more; an object that lies there lies on.

        Raises:
            ProtocolError: there is none.
        """
        if self._blocks.pop(number, None) is None:
            raise _broken("a block is forgotten that is not there")

    def lend(self, number: int, lend: int, meta: TensorMeta) -> Loan | None:
        """Return what was written to a block; None if it is not there any more.

        Raises:
            ProtocolError: it is lent already, or shorter than the tensor, or that has no bytes.
        """
        block = self._blocks.get(number)
        if block is None:
            return None
        if block.is_lent or not 0 < meta.nbytes <= block.nbytes:
            raise _broken("a block that is lent already, or too small, or for no bytes")
        block.is_lent = True
        return Loan(self, block, lend, meta)

    def flush(self) -> None:
        """Tell of what ended in other threads."""
        while self._late:
            self._post(ReturnedMessage(self._late.pop()).encode())

    def close(self) -> None:
        """Forget everything; objects that lie in blocks lie on."""
        self._blocks.clear()

    def end(self, block: _Theirs, lend: int) -> None:
        """Give a block back: nothing refers to what was written there any more."""
        block.is_lent = False
        if threading.get_ident() == self._thread:
            self._post(ReturnedMessage(lend).encode())
        else:
            self._late.append(lend)


class Loan:
    """A tensor that lies in a block of its owner's. It is given back with the last reference to it.

    Attributes:
        blocks: of which link.
        lend: what the owner calls it.
        nbytes: how much memory is held for it: all of the block.
        writes: how often torch has written to it, as to each that `allocate` returns.
    """

    writes = NEW_WRITES

    def __init__(self, blocks: TheirBlocks, block: _Theirs, lend: int, meta: TensorMeta) -> None:
        self.blocks = blocks
        self.lend = lend
        self.nbytes = block.nbytes
        self._meta = meta
        address = ctypes.addressof(block.memory)
        content = (ctypes.c_ubyte * meta.nbytes).from_address(address)
        weakref.finalize(content, blocks.end, block, lend).atexit = False
        self._content = content

    @functools.cached_property
    def raw(self) -> torch.Tensor:
        """The tensor as it lies there, for who reads each byte once, and believes none.

        The owner can change it at any time. Not to be written to. Made when it is first asked for:
        most are read by their owner alone.
        """
        content = torch.frombuffer(self._content, dtype=torch.uint8)
        return allocate(self._meta, content.untyped_storage())

    def copied(self) -> torch.Tensor:
        """Return a copy, which is nobody's but the caller's.

        Raises:
            QuotaExceeded: this machine has no room for it.
        """
        tensor = allocate(self._meta)
        copy_now(tensor_bytes(tensor), tensor_bytes(self.raw))
        return tensor


def _broken(why: str) -> ProtocolError:
    return ProtocolError("shared memory", why=why)
