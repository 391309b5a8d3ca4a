"""The few file operations that keys, invites and authorized keys stand on, each all or nothing.

What these functions leave behind after a crash or a race is either the old file or the new one,
whole and on disk, and never readable by more people than asked for.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["create_file", "locked", "read_file", "replace_file"]

# Editing takes milliseconds; whoever holds a lock longer is stopped or stuck. Below the 5 s that an
# authorizer has for its answer.
_LOCK_SECONDS = 4.0
_LOCK_RETRY_SECONDS = 0.01

# Not every platform has each of these; where one is missing, the check it serves does not apply.
_OPEN_FLAGS = (
    getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NOCTTY", 0)
    # A named pipe without a writer must not hold us.
    | getattr(os, "O_NONBLOCK", 0)
)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def read_file(path: Path, *, max_bytes: int, refuse_mode: int, follow: bool) -> bytes:
    """Read a small regular file whose owner and mode can be trusted.

    Args:
        path: the file.
        max_bytes: refuse a larger one.
        refuse_mode: refuse a file with any of these permission bits (POSIX only).
        follow: whether the last component may be a symbolic link.

    Raises:
        OSError: it can't be opened or read; FileNotFoundError if there is none.
        ValueError: it is not what it should be; the text says why, and what to run if that helps.
    """
    if not follow and path.is_symlink():
        raise ValueError("it is a symbolic link")
    descriptor = os.open(path, os.O_RDONLY | _OPEN_FLAGS | (0 if follow else _NO_FOLLOW))
    try:
        _check_status(path, os.fstat(descriptor), refuse_mode)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return data


def create_file(path: Path, data: bytes) -> None:
    """Create ``path`` (mode 0600) with ``data``, whole and on disk, or not at all.

    Of several callers at once exactly one succeeds, in one process or many.

    Raises:
        FileExistsError: there is something at ``path`` already; it is left alone.
        OSError: the file can't be written.
    """
    temporary = _write_temporary(path, data)
    try:
        # Linking fails if the name is taken, and shows the file only once it is complete.
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of ``path`` (mode 0600): readers see the old file or the new one.

    Raises:
        OSError: the file can't be written; the old one stays.
    """
    temporary = _write_temporary(path, data)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the one lock of ``path`` against other threads and processes, at ``path`` + ``.lock``.

    Raises:
        TimeoutError: another holder kept it for 4 s.
        OSError: the lock file can't be opened.
    """
    lock = path.with_name(path.name + ".lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS | _NO_FOLLOW, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{lock} has been locked for {_LOCK_SECONDS:.0f} s")
            time.sleep(_LOCK_RETRY_SECONDS)
        yield
    finally:
        # Closing the descriptor gives the lock up.
        os.close(descriptor)


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _check_status(path: Path, status: os.stat_result, refuse_mode: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if sys.platform != "win32" and status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"it belongs to user {status.st_uid}, who could change it at any time")
    mode = stat.S_IMODE(status.st_mode)
    if sys.platform != "win32" and mode & refuse_mode:
        access = "read or changed" if refuse_mode & 0o044 else "changed"
        raise ValueError(
            f"its mode is {mode:04o}, so that others could have {access} it; "
            f"run: chmod 600 {shlex.quote(str(path))}"
        )


def _write_temporary(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS | _NO_FOLLOW
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _sync_directory(directory: Path) -> None:
    # A new name is on disk only once its directory is; Windows has no such call and needs none.
    if sys.platform != "win32":
        descriptor = os.open(directory, os.O_RDONLY | _OPEN_FLAGS)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
