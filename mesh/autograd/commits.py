"""Backwards whose gradients count only if all of it has succeeded.

Each node puts the gradients of such a run aside. When the root knows that all runs are over and
well, it says so down the tree, and they are added to those of the context; when one has failed,
they are let go of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import anyio

from auth import MeshError, NodeId
from mesh.autograd.contexts import MAX_MARKINGS, Aside, Contexts
from mesh.autograd.errors import BackwardError
from mesh.autograd.leaves import add_all
from mesh.autograd.marking import Marking
from mesh.autograd.peers import Peers
from mesh.autograd.run import Run
from mesh.autograd.wire import SETTLE_SERVICE, Failure, MarkingId, SettleOrder
from mesh.rpc.errors import RpcError
from mesh.rpc.limits import limit
from mesh.rpc.wire import SCOPE
from transport import CborValue, Endpoint, Incoming, LimitExceeded

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent

__all__ = ["Commits"]

LET_GO_SECONDS = 5.0
"""How long others may take to hear that a backward has failed; who does not, keeps what it has put
aside until the context ends."""


class Commits:
    """What was put aside by the runs of a node.

    Args:
        agent: what a node talks to others by.
        contexts: the node's.
        peers: those others.
    """

    def __init__(self, agent: Agent, contexts: Contexts, peers: Peers) -> None:
        self._agent = agent
        self._contexts = contexts
        self._peers = peers

    def register(self, endpoint: Endpoint) -> None:
        """Offer the service to peers that may call this node."""
        endpoint.register_call(SETTLE_SERVICE, self._answer, scope=SCOPE)

    # -- at the root, in threads

    def commit(self, marking: Marking, run: Run, seconds: float) -> Failure | None:
        """Have the gradients of a run count everywhere; return why they do not.

        Args:
            marking, run: of this node's.
            seconds: how long it may take; 0 for as long as it takes.
        """
        order = SettleOrder(marking.context.id, marking.id, run.number, counts=True)

        async def tell() -> Failure | None:
            try:
                with limit(seconds, "adding of gradients that were put aside", "others"):
                    return await self._tell(marking.children, order)
            except MeshError as error:
                return self._peers.failure(error)

        failure = self._agent.bridge.block_on(tell)
        if failure is None and run.leaves.aside is not None:
            add_all(marking.context, run.leaves.aside.gradients)
        return failure

    def let_go(self, marking: Marking, run: Run) -> None:
        """Have others let go of what they have put aside for a run that has failed."""
        with contextlib.suppress(RpcError):  # it is over
            self._agent.bridge.start(partial(self.dropped, marking, run))

    # -- everywhere, in the loop

    async def dropped(self, marking: Marking, run: Run) -> None:
        """Tell them, and wait until they have heard."""
        order = SettleOrder(marking.context.id, marking.id, run.number, counts=False)
        with anyio.move_on_after(LET_GO_SECONDS):
            await self._tell(marking.children, order)

    def keep(self, marking: Marking, run: Run) -> None:
        """Keep what a run that went well has put aside, until its parent says what is to be of it.

        Raises:
            LimitExceeded: there is too much already.
        """
        context, aside = marking.context, run.leaves.aside
        assert aside is not None
        with context.lock:
            if len(context.asides) >= MAX_MARKINGS:
                raise LimitExceeded("backward", why=f"{MAX_MARKINGS} are put aside already")
            if not context.is_over:
                aside.parent, aside.children = marking.parent, frozenset(marking.children)
                context.asides[marking.id, run.number] = aside

    async def _tell(self, peers: Iterable[NodeId], order: SettleOrder) -> Failure | None:
        """Say to others what is to be of it; return the first failure."""
        failures: list[Failure] = []

        async def tell(peer: NodeId) -> None:
            answer = await self._peers.call(peer, SETTLE_SERVICE, order.encode())
            if isinstance(answer, Failure):
                failures.append(answer)

        async with anyio.create_task_group() as tasks:
            for peer in peers:
                tasks.start_soon(tell, peer)
        return failures[0] if failures else None

    async def _answer(self, incoming: Incoming) -> CborValue:
        order, by = SettleOrder.decode(incoming.value), incoming.peer.node_id
        try:
            context = self._contexts.need(order.context)
            aside = self._taken(context.asides, order, by)
            if aside is None:
                return None
            failure = await self._tell(aside.children, order)
            if order.counts:
                await self._peers.in_thread(partial(add_all, context, aside.gradients))
        except MeshError as error:
            return self._peers.failure(error).encode()
        return None if failure is None else failure.encode()

    def _taken(
        self, asides: dict[tuple[MarkingId, int], Aside], order: SettleOrder, by: NodeId
    ) -> Aside | None:
        key = (order.marking, order.run)
        aside = asides.get(key)
        if aside is not None and aside.parent == by:
            return asides.pop(key)
        if order.counts:
            raise BackwardError("backward", why="nothing was put aside for it")
        return None
