"""A CNN learns the digits on a peer's hardware. The program is plain PyTorch but for one line.

Run ``mesh up --device cpu`` on the peer, and here, on a machine that may compute there::

    python -m examples.remote_device mesh1...

The machine itself may; another needs the scope: ``mesh allow NODE --scopes device,tensor,node``.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import mesh
from examples import digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ticket", help="what the peer printed: mesh1..., or its name")
    parser.add_argument("--index", type=int, default=0, help="which of the peer's devices")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    try:
        device = mesh.device(options.ticket, options.index)
        print(f"{device} is {mesh.describe(device).name} of {mesh.describe(device).peer}")
        train(device, options.epochs)
    except mesh.MeshError as error:
        sys.exit(str(error))


def train(device: torch.device, epochs: int) -> None:
    torch.manual_seed(0)
    data = digits.load()
    images, labels = data.images.float().to(device), data.labels.to(device)
    test_images, test_labels = data.test_images.float().to(device), data.test_labels.to(device)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10)),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        model.train()
        for chosen in torch.randperm(len(labels)).split(digits.BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).float().mean()
        print(
            f"epoch {epoch}: loss {loss.item():.4f}, {100 * right.item():.1f} % right", flush=True
        )


if __name__ == "__main__":
    main()
