"""Backwards across nodes: marking, runs, and how they end.

The nodes of a backward make a tree: each was first marked by its parent. A start goes down the
tree, and how it all ended comes up it, as the answers of nested calls. So nodes talk only to those
that they have talked to before; whoever is cancelled, or lost, takes its branch with it; and the
first failure anywhere ends all of it. What a node is told counts only if it comes from one who
takes part: marks and gradients of a message from who got it, a start from the parent.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import torch

from auth import MeshError, NodeId
from mesh.autograd.contexts import MAX_MARKINGS, Context, Contexts, gone
from mesh.autograd.errors import BackwardError
from mesh.autograd.marking import Edge, Found, Marking
from mesh.autograd.nodes import Origin
from mesh.autograd.run import Aborted, Run
from mesh.autograd.wire import (
    MARK_SERVICE,
    MAX_FORGOTTEN,
    MAX_MARKED,
    START_SERVICE,
    Failure,
    Gradients,
    Marked,
    MarkingId,
    MarkOrder,
    StartOrder,
    Wanted,
)
from mesh.rpc.errors import RpcTimeout
from mesh.rpc.exceptions import decode_exception, encode_exception
from mesh.rpc.limits import limit
from mesh.rpc.links import current_context
from mesh.rpc.wire import SCOPE
from mesh.rpc.workers import contained
from transport import CborValue, Endpoint, Incoming, LimitExceeded, ProtocolError

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent

__all__ = ["Passes"]

MAX_RUNS = 512
"""Most runs here that others have started. Each takes a thread, which mostly waits."""

MAX_RUNS_OF_ONE = 128
"""The same of one of them."""

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class Passes:
    """The backwards that a node takes part in.

    Args:
        agent: what it talks to others by.
        contexts: the node's.
    """

    def __init__(self, agent: Agent, contexts: Contexts) -> None:
        self._agent = agent
        self._contexts = contexts
        self._numbers = itertools.count(1)
        self._threads = anyio.CapacityLimiter(math.inf)
        self._running: Counter[NodeId] = Counter()

    def register(self, endpoint: Endpoint) -> None:
        """Offer the services to peers that may call this node."""
        endpoint.register_call(MARK_SERVICE, self._answer_mark, scope=SCOPE)
        endpoint.register_call(START_SERVICE, self._answer_start, scope=SCOPE)

    @property
    def running(self) -> int:
        """How many runs others have started here that are not over."""
        return self._running.total()

    def backward(
        self,
        context: Context,
        losses: Sequence[torch.Tensor],
        *,
        retain_graph: bool,
        fast: bool,
    ) -> None:
        """Go backward from these losses, here and wherever they lead; for threads.

        Raises:
            BackwardError: it has failed, here or elsewhere.
            ContextGone: the context has ended.
        """
        seconds = float(self._agent.timeout)
        marking = self._marked(context, losses, fast=fast, seconds=seconds)
        run = marking.begin()
        order = StartOrder(context.id, marking.id, run.number, retain_graph, seconds)
        below = None
        try:
            if marking.children:
                below = self._agent.bridge.start(lambda: self._start_children(marking, run, order))
            self._execute(run, order, losses)
            if below is not None and run.failure is None:
                self._agent.bridge.wait(below)
        finally:
            if below is not None:
                below.cancel()
            marking.end(run)
            self._keep(marking, losses, run, reusable=retain_graph and not fast)
        if run.failure is not None:
            raise self._error(run.failure)

    def take(self, by: NodeId, gradients: Gradients) -> None:
        """Take the gradients of a message; those of a run that is over are counted, and dropped.

        Raises:
            ProtocolError: they are not what is needed, or `by` did not get that message.
        """
        context = self._contexts.live(gradients.context)
        marking = None if context is None else context.markings.get(gradients.marking)
        if context is None or marking is None:
            self._contexts.late += 1
            return
        message = context.sent.get(gradients.message)
        needed = marking.needed.get(gradients.message)
        if message is None or needed is None or message.peer != by:
            raise ProtocolError("gradients", why="no such message needs any of this peer")
        given = gradients.gradients
        if len(given) != len(message.edges) or any(
            each is not None and (index not in needed or each.shape != message.shapes[index])
            for index, each in enumerate(given)
        ):
            raise ProtocolError("gradients", why="they are not those that are needed")
        run = marking.run(gradients.run)
        if run is None:
            self._contexts.late += 1
            return
        run.put(gradients.message, given)

    def end(self, markings: Iterable[Marking], why: MeshError) -> None:
        """End the runs of these markings, whose context has ended."""
        for marking in markings:
            for run in marking.runs():
                run.fail(self.failure(why))

    def failure(self, error: BaseException, node: NodeId | None = None) -> Failure:
        """Return what a node tells others of an error of its own, or of one about `node`."""
        if node is None or node == self._agent.node_id:
            worker = self._contexts.worker_id
            return Failure(self._agent.node_id, worker, encode_exception(error), error)
        return Failure(node, None, encode_exception(error), error)

    # -- marking

    def _marked(
        self, context: Context, losses: Sequence[torch.Tensor], *, fast: bool, seconds: float
    ) -> Marking:
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
            everybody: frozenset[NodeId] = frozenset()
            if fast:
                marking.mark_all()
                everybody = frozenset(context.peers - {me})
            if found or everybody:
                self._agent.bridge.block_on(
                    lambda: self._spread_within(seconds, marking, found, everybody, forgotten)
                )
        except _Failed as failed:
            context.markings.pop(marking.id, None)
            raise self._error(failed.failure) from None
        except BaseException:
            context.markings.pop(marking.id, None)
            raise
        marking.settle()
        return marking

    async def _spread_within(
        self,
        seconds: float,
        marking: Marking,
        found: Found,
        everybody: frozenset[NodeId],
        forgotten: tuple[int, ...],
    ) -> None:
        try:
            with limit(seconds, "marking for a backward", "others"):
                await self._spread(marking, found, everybody, forgotten)
        except RpcTimeout as error:
            raise _Failed(self.failure(error)) from None

    def _keep(
        self, marking: Marking, losses: Sequence[torch.Tensor], run: Run, *, reusable: bool
    ) -> None:
        """Keep a marking for the next backward from the same losses, or let go of it."""
        context = marking.context
        with context.lock:
            if reusable and context.spare is None and not context.is_over:
                context.spare = (_edges(losses), marking)
                return
            context.markings.pop(marking.id, None)
            if reusable or run.failure is not None:  # else others have let go of it themselves
                context.stale.append(marking.id.number)

    async def _spread(
        self,
        marking: Marking,
        found: Found,
        everybody: frozenset[NodeId],
        forgotten: tuple[int, ...],
    ) -> None:
        """Tell others what is needed of them; return when all that this leads to is marked.

        Raises:
            _Failed: it is not, and why.
        """
        failure: Failure | None = None

        async def tell(peer: NodeId, wanted: Wanted | None) -> None:
            nonlocal failure
            order = MarkOrder(marking.context.id, marking.id, wanted, forgotten)
            answer = await self._call(peer, MARK_SERVICE, order.encode())
            if isinstance(answer, Failure):
                failure = failure or answer
                tasks.cancel_scope.cancel()
            elif Marked.decode(answer).is_first:
                marking.children.add(peer)

        async with anyio.create_task_group() as tasks:
            for peer in everybody:
                tasks.start_soon(tell, peer, None)
            for peer, messages in found.items():
                for part in _parts(list(messages.items()), MAX_MARKED):
                    wanted = {number: frozenset(tensors) for number, tensors in part}
                    tasks.start_soon(tell, peer, wanted)
        if failure is not None:
            raise _Failed(failure)

    async def _answer_mark(self, incoming: Incoming) -> CborValue:
        order, by = MarkOrder.decode(incoming.value), incoming.peer.node_id
        try:
            context = self._contexts.need(order.context)
            marking, is_first = self._joined(context, order, by)
            found: Found = {}
            everybody: frozenset[NodeId] = frozenset()
            if order.wanted is not None:
                found = await self._in_thread(partial(marking.mark, order.wanted, by))
            elif await self._in_thread(marking.mark_all):
                everybody = frozenset(context.peers - {self._agent.node_id, by})
            if found or everybody:
                await self._spread(marking, found, everybody, order.forgotten)
        except _Failed as failed:
            return failed.failure.encode()
        except MeshError as error:
            return self.failure(error).encode()
        return Marked(is_first).encode()

    def _joined(self, context: Context, order: MarkOrder, by: NodeId) -> tuple[Marking, bool]:
        """Return a marking of another node's, and whether it is new here."""
        with context.lock:
            for number in order.forgotten:
                old = context.markings.get(MarkingId(order.marking.owner, number))
                if old is not None and old.parent == by and not old.runs():
                    del context.markings[old.id]
            marking = context.markings.get(order.marking)
            if by not in context.peers:
                raise ProtocolError("marking", why="who asks takes no part in the context")
            if marking is not None:
                return marking, False
            if order.marking.owner == self._agent.node_id:
                raise ProtocolError(
                    "marking", why="there is no such marking of this node's any more"
                )
            marking = Marking(order.marking, context, self._agent.node_id, by)
            _keep(context, marking)
            return marking, True

    # -- runs

    async def _answer_start(self, incoming: Incoming) -> CborValue:
        order, by = StartOrder.decode(incoming.value), incoming.peer.node_id
        try:
            context = self._contexts.need(order.context)
            marking = context.markings.get(order.marking)
            if marking is None or marking.parent != by:
                raise BackwardError("backward", why="nothing is marked for it")
            if self.running >= MAX_RUNS or self._running[by] >= MAX_RUNS_OF_ONE:
                raise LimitExceeded(
                    "backward",
                    why=f"{self.running} are under way here already, {self._running[by]} of them "
                    "of this caller's",
                )
            run = marking.run(order.run)
            if run is None or not run.claim():
                raise BackwardError("backward", why="it has been started already")
        except MeshError as error:
            return self.failure(error).encode()
        marking.settle()
        self._running[by] += 1
        token = current_context.set(context.id)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._start_children, marking, run, order)
                await self._in_thread(lambda: self._execute(run, order, ()))
                if run.failure is not None:
                    tasks.cancel_scope.cancel()
            failure = run.failure
        finally:
            run.fail(self.failure(BackwardError("backward", why="it was cancelled")))
            current_context.reset(token)
            self._running[by] -= 1
            if not self._running[by]:
                del self._running[by]
            marking.end(run)
            if not order.retain_graph:
                context.markings.pop(marking.id, None)
        return None if failure is None else failure.encode()

    async def _start_children(self, marking: Marking, run: Run, order: StartOrder) -> None:
        """Start those whom this node has brought the marking to; return when all are done."""

        async def start(peer: NodeId) -> None:
            answer = await self._call(peer, START_SERVICE, order.encode())
            if isinstance(answer, Failure):
                run.fail(answer)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for peer in marking.children:
                tasks.start_soon(start, peer)

    def _execute(self, run: Run, order: StartOrder, losses: Sequence[torch.Tensor]) -> None:
        try:
            run.execute(losses, self._post, retain_graph=order.retain_graph, seconds=order.seconds)
        except Aborted:
            pass
        except Exception as error:
            run.fail(self.failure(error))
        except BaseException as error:
            run.fail(self.failure(error))
            raise

    def _post(self, run: Run, origin: Origin, gradients: list[Any]) -> None:
        """Have gradients sent; in the thread of the engine, which does not wait for it."""
        marking = run.marking
        message = Gradients(marking.context.id, marking.id, run.number, origin.message, gradients)
        if origin.peer == self._agent.node_id:
            run.put(origin.message, gradients)
            run.delivered()
            return
        send = partial(self._send, run, origin.peer, message)
        self._agent.bridge.call_soon(lambda: self._agent.start_soon(send))

    async def _send(self, run: Run, to: NodeId, message: Gradients) -> None:
        current_context.set(None)  # it is part of no program's call
        try:
            await self._agent.send_gradients(to, message.arguments())
        except Exception as error:
            run.fail(self.failure(error, to))
        else:
            run.delivered()

    # -- inside

    async def _call(self, peer: NodeId, service: str, value: CborValue) -> CborValue | Failure:
        """Return a peer's answer, or why there is none: its own failure, or one on the way."""
        try:
            connection = await self._agent.connected(peer)
            # Whoever began all this has set a limit; the loss of the peer ends it, too.
            answer = await connection.call(service, value, timeout=math.inf)
            return Failure.decode(answer) if Failure.is_in(answer) else answer
        except MeshError as error:
            return self.failure(error, peer)

    async def _in_thread(self, function: Callable[[], _Result]) -> _Result:
        return await anyio.to_thread.run_sync(
            lambda: contained(function), limiter=self._threads, abandon_on_cancel=True
        )

    def _error(self, failure: Failure) -> BackwardError:
        """Return what is raised at the root."""
        label = self._agent.label(failure.node)
        cause = failure.raised
        if cause is None:
            cause = decode_exception(failure.error, peer=label, what="backward")
        node = failure.node.short if failure.worker is None else str(failure.worker)
        place = f", {failure.place}" if failure.place else ""
        error = BackwardError(f"Error on Node {node}", why=f"{cause} (raised at {label}{place})")
        error.__cause__ = cause
        return error


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


def _parts(items: list[_Item], size: int) -> Iterator[list[_Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
