"""Backwards that need the reducers of several nodes do not wait for each other in a circle.

A backward through a ``DistributedDataParallel`` has its parameters for itself until its run is over
there. Two that have one node's each, and want the other's, would wait for ever. So where more than
one node has such parameters, all are claimed before any run begins. A backward waits for another
only if it is the older of the two; the younger lets go of all that it has claimed, and claims it
anew, at its old age, after a while. So there is no circle, for whoever waits, waits for a younger
one; and the oldest never retreats. (This is wait-die, of Rosenkrantz, Stearns and Lewis, 1978.)

A backward with such parameters at one node claims them as its run begins there. It waits for any
other, but has nothing meanwhile that one could wait for.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import anyio

from auth import MeshError, NodeId
from mesh.autograd.contexts import Context, Contexts
from mesh.autograd.errors import BackwardError
from mesh.autograd.marking import Marking
from mesh.autograd.peers import Peers
from mesh.autograd.run import Run
from mesh.autograd.wire import CLAIM_SERVICE, Claimed, ClaimOrder, Failure
from mesh.rpc.errors import RpcError
from mesh.rpc.limits import limit
from mesh.rpc.wire import SCOPE
from transport import Backoff, CborValue, Endpoint, Incoming, LimitExceeded

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent

__all__ = ["Claims"]

FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.2
"""Seconds between two tries."""

GIVE_UP_SECONDS = 5.0
"""How long others may take to hear that a claim is given up; who does not, has it until the context
ends."""

MAX_CLAIMS, MAX_CLAIMS_OF_ONE = 256, 64
"""Most claims here, of others and of one of them, that wait. Each takes a thread."""


class Claims:
    """Claims the parameters of reducers, on all nodes of a backward.

    Args:
        agent: what a node talks to others by.
        contexts: the node's.
        peers: those others.
    """

    def __init__(self, agent: Agent, contexts: Contexts, peers: Peers) -> None:
        self._agent = agent
        self._contexts = contexts
        self._peers = peers
        self._waiting: Counter[NodeId] = Counter()

    def register(self, endpoint: Endpoint) -> None:
        """Offer the service to peers that may call this node."""
        endpoint.register_call(CLAIM_SERVICE, self._answer, scope=SCOPE)

    def claimed(self, marking: Marking, seconds: float) -> Run:
        """Return a new run of a marking that has what it needs of reducers; for threads, at a root.

        Args:
            marking: of this node's.
            seconds: how long it may take; 0 for as long as it takes.

        Raises:
            BackwardError: others had it for longer, or a claim has failed.
        """
        run = marking.begin()
        if marking.lenders < 2:  # which can't wait in a circle
            return run
        age, backoff = time.time_ns(), Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        until = time.monotonic() + seconds if seconds else float("inf")
        while True:
            order = ClaimOrder(marking.context.id, marking.id, run.number, age)
            try:
                left = max(until - time.monotonic(), 0.001) if seconds else 0.0
                attempt = partial(self._claimed_within, marking, run, order, left)
                answer = self._agent.bridge.block_on(attempt)
            except BaseException:
                self.give_up(marking, run)
                raise
            if answer is True:
                return run
            self.give_up(marking, run)
            if isinstance(answer, Failure):
                raise self._peers.error(answer)
            time.sleep(backoff.pause())
            run = marking.begin()

    async def _claimed_within(
        self, marking: Marking, run: Run, order: ClaimOrder, seconds: float
    ) -> bool | Failure:
        try:
            with limit(seconds, "claim of parameters that other backwards have", "others"):
                return await self._claim(marking, run, order)
        except MeshError as error:
            return self._peers.failure(error)

    def give_up(self, marking: Marking, run: Run) -> None:
        """Have let go of what was claimed, wherever the run has not begun; for threads."""
        _abandon(marking, run)
        order = ClaimOrder(marking.context.id, marking.id, run.number, 0, gives_up=True)

        async def tell() -> None:
            with anyio.move_on_after(GIVE_UP_SECONDS):
                await self._tell_children(marking, order)

        with contextlib.suppress(RpcError):  # it is over
            self._agent.bridge.start(tell)

    # -- everywhere, in the loop

    async def _claim(self, marking: Marking, run: Run, order: ClaimOrder) -> bool | Failure:
        """Claim what a run needs here, and below; return whether nobody older has some of it."""
        rank = (order.age, order.marking)
        is_done = False
        try:
            is_mine: Callable[[], bool] = partial(run.leaves.claim, marking.leaves, rank)
            if not await self._peers.in_thread(is_mine):
                return False
            answer = await self._tell_children(marking, order)
            is_done = answer is True
            return answer
        finally:
            if not is_done:
                _abandon(marking, run)

    async def _tell_children(self, marking: Marking, order: ClaimOrder) -> bool | Failure:
        """Have others claim, or give up; return the first answer that is not that they have."""
        found: list[bool | Failure] = []

        async def tell(peer: NodeId) -> None:
            answer = await self._peers.call(peer, CLAIM_SERVICE, order.encode())
            try:
                is_so = answer if isinstance(answer, Failure) else Claimed.decode(answer).is_so
            except MeshError as error:
                is_so = self._peers.failure(error, peer)
            if is_so is not True:
                found.append(is_so)
                if not order.gives_up:
                    tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for peer in marking.children:
                tasks.start_soon(tell, peer)
        return found[0] if found else True

    async def _answer(self, incoming: Incoming) -> CborValue:
        order, by = ClaimOrder.decode(incoming.value), incoming.peer.node_id
        try:
            marking = self._marking(self._contexts.need(order.context), order, by)
            run = marking.run(order.run)
            if order.gives_up:
                if run is not None:
                    _abandon(marking, run)
                answer = await self._tell_children(marking, order)
            elif run is None:
                answer = False
            else:
                answer = await self._counted(by, marking, run, order)
        except MeshError as error:
            return self._peers.failure(error).encode()
        return answer.encode() if isinstance(answer, Failure) else Claimed(answer).encode()

    async def _counted(
        self, by: NodeId, marking: Marking, run: Run, order: ClaimOrder
    ) -> bool | Failure:
        of_one, of_all = self._waiting[by], self._waiting.total()
        if of_one >= MAX_CLAIMS_OF_ONE or of_all >= MAX_CLAIMS:
            raise LimitExceeded(
                "backward",
                why=f"{of_all} claims wait here already, {of_one} of them of this caller's",
            )
        self._waiting[by] += 1
        try:
            return await self._claim(marking, run, order)
        finally:
            self._waiting[by] -= 1
            if not self._waiting[by]:
                del self._waiting[by]

    def _marking(self, context: Context, order: ClaimOrder, by: NodeId) -> Marking:
        marking = context.markings.get(order.marking)
        if marking is None or marking.parent != by:
            raise BackwardError("backward", why="nothing is marked for it")
        return marking


def _abandon(marking: Marking, run: Run) -> None:
    """End a run that has not begun, and let go of what it has claimed."""
    if run.claim():
        run.leaves.restore()
        marking.end(run)
