"""What the nodes of a backward say to each other, and what is told of a failure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

from auth import MeshError, NodeId
from mesh.autograd.contexts import Contexts
from mesh.autograd.errors import BackwardError
from mesh.autograd.wire import Failure
from mesh.rpc.encoding.exceptions import decode_exception, encode_exception
from mesh.rpc.workers import contained, may_block
from transport import NOT_NOW, CborValue, DeadlineExceeded, NotNow

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent

__all__ = ["Peers"]

_Result = TypeVar("_Result")


class Peers:
    """Those that a node goes backward with.

    Args:
        agent: what it talks to them by.
        contexts: the node's.
    """

    def __init__(self, agent: Agent, contexts: Contexts) -> None:
        self._agent = agent
        self._contexts = contexts
        self._threads = anyio.CapacityLimiter(math.inf)

    async def call(self, peer: NodeId, service: str, value: CborValue) -> CborValue | Failure:
        """Return a peer's answer, or why there is none: its own failure, or one on the way."""
        try:
            connection = await self._agent.connected(peer)
            # Whoever began all this has set a limit; the loss of the peer ends it, too.
            answer = await connection.call(service, value, timeout=math.inf)
            return _read(answer)
        except MeshError as error:
            return self.failure(error, peer)

    def call_in_thread(
        self, peer: NodeId, service: str, value: CborValue, seconds: float
    ) -> CborValue | Failure | NotNow:
        """Do the same without the event loop, for a thread, where there is such a way.

        Returns:
            The same; `NOT_NOW` if there is none, and nothing was said.

        Raises:
            DeadlineExceeded: it took more than `seconds`.
        """
        connection = self._agent.short_way(peer)
        if connection is None:
            return NOT_NOW
        try:
            with may_block():
                answer = connection.call_in_thread(
                    service,
                    value,
                    timeout=seconds,
                    is_over=lambda: not self._agent.bridge.is_open,
                )
            return answer if isinstance(answer, NotNow) else _read(answer)
        except DeadlineExceeded:
            raise
        except MeshError as error:
            return self.failure(error, peer)

    async def in_thread(self, function: Callable[[], _Result]) -> _Result:
        """Return what `function` does in a thread; who is cancelled does not wait for its end."""
        return await anyio.to_thread.run_sync(
            lambda: contained(function), limiter=self._threads, abandon_on_cancel=True
        )

    def failure(self, error: BaseException, node: NodeId | None = None) -> Failure:
        """Return what a node tells others of an error of its own, or of one about `node`."""
        if node is None or node == self._agent.node_id:
            worker = self._contexts.worker_id
            return Failure(self._agent.node_id, worker, encode_exception(error), error)
        return Failure(node, None, encode_exception(error), error)

    def error(self, failure: Failure) -> BackwardError:
        """Return what is raised of a failure where the backward was called."""
        label = self._agent.label(failure.node)
        cause = failure.raised
        if cause is None:
            cause = decode_exception(failure.error, peer=label, what="backward")
        node = failure.node.short if failure.worker is None else str(failure.worker)
        place = f", {failure.place}" if failure.place else ""
        error = BackwardError(f"Error on Node {node}", why=f"{cause} (raised at {label}{place})")
        error.__cause__ = cause
        return error


def _read(answer: CborValue) -> CborValue | Failure:
    return Failure.decode(answer) if Failure.is_in(answer) else answer
