"""Backwards across nodes: runs, and how they end.

The nodes of a backward make a tree: each was first marked by its parent. A start goes down the
tree, and how it all ended comes up it, as the answers of nested calls. So nodes talk only to those
that they have talked to before; whoever is cancelled, or lost, takes its branch with it; and the
first failure anywhere ends all of it. What a node is told counts only if it comes from one who
takes part: marks and gradients of a message from who got it, a start from the parent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import torch

from auth import MeshError, NodeId
from mesh.autograd.claims import Claims
from mesh.autograd.commits import Commits
from mesh.autograd.contexts import Context, Contexts
from mesh.autograd.errors import BackwardError
from mesh.autograd.marker import Marker
from mesh.autograd.marking import Marking
from mesh.autograd.nodes import Origin
from mesh.autograd.peers import Peers
from mesh.autograd.run import Aborted, Run
from mesh.autograd.wire import (
    START_SERVICE,
    Failure,
    Gradients,
    StartOrder,
)
from mesh.rpc.links import current_context
from mesh.rpc.wire import SCOPE
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
        self._peers = Peers(agent, contexts)
        self._marker = Marker(agent, contexts, self._peers)
        self._claims = Claims(agent, contexts, self._peers)
        self._commits = Commits(agent, contexts, self._peers)
        self._running: Counter[NodeId] = Counter()

    def register(self, endpoint: Endpoint) -> None:
        """Offer the services to peers that may call this node."""
        self._marker.register(endpoint)
        self._claims.register(endpoint)
        self._commits.register(endpoint)
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
        atomic: bool,
    ) -> None:
        """Go backward from these losses, here and wherever they lead; for threads.

        Raises:
            BackwardError: it has failed, here or elsewhere.
            ContextGone: the context has ended.
        """
        seconds = float(self._agent.timeout)
        marking = self._marker.marked(context, losses, fast=fast, seconds=seconds)
        try:
            run = self._claims.claimed(marking, seconds)
        except BaseException:
            self._marker.forget(marking)
            raise
        order = StartOrder(context.id, marking.id, run.number, retain_graph, seconds, atomic)
        below = None
        try:
            if run.claim():  # else the context has ended meanwhile
                if marking.children:
                    below = self._agent.bridge.start(
                        lambda: self._start_children(marking, run, order)
                    )
                self._execute(run, order, losses)
            if below is not None and run.failure is None:
                self._agent.bridge.wait(below)
            if atomic and run.failure is None:
                run.failure = self._commits.commit(marking, run, seconds)
        finally:
            if below is not None:
                below.cancel()
            marking.end(run)
            self._marker.keep(marking, losses, run, reusable=retain_graph and not fast)
        if run.failure is not None:
            if marking.lenders > 1:
                self._claims.give_up(marking, run)  # where it was not started any more
            if atomic:
                self._commits.let_go(marking, run)
            raise self._peers.error(run.failure)

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
                run.fail(self._peers.failure(why))
                if run.claim():  # and nobody begins it any more
                    run.leaves.restore()

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
            return self._peers.failure(error).encode()
        marking.settle()
        self._running[by] += 1
        token, is_kept = current_context.set(context.id), False
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._start_children, marking, run, order)
                await self._peers.in_thread(lambda: self._execute(run, order, ()))
                if run.failure is not None:
                    tasks.cancel_scope.cancel()
            if order.puts_aside and run.failure is None:
                self._commits.keep(marking, run)
                is_kept = True
            failure = run.failure
        except LimitExceeded as error:
            failure = self._peers.failure(error)
        finally:
            run.fail(self._peers.failure(BackwardError("backward", why="it was cancelled")))
            current_context.reset(token)
            self._running[by] -= 1
            if not self._running[by]:
                del self._running[by]
            marking.end(run)
            if order.puts_aside and not is_kept:
                self._agent.start_soon(partial(self._commits.dropped, marking, run))
            if not order.retain_graph:
                context.markings.pop(marking.id, None)
        return None if failure is None else failure.encode()

    async def _start_children(self, marking: Marking, run: Run, order: StartOrder) -> None:
        """Start those whom this node has brought the marking to; return when all are done."""

        async def start(peer: NodeId) -> None:
            answer: CborValue | Failure = await self._marker.asked(marking, peer)
            if answer is None:
                answer = await self._peers.call(peer, START_SERVICE, order.encode())
            if isinstance(answer, Failure):
                run.fail(answer)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for peer in marking.children:
                tasks.start_soon(start, peer)

    def _execute(self, run: Run, order: StartOrder, losses: Sequence[torch.Tensor]) -> None:
        if order.puts_aside:
            run.leaves.put_aside()
        try:
            run.execute(losses, self._post, retain_graph=order.retain_graph, seconds=order.seconds)
        except Aborted:
            pass
        except Exception as error:
            run.fail(self._peers.failure(error))
        except BaseException as error:
            run.fail(self._peers.failure(error))
            raise

    def _post(self, run: Run, origin: Origin, gradients: list[Any]) -> None:
        """Have gradients sent; in the thread of the engine, which does not wait for it."""
        marking = run.marking
        message = Gradients(marking.context.id, marking.id, run.number, origin.message, gradients)
        if origin.peer == self._agent.node_id:
            run.put(origin.message, list(gradients))
            run.delivered(gradients)
            return
        send = partial(self._send, run, origin.peer, message)
        self._agent.bridge.call_soon(lambda: self._agent.start_soon(send))

    async def _send(self, run: Run, to: NodeId, message: Gradients) -> None:
        current_context.set(None)  # it is part of no program's call
        try:
            if (unasked := run.marking.unasked.get(to)) is not None:
                await self._agent.bridge.until_done(unasked.is_over)
            await self._agent.send_gradients(to, message.arguments())
        except Exception as error:
            run.fail(self._peers.failure(error, to))
        else:
            run.delivered(message.gradients)
