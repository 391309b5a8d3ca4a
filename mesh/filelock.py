"""A lock that ends with its process, however that ends: who holds it lives."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mesh.errors import HomeError

__all__ = ["FileLock"]


class FileLock:
    """An advisory lock on the file at `path`, for this project's own processes.

    The lock is on the open file and not on its existence, so that a killed process leaves nothing
    to clean up, and no process id has to be trusted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def acquire(self) -> bool:
        """Take the lock if nobody holds it, not even this object. Never waits.

        Raises:
            HomeError: the file can't be opened.
        """
        if self._handle is not None:
            return False
        self._handle = self._lock(shared=False)
        return self._handle is not None

    def release(self) -> None:
        """Give the lock back; nothing happens if it is not held."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def is_held(self) -> bool:
        """Say whether this or another process holds the lock now."""
        if self._handle is not None:
            return True
        if not self._path.exists():
            return False
        # Shared, so that several who only ask don't take each other for a holder.
        handle = self._lock(shared=True)
        if handle is None:
            return True
        os.close(handle)
        return False

    def _lock(self, *, shared: bool) -> int | None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        try:
            handle = os.open(self._path, flags, 0o600)
        except OSError as error:
            raise HomeError(
                f"lock file {self._path}",
                why=error.strerror or str(error),
                fix="Remove what is in its place, if it is no file that can be written.",
            ) from error
        if _try_lock(handle, shared=shared):
            return handle
        os.close(handle)
        return None


if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int, *, shared: bool) -> bool:  # it knows exclusive locks only
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(handle: int, *, shared: bool) -> bool:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
