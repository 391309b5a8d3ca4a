"""What a message depends on, told with it.

Who answers a call says which messages of the caller's each tensor of the answer depends on, if that
is all it depends on, and soon seen. Where all answers say so, their reader knows what a loss needs
without asking anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from auth import NodeId
from mesh.autograd import reducers
from mesh.autograd.nodes import Origin, is_received
from mesh.rpc.links import MAX_FORETOLD, ContextId, Wanted

__all__ = ["foretold"]

MAX_NODES = 256
"""Most nodes that are looked at: it is done in the event loop, and takes some hundred
microseconds."""


def foretold(
    edges: Sequence[torch.Tensor], reader: NodeId, context: ContextId
) -> tuple[Wanted, ...] | None:
    """Return what the tensors of a message depend on.

    Args:
        edges: for each tensor, what its graph hangs on.
        reader: who gets the message.
        context: what it is sent in.

    Returns:
        For each tensor, messages of the reader's and which of their tensors; None if one of them
        depends on others', or on too much, or may lead to parameters of a reducer: of those the
        root has to know before any run begins.
    """
    if reducers.are_there():
        return None
    left = MAX_NODES
    told: list[Wanted] = []
    for edge in edges:
        wanted: dict[int, set[int]] = {}
        visited: set[Any] = set()
        pending: list[tuple[Any, int]] = [(edge.grad_fn, 0)]
        while pending:
            node, index = pending.pop()
            if node is None:
                continue
            if is_received(node):
                origin: Origin = node.origin
                if origin.peer != reader or origin.context != context:
                    return None
                wanted.setdefault(origin.message, set()).add(index)
            elif node not in visited:
                visited.add(node)
                pending.extend(node.next_functions)
            left -= 1
            if not left:
                return None
        told.append(wanted)
    return None if sum(map(len, told)) > MAX_FORETOLD else tuple(told)
