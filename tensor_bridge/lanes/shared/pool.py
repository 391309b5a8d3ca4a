"""A pool of slots: memory without a name, sealed against resizing, mapped by two processes.

The memory is the kernel's, for as long as either process has it; it has no name in any file system,
so that whatever becomes of the two, nothing is left of it. Seals see to it that a mapping can't be
cut short under its reader, who would be killed by the access.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import stat
import sys

from tensor_bridge.lanes.shared.protocol import MAX_SLOTS
from transport import ProtocolError

if sys.platform == "linux":
    import fcntl

__all__ = [
    "Pool",
    "anonymous_memory",
    "check_memory",
    "device_of_memory",
    "make_pool",
    "map_pool",
    "seal_size",
]


class Pool:
    """Slots of memory, mapped here.

    Args:
        memory: what they are cut out of.
        slot_bytes: the size of each.
    """

    def __init__(self, memory: mmap.mmap, slot_bytes: int) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._slot_bytes = slot_bytes
        self.count = len(memory) // slot_bytes

    def fill(self, slot: int, data: memoryview) -> None:
        """Copy `data`, at most a slot of it, to the beginning of `slot`."""
        start = slot * self._slot_bytes
        self._view[start : start + len(data)] = data

    def copy_out(self, slot: int, target: memoryview) -> None:
        """Fill `target`, at most a slot of it, from the beginning of `slot`."""
        start = slot * self._slot_bytes
        target[:] = self._view[start : start + len(target)]

    def close(self) -> None:
        """Unmap it. May be repeated."""
        with contextlib.suppress(BufferError):  # a forked child may find it amid a copy
            self._view.release()
            self._memory.close()


def make_pool(count: int, slot_bytes: int) -> tuple[Pool, int]:
    """Make a pool to send from; return it, and a descriptor of it for the receiver.

    Raises:
        OSError: the system has no such memory, or no more.
    """
    descriptor = anonymous_memory()
    try:
        os.ftruncate(descriptor, count * slot_bytes)
        seal_size(descriptor)
        return Pool(mmap.mmap(descriptor, count * slot_bytes), slot_bytes), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def map_pool(descriptor: int, slot_bytes: int) -> Pool:
    """Map another process's pool to receive from it; its size is what the kernel says.

    The descriptor stays the caller's.

    Raises:
        ProtocolError: it is not anonymous memory of this user's, not sealed, or not of whole slots,
            one at least and `MAX_SLOTS` at most.
        OSError: it can't be mapped.
    """
    nbytes = check_memory(descriptor)
    count, rest = divmod(nbytes, slot_bytes)
    if rest or not 0 < count <= MAX_SLOTS:
        raise _refused(f"{nbytes} bytes of memory for slots of {slot_bytes}")
    return Pool(mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ), slot_bytes)


def check_memory(descriptor: int) -> int:
    """Return the size of memory that another process made, as the kernel tells it.

    Raises:
        ProtocolError: it is not anonymous memory of this user's, or not sealed against resizing.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_dev != device_of_memory() or found.st_nlink:
        raise _refused("a descriptor that is not of anonymous memory")
    if found.st_uid != os.geteuid():
        raise _refused("memory of another user")
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() != _seals():
        raise _refused("memory that is not sealed against resizing")
    return found.st_size


def seal_size(descriptor: int) -> None:
    """Seal memory against resizing and against further seals."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())


def anonymous_memory() -> int:
    """Return a descriptor of new, empty memory without a name, which can be sealed."""
    return os.memfd_create("quicmesh", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@functools.cache
def device_of_memory() -> int:
    """Return the device that all anonymous memory is on; that of huge pages is on another.

    Of those there may be too few at any access, which kills whoever makes it.
    """
    descriptor = anonymous_memory()
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


def _refused(why: str) -> ProtocolError:
    return ProtocolError("shared memory", why=why)
