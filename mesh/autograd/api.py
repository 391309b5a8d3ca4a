"""``torch.distributed.autograd``: contexts, and backwards that cross nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mesh.autograd.errors import BackwardError
from mesh.autograd.participant import backward_of, check_losses
from mesh.rpc.links import current_context

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent
    from mesh.rpc.refs.reference import RRef

__all__ = ["backward", "context", "get_gradients"]


@contextmanager
def context(agent: Agent | None = None) -> Iterator[int]:
    """Record the calls of this thread, or task, in the block for a backward across nodes.

    Functions that are called in it run in the same context, wherever they are, and so do the calls
    that they make. When the block ends, the context does, everywhere.

    Args:
        agent: of a node that is no worker of `mesh.rpc.init_rpc`.

    Returns:
        The context's id, for `backward` and `get_gradients`.

    Raises:
        RuntimeError: this thread is in a context already.
    """
    autograd = _agent(agent).autograd
    current = current_context.get()
    if current is not None and autograd.contexts.live(current) is not None:
        raise BackwardError(
            "Already have an autograd context id for this thread",
            fix="Contexts do not nest; a function that is called in one is in it.",
        )
    begun = autograd.begin()
    token = current_context.set(begun.id)
    try:
        yield begun.id.number
    finally:
        current_context.reset(token)
        autograd.end(begun)


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    *,
    fast: bool = False,
    atomic: bool = False,
    agent: Agent | None = None,
) -> None:
    """Compute the gradients of the sum of `roots`, on all nodes that their graph leads to.

    They are added up in the context, on each node those of its own leaves; ``.grad`` stays as it
    is. Several backwards may run at the same time, in one context too.

    Args:
        context_id: of the context that the calls were made in.
        roots: scalar tensors.
        retain_graph: keep the graph, to go backward again.
        fast: take it that all that was sent in the context is needed, as upstream does, and save
            the marking; if some of it is not, it waits for gradients that never come.
        atomic: have its gradients count only when all of it has succeeded: until then they are put
            aside, and let go of if it fails. Hooks that look at ``.grad`` see its own alone. Only
            the loss of a node, or the end of the time, just as all are told that it has succeeded
            leaves it done by half.
        agent: as for `context`.

    Raises:
        BackwardError: something failed, here or on another node, which it names; its ``__cause__``
            is what was raised there.
        ContextGone: there is no such context.
    """
    if type(context_id) is not int:
        raise TypeError("backward(): incompatible function arguments: the context id is no int")
    losses = check_losses(roots)
    _agent(agent).autograd.backward(
        context_id, losses, retain_graph=retain_graph, fast=fast, atomic=atomic
    )


def get_gradients(
    context_id: int, *, agent: Agent | None = None
) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients of this node's leaves in a context, by leaf.

    Raises:
        ContextGone: there is no such context here.
    """
    return _agent(agent).autograd.gradients(context_id)


def backward_from(agent: Agent, ref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """Go backward from a reference's value, at its owner; see `RRef.backward`."""
    from mesh.rpc import api

    if ref.is_owner():
        backward_of(agent.autograd, ref.local_value(), context_id, retain_graph)
    else:
        api.wait_for(agent, lambda: agent.backward_at(ref, context_id, retain_graph))


def _agent(agent: Agent | None) -> Agent:
    if agent is not None:
        return agent
    from mesh.rpc import api

    return api.current_agent()
