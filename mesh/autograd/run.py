"""One node's part of one backward: a single run of torch's own engine, held up by gates.

Gradients of a message come when they come; the engine wants to run each node once, when all its
gradients are there. So a run's root leads to the losses and to a chain of gates, one for each
message that gradients will come for. A gate waits for them. Three rules keep nodes from waiting for
each other forever, whatever the pattern of calls:

1. Gates are chained in descending Lamport time of their messages.
2. The engine runs a gate only when nothing else can be run: its sequence number is the lowest.
3. What is needed is final before a run begins.

For take, of all nodes that wait forever, the gate with the latest message. The peer that got the
message does not send its gradients, so (rule 2) it waits as well, at a gate for a message that it
sent after it had received the first one; that is a later one, and (rule 1) the gate where it waits
is for one as late at least. That is a contradiction.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.graph

from auth import NodeId
from mesh.autograd.leaves import Leaves
from mesh.autograd.nodes import LAST, Gate, Origin, Root, running
from mesh.rpc.errors import RpcTimeout
from mesh.rpc.workers import may_block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh.autograd.marking import Marking
    from mesh.autograd.wire import Failure

__all__ = ["Aborted", "Run"]


class Aborted(Exception):
    """What a gate raises when the run has failed elsewhere."""


class Run:
    """A run. Safe for many threads.

    Args:
        number: which of its marking's it is.
        marking: what is needed.

    Attributes:
        task: the engine's number of it, once it runs.
        failure: why it has failed.
        leaves: where its gradients go.
    """

    def __init__(self, number: int, marking: Marking) -> None:
        self.number = number
        self.marking = marking
        self.task: int | None = None
        self.failure: Failure | None = None
        self.leaves = Leaves(marking.context)
        self._mail: dict[int, list[torch.Tensor | None]] = {}
        self._in_hand: Counter[int] = Counter()
        """Gradients in the mail or on their way, by identity: of those the engine knows nothing."""
        self._news = threading.Condition()
        self._unsent = 0
        self._is_begun = False
        self._post: Callable[[Run, Origin, list[Any]], None] | None = None
        self._until = float("inf")
        self._seconds = 0.0

    # -- for others, in any thread

    def claim(self) -> bool:
        """Return whether nobody has begun it before."""
        with self._news:
            was, self._is_begun = self._is_begun, True
            return not was

    def put(self, message: int, gradients: list[torch.Tensor | None]) -> None:
        """Take the gradients of a message."""
        with self._news:
            if message not in self._mail:
                self._mail[message] = gradients
                self._in_hand.update(map(id, gradients))
            self._news.notify_all()

    def fail(self, failure: Failure) -> None:
        """End the run, if nothing else has failed before."""
        with self._news:
            self.failure = self.failure or failure
            self._news.notify_all()

    def delivered(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Count gradients that a peer has got."""
        with self._news:
            self._in_hand.subtract(map(id, gradients))
            self._unsent -= 1
            self._news.notify_all()

    def has(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient waits for its turn, or is on its way to a peer."""
        return self._in_hand[id(gradient)] > 0

    # -- the run itself

    def execute(
        self,
        losses: Sequence[torch.Tensor],
        post: Callable[[Run, Origin, list[Any]], None],
        *,
        retain_graph: bool,
        seconds: float,
    ) -> None:
        """Run the engine, and return once all gradients from here have been received.

        Args:
            losses: scalars, at the root.
            post: sends gradients to the sender of a message, and says when they are `delivered`.
            retain_graph: keep the graph.
            seconds: how long gates may wait, from now on; 0 for as long as it takes.

        Raises:
            Aborted: it has failed elsewhere; see `failure`.
            Exception: what the engine raised.
        """
        self._post = post
        self._seconds = seconds
        self._until = time.monotonic() + seconds if seconds else float("inf")
        leaves = self.leaves
        try:
            with torch.enable_grad():
                root = Root.apply(self, self._gates(), *losses)  # type: ignore[no-untyped-call]
            leaves.divert(self.marking.leaves, self._is_mine, self.has, seconds)
            if root.requires_grad:
                # Torch's own way to its engine, which devices of peers change for theirs.
                torch.autograd.graph._engine_run_backward(
                    (root,),
                    (torch.ones((), device="cpu"),),
                    retain_graph,
                    False,
                    (),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
        finally:
            leaves.restore()
            if self.task is not None:
                running.pop(self.task, None)
            self._mail = {}
        self._wait(lambda: self._unsent == 0, "delivery of gradients")

    def wait_for(self, message: int) -> None:
        """Wait for the gradients of a message.

        Raises:
            Aborted: the run has failed.
            RpcTimeout: they did not come in time.
        """
        if message not in self._mail:
            self._wait(lambda: message in self._mail, "waiting for gradients", message)

    def take(self, message: int, index: int) -> torch.Tensor | None:
        """Return the gradient of one tensor of a message, which a gate has waited for."""
        with self._news:
            gradients = self._mail[message]
            gradient, gradients[index] = gradients[index], None
            self._in_hand[id(gradient)] -= 1
        return gradient

    def send(self, origin: Origin, gradients: list[Any]) -> None:
        """Send the gradients of a message to its sender; do not wait."""
        assert self._post is not None
        with self._news:
            self._in_hand.update(map(id, gradients))
            self._unsent += 1
        self._post(self, origin, gradients)

    # -- inside

    def _gates(self) -> torch.Tensor | None:
        """Return the gate that is passed first, to which the others are chained."""
        sent, needed = self.marking.context.sent, self.marking.needed
        gate: torch.Tensor | None = None
        try:
            for number in sorted(needed, key=lambda each: sent[each].clock):
                edges = [sent[number].edges[index] for index in sorted(needed[number])]
                gate = Gate.apply(self, number, gate, *edges)  # type: ignore[no-untyped-call]
                gate.grad_fn._set_sequence_nr(LAST)  # type: ignore[union-attr]
        except KeyError:
            raise Aborted from None  # the context has ended, and said so
        return gate

    def _is_mine(self) -> bool:
        return self.task is not None and torch._C._current_graph_task_id() == self.task

    def _wait(self, is_there: Callable[[], bool], what: str, message: int | None = None) -> None:
        with self._news:
            if self.failure is None and is_there():
                return
        # Outside of the lock, which the loop takes, and which this waits for.
        with may_block(), self._news:
            while not (self.failure or is_there()):
                left = self._until - time.monotonic()
                if left <= 0:
                    raise self._late(what, message)
                self._news.wait(min(left, threading.TIMEOUT_MAX))
        if self.failure is not None:
            raise Aborted

    def _late(self, what: str, message: int | None) -> RpcTimeout:
        record = None if message is None else self.marking.context.sent.get(message)
        peer: NodeId | None = None if record is None else record.peer
        return RpcTimeout(
            what,
            peer=None if peer is None else peer.short,
            after=self._seconds,
            why=f"the backward ran for more than the set timeout ({self._seconds:g} s)",
            fix="Give it more time: rpc_timeout, in seconds; 0 is no limit.",
        )
