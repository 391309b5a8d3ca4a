"""Gradients across two workers: the program of torch.distributed.autograd's documentation.

But for its imports it is that program. Run both workers, as `examples.rpc_worker` says.
"""

from __future__ import annotations

import torch

from examples import rpc_worker
from mesh import autograd as dist_autograd
from mesh import optim, rpc


def random_tensor() -> torch.Tensor:
    return torch.rand((3, 3), requires_grad=True)


def main() -> None:
    with dist_autograd.context() as context_id:
        # Forward pass: two tensors that stay at the other worker, and their sum here.
        first = rpc.remote("worker1", random_tensor)
        second = rpc.remote("worker1", random_tensor)
        loss = first.to_here() + second.to_here()

        # Backward pass: to the other worker, whose the tensors are.
        dist_autograd.backward(context_id, [loss.sum()])

        # One optimizer for parameters wherever they lie.
        before = first.to_here().detach().clone()
        optimizer = optim.DistributedOptimizer(torch.optim.SGD, [first, second], lr=0.05)
        optimizer.step(context_id)
        assert torch.allclose(first.to_here().detach(), before - 0.05)
    print("stepped")


rpc.expose(__name__)

if __name__ == "__main__":
    rpc_worker.run(__doc__, ["worker0", "worker1"], main)
