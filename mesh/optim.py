"""``torch.distributed.optim``: one optimizer for parameters that lie on many nodes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from auth import NodeId
from mesh.autograd.errors import ContextGone
from mesh.rpc import api
from mesh.rpc.errors import RpcError
from mesh.rpc.refs.reference import RRef

__all__ = ["DistributedOptimizer", "LocalOptimizer"]


class DistributedOptimizer:
    """Optimizes parameters where they are, with the gradients of an autograd context.

    Each owner has an optimizer of the same class, for its own parameters. Several may be made for
    the same owner; their steps come one after another there.

    Args:
        optimizer_class: any of ``torch.optim``, or one that the owners expose.
        params_rref: references to the parameters, of this node or of others.
        args, kwargs: for the class's constructor at each owner.

    Raises:
        Exception: what a constructor raised.
        MeshError: an owner can't be reached, or refuses.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params_rref: Sequence[RRef[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        by_owner: dict[NodeId, list[RRef[Any]]] = {}
        for ref in params_rref:
            by_owner.setdefault(ref.owner_id, []).append(ref)
        kind = _portable(optimizer_class)
        self._optimizers = [
            api.remote(owner, LocalOptimizer, (kind, refs, list(args), kwargs))
            for owner, refs in by_owner.items()
        ]
        _wait([each.rpc_async().is_made() for each in self._optimizers])

    def step(self, context_id: int) -> None:
        """Let every owner take a step with the gradients that its parameters have in a context.

        ``.grad`` is as it was afterwards; parameters without a gradient are passed over.

        Raises:
            ContextGone: there is no such context here.
            Exception: what an optimizer raised. The others have taken their step.
        """
        api.current_agent().autograd.contexts.find(context_id)
        _wait([each.rpc_async().step(context_id) for each in self._optimizers])


class LocalOptimizer:
    """The optimizer of one owner; made by `DistributedOptimizer`, there.

    Args:
        kind: the class, or its name in ``torch.optim``.
        params: references to this node's own parameters.
        args, kwargs: for the class's constructor.

    Raises:
        RpcError: it is no optimizer.
    """

    def __init__(
        self,
        kind: type[Optimizer] | str,
        params: Sequence[RRef[Any]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._agent = params[0].agent
        values = [ref.local_value() for ref in params]
        self._optimizer = _class_of(kind)(values, *args, **kwargs)

    def is_made(self) -> bool:
        """Return that it is there, for one who waits for that."""
        return True

    def step(self, context_id: int) -> None:
        """Take a step with the gradients of a context, of which there may be none here."""
        try:
            gradients = self._agent.autograd.gradients(context_id)
        except ContextGone:
            gradients = {}
        groups = self._optimizer.param_groups
        params: list[torch.Tensor] = [each for group in groups for each in group["params"]]
        with _one_at_a_time:
            before = [each.grad for each in params]
            try:
                for each in params:
                    each.grad = gradients.get(each)
                self._optimizer.step()
            finally:
                for each, gradient in zip(params, before, strict=True):
                    each.grad = gradient


_one_at_a_time = threading.Lock()
"""Of all optimizers of a program: they may share parameters."""


def _portable(kind: type[Optimizer]) -> type[Optimizer] | str:
    """Return what stands for a class in a call."""
    name = kind.__name__
    return f"torch.optim.{name}" if getattr(torch.optim, name, None) is kind else kind


def _class_of(kind: object) -> Any:
    if isinstance(kind, str) and kind.startswith("torch.optim."):
        kind = vars(torch.optim).get(kind.removeprefix("torch.optim."))
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
        return kind
    raise RpcError("DistributedOptimizer", why=f"{kind!r:.80} is no optimizer")


def _wait(futures: Sequence[Any]) -> None:
    """Wait for all, and raise what the first that failed has raised."""
    failed: Exception | None = None
    for future in futures:
        try:
            future.wait()
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed
