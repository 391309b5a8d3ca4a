"""Models, data and optimizers of the tests, and the same training without any of `mesh.train`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["OPTIMIZERS", "batches", "compute", "encoder", "mlp", "plain"]

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-2),
}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Flatten(1), nn.Linear(16 * 5, 3))


def batches(count: int, *shape: int, size: int = 10) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, *shape, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def compute(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def plain(
    model: nn.Module, make: Any, data: list[Any], clip: float | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a copy of a model; return the losses and what it has become."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = compute(model, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()
