"""A training with Hugging Face's Trainer; the one word of the mesh is the backend's name.

::

    mesh run --nproc-per-node 2 -m examples.train_trainer
    torchrun --standalone --nproc-per-node 2 -m examples.train_trainer

On a CPU Accelerate, on which the Trainer stands, would choose gloo whatever it is told, so that the
script forms the group first. With GPUs ``TrainingArguments(ddp_backend="mesh")`` does as well.
Needs ``transformers`` and ``accelerate``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainingArguments

from examples import digits


class Images(Dataset):
    """Digits as the Trainer wants them: a dictionary each."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    """The network of the examples, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = digits.build_model()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss, and what the network says."""
        logits = self.network(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


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
    data = digits.load()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            use_cpu=not torch.cuda.is_available(),
            num_train_epochs=epochs,
            per_device_train_batch_size=digits.BATCH // dist.get_world_size(),
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(Classifier(), settings, train_dataset=Images(data.images, data.labels))
        trainer.remove_callback(PrinterCallback)  # one line is all that is to be printed
        loss = trainer.train().training_loss
        seen = trainer.evaluate(
            Images(data.test_images, data.test_labels), metric_key_prefix="test"
        )
    if dist.get_rank() == 0:
        right = digits.accuracy(trainer.model.cpu().network, data)
        facts = {"loss": loss, "test_loss": seen["test_loss"], "accuracy": right}
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main())
