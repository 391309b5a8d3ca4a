"""A peer's hardware as a `torch.device`: ordinary PyTorch code computes there.

::

    d = mesh.device(ticket, 0)
    model.to(d); loss.backward(); optimizer.step(); y.cpu()

Tensors on ``mesh:k`` are plain `torch.Tensor` objects whose elements lie at a peer. Each storage
has one handle there; views are made here, and the peer hears of them as shape, strides and offset
alone. Operations stream to the peer in batches and nobody waits for them; who reads elements does.

The rooms, and the one idea of each:

``ops``      the positive list: what a client may have run, by name
``wire``     templates, batches, answers: pure, strict, bounded
``link``     frames that survive the stream they travel on: numbered, kept until acknowledged
``client/``  a torch backend that sends operations on instead of running them
``server/``  one executor process per session, which checks everything and can only harm itself
``api``      `device`, `devices`, `describe`: what programs call
``errors``   the branch of the exception tree

A peer offers devices by name (``mesh up --device cpu``), to programs that are granted the scope
``device``: none has it unless somebody says so, because it is the right to compute.
"""

from __future__ import annotations
