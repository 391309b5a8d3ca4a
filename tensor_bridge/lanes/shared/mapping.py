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
    address = _libc().mmap(None, nbytes, protection, flags, descriptor, 0)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    content = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit: tensors may still be used there, and the process takes its memory with it.
    weakref.finalize(content, _unmap, address, nbytes, before).atexit = False
    return content


def _unmap(address: int, nbytes: int, before: Callable[[int], object]) -> None:
    before(address)
    _libc().munmap(address, nbytes)


_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, address = ctypes.c_size_t, ctypes.c_void_p
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [address, size]
    return libc
