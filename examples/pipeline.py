"""A model in three stages, each at another worker: micro-batches overlap, gradients come back.

The master never has a parameter, and no activation passes through it: each stage calls the next.
Run four workers, as `examples.rpc_worker` says.
"""

from __future__ import annotations

import torch
from torch import nn

from examples import digits, rpc_worker
from mesh import autograd, optim, rpc

STAGES = ["first", "middle", "last"]
WIDTHS = [64, 48, 32, 10]
STEPS = 30
MICRO_BATCHES = 4


class Stage(nn.Module):
    """One part of the model, and the one behind it."""

    def __init__(self, number: int, behind: rpc.RRef | None) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTHS[number], WIDTHS[number + 1])
        self.is_last = behind is None
        self.behind = behind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Go through this stage and those behind it."""
        y = self.layer(x)
        if self.behind is None:
            return y
        return self.behind.rpc_sync().forward(torch.relu(y))

    def parameter_refs(self) -> list[rpc.RRef]:
        """Return references to this stage's parameters."""
        return [rpc.RRef(each) for each in self.layer.parameters()]


def main() -> None:
    data = digits.load()
    images = data.images.flatten(1).float()
    behind = None
    stages = []
    for number in reversed(range(len(STAGES))):
        behind = rpc.remote(STAGES[number], Stage, (number, behind))
        stages.append(behind)
    head = stages[-1]
    refs = [ref for stage in stages for ref in stage.rpc_sync().parameter_refs()]
    optimizer = optim.DistributedOptimizer(torch.optim.Adam, refs, lr=0.01)
    losses = []
    for step in range(STEPS):
        rows = torch.arange(step * 64, (step + 1) * 64) % len(data.labels)
        with autograd.context() as context_id:
            parts = zip(
                images[rows].chunk(MICRO_BATCHES),
                data.labels[rows].chunk(MICRO_BATCHES),
                strict=True,
            )
            flying = [(head.rpc_async().forward(x), y) for x, y in parts]
            loss = sum(nn.functional.cross_entropy(x.wait(), y) for x, y in flying) / MICRO_BATCHES
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    assert losses[-1] < 0.7 * losses[0]


rpc.expose(__name__)

if __name__ == "__main__":
    rpc_worker.run(__doc__, ["master", *STAGES], main)
