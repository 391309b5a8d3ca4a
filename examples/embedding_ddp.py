"""DistributedDataParallel and remote calls in one model: a table at a peer, dense layers in DDP.

Two trainers share a table that lies at a server, and have each a replica of the dense part. One
backward goes through both: gradients of the replicas are averaged between the trainers, those of
the table come to the server. Run four workers, as `examples.rpc_worker` says.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from examples import rpc_worker
from mesh import autograd, optim, rpc

TRAINERS = ["trainer0", "trainer1"]
ROWS, WIDTH, BATCH, STEPS = 20, 8, 16, 25


class Table:
    """The rows, at the server."""

    def __init__(self) -> None:
        self.rows = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")

    def look_up(self, words: torch.Tensor) -> torch.Tensor:
        """Return the sums of the rows of words."""
        return self.rows(words)

    def parameter_ref(self) -> rpc.RRef:
        """Return a reference to the rows."""
        return rpc.RRef(self.rows.weight)


def train(rank: int, table: rpc.RRef, meet: str) -> list[float]:
    """Be one trainer; return the loss of each step."""
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=len(TRAINERS))
    try:
        torch.manual_seed(rank)
        model = DistributedDataParallel(nn.Linear(WIDTH, 1))
        # Both average the dense part's gradients; each steps the table with its own.
        refs = [rpc.RRef(each) for each in model.parameters()]
        refs.append(table.rpc_sync().parameter_ref())
        optimizer = optim.DistributedOptimizer(torch.optim.SGD, refs, lr=0.02)
        losses = []
        for _ in range(STEPS):
            words = torch.randint(ROWS, (BATCH, 3))
            wanted = words.float().mean(1, keepdim=True) / ROWS
            with autograd.context() as context_id:
                loss = (model(table.rpc_sync().look_up(words)) - wanted).square().mean()
                autograd.backward(context_id, [loss])
                own = autograd.get_gradients(context_id)[model.module.weight]
                everybody = [torch.empty_like(own) for _ in TRAINERS]
                dist.all_gather(everybody, own)
                assert torch.equal(everybody[0], everybody[1])  # they are averaged
                optimizer.step(context_id)
            losses.append(loss.item())
        return losses
    finally:
        dist.destroy_process_group()


def main() -> None:
    table = rpc.remote("server", Table)
    with tempfile.TemporaryDirectory() as directory:
        meet = f"file://{directory}/trainers"  # on several machines: tcp://HOST:PORT
        futures = [
            rpc.rpc_async(name, train, (rank, table, meet)) for rank, name in enumerate(TRAINERS)
        ]
        for losses in (each.wait() for each in futures):
            print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
            assert losses[-1] < 0.7 * losses[0]


rpc.expose(__name__)

if __name__ == "__main__":
    rpc_worker.run(__doc__, ["master", "server", *TRAINERS], main)
