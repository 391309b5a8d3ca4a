"""``torch.distributed.rpc.functions``: marks on functions that are called from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["async_execution", "is_async_execution"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MARK = "_mesh_async_execution"


def async_execution(function: _Function) -> _Function:
    """Say that a function returns a ``torch.futures.Future`` whose value is the result.

    The thread that ran it is free meanwhile; the answer goes when the future is complete, as in
    ``torch.distributed.rpc.functions.async_execution``. A coroutine function needs no mark.
    """
    setattr(getattr(function, "__func__", function), _MARK, True)
    return function


def is_async_execution(function: Callable[..., Any]) -> bool:
    """Return whether a function is so marked."""
    return bool(getattr(function, _MARK, False))
