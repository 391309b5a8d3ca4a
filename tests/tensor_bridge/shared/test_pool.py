"""Memory that another process made: taken only if nobody can pull it away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator

import pytest

from tensor_bridge.lanes.shared.host import unavailable
from tensor_bridge.lanes.shared.pool import make_pool, map_pool
from tensor_bridge.lanes.shared.protocol import MAX_SLOTS
from transport import ProtocolError

pytestmark = [
    pytest.mark.attack,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

SLOT = 1 << 16
RESIZING = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def memory(size: int, seals: int, flags: int = 0) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_both_see_the_same() -> None:
    ours, descriptor = make_pool(3, SLOT)
    with closing(descriptor):
        theirs = map_pool(descriptor, SLOT)
    assert theirs.count == ours.count == 3
    ours.fill(2, memoryview(b"x" * SLOT))
    ours.fill(1, memoryview(b"abc"))
    room = bytearray(3)
    theirs.copy_out(1, memoryview(room))
    assert room == b"abc"
    room = bytearray(SLOT)
    theirs.copy_out(2, memoryview(room))
    assert room == b"x" * SLOT
    with pytest.raises(TypeError):
        theirs.fill(1, memoryview(b"abc"))  # it is to be read here, and nothing else
    for pool in (ours, theirs):
        pool.close()
        pool.close()


def test_nobody_can_resize_it() -> None:
    pool, descriptor = make_pool(3, SLOT)
    with closing(descriptor):
        for size in (0, SLOT, 4 * SLOT):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    pool.close()


def file() -> int:
    with tempfile.TemporaryFile() as it:
        it.truncate(SLOT)
        return os.dup(it.fileno())


def shared_file() -> int:
    with tempfile.TemporaryFile(dir="/dev/shm") as it:
        it.truncate(SLOT)
        return os.dup(it.fileno())


def pipe() -> int:
    one, other = os.pipe()
    os.close(other)
    return one


def huge() -> int:
    try:
        return memory(2 << 20, RESIZING | fcntl.F_SEAL_SEAL, os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"there are no huge pages: {error}")


SEALED = RESIZING | fcntl.F_SEAL_SEAL

FOREIGN: dict[str, Callable[[], int]] = {
    "unsealed": lambda: memory(SLOT, 0),
    "sealed against shrinking alone": lambda: memory(SLOT, fcntl.F_SEAL_SHRINK),
    "sealed against growing alone": lambda: memory(SLOT, fcntl.F_SEAL_GROW),
    "with seals to add": lambda: memory(SLOT, RESIZING),
    "empty": lambda: memory(0, SEALED),
    "no whole slots": lambda: memory(SLOT + 1, SEALED),
    "too many slots": lambda: memory((MAX_SLOTS + 1) * SLOT, SEALED),
    "a file": file,
    "a file in memory": shared_file,
    "a device": lambda: os.open("/dev/zero", os.O_RDWR),
    "a directory": lambda: os.open("/", os.O_RDONLY),
    "a pipe": pipe,
    "of huge pages": huge,
}


@pytest.mark.parametrize("what", FOREIGN)
def test_other_memory_is_refused(what: str) -> None:
    with closing(FOREIGN[what]()) as descriptor, pytest.raises(ProtocolError):
        map_pool(descriptor, SLOT)


def test_sealed_memory_of_whole_slots_is_taken() -> None:
    with closing(memory(MAX_SLOTS * SLOT, SEALED)) as descriptor:
        pool = map_pool(descriptor, SLOT)
    assert pool.count == MAX_SLOTS
    pool.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="memory of another user needs root")
def test_memory_of_another_user_is_refused() -> None:
    with closing(memory(SLOT, SEALED)) as descriptor:
        os.fchown(descriptor, 65534, 65534)
        with pytest.raises(ProtocolError, match="another user"):
            map_pool(descriptor, SLOT)
