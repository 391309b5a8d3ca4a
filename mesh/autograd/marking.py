"""What a backward needs of one node's graph: which messages, and which leaves. No I/O.

The loss needs what its graph leads to. Where that is the tensor of a message, its sender's graph
goes on from there, so the sender is told, marks on, and tells others; whoever was told answers when
all whom it has told in turn have answered. When the root has all answers, every node knows what is
needed of it, and nobody marks any more: a diffusing computation (Dijkstra and Scholten, 1980).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch

from auth import NodeId
from mesh.autograd.contexts import Context
from mesh.autograd.errors import BackwardError
from mesh.autograd.nodes import FIRST, LAST, Origin, is_received
from mesh.autograd.run import Run
from mesh.autograd.wire import MarkingId
from transport import LimitExceeded, ProtocolError

__all__ = ["Edge", "Found", "Marking"]

MAX_RUNS = 64
"""Most runs of a marking at a time; those ahead of their start included."""

Found: TypeAlias = dict[NodeId, dict[int, set[int]]]
"""Tensors that were found to be needed: by sender, by message, which of it."""

Edge: TypeAlias = tuple[Any, int]
"""A node of the graph, and which of its outputs."""

_Leaf = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


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
        self._me = me
        self._lock = threading.RLock()
        self._visited: set[Any] = set()
        self._received: dict[Origin, set[int]] = {}
        self._is_all = False
        self._runs: dict[int, Run] = {}
        self._ended: set[int] = set()
        self._count = 0

    def reach(self, edges: Iterable[Edge]) -> Found:
        """Mark what leads to these edges; return what is newly found to be needed of others.

        Raises:
            BackwardError: the graph leads into another context.
        """
        with self._lock:
            return self._without_self(self._traverse(edges))

    def mark(self, wanted: Mapping[int, Iterable[int]], by: NodeId) -> Found:
        """Mark what leads to messages that `by` got; return as `reach`.

        Raises:
            ProtocolError: it got no such messages.
            BackwardError: as `reach`.
        """
        with self._lock:
            return self._without_self(self._mark(wanted, by))

    def mark_all(self) -> bool:
        """Mark every message that was sent from here; return whether that is news."""
        with self._lock:
            if self._is_all:
                return False
            self._is_all = True
            with self.context.lock:
                everything = dict(self.context.sent)
            edges: list[Edge] = []
            for number, message in everything.items():
                self.needed[number] = set(range(len(message.edges)))
                edges += [(edge.grad_fn, 0) for edge in message.edges]
            self._traverse(edges)
            return True

    def settle(self) -> None:
        """Let go of what only more marking would need."""
        with self._lock:
            self._visited = set()

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

    def _without_self(self, found: Found) -> Found:
        """Mark what a node's messages to itself lead to, until none is left."""
        while own := found.pop(self._me, None):
            for peer, messages in self._mark(own, self._me).items():
                theirs = found.setdefault(peer, {})
                for number, tensors in messages.items():
                    theirs.setdefault(number, set()).update(tensors)
        return found

    def _mark(self, wanted: Mapping[int, Iterable[int]], by: NodeId) -> Found:
        edges: list[Edge] = []
        for number, tensors in wanted.items():
            message = self.context.sent.get(number)
            if message is None or message.peer != by:
                raise ProtocolError("marking", why=f"no message {number} was sent there")
            known = self.needed.setdefault(number, set())
            new = set(tensors) - known
            if any(index >= len(message.edges) for index in new):
                raise ProtocolError("marking", why=f"message {number} has no such tensor")
            known |= new
            edges += [(message.edges[index].grad_fn, 0) for index in new]
        return self._traverse(edges)

    def _traverse(self, edges: Iterable[Edge]) -> Found:
        found: Found = {}
        visited = self._visited
        pending = list(edges)
        while pending:
            node, index = pending.pop()
            if is_received(node):
                self._found(found, node, index)
            if node is None or node in visited:
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
        return found

    def _found(self, found: Found, node: Any, index: int) -> None:
        origin: Origin = node.origin
        if origin.context != self.context.id:
            raise BackwardError(
                "backward",
                why=f"the graph leads into autograd context {origin.context.number}, and this is "
                f"{self.context.id.number}",
                fix="Detach what is kept from one context to the next.",
            )
        known = self._received.setdefault(origin, set())
        if index not in known:
            known.add(index)
            found.setdefault(origin.peer, {}).setdefault(origin.message, set()).add(index)
