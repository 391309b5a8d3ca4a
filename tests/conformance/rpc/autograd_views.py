"""What torch's suites for distributed autograd look at inside, said by what the mesh has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mesh import autograd
from mesh.autograd.contexts import RANDOM_BITS, Context
from mesh.rpc import api
from mesh.rpc.links import current_context

__all__ = [
    "FAST",
    "autograd_counts",
    "backward",
    "current",
    "is_valid",
    "max_id",
    "new",
    "release",
    "retrieve",
]


FAST = ("test_backward_unused_send_function",)
"""Tests that expect what upstream's only mode does."""

is_fast = False


class SendView:
    """One message that was sent, whose tensors each have a node of their own here."""

    def __init__(self, edges: tuple[torch.Tensor, ...]) -> None:
        self.next_functions = tuple(edge.grad_fn.next_functions[0] for edge in edges)  # type: ignore[union-attr]


class ContextView:
    """What upstream's ``DistAutogradContext`` shows."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _context_id(self) -> int:
        return self._context.id.number

    def _send_functions(self) -> dict[int, SendView]:
        return {number: SendView(sent.edges) for number, sent in self._context.sent.items()}

    def _recv_functions(self) -> dict[Any, Any]:
        return dict(self._context.received)

    def _known_worker_ids(self) -> set[int]:
        return {api.worker_of(each).id for each in self._context.peers}


def current() -> ContextView:
    """Return this thread's context."""
    context_id = current_context.get()
    if context_id is None:
        raise RuntimeError("there is none")
    return ContextView(_contexts().need(context_id))


def retrieve(number: int) -> ContextView:
    """Return a context by its number."""
    return ContextView(_contexts().find(number))


def is_valid(number: int) -> None:
    """Raise if there is no context of that number."""
    _contexts().find(number)


def new() -> ContextView:
    """Begin a context, and be in it."""
    context = _contexts().begin()
    current_context.set(context.id)
    return ContextView(context)


def release(number: int) -> None:
    """End a context."""
    context = _contexts().find(number)
    current_context.set(None)
    api.current_agent().autograd.end(context)


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Go backward, in the mode of the test."""
    autograd.backward(context_id, roots, retain_graph, fast=is_fast)


def max_id() -> int:
    """Return the largest number of a context of this worker's."""
    worker = _contexts().worker_id
    assert worker is not None
    return (worker + 1 << RANDOM_BITS) - 1


def autograd_counts() -> dict[str, str]:
    """Return how much of autograd there is, by names of upstream's."""
    contexts = _contexts()
    runs = sum(len(each.runs()) for one in contexts for each in one.markings.values())
    return {
        "num_current_backward_passes": str(runs),
        "num_autograd_contexts": str(len(contexts)),
    }


def _contexts() -> Any:
    return api.current_agent().autograd.contexts
