"""Spans for torch's profiler: one for each operation, from its issue to its end.

They are named as torch's own groups do, ``mesh:all_reduce``, and stand where the operation was
called, though it may run, and end, on another thread.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
from torch.autograd.profiler import record_function

from mesh.distributed.work import MeshWork

__all__ = ["Span"]


class Span:
    """A context manager for the issue of an operation. Does nothing while nobody profiles.

    Args:
        name: what the profiler shows.
    """

    def __init__(self, name: str) -> None:
        self._record = record_function(name) if torch._C._autograd._profiler_enabled() else None
        self._work: MeshWork | None = None

    def end_with(self, work: MeshWork) -> None:
        """Let the span last until `work` is over."""
        self._work = work

    def __enter__(self) -> Self:
        if self._record is not None:
            self._record.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._record is None:
            return
        if self._work is None or self._work.is_completed():
            self._record.__exit__(kind, error, traceback)
        else:
            self._record._call_end_callbacks_on_future(self._work.get_future())
