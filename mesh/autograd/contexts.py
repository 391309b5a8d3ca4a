"""Autograd contexts of one node: what was sent and received in each, and its gradients. No I/O.

A context begins where a program enters it, and comes to be at every node that a call of it reaches.
It ends where it began; that node tells those that it has called, they tell theirs. A context whose
callers have all vanished ends as well. What comes for one that has ended is counted, and dropped.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from auth import NodeId
from mesh.autograd.errors import ContextGone
from mesh.autograd.foresight import foretold
from mesh.autograd.nodes import sent
from mesh.rpc.links import MAX_CLOCK, ContextId, Link, Wanted
from transport import LimitExceeded, ProtocolError

if TYPE_CHECKING:
    from mesh.autograd.marking import Marking
    from mesh.autograd.wire import MarkingId

__all__ = ["MAX_WORKERS", "Context", "Contexts", "Sent"]

MAX_CONTEXTS_OF_ONE = 1024
"""Most live contexts that the calls of one node may make here."""

MAX_MESSAGES = 1 << 18
"""Most recorded messages of a context, each way."""

MAX_MARKINGS = 256
"""Most markings of a context by one node that wait for a backward, or for another one."""

MAX_ENDED = 8192
"""Contexts that have ended and are remembered, so that what comes late begins none anew."""

MAX_WORKERS = 1 << 15
RANDOM_BITS = 48
"""An id's lower bits, where upstream counts: above them is the worker that began the context."""


@dataclasses.dataclass(slots=True)
class Sent:
    """A message that was sent and recorded.

    Attributes:
        clock: the Lamport time of it.
        peer: to whom.
        edges: for each tensor that wants a gradient, a scalar that its graph hangs on.
        shapes: of these tensors.
    """

    clock: int
    peer: NodeId
    edges: tuple[torch.Tensor, ...]
    shapes: tuple[torch.Size, ...]


@dataclasses.dataclass(slots=True)
class Aside:
    """Gradients of one run, which count when its backward has succeeded.

    Attributes:
        gradients: by leaf; under `gradients_lock`, as those of a `Context`.
        parent: who says what is to be of them.
        children: to whom that is passed on.
    """

    gradients: dict[torch.Tensor, torch.Tensor] = dataclasses.field(default_factory=dict)
    gradients_lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)
    parent: NodeId | None = None
    children: frozenset[NodeId] = frozenset()


class Context:
    """What one node knows of one context. Safe for many threads, with its locks.

    The event loop takes `lock`, so nobody computes under it.

    Attributes:
        id: which it is.
        sent: the messages that were sent from here, by their numbers.
        received: the nodes of those that have come here, by sender and number.
        gradients: of the leaves here, by leaf; under `gradients_lock`, which no loop takes.
        callers: who has called here in it; when all are gone, so is the context.
        parent: who has brought it here, or its owner once that has called here: they may end it.
        peers: everybody here who takes part.
        markings: what is marked here for backwards.
        spare: the marking of the latest backward that kept its graph, for another one.
        asides: gradients that were put aside, by marking and run.
        stale: numbers of markings of this node's that others may still have, for nothing.
        is_over: whether it has ended.
    """

    def __init__(self, context_id: ContextId) -> None:
        self.id = context_id
        self.lock = threading.RLock()
        self.gradients_lock = threading.RLock()
        self.sent: dict[int, Sent] = {}
        self.received: dict[tuple[NodeId, int], Any] = {}
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.callers: set[NodeId] = set()
        self.parent: NodeId | None = None
        self.peers: set[NodeId] = set()
        self.markings: dict[MarkingId, Marking] = {}
        self.spare: tuple[Sequence[Any], Marking] | None = None
        self.asides: dict[tuple[MarkingId, int], Aside] = {}
        self.stale: list[int] = []
        self.is_over = False
        self._clock = 0
        self._messages = 0

    def send(self, to: NodeId, tensors: Sequence[torch.Tensor]) -> Link:
        """Record a message with tensors that want gradients; return what it is to say of that.

        Raises:
            LimitExceeded: there are too many already.
        """
        with self.lock:
            if self._messages >= MAX_MESSAGES:
                raise _full(f"{MAX_MESSAGES} messages were sent in the context already")
            self._messages += 1
            self._clock += 1
            number, clock = self._messages, self._clock
        edges = tuple(sent(number, index, tensor) for index, tensor in enumerate(tensors))
        with self.lock:
            self.peers.add(to)
            if not self.is_over:
                shapes = tuple(each.shape for each in tensors)
                self.sent[number] = Sent(clock, to, edges, shapes)
        # Who has called here may go backward from what it gets.
        leads_to = foretold(edges, to, self.id) if to in self.callers else None
        return Link(self.id, number, clock, leads_to)

    def check(self, wanted: Wanted, by: NodeId) -> None:
        """Check that `by` has got these tensors of messages.

        Raises:
            ProtocolError: it has not.
        """
        for number, tensors in wanted.items():
            message = self.sent.get(number)
            if message is None or message.peer != by:
                raise ProtocolError("marking", why=f"no message {number} was sent there")
            if max(tensors) >= len(message.edges):
                raise ProtocolError("marking", why=f"message {number} has no such tensor")

    def receive(self, by: NodeId, link: Link, node: Any) -> None:
        """Record a message that has come.

        Raises:
            ProtocolError: its sender has sent another with its number.
            LimitExceeded: there are too many already.
        """
        with self.lock:
            if (by, link.message) in self.received:
                raise ProtocolError("a call", why="another message of its context has its number")
            if len(self.received) >= MAX_MESSAGES:
                raise _full(f"{MAX_MESSAGES} messages have come in the context already")
            if not self.is_over:
                self.received[by, link.message] = node

    def hear(self, link: Link) -> None:
        """Set the clock after that of a message that has come."""
        with self.lock:
            self._clock = max(self._clock, link.clock) + 1
            if self._clock >= MAX_CLOCK:
                raise ProtocolError("a call", why="its context's clock is beyond any count")

    def clear(self) -> list[Marking]:
        """End it: let go of every graph; return the markings that were left.

        By hand, for the way from a context through its graph and back is hidden from Python.
        """
        with self.lock:
            self.is_over = True
            markings = list(self.markings.values())
            self.sent, self.received, self.gradients = {}, {}, {}
            self.markings, self.spare, self.asides = {}, None, {}
        return markings


class Contexts:
    """The contexts of one node. Safe for many threads.

    Args:
        me: whose they are.
        lease: seconds that a caller may be without a connection before it counts as gone.

    Attributes:
        worker_id: this program's rank, which the ids of its contexts begin with.
        late: how much has come for contexts that had ended, and was dropped.
        begun: how many contexts there have been.
    """

    def __init__(self, me: NodeId, lease: float) -> None:
        self._me = me
        self._lease = lease
        self._lock = threading.Lock()
        self._contexts: dict[ContextId, Context] = {}
        self._ended: OrderedDict[ContextId, None] = OrderedDict()
        self._absent: dict[NodeId, float] = {}
        self.worker_id: int | None = None
        self.late = 0
        self.begun = 0

    def __len__(self) -> int:
        """Return how many contexts are alive here."""
        return len(self._contexts)

    def __iter__(self) -> Iterator[Context]:
        with self._lock:
            return iter(tuple(self._contexts.values()))

    def begin(self) -> Context:
        """Begin a context of this node's own."""
        with self._lock:
            context_id = self._new_id()
            while context_id in self._contexts:
                context_id = self._new_id()
            context = Context(context_id)
            self._contexts[context.id] = context
            self.begun += 1
            return context

    def _new_id(self) -> ContextId:
        # At random: who can guess an id, can end what he takes no part in.
        if self.worker_id is None:
            return ContextId(self._me, 1 << 62 | secrets.randbits(62))
        number = self.worker_id << RANDOM_BITS | secrets.randbits(RANDOM_BITS)
        return ContextId(self._me, number)

    def find(self, number: int) -> Context:
        """Return the context that a program calls `number`: its own, or else that of a caller.

        Raises:
            ContextGone: there is none here.
        """
        with self._lock:
            own = self._contexts.get(ContextId(self._me, number))
            if own is not None:
                return own
            found = [each for each in self._contexts.values() if each.id.number == number]
        if len(found) != 1:
            raise gone(number)
        return found[0]

    def live(self, context_id: ContextId) -> Context | None:
        """Return a context, None if it has ended."""
        return self._contexts.get(context_id)

    def need(self, context_id: ContextId) -> Context:
        """Return a context.

        Raises:
            ContextGone: it has ended.
        """
        context = self._contexts.get(context_id)
        if context is None:
            raise gone(context_id.number)
        return context

    def join(self, context_id: ContextId, caller: NodeId) -> Context | None:
        """Return the context of a caller, new or known; None, and count, if it has ended.

        Raises:
            LimitExceeded: the caller has too many here.
        """
        with self._lock:
            context = self._contexts.get(context_id)
            if context is None:
                # One of this node's own that is not there has ended.
                if context_id in self._ended or context_id.owner == self._me:
                    self.late += 1
                    return None
                its_own = sum(caller in each.callers for each in self._contexts.values())
                if its_own >= MAX_CONTEXTS_OF_ONE:
                    raise _full(f"{its_own} contexts of this caller's are alive here")
                context = self._contexts[context_id] = Context(context_id)
                self.begun += 1
            context.callers.add(caller)
            context.peers.add(caller)
            if context.parent is None or caller == context_id.owner:
                context.parent = caller
            return context

    def leave(self, context: Context, caller: NodeId) -> bool:
        """Count a caller as gone; return whether that ends the context here."""
        with self._lock:
            is_caller = caller in context.callers
            context.callers.discard(caller)
            return is_caller and (caller == context.parent or not context.callers)

    def end(self, context_id: ContextId) -> Context | None:
        """Take a context out, for its end; None if it is not there. None will be made anew."""
        with self._lock:
            if context_id.owner != self._me:
                self._ended[context_id] = None
                if len(self._ended) > MAX_ENDED:
                    self._ended.popitem(last=False)
            return self._contexts.pop(context_id, None)

    # -- who is there

    def left(self, node: NodeId, now: float) -> None:
        """Begin the lease of a caller whose connection is over."""
        with self._lock:
            if any(node in each.callers for each in self._contexts.values()):
                self._absent.setdefault(node, now + self._lease)

    def returned(self, node: NodeId) -> None:
        """End the lease of a caller that is there again."""
        with self._lock:
            self._absent.pop(node, None)

    def forget(self, node: NodeId) -> tuple[ContextId, ...]:
        """Count a caller as gone; return the contexts that nobody is left of."""
        with self._lock:
            return self._forget(node)

    def lapse(self, now: float) -> tuple[tuple[ContextId, ...], float]:
        """Count as gone whose lease is over.

        Returns:
            The contexts that nobody is left of, and when to call this again.
        """
        with self._lock:
            over = [node for node, until in self._absent.items() if until <= now]
            orphans = tuple(each for node in over for each in self._forget(node))
            return orphans, min(self._absent.values(), default=math.inf)

    def _forget(self, node: NodeId) -> tuple[ContextId, ...]:
        self._absent.pop(node, None)
        orphans: list[ContextId] = []
        for context in self._contexts.values():
            if node in context.callers:
                context.callers.discard(node)
                if not context.callers and context.id.owner != self._me:
                    orphans.append(context.id)
        return tuple(orphans)


def gone(number: int) -> ContextGone:
    """Return the error that there is no context of that number, in upstream's words."""
    return ContextGone(f"Could not find autograd context with id: {number}")


def _full(why: str) -> LimitExceeded:
    return LimitExceeded(
        "recording for autograd", why=why, fix="Begin a context for each step, and leave it."
    )
