"""Marking across nodes: who asks whom what is needed, and when all of it is known.

Whoever is told to mark answers when all whom it has told in turn have answered; what is needed of
the one who has told it, it says in its answer. So a chain of calls from one node, there and back
again, takes it one short call each.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import InvalidStateError
from functools import partial
from typing import TYPE_CHECKING

import anyio
import torch

from auth import MeshError, NodeId
from mesh.autograd.contexts import MAX_MARKINGS, Context, Contexts, gone
from mesh.autograd.errors import BackwardError
from mesh.autograd.marking import Edge, Found, Marking
from mesh.autograd.peers import Peers
from mesh.autograd.run import Run
from mesh.autograd.wire import (
    MARK_SERVICE,
    MAX_FORGOTTEN,
    MAX_MARKED,
    Failure,
    Marked,
    MarkingId,
    MarkOrder,
)
from mesh.rpc.errors import RpcTimeout
from mesh.rpc.limits import limit, timed_out
from mesh.rpc.links import Wanted
from mesh.rpc.wire import SCOPE
from transport import (
    NOT_NOW,
    CborValue,
    DeadlineExceeded,
    Endpoint,
    Incoming,
    LimitExceeded,
    NotNow,
    ProtocolError,
)

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent

__all__ = ["Marker"]

_WHAT = "marking for a backward"

_LEAST = 0.001
"""Seconds that are left at least of a limit that has not passed: 0 would be none."""


class Marker:
    """Marks what backwards need.

    Args:
        agent: what a node talks to others by.
        contexts: the node's.
        peers: those others.
    """

    def __init__(self, agent: Agent, contexts: Contexts, peers: Peers) -> None:
        self._agent = agent
        self._contexts = contexts
        self._peers = peers
        self._numbers = itertools.count(1)

    def register(self, endpoint: Endpoint) -> None:
        """Offer the service to peers that may call this node."""
        endpoint.register_call(MARK_SERVICE, self._answer, scope=SCOPE, prompt=self._answer_now)

    # -- at the root, in threads

    def marked(
        self, context: Context, losses: Sequence[torch.Tensor], *, fast: bool, seconds: float
    ) -> Marking:
        """Return a marking of all that these losses need here; others have theirs, or are `asked`.

        Args:
            context: what they were computed in.
            losses: scalars.
            fast: mark all that was sent.
            seconds: how long it may take; 0 for as long as it takes.

        Raises:
            BackwardError: it has failed, here or elsewhere.
            ContextGone: the context has ended.
        """
        edges = _edges(losses)
        with context.lock:
            if context.is_over:
                raise gone(context.id.number)
            if context.spare is not None and not fast:
                known, spare = context.spare
                context.spare = None
                if known == edges:
                    return spare
                context.markings.pop(spare.id, None)
                context.stale.append(spare.id.number)
            forgotten = tuple(context.stale[:MAX_FORGOTTEN])
            del context.stale[:MAX_FORGOTTEN]
            me = self._agent.node_id
            marking = Marking(MarkingId(me, next(self._numbers)), context, me, None)
            _keep(context, marking)
        try:
            found = marking.reach(edges)
            if fast:
                marking.mark_all()
                if everybody := frozenset(context.peers - {me}):
                    self._spread_by_loop(marking, found, everybody, forgotten, seconds)
            elif marking.is_foretold and all(len(each) <= MAX_MARKED for each in found.values()):
                marking.put_off(found, forgotten)
            else:
                self._spread_in_thread(marking, found, forgotten, seconds)
        except _Failed as failed:
            context.markings.pop(marking.id, None)
            raise self._peers.error(failed.failure) from None
        except BaseException:
            context.markings.pop(marking.id, None)
            raise
        marking.lenders += marking.lends()
        marking.settle()
        return marking

    def keep(
        self, marking: Marking, losses: Sequence[torch.Tensor], run: Run, *, reusable: bool
    ) -> None:
        """Keep a marking for the next backward from the same losses, or let go of it."""
        context = marking.context
        with context.lock:
            reusable = reusable and not marking.unasked
            if reusable and context.spare is None and not context.is_over:
                context.spare = (_edges(losses), marking)
                return
            for unasked in tuple(marking.unasked.values()):
                unasked.is_over.cancel()
            if reusable or run.failure is not None:
                self.forget(marking)
            else:  # others have let go of it themselves
                context.markings.pop(marking.id, None)

    def forget(self, marking: Marking) -> None:
        """Let go of a marking, and have others do so when they are asked to mark again."""
        context = marking.context
        with context.lock:
            context.markings.pop(marking.id, None)
            context.stale.append(marking.id.number)

    def _spread_in_thread(
        self, marking: Marking, found: Found, forgotten: tuple[int, ...], seconds: float
    ) -> None:
        """Tell others what is needed of them, until all is marked; one after another, itself.

        Where there are several to be told, or no such way to one, the event loop tells them.

        Raises:
            _Failed: not all is marked, and why.
        """
        until = time.monotonic() + seconds if seconds else math.inf
        while found:
            (peer, wanted), *others = _wishes(found)
            answer: CborValue | Failure | NotNow = NOT_NOW
            left = until - time.monotonic()
            if not others:
                order = MarkOrder(marking.context.id, marking.id, wanted, forgotten)
                try:
                    answer = self._peers.call_in_thread(peer, MARK_SERVICE, order.encode(), left)
                except DeadlineExceeded:
                    late = timed_out(_WHAT, self._agent.label(peer), seconds)
                    raise _Failed(self._peers.failure(late)) from None
            if isinstance(answer, NotNow):
                left = max(left, _LEAST) if seconds else 0.0
                self._spread_by_loop(marking, found, frozenset(), forgotten, left)
                return
            try:
                marked = self._heard(marking, peer, answer)
                marking.lenders += marked.lenders
                found = marking.mark(marked.wanted, peer)
            except MeshError as error:
                raise _Failed(self._peers.failure(error, peer)) from None

    def _spread_by_loop(
        self,
        marking: Marking,
        found: Found,
        everybody: frozenset[NodeId],
        forgotten: tuple[int, ...],
        seconds: float,
    ) -> None:
        """Tell others, all at once. Raises as `_spread_in_thread`."""

        async def spread() -> None:
            try:
                with limit(seconds, _WHAT, "others"):
                    marking.lenders += await self._spread(marking, found, everybody, forgotten)
            except RpcTimeout as error:
                raise _Failed(self._peers.failure(error)) from None

        self._agent.bridge.block_on(spread)

    # -- everywhere, in the loop

    async def asked(self, marking: Marking, peer: NodeId) -> Failure | None:
        """Have a peer mark what it was not yet asked to; return why it has not."""
        unasked = marking.unasked.get(peer)
        if unasked is None:
            return None
        order = MarkOrder(marking.context.id, marking.id, unasked.wanted, unasked.forgotten)
        answer = await self._peers.call(peer, MARK_SERVICE, order.encode())
        if isinstance(answer, Failure):
            return answer
        try:
            marked = Marked.decode(answer)
            if marked.wanted != unasked.foretold:
                raise ProtocolError("marking", why="what it needs is not what it has foretold")
            marking.lenders += marked.lenders
            if marking.lenders > 1 and marked.lenders:
                # Nobody has claimed them before the runs began, so these might wait in a circle.
                raise BackwardError(
                    "marking",
                    why="a DistributedDataParallel module was made of parameters that a call of "
                    "this context had used before, and another node has one as well",
                    fix="Make such modules before the context begins.",
                )
        except MeshError as error:
            return self._peers.failure(error, peer)
        del marking.unasked[peer]
        with contextlib.suppress(InvalidStateError):  # it is over, and nobody waits for it
            unasked.is_over.set_result(None)
        return None

    async def _spread(
        self,
        marking: Marking,
        found: Found,
        everybody: frozenset[NodeId],
        forgotten: tuple[int, ...],
    ) -> int:
        """Tell others what is needed of them; return when all that this leads to is marked.

        Returns:
            How many nodes have come to parameters of reducers by that.

        Raises:
            _Failed: it is not, and why.
        """
        failure: Failure | None = None
        lenders = 0

        async def tell(peer: NodeId, wanted: Wanted | None) -> None:
            nonlocal failure, lenders
            order = MarkOrder(marking.context.id, marking.id, wanted, forgotten)
            try:
                answer = await self._peers.call(peer, MARK_SERVICE, order.encode())
                marked = self._heard(marking, peer, answer)
                lenders += marked.lenders
                if marked.wanted:
                    tell_all(await self._mark(marking, marked.wanted, peer))
            except _Failed as failed:
                failure = failure or failed.failure
                tasks.cancel_scope.cancel()
            except MeshError as error:
                failure = failure or self._peers.failure(error, peer)
                tasks.cancel_scope.cancel()

        def tell_all(found: Found) -> None:
            for peer, wanted in _wishes(found):
                tasks.start_soon(tell, peer, wanted)

        async with anyio.create_task_group() as tasks:
            for peer in everybody:
                tasks.start_soon(tell, peer, None)
            tell_all(found)
        if failure is not None:
            raise _Failed(failure)
        return lenders

    def _heard(self, marking: Marking, peer: NodeId, answer: CborValue | Failure) -> Marked:
        """Return what a peer says of its marking.

        Raises:
            _Failed: it has failed to mark, or others have that it has told.
            ProtocolError: it is no answer.
        """
        if isinstance(answer, Failure):
            raise _Failed(answer)
        marked = Marked.decode(answer)
        if marked.is_first:
            marking.children.add(peer)
        return marked

    async def _mark(self, marking: Marking, wanted: Wanted, by: NodeId) -> Found:
        found = marking.mark_now(wanted, by)
        if found is None:
            found = await self._peers.in_thread(partial(marking.mark, wanted, by))
        return found

    def _answer_now(self, incoming: Incoming) -> CborValue | NotNow:
        """Answer what leads nowhere else, and takes a moment. What is marked, is so in any case."""
        order, by = MarkOrder.decode(incoming.value), incoming.peer.node_id
        if order.wanted is None:
            return NOT_NOW
        try:
            marking = self._joined(self._contexts.need(order.context), order, by)
            found = marking.mark_now(order.wanted, by, leading_to=by)
        except MeshError as error:
            return self._peers.failure(error).encode()
        if found is None:
            return NOT_NOW
        return Marked(marking.parent == by, found.get(by, {}), int(marking.lends())).encode()

    async def _answer(self, incoming: Incoming) -> CborValue:
        order, by = MarkOrder.decode(incoming.value), incoming.peer.node_id
        back: Wanted = {}
        try:
            context = self._contexts.need(order.context)
            marking = self._joined(context, order, by)
            found: Found = {}
            lenders, everybody = 0, frozenset[NodeId]()
            if order.wanted is not None:
                found = await self._mark(marking, order.wanted, by)
                if len(found.get(by, ())) <= MAX_MARKED:
                    back = found.pop(by, {})
            elif await self._peers.in_thread(marking.mark_all):
                everybody = frozenset(context.peers - {self._agent.node_id, by})
            if found or everybody:
                lenders = await self._spread(marking, found, everybody, order.forgotten)
        except _Failed as failed:
            return failed.failure.encode()
        except MeshError as error:
            return self._peers.failure(error).encode()
        return Marked(marking.parent == by, back, lenders + marking.lends()).encode()

    def _joined(self, context: Context, order: MarkOrder, by: NodeId) -> Marking:
        """Return a marking of another node's, new here or not."""
        with context.lock:
            for number in order.forgotten:
                old = context.markings.get(MarkingId(order.marking.owner, number))
                if old is not None and old.parent == by and not old.runs():
                    del context.markings[old.id]
            marking = context.markings.get(order.marking)
            if by not in context.peers:
                raise ProtocolError("marking", why="who asks takes no part in the context")
            if marking is not None:
                return marking
            if order.marking.owner == self._agent.node_id:
                raise ProtocolError(
                    "marking", why="there is no such marking of this node's any more"
                )
            marking = Marking(order.marking, context, self._agent.node_id, by)
            _keep(context, marking)
            return marking


class _Failed(Exception):
    """What ends a marking."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


def _edges(losses: Sequence[torch.Tensor]) -> list[Edge]:
    return [(loss.grad_fn, loss.output_nr) for loss in losses]


def _keep(context: Context, marking: Marking) -> None:
    """Add a marking to its context, whose lock is held."""
    if sum(each.parent == marking.parent for each in context.markings.values()) >= MAX_MARKINGS:
        raise LimitExceeded("marking", why=f"{MAX_MARKINGS} of the context are kept already")
    context.markings[marking.id] = marking


def _wishes(found: Found) -> Iterator[tuple[NodeId, Wanted]]:
    """Yield what is to be asked of whom, in parts that fit into a message each."""
    for peer, messages in found.items():
        items = list(messages.items())
        for start in range(0, len(items), MAX_MARKED):
            yield peer, dict(items[start : start + MAX_MARKED])
