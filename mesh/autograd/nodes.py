"""The nodes that distributed autograd adds to torch's own graph.

===========  ===================================================================================
`RpcSend`    stands behind each tensor of a message that was sent; its gradient comes from afar
`RpcRecv`    stands before the tensors of a message that was received; it sends their gradients
`Gate`       holds the engine until the gradients of one message are there; made for one run
`Root`       where a run begins: the losses, and the first gate
===========  ===================================================================================

A node knows numbers, not the context that it belongs to: that leads to the graph, by ways that the
garbage collector does not see.

What they hang on is the CPU's, whatever the program's default device is: gates wait, and would do
so in the engine's thread for that device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import Function

from auth import NodeId
from mesh.autograd.errors import BackwardError
from mesh.rpc.links import ContextId, Wanted

if TYPE_CHECKING:
    from mesh.autograd.run import Run

__all__ = ["Gate", "Origin", "Root", "RpcRecv", "RpcSend", "is_received", "running", "sent"]

FIRST = 2**62
"""Sequence number of what the engine is to run as soon as it can."""

LAST = 0
"""Sequence number of gates, which it is to run when there is nothing else; nothing else has it."""

running: dict[int, Run] = {}
"""The runs of this process, by the engine's own number of them."""


class Origin(NamedTuple):
    """Where a message came from.

    Attributes:
        context: the one that it was sent in.
        peer: who sent it.
        message: its number there.
    """

    context: ContextId
    peer: NodeId
    message: int


def sent(message: int, index: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return a scalar that keeps what stands behind `tensor`, and none of its content."""
    with torch.enable_grad():
        edge: torch.Tensor = RpcSend.apply(message, index, tensor)  # type: ignore[no-untyped-call]
    return edge


def received(
    origin: Origin, tensors: Sequence[torch.Tensor], leads_to: Sequence[Wanted] | None
) -> tuple[torch.Tensor, ...]:
    """Return `tensors`, which came with a message, as what its sender's graph goes on in.

    Args:
        origin: the message.
        tensors: those of it that want gradients.
        leads_to: what each depends on here, if it depends on nothing else.
    """
    with torch.enable_grad():
        hidden = [tensor.requires_grad_(False) for tensor in tensors]
        return RpcRecv.apply(_anchor, origin, hidden, leads_to)  # type: ignore[no-untyped-call, no-any-return]


def is_received(node: object) -> bool:
    """Return whether a node of the graph is an `RpcRecv`."""
    return type(node) is _RecvNode


def run_now() -> Run:
    """Return the run that this node is executed in.

    Raises:
        BackwardError: it is none: somebody called ``loss.backward()``.
    """
    run = running.get(torch._C._current_graph_task_id())
    if run is None:
        raise BackwardError(
            "backward",
            why="the graph leads to another node, and this backward is a local one",
            fix="Use mesh.autograd.backward(context_id, [loss]).",
        )
    return run


class RpcSend(Function):
    """One for each tensor, so that what leads to one is not run for another's sake."""

    @staticmethod
    def forward(ctx: Any, message: int, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the scalar."""
        ctx.message, ctx.index, ctx.device = message, index, tensor.device
        ctx.set_materialize_grads(False)
        return torch.empty((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Return the gradient that has come."""
        gradient = run_now().take(ctx.message, ctx.index)
        if gradient is not None and gradient.device != ctx.device:
            gradient = gradient.to(ctx.device)
        return None, None, gradient


class RpcRecv(Function):
    """One for a message. Its tensors come in a list: as inputs they would come out as views."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, origin: Origin, tensors: Any, leads_to: Any) -> Any:
        """Return the tensors."""
        ctx.origin, ctx.leads_to = origin, leads_to
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Send their gradients."""
        run_now().send(ctx.origin, list(gradients))
        return None, None, None, None


class Gate(Function):
    """Waits for the gradients of one message, and then lets the next gate and the senders go."""

    @staticmethod
    def forward(ctx: Any, run: Run, message: int, after: Any, *edges: Any) -> torch.Tensor:
        """Return what the gate after this hangs on."""
        ctx.run, ctx.message, ctx.count = run, message, len(edges)
        ctx.set_materialize_grads(False)
        return torch.empty((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Wait."""
        ctx.run.wait_for(ctx.message)
        return (None,) * (3 + ctx.count)


class Root(Function):
    """The one root of a run, so that it is known before anything else of it is executed."""

    @staticmethod
    def forward(ctx: Any, run: Run, gate: Any, *losses: Any) -> torch.Tensor:
        """Return what the engine begins at."""
        ctx.run, ctx.ones = run, [torch.ones_like(loss) for loss in losses]
        ctx.set_materialize_grads(False)
        return torch.empty((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Note the run, and begin at the losses."""
        ctx.run.task = task = torch._C._current_graph_task_id()
        running[task] = ctx.run
        return (None, None, *ctx.ones)


_anchor = torch.empty((), device="cpu", requires_grad=True)
"""What makes `RpcRecv` part of a graph at all."""

_RecvNode: type = RpcRecv._backward_cls
# As upstream's nodes are called, which people look for in graphs.
_RecvNode.__name__ = "torch::distributed::autograd::RecvRpcBackward"
RpcSend._backward_cls.__name__ = "torch::distributed::autograd::SendRpcBackward"
