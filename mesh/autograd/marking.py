"""What a backward needs of one node's graph: which messages, and which leaves. No I/O.

The loss needs what its graph leads to. Where that is the tensor of a message, its sender's graph
goes on from there, so the sender is told, marks on, and tells others; whoever was told answers when
all whom it has told in turn have answered. When the root has all answers, every node knows what is
needed of it, and nobody marks any more: a diffusing computation (Dijkstra and Scholten, 1980).
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import torch

from auth import NodeId
from mesh.autograd import reducers
from mesh.autograd.contexts import Context
from mesh.autograd.errors import BackwardError
from mesh.autograd.nodes import FIRST, LAST, Origin, is_received
from mesh.autograd.run import Run
from mesh.autograd.wire import MAX_MARKED, MarkingId
from mesh.rpc.links import Wanted
from transport import LimitExceeded

__all__ = ["Edge", "Found", "Marking"]

MAX_RUNS = 64
"""Most runs of a marking at a time; those ahead of their start included."""

NODES_NOW = 256
"""Most nodes that are marked in the event loop: some hundred microseconds."""

Found: TypeAlias = dict[NodeId, dict[int, set[int]]]
"""Tensors that were found to be needed: by sender, by message, which of it."""

Edge: TypeAlias = tuple[Any, int]
"""A node of the graph, and which of its outputs."""

_Leaf = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, slots=True)
class Unasked:
    """What a node is still to be asked to mark.

    Attributes:
        wanted: messages of its.
        foretold: messages from here that it must find them to depend on.
        forgotten: markings of this node's that it may forget.
        is_over: done when it has been asked, or nobody asks any more.
    """

    wanted: Wanted
    foretold: Wanted
    forgotten: tuple[int, ...]
    is_over: Future[None] = dataclasses.field(default_factory=Future)


class Marking:
    """One node's part of a marking. Safe for many threads.

    Args:
        marking_id: which it is.
        context: what it is in.
        me: whose part it is.
        parent: who has brought it here; None at the root.

    Attributes:
        needed: messages of this node's, and which of their tensors gradients will come for.
        leaves: the nodes at the leaves that gradients will come to.
        children: those whom this node has brought it to, and nobody before.
        lenders: at the root, how many nodes lend parameters to reducers.
        is_foretold: whether all that it leads to elsewhere leads back to messages from here, as was
            said when it came: then nothing else is needed.
        unasked: those who are still to be asked to mark.
    """

    def __init__(
        self, marking_id: MarkingId, context: Context, me: NodeId, parent: NodeId | None
    ) -> None:
        self.id = marking_id
        self.parent = parent
        self.context = context
        self.needed: dict[int, set[int]] = {}
        self.leaves: list[Any] = []
        self.children: set[NodeId] = set()
        self.lenders = 0
        self.is_foretold = True
        self.unasked: dict[NodeId, Unasked] = {}
        self._me = me
        self._lock = threading.RLock()
        self._pending: list[Edge] = []
        self._visited: set[Any] = set()
        self._found: Found = {}
        self._foretold: Found = {}
        self._received: dict[Origin, set[int]] = {}
        self._is_all = False
        self._lends = False
        self._runs: dict[int, Run] = {}
        self._ended: set[int] = set()
        self._count = 0

    def reach(self, edges: Iterable[Edge]) -> Found:
        """Mark what leads to these edges; return what is newly found to be needed of others.

        Raises:
            BackwardError: the graph leads into another context.
        """
        with self._lock:
            self._pending += edges
            return self._walk()

    def mark(self, wanted: Wanted, by: NodeId) -> Found:
        """Mark what leads to messages that `by` got; return as `reach`.

        Raises:
            ProtocolError: it got no such messages.
            BackwardError: as `reach`.
        """
        with self._lock:
            self._want(wanted, by)
            return self._walk()

    def mark_now(
        self, wanted: Wanted, by: NodeId, *, leading_to: NodeId | None = None
    ) -> Found | None:
        """Do the same in a moment; raise as `mark`.

        Args:
            wanted, by: as `mark`.
            leading_to: the one node that it may lead to, if not to any.

        Returns:
            As `mark`; None if it takes longer, or leads elsewhere: then `mark` is to go on.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self._want(wanted, by)
            if not self._has_walked(NODES_NOW):
                return None
            is_there = leading_to is None or (
                self._found.keys() <= {leading_to}
                and len(self._found.get(leading_to, ())) <= MAX_MARKED
            )
            return self._walk() if is_there else None
        finally:
            self._lock.release()

    def mark_all(self) -> bool:
        """Mark every message that was sent from here; return whether that is news."""
        with self._lock:
            if self._is_all:
                return False
            self._is_all = True
            with self.context.lock:
                everything = dict(self.context.sent)
            for number, message in everything.items():
                self.needed[number] = set(range(len(message.edges)))
                self._pending += [(edge.grad_fn, 0) for edge in message.edges]
            self._walk()
            return True

    def put_off(self, found: Found, forgotten: tuple[int, ...]) -> None:
        """Have others mark what was found to be needed of them when they are started."""
        for peer, wanted in found.items():
            foretold = self._foretold.get(peer, {})
            self.unasked[peer] = Unasked(wanted, foretold, forgotten)
            self.children.add(peer)

    def lends(self) -> bool:
        """Return whether it has come to parameters of a reducer, the first time that it has."""
        # Without the lock, which the event loop can't wait for: to say it twice does no harm.
        if self._lends or not reducers.are_there():
            return False
        of_reducers = reducers.reduced()
        self._lends = any(id(each.variable) in of_reducers for each in tuple(self.leaves))
        return self._lends

    def settle(self) -> None:
        """Let go of what only more marking would need."""
        with self._lock:
            self._pending, self._visited = [], set()

    # -- runs

    def begin(self) -> Run:
        """Return a new run, at the root."""
        with self._lock:
            self._count += 1
            return self._run(self._count)

    def run(self, number: int) -> Run | None:
        """Return a run by its number, new if it has not been heard of; None if it is over.

        Raises:
            LimitExceeded: there are too many already.
        """
        with self._lock:
            return None if number in self._ended else self._run(number)

    def end(self, run: Run) -> None:
        """Forget a run that is over."""
        with self._lock:
            self._runs.pop(run.number, None)
            self._ended.add(run.number)

    def runs(self) -> tuple[Run, ...]:
        """Return the runs that are not over."""
        with self._lock:
            return tuple(self._runs.values())

    def _run(self, number: int) -> Run:
        run = self._runs.get(number)
        if run is None:
            if len(self._runs) >= MAX_RUNS:
                raise LimitExceeded(
                    "backward", why=f"{MAX_RUNS} of the same graph are under way already"
                )
            run = self._runs[number] = Run(number, self)
        return run

    # -- with the lock held

    def _want(self, wanted: Wanted, by: NodeId) -> None:
        """Note that gradients of these tensors will come, and that what leads to them is needed."""
        self.context.check(wanted, by)
        for number, tensors in wanted.items():
            known = self.needed.setdefault(number, set())
            new = tensors - known
            known |= new
            edges = self.context.sent[number].edges
            self._pending += [(edges[index].grad_fn, 0) for index in new]

    def _walk(self) -> Found:
        """Mark all that is to be marked; return what was found since this was called last."""
        self._has_walked(math.inf)
        found, self._found = self._found, {}
        return found

    def _has_walked(self, most: float) -> bool:
        """Mark what is to be marked, so many nodes of it; return whether that was all."""
        pending, visited = self._pending, self._visited
        while pending:
            if most <= 0:
                return False
            most -= 1
            node, index = pending.pop()
            if node is None:
                continue
            if is_received(node):
                self._reached(node, index)
            if node in visited:
                continue
            visited.add(node)
            if is_received(node):
                node._set_sequence_nr(FIRST)
            elif type(node) is _Leaf:
                self.leaves.append(node)
            else:
                if node._sequence_nr() == LAST:
                    node._set_sequence_nr(LAST + 1)  # every thread counts from there
                pending.extend(node.next_functions)
        return True

    def _reached(self, node: Any, index: int) -> None:
        """Note a tensor that a message brought, which its sender is to be asked for."""
        origin: Origin = node.origin
        if origin.context != self.context.id:
            raise BackwardError(
                "backward",
                why=f"the graph leads into autograd context {origin.context.number}, and this is "
                f"{self.context.id.number}",
                fix="Detach what is kept from one context to the next.",
            )
        known = self._received.setdefault(origin, set())
        if index in known:
            return
        known.add(index)
        if origin.peer == self._me:  # which needs no asking
            self._want({origin.message: {index}}, self._me)
            return
        _add(self._found.setdefault(origin.peer, {}), {origin.message: {index}})
        leads_to: Sequence[Wanted] | None = node.leads_to
        if leads_to is None:
            self.is_foretold = False
        else:
            _add(self._foretold.setdefault(origin.peer, {}), leads_to[index])
            self._want(leads_to[index], origin.peer)


def _add(wanted: dict[int, set[int]], more: Wanted) -> None:
    for number, tensors in more.items():
        wanted.setdefault(number, set()).update(tensors)
