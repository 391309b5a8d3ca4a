"""Models train on a peer's device, in another process, to the last bit as they do here."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import mesh
from mesh.device.client.tensors import devices
from tests.mesh.device.models import MODELS, OPTIMIZERS, train
from tests.mesh.device.peer import client, peer

QUICK = {("mlp", "adam-loop"), ("cnn", "sgd"), ("encoder", "adamw-fused"), ("lstm", "adam-foreach")}
"""What runs each time; all of them run with --slow."""


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    torch.set_num_threads(1)  # as the peer does
    with peer() as there, client() as node:
        yield mesh.device(there.ticket, 0, node=node)
        gc.collect()
    devices.clear()


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        pytest.param(
            *(model, optimizer),
            marks=() if (model, optimizer) in QUICK else pytest.mark.slow,
            id=f"{model}-{optimizer}",
        )
        for model in MODELS
        for optimizer in OPTIMIZERS
    ],
)
def test_training_is_the_same_as_here(model: str, optimizer: str, device: torch.device) -> None:
    make, shape = MODELS[model]
    torch.manual_seed(0)
    net, x = make(), torch.randn(shape)
    y = torch.randint(0, 10, (shape[0],))
    there = train(net, x, y, OPTIMIZERS[optimizer], device)
    here = train(net, x, y, OPTIMIZERS[optimizer], "cpu")
    tolerance = 1e-6 if model == "lstm" else 0.0  # recurrent layers are decomposed
    for one, other in zip(there, here, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance)
