"""A training with Hugging Face's Accelerate; the one word of the mesh is the backend's name.

::

    mesh run --nproc-per-node 2 -m examples.train_accelerate
    torchrun --standalone --nproc-per-node 2 -m examples.train_accelerate

On a CPU Accelerate would choose gloo whatever it is told, so that the script forms the group first.
With GPUs ``InitProcessGroupKwargs(backend="mesh")`` does as well. Needs ``accelerate``.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples import digits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--backend", default="mesh")
    options = parser.parse_args()

    dist.init_process_group(options.backend)
    try:
        train(options.epochs)
    finally:
        dist.destroy_process_group()
    return 0


def train(epochs: int) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    data = digits.load()
    images = TensorDataset(data.images, data.labels)
    loader = DataLoader(images, digits.BATCH // accelerator.num_processes, shuffle=True)
    model = digits.build_model()
    optimizer = digits.build_optimizer(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        mean = accelerator.gather(total / len(loader)).mean()
        if accelerator.is_main_process:
            right = digits.accuracy(accelerator.unwrap_model(model).cpu(), data)
            model.to(accelerator.device)
            print(json.dumps({"epoch": epoch, "loss": mean.item(), "accuracy": right}), flush=True)
        accelerator.wait_for_everyone()


if __name__ == "__main__":
    sys.exit(main())
