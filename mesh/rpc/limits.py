"""The time that a call may take, at whoever waits for it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar

import anyio

from mesh.rpc.errors import RpcTimeout
from transport import DeadlineExceeded

__all__ = ["GRACE", "PATIENCE", "STREAMS_BACK", "is_answering", "limit", "timed_out"]

GRACE = 1.0
"""Seconds that a callee has beyond a call's limit to say itself that the time was up."""

PATIENCE = 5.0
"""Seconds that a call which a handler makes waits for a stream while none ends: they may all be of
calls that wait for each other, and for this one."""

STREAMS_BACK = 1024
"""Streams that a callee may have open at its caller for the caller's own calls, one for each: those
that call back need as many as they are deep."""

is_answering: ContextVar[bool] = ContextVar("is_answering", default=False)
"""Whether this is a task or thread of a call that is answered here."""


@contextlib.contextmanager
def limit(seconds: float, what: str, peer: str) -> Iterator[None]:
    """Raise `RpcTimeout` about `what` if the block takes longer than `seconds`; 0 is no limit."""
    try:
        with anyio.move_on_after(seconds or math.inf) as scope:
            yield
    except DeadlineExceeded as error:
        if isinstance(error, RpcTimeout):
            raise
        raise timed_out(what, peer, seconds) from error
    if scope.cancelled_caught:
        raise timed_out(what, peer, seconds)


def timed_out(what: str, peer: str | None, seconds: float) -> RpcTimeout:
    """Return the error for `what`, at `peer` or here, that took longer than `seconds`."""
    return RpcTimeout(
        what,
        peer=peer,
        after=seconds,
        why=f"the RPC ran for more than the set timeout ({seconds:g} s)",
        fix="Give it more time: timeout=, in seconds; 0 is no limit.",
    )
