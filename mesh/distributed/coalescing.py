"""Which of a group's operations are to be one work: those that a thread starts meanwhile.

torch's manager says when that begins, and when it ends unless what is in its block raises: then it
is over without a word. So each collection knows the manager that it is for, and ends with it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, GeneratorType
from typing import Any

from torch.distributed import distributed_c10d

from mesh.distributed.work import MeshWork

__all__ = ["Collections"]


class Collections:
    """What the threads of this process collect, each for itself. For any thread."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[list[MeshWork], Callable[[], bool]]] = {}

    def begin(self) -> None:
        """Collect the works that this thread starts from now on."""
        self._open[threading.get_ident()] = [], _end_of_manager()

    def end(self) -> list[MeshWork]:
        """Return what this thread has collected."""
        return self._open.pop(threading.get_ident(), ([], _never))[0]

    def current(self) -> list[MeshWork] | None:
        """Return where this thread's works are collected, None if they are not."""
        if not self._open:
            return None
        thread = threading.get_ident()
        works, is_over = self._open.get(thread, (None, _never))
        if works is not None and is_over():
            del self._open[thread]
            return None
        return works


def _end_of_manager() -> Callable[[], bool]:
    """Return what tells whether torch's manager is over, from whose block's begin this is called.

    A call from elsewhere is over when it says so.
    """
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not _MANAGER:
        frame = frame.f_back
    manager = frame.f_back.f_locals.get("self") if frame.f_back is not None else None
    if not isinstance(manager, contextlib._GeneratorContextManager):
        return _never
    assert isinstance(manager.gen, GeneratorType)
    block: weakref.ref[GeneratorType[Any, Any, Any]] = weakref.ref(manager.gen)

    def is_over() -> bool:
        generator = block()
        return generator is None or generator.gi_frame is None

    return is_over


def _never() -> bool:
    return False


_MANAGER: CodeType | None = getattr(
    getattr(distributed_c10d._coalescing_manager, "__wrapped__", None), "__code__", None
)
