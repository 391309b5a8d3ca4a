"""Models and optimizers that train the same here and on a peer's device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

__all__ = ["MODELS", "OPTIMIZERS", "train"]


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)), inplace=True)))
        return F.relu(y + self.shortcut(x))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def _mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.GELU()),
        nn.Linear(64, 10),
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(1), nn.Linear(32 * 12, 10))


def _resnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(_Block(8, 8, 1), _Block(8, 16, 2), _Block(16, 32, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (_mlp, (16, 32)),
    "cnn": (_cnn, (8, 3, 16, 16)),
    "encoder": (_encoder, (4, 12, 32)),
    "resnet": (_resnet, (4, 3, 16, 16)),
    "lstm": (_Recurrent, (4, 6, 8)),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4, foreach=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
    "adam-loop": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=False),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


def train(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer],
    device: torch.device | str,
    steps: int = 4,
) -> list[torch.Tensor]:
    """Train a copy of `model`; return losses, gradients and state, on the CPU."""
    model = copy.deepcopy(model).to(device)
    chosen = optimizer(model.parameters())
    torch.manual_seed(7)
    x, y = x.to(device), y.to(device)
    losses = []
    for _ in range(steps):
        chosen.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        chosen.step()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters()]
    return [each.cpu() for each in (*losses, *gradients, *model.state_dict().values())]
