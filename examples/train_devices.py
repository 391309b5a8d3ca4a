"""A CNN learns the digits over the devices of several peers, or of this machine.

Each peer runs ``mesh up --device cpu`` (or ``cuda:0``, ...) and admits the other peers and this
machine: ``mesh allow NODE --scopes device,tensor,collective,node``. Then, here::

    python -m examples.train_devices mesh1... mesh1...            # every device of these peers
    python -m examples.train_devices mesh1... mesh1... --sharded  # the optimizer's state split
    python -m examples.train_devices                              # this machine's own

Gradients go between the peers, and not through this program. The model is a CNN, or with
``--sharded`` a small transformer that reads an image row by row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mesh
import mesh.train
from examples import digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("peers", nargs="*", help="what each printed: mesh1..., or its name")
    parser.add_argument("--sharded", action="store_true", help="split the optimizer's state")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--directory", help="for checkpoints, metrics and a plot")
    parser.add_argument("--on-lost", choices=("raise", "continue"), default="raise")
    options = parser.parse_args()
    try:
        devices = find(options.peers)  # or: devices = ["cpu"]
        train(devices, options)
    except mesh.MeshError as error:
        sys.exit(str(error))


def find(peers: Sequence[str]) -> list[torch.device]:
    """Return every device that the peers offer; those of this machine if there are none."""
    found = [mesh.device(peer, info.index) for peer in peers for info in mesh.devices(peer)]
    for device in found:
        info = mesh.describe(device)
        print(f"{device} is {info.name} of {info.peer}")
    return found or [torch.device("cpu")]


def train(devices: Sequence[torch.device], options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    data = digits.load()
    choose = mesh.train.sharded_optimizer if options.sharded else mesh.train.ddp
    with choose(devices) as strategy:
        history = mesh.train.fit(
            strategy,
            transformer() if options.sharded else cnn(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
            loss=loss,
            train=batches(data.images, data.labels, shuffle=True),
            validate=batches(data.test_images, data.test_labels),
            measures={"right": right},
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
            epochs=options.epochs,
            directory=options.directory,
            on_lost=options.on_lost,
            progress=sys.stdout.isatty(),
        )
    for record in history.records:
        print(
            f"epoch {record['epoch']:g}: loss {record['train_loss']:.4f}, "
            f"{100 * record['valid_right']:.1f} % right"
        )


def batches(images: torch.Tensor, labels: torch.Tensor, *, shuffle: bool = False) -> Any:
    return DataLoader(TensorDataset(images.float(), labels), digits.BATCH, shuffle=shuffle)


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


def transformer() -> nn.Module:
    """Reads the eight rows of an image as a sequence."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(
        *(nn.Flatten(1, 2), nn.Linear(8, 32), nn.TransformerEncoder(layer, 2)),
        *(nn.Flatten(1), nn.Linear(32 * 8, 10)),
    )


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def right(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return (model(images).argmax(1) == labels).float().mean()


if __name__ == "__main__":
    main()
