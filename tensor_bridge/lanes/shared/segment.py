"""Memory without a name that several processes write to, sealed against resizing.

As with a pool (see `pool`): it is the kernel's, gone with the last process that has it, and can't
be cut short under anybody's hands.
"""

from __future__ import annotations

import functools
import mmap
import os
import stat
import sys

from transport import ProtocolError

if sys.platform == "linux":
    import fcntl

__all__ = ["make_segment", "map_segment"]


def make_segment(nbytes: int) -> tuple[mmap.mmap, int]:
    """Make memory of `nbytes` zeros; return it, and a descriptor of it for the others.

    Raises:
        OSError: the system has no such memory, or no more.
    """
    descriptor = _memory()
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
        return mmap.mmap(descriptor, nbytes), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def map_segment(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map memory that another process made. The descriptor stays the caller's.

    Raises:
        ProtocolError: it is not anonymous memory of this user's, of this size, and sealed.
        OSError: it can't be mapped.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_dev != _device() or found.st_nlink:
        raise _refused("a descriptor that is not of anonymous memory")
    if found.st_uid != os.geteuid():
        raise _refused("memory of another user")
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() != _seals():
        raise _refused("memory that is not sealed against resizing")
    if found.st_size != nbytes:
        raise _refused(f"{found.st_size} bytes of memory where {nbytes} belong")
    return mmap.mmap(descriptor, nbytes)


def _memory() -> int:
    return os.memfd_create("quicmesh", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@functools.cache
def _device() -> int:
    """Return the device that all anonymous memory is on; that of huge pages is on another.

    Of those there may be too few at any access, which kills whoever makes it.
    """
    descriptor = _memory()
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


def _refused(why: str) -> ProtocolError:
    return ProtocolError("shared memory", why=why)
