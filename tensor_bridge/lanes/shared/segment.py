"""Memory without a name that several processes write to, sealed against resizing.

As with a pool (see `pool`): it is the kernel's, gone with the last process that has it, and can't
be cut short under anybody's hands.
"""

from __future__ import annotations

import mmap
import os

from tensor_bridge.lanes.shared.pool import anonymous_memory, check_memory, seal_size
from transport import ProtocolError

__all__ = ["make_segment", "map_segment"]


def make_segment(nbytes: int) -> tuple[mmap.mmap, int]:
    """Make memory of `nbytes` zeros; return it, and a descriptor of it for the others.

    Raises:
        OSError: the system has no such memory, or no more.
    """
    descriptor = anonymous_memory()
    try:
        os.ftruncate(descriptor, nbytes)
        seal_size(descriptor)
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
    found = check_memory(descriptor)
    if found != nbytes:
        raise ProtocolError("shared memory", why=f"{found} bytes of memory where {nbytes} belong")
    return mmap.mmap(descriptor, nbytes)
