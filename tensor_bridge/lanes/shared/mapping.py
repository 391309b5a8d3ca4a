"""Memory of a descriptor, mapped for as long as anything refers to the mapping.

Not by ``mmap.mmap``, which keeps a descriptor of its own for each and refuses to be closed while
a tensor lies in it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Callable
from typing import TypeAlias

from tensor_bridge.huge_pages import HUGE_PAGE, in_huge_pages

__all__ = ["Mapped", "map_memory"]

Mapped: TypeAlias = ctypes.Array[ctypes.c_ubyte]


def map_memory(
    descriptor: int,
    nbytes: int,
    flags: int,
    *,
    writable: bool = True,
    before: Callable[[int], object] = lambda address: None,
) -> Mapped:
    """Map the first `nbytes` of memory; the mapping goes with the last reference to it.

    Memory of a huge page and more begins at a multiple of one, so that it can be in such pages.

    Args:
        descriptor: of the memory; it stays the caller's.
        nbytes: how much of it.
        flags: of mmap(2): ``mmap.MAP_SHARED`` or ``mmap.MAP_PRIVATE``.
        writable: whether it may be written to here; who does so nevertheless is killed.
        before: told of its address before it is unmapped, in whatever thread that happens.

    Raises:
        OSError: it can't be mapped.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if nbytes < HUGE_PAGE:
        address = _map(None, nbytes, protection, flags, descriptor)
    else:
        address = _map_aligned(nbytes, protection, flags, descriptor)
    content = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit: tensors may still be used there, and the process takes its memory with it.
    weakref.finalize(content, _unmap, address, nbytes, before).atexit = False
    return content


def _map(at: int | None, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    address: int = _libc().mmap(at, nbytes, protection, flags, descriptor, 0)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return address


def _map_aligned(nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    """Map it in the middle of room that is a huge page longer, and let go of the rest."""
    room = nbytes + HUGE_PAGE
    outer = _map(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    inner = in_huge_pages(outer)
    end = -(-(inner + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        _map(inner, nbytes, protection, flags | _MAP_FIXED, descriptor)
    except OSError:
        _libc().munmap(outer, room)
        raise
    if inner > outer:
        _libc().munmap(outer, inner - outer)
    if outer + room > end:
        _libc().munmap(end, outer + room - end)
    return inner


def _unmap(address: int, nbytes: int, before: Callable[[int], object]) -> None:
    before(address)
    _libc().munmap(address, nbytes)


_MAP_FIXED = 0x10

_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, address = ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [address, size]
    return libc
