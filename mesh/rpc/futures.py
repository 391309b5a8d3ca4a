"""Futures of calls, which are torch's, and wait without holding up anybody's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from mesh.rpc.workers import may_block

__all__ = ["CallFuture"]

_Value = TypeVar("_Value")


class CallFuture(torch.futures.Future, Generic[_Value]):  # type: ignore[type-arg]
    """A ``torch.futures.Future`` of a call. Its callbacks run on threads of their own."""

    def wait(self) -> _Value:
        """Return the result, as soon as it is there; threads of handlers let others run meanwhile.

        Raises:
            Exception: what the call raised.
        """
        if self.done():
            return super().wait()  # type: ignore[no-any-return]
        with may_block():
            return super().wait()  # type: ignore[no-any-return]

    def complete(self, compute: Callable[[], Any]) -> None:
        """Set the result, or what getting it raises. For the thread whose time callbacks take."""
        try:
            value = compute()
        except Exception as error:
            self.set_exception(error)
        else:
            self.set_result(value)
