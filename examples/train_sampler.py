"""A training as PyTorch's own tutorials have it; the one word of the mesh is the backend's name.

Digits, batch normalization, a `DistributedSampler`, and a checkpoint by rank 0 that a later run
goes on from. Each of these starts two ranks, and no address or port is given::

    mesh run --nproc-per-node 2 -m examples.train_sampler --checkpoint digits.pt
    torchrun --standalone --nproc-per-node 2 -m examples.train_sampler --checkpoint digits.pt

Over several machines: ``mesh run --nnodes 2 ...`` on one, and on the other what that prints.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from examples import digits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3, help="epochs of the whole training")
    parser.add_argument("--checkpoint", help="file to save to after each epoch, and to go on from")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("mesh")
    try:
        train(options)
    finally:
        dist.destroy_process_group()
    return 0


def train(options: argparse.Namespace) -> None:
    data = digits.load()
    images = TensorDataset(data.images.float(), data.labels)
    sampler: DistributedSampler = DistributedSampler(images, seed=3)
    loader = DataLoader(images, batch_size=digits.BATCH // dist.get_world_size(), sampler=sampler)
    model = build_model()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=digits.LEARNING_RATE, momentum=0.9)
    first = resume(options.checkpoint, model, optimizer)
    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        replica.train()
        total = torch.zeros(2)
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(replica(batch), labels)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            report(epoch, total, model, data)
            save(options.checkpoint, epoch, model, optimizer)
        dist.barrier()
    if options.checkpoint and dist.get_rank() == 0:
        more = options.epochs + 2
        print(f"{options.checkpoint} has it all; with --epochs {more} it goes on from there")


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def resume(checkpoint: str | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load what was saved, on every rank, and return the epoch to go on with."""
    if checkpoint is None or not Path(checkpoint).exists():
        return 0
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["epoch"]) + 1


def save(
    checkpoint: str | None, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    if checkpoint is not None:
        new = Path(f"{checkpoint}.new")  # a run that is killed here leaves the old one whole
        state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, new)
        new.replace(checkpoint)


@torch.no_grad()
def report(epoch: int, total: torch.Tensor, model: nn.Module, data: digits.Digits) -> None:
    model.eval()
    right = model(data.test_images.float()).argmax(1) == data.test_labels
    facts = {
        "epoch": epoch,
        "loss": (total[0] / total[1]).item(),
        "accuracy": right.double().mean().item(),
    }
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main())
