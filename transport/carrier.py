"""Another way for calls than a stream each, between two nodes that have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["NOT_NOW", "Carrier", "NotNow"]


class NotNow:
    """What says of a call that it takes another way, or waiting."""


NOT_NOW = NotNow()


class Carrier(Protocol):
    """Carries the requests and replies of calls on one connection, to and from its own peer.

    What travels are the frames of ``transport.frames``, without their lengths. The other end has
    each request served by ``Endpoint.begin_answer``.
    """

    @property
    def most(self) -> int:
        """Bytes of the longest request that it takes."""
        ...

    async def call(self, request: bytes) -> bytes | None:
        """Send a request and return the reply; cancelled, it has the handler cancelled as well.

        None if it can't carry the call, which was not begun then, and is to go on a stream.

        Raises:
            MeshError: the way is gone, and nobody knows what has become of the call.
        """
        ...

    def call_in_thread(
        self, request: bytes, timeout: float, is_over: Callable[[], bool]
    ) -> bytes | None:
        """Do the same for a thread that is not the event loop's, which waits.

        Raises:
            TimeoutError: no reply within `timeout` seconds, or before `is_over`, which is asked now
                and then; the handler is cancelled.
            MeshError: as `call`.
        """
        ...
