"""The seam between calls and autograd: messages that leave and come are recorded in contexts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from auth import NodeId
from mesh.autograd.contexts import Contexts
from mesh.autograd.nodes import Origin, received
from mesh.rpc.links import Link, current_context, gradients_off
from transport import ProtocolError

__all__ = ["Recorder"]

_log = logging.getLogger("quicmesh.autograd")


class Recorder:
    """What calls tell autograd, in the node's event loop.

    Args:
        contexts: the node's.
    """

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts

    def leaving(self, to: NodeId, tensors: Sequence[torch.Tensor]) -> Link | None:
        """Record a message of the current context; return what it is to say of that.

        Args:
            to: who gets it.
            tensors: those in it that want gradients.

        Raises:
            LimitExceeded: the context has too many messages.
        """
        context_id = current_context.get()
        if context_id is None:
            return None
        context = self._contexts.live(context_id)
        if context is None:
            self._contexts.late += 1
            _log.warning(
                "a call goes to %s without autograd: its context %d has ended",
                to.short,
                context_id.number,
            )
            return None
        if tensors and not gradients_off.get():
            return context.send(to, tensors)
        with context.lock:
            context.peers.add(to)
        return Link(context_id)

    @contextlib.contextmanager
    def joined(self, link: Link | None, caller: NodeId) -> Iterator[None]:
        """Be in the context of a caller for the block, and in none if it has none, or had.

        Raises:
            LimitExceeded: it has too many here.
        """
        context = None if link is None else self._contexts.join(link.context, caller)
        token = current_context.set(None if context is None else context.id)
        gradients = gradients_off.set(False)
        try:
            yield
        finally:
            gradients_off.reset(gradients)
            current_context.reset(token)

    def arriving(
        self, by: NodeId, link: Link | None
    ) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] | None:
        """Return what makes the tensors of a message part of the graph; None if nothing is to."""
        context = None if link is None else self._contexts.live(link.context)
        if link is None or not link.message:
            return None
        if context is None:
            self._contexts.late += 1
            return None

        def record(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            if not tensors:
                raise ProtocolError("a call", why="none of its tensors wants the gradient it says")
            leads_to = link.leads_to
            if leads_to is not None and len(leads_to) != len(tensors):
                raise ProtocolError("a call", why="it says of other tensors what they depend on")
            outputs = received(Origin(link.context, by, link.message), tensors, leads_to)
            context.receive(by, link, outputs[0].grad_fn)
            return outputs

        context.hear(link)
        with context.lock:
            if not context.is_over:
                for each in link.leads_to or ():
                    context.check(each, by)
        return record

    def answered(
        self, by: NodeId, asked: Link | None, link: Link | None
    ) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] | None:
        """Return the same as `arriving`, of an answer.

        Raises:
            ProtocolError: it is of another context than the request.
        """
        if link is not None and (asked is None or asked.context != link.context):
            raise ProtocolError("an answer", why="it is of another context than its request")
        if gradients_off.get():
            return _detached
        return self.arriving(by, link)


def _detached(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [tensor.requires_grad_(False) for tensor in tensors]
