"""The task of the training examples: the handwritten digits that ship in scikit-learn.

1,797 images of 8 by 8 pixels. The model computes in double precision, so that a training split over
processes can be compared with one in a single process: in single precision the different order of
the sums grows, over hundreds of steps, into differences that say nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import nn

TRAIN_IMAGES = 1408
"""A multiple of the batch size: every step sees as many images on every rank."""

BATCH = 88
EPOCHS = 10
LEARNING_RATE = 0.07
MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images ``(n, 1, 8, 8)`` in float64 from 0 to 1, labels ``(n,)`` in int64."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load() -> Digits:
    """Return the digits, always split the same way."""
    raw = load_digits()
    images = torch.tensor(raw.images / 16.0, dtype=torch.float64).unsqueeze(1)
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    images, labels = images[order], labels[order]
    return Digits(
        images[:TRAIN_IMAGES], labels[:TRAIN_IMAGES], images[TRAIN_IMAGES:], labels[TRAIN_IMAGES:]
    )


def build_model() -> nn.Module:
    """Return a small convolutional network, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    ).double()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every training here."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def batches(data: Digits, epoch: int, rank: int, world_size: int) -> Iterator[tuple]:
    """Yield this rank's share of each global batch: every `world_size`-th image from `rank`."""
    order = torch.randperm(TRAIN_IMAGES, generator=torch.Generator().manual_seed(100 + epoch))
    for start in range(0, TRAIN_IMAGES, BATCH):
        mine = order[start : start + BATCH][rank::world_size]
        yield data.images[mine], data.labels[mine]


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Digits,
    epoch: int,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> float:
    """Train one epoch; return the mean loss of this rank's batches."""
    total, steps = 0.0, 0
    for images, labels in batches(data, epoch, rank, world_size):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total, steps = total + loss.item(), steps + 1
    return total / steps


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """Return the share of test images that `model` names rightly."""
    return (model(data.test_images).argmax(1) == data.test_labels).double().mean().item()
