"""Memory that passes between processes by its descriptor, and that nobody can change any more.

A move promises a copy: what one side does to its tensor afterwards is not to show on the other. To
hand memory over instead of bytes keeps that promise in one way only: by the kernel's seals. Sealed
against writing (F_SEAL_WRITE), memory can be mapped shared by nobody who may write to it, which the
kernel checks when the seal is set, pages that are pinned for a device included. Each process then
maps it privately: it reads the same pages, and the first write to one gives it a page of its own.
So whoever receives it relies on the seals that it has asked the kernel for, and on nothing that the
other end says, and neither has to know what the other does to its tensor.

Why not everything moves like that: pages cost more than bytes. For 64 MiB, on the machine that this
was measured on, a copy into memory that was touched before takes 8 ms. To map it takes 0.06 ms; to
read through the new mapping for the first time, 8 ms more than through an old one; to write to all
of it, 60 ms. A seal can't be taken off, so that sealed memory is never used again, and new
memory takes 16 ms to write, and 30 in small pages, where the copy took 8. Hence a move copies
unless it is asked not to:

- ``put(shareable=True)`` writes the tensor once, into new memory, seals it and hands it over. The
  cost is paid there, once.
- ``get(copy=False)`` of such a tensor maps it: about as long as a round trip, at any size. It pays
  where many read one tensor, or parts of it, or where there is no memory for a copy for each.

What was weighed and left: to share memory that one side can still write to needs no seal, and lets
a hostile peer change bytes after they were checked. F_SEAL_FUTURE_WRITE leaves the mappings there
are writable: the same. To seal what has landed in memory that is used again, when somebody asks for
it, costs its mapping (30 ms for 1 GiB) and the seal (12 ms), and the memory for the next. To read
the other process's own memory (process_vm_readv) copies at two thirds of the rate, needs the right
to trace it, reads on if the tensor is given back meanwhile, and waits for as long as the other
likes, who may have a page come from a file system or a fault handler of its own.

A tensor that was written to through its private mapping, by whatever means, is no more what the
sealed memory holds: the kernel is asked whether any page of it is the process's own
(PAGEMAP_SCAN, Linux 6.7). If one is, or it can't tell, the tensor is copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat
import struct
import sys
from collections.abc import Iterator

import torch

from tensor_bridge.copying import copy_now
from tensor_bridge.lanes.shared.mapping import map_memory
from tensor_bridge.lanes.shared.pool import anonymous_memory, device_of_memory
from transport import ProtocolError

if sys.platform == "linux":
    import fcntl

__all__ = ["MAX_KEPT", "SealedMemory", "Writer", "kept_memory", "map_sealed", "sealed_memory"]

MAX_KEPT = 64
"""Descriptors kept to hand memory on, in all of the process; a tensor beyond them is copied."""

_BLOCK = 512
"""What ``st_blocks`` counts in."""


class Writer:
    """New memory, written and then sealed.

    Args:
        nbytes: its size.

    Raises:
        OSError: the system has no such memory, or no more.
    """

    def __init__(self, nbytes: int) -> None:
        self._descriptor = anonymous_memory()
        self._nbytes = nbytes
        self._written = 0
        try:
            os.ftruncate(self._descriptor, nbytes)
        except BaseException:
            os.close(self._descriptor)
            raise

    @contextlib.contextmanager
    def mapped(self) -> Iterator[memoryview]:
        """Map it for the block, to be written to; nothing refers to it any more after the block.

        Raises:
            OSError: it can't be mapped.
        """
        content = map_memory(self._descriptor, self._nbytes, mmap.MAP_SHARED)
        with memoryview(content) as room, room.cast("B") as view:
            del content  # the two have it: a mapping that may be written to forbids the seal
            yield view

    def fill(self, content: memoryview) -> None:
        """Write all of it at once; `content` is writable, too.

        Raises:
            OSError: it can't be mapped.
        """
        with self.mapped() as room:
            copy_now(room, content, fresh=self._nbytes)

    def write(self, piece: memoryview) -> None:
        """Write `piece` after those before it.

        By write(2) and not through a mapping: new pages are neither cleared first nor faulted in,
        which takes less than half of the time where they are small.

        Raises:
            OSError: there is no more memory.
        """
        while len(piece):
            count = os.pwrite(self._descriptor, piece, self._written)
            self._written += count
            piece = piece[count:]

    def seal(self) -> SealedMemory:
        """Seal what was written.

        Raises:
            OSError: the system refuses it.
        """
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _seals())
        memory = SealedMemory(self._descriptor, self._nbytes)
        memory.keep(self._descriptor)
        return memory

    def give(self) -> int:
        """Seal what was written; return a descriptor of it, the caller's to close.

        Raises:
            OSError: the system refuses it.
        """
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _seals())
        return os.dup(self._descriptor)

    def close(self) -> None:
        """Let go of the memory, unless it is kept by what was made of it."""
        os.close(self._descriptor)


class SealedMemory:
    """Sealed memory, mapped here so that what is written to it here shows nowhere else.

    Args:
        descriptor: of memory that is sealed; it stays the caller's.
        nbytes: its size.

    Attributes:
        storage: the mapping, for as long as anything refers to it.

    Raises:
        OSError: it can't be mapped.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._kept: int | None = None
        content = map_memory(descriptor, nbytes, mmap.MAP_PRIVATE, before=_forget)
        self.address = ctypes.addressof(content)
        self.storage = torch.frombuffer(content, dtype=torch.uint8).untyped_storage()

    def keep(self, descriptor: int) -> None:
        """Keep a descriptor of it for as long as it is mapped, to hand it on, if there is room."""
        if len(_kept) < MAX_KEPT:
            _kept[self.address] = (os.dup(descriptor), self.nbytes)


def sealed_memory(tensor: torch.Tensor, nbytes: int) -> int | None:
    """Return a descriptor of the sealed memory that is just this tensor, None if there is none.

    There is none any more once the tensor was written to. The descriptor is good until the tensor's
    memory is let go of.

    Args:
        tensor: on the CPU.
        nbytes: how many bytes its elements are, in the order of memory: all that is handed over.
    """
    descriptor = kept_memory(tensor, nbytes)
    if descriptor is None or not _is_untouched(tensor.data_ptr(), nbytes):
        return None
    return descriptor


def kept_memory(tensor: torch.Tensor, nbytes: int) -> int | None:
    """Return the same whether or not the tensor was written to since it was sealed."""
    storage = tensor.untyped_storage()
    kept = _kept.get(storage.data_ptr()) if tensor.device.type == "cpu" else None
    if kept is None or kept[1] != nbytes or storage.nbytes() != nbytes or tensor.storage_offset():
        return None
    return kept[0]


def map_sealed(descriptor: int, nbytes: int) -> SealedMemory:
    """Map memory that another process hands over; nothing is taken from that one's word.

    The descriptor stays the caller's.

    Raises:
        ProtocolError: it is not anonymous memory of this user's, all there, of just this size, and
            sealed against writing and resizing.
        OSError: it can't be mapped.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_dev != device_of_memory() or found.st_nlink:
        raise _refused("a descriptor that is not of anonymous memory")
    if found.st_uid != os.geteuid():
        raise _refused("memory of another user")
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() != _seals():
        raise _refused("memory that is not sealed against writing and resizing")
    if found.st_size != nbytes:
        raise _refused(f"{found.st_size} bytes of memory for {nbytes}")
    if found.st_blocks * _BLOCK < nbytes:
        raise _refused("memory with holes in it")  # each would be filled at this side's expense
    return SealedMemory(descriptor, nbytes)


_kept: dict[int, tuple[int, int]] = {}
"""The descriptors that are kept, and sizes, by where the memory is mapped."""


def _forget(address: int) -> None:
    """Let go of the descriptor of memory that nothing refers to any more."""
    kept = _kept.pop(address, None)
    if kept is not None:
        os.close(kept[0])


def _seals() -> int:
    return fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


# <linux/fs.h>: struct pm_scan_arg, struct page_region, and the categories of pages.
_PAGEMAP = "/proc/self/pagemap"
_SCAN = struct.Struct("=12Q")
_FOUND = struct.Struct("=3Q")
_PAGEMAP_SCAN = 3 << 30 | _SCAN.size << 16 | ord("f") << 8 | 16
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4


def _is_untouched(address: int, nbytes: int) -> bool:
    """Whether no page of a private mapping was written to, as far as the kernel can tell."""
    pages = -(-nbytes // mmap.PAGESIZE)
    found = ctypes.create_string_buffer(_FOUND.size)
    question = _SCAN.pack(
        _SCAN.size,
        0,
        address,
        address + pages * mmap.PAGESIZE,
        0,
        ctypes.addressof(found),
        1,
        1,
        _IS_FILE,  # asked for by its absence
        _IS_FILE,
        _IS_PRESENT | _IS_SWAPPED,
        _IS_PRESENT | _IS_SWAPPED,
    )
    try:
        pagemap = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        try:
            touched: int = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, bytearray(question))
        finally:
            os.close(pagemap)
    except OSError:
        return False
    return touched == 0


def _refused(why: str) -> ProtocolError:
    return ProtocolError("shared memory", why=why)


def _close_in_child() -> None:
    """Close, in a forked child, the descriptors: the mappings stay, and are handed on by nobody."""
    while _kept:
        _, (descriptor, _) = _kept.popitem()
        os.close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
