"""Gradients across nodes: ``torch.distributed.autograd`` over `mesh.rpc`.

::

    with mesh.autograd.context() as context_id:
        loss = mesh.rpc.rpc_sync("other", forward, (x,)).sum()
        mesh.autograd.backward(context_id, [loss])
        gradients = mesh.autograd.get_gradients(context_id)

=================  ===========================================================================
api                what programs call
contexts           what a node knows of a context
recording          messages of calls, as they leave and come
nodes              what stands in torch's graph for a message
marking            what of the graph a loss needs
marker             who is asked for that, on all nodes
foresight          what answers say of it beforehand
claims             parameters that reducers read, on several nodes
run                one node's part of one backward
commits            gradients that count if all has succeeded
leaves, reducers   where the gradients go
passes             backwards across nodes
participant        all of that, for one node
wire               the messages
=================  ===========================================================================
"""

from __future__ import annotations

from mesh.autograd.api import backward, context, get_gradients
from mesh.autograd.errors import BackwardError, ContextGone

__all__ = ["BackwardError", "ContextGone", "backward", "context", "get_gradients"]
