"""A transformer split over two peers learns the digits. No activation passes through this program.

Run ``mesh up --device cpu`` on two peers that authorize each other, and here::

    python -m examples.split_transformer mesh1... mesh1...

Each image is read as a sequence of its eight rows. The first half of the layers is on one peer, the
second on the other: ``.to(device)`` between them goes straight from peer to peer, in the forward
pass and, for gradients, back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
from torch import nn

import mesh
from examples import digits

WIDTH, ROWS = 32, 8


class Split(nn.Module):
    """Two halves, each on a device of its own; labels are wanted where the second is."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.second_device = second
        self.embed = nn.Linear(ROWS, WIDTH).to(first)
        self.place = nn.Parameter(torch.randn(ROWS, WIDTH).to(first) / 8)
        self.lower = _layer().to(first)
        self.upper = _layer().to(second)
        self.head = nn.Linear(WIDTH, 10).to(second)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return ten logits for each of the images, which are where the first half is."""
        rows = self.lower(self.embed(images.squeeze(1)) + self.place)
        result: torch.Tensor = self.head(self.upper(rows.to(self.second_device)).mean(1))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tickets", nargs=2, help="what the two peers printed, or their names")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    try:
        first, second = map(mesh.device, options.tickets)
        print(
            f"{first} is of {mesh.describe(first).peer}, {second} of {mesh.describe(second).peer}"
        )
        train(first, second, options.epochs)
    except mesh.MeshError as error:
        sys.exit(str(error))


def train(first: torch.device, second: torch.device, epochs: int) -> None:
    torch.manual_seed(0)
    data = digits.load()
    images, labels = data.images.float().to(first), data.labels.to(second)
    test_images, test_labels = data.test_images.float().to(first), data.test_labels.to(second)
    model = Split(first, second)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        for chosen in _batches(len(labels)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).float().mean()
        print(
            f"epoch {epoch}: loss {loss.item():.4f}, {100 * right.item():.1f} % right", flush=True
        )


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)


def _batches(count: int) -> Iterator[torch.Tensor]:
    yield from torch.randperm(count).split(digits.BATCH)


if __name__ == "__main__":
    main()
