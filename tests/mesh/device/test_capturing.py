"""A captured sequence gives what its operations give, and costs one message."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import mesh
from mesh.device.client.tensors import device_of
from mesh.device.errors import DeviceError, UnsupportedOnDevice
from tests.mesh.device.inprocess import Loopback
from tests.mesh.device.models import MODELS, OPTIMIZERS

Opened = tuple[Loopback, list[torch.device]]


def test_a_replay_computes_with_what_is_there_by_then(loopback: Opened) -> None:
    carrier, (d, _) = loopback
    x = torch.arange(3.0).to(d)
    total = torch.zeros(3).to(d)
    with mesh.device.capture(d) as step:
        y = (x * 2 + 1).relu()
        total += y
    assert y.tolist() == [1, 3, 5]
    kept = y[1:]  # a view of what is made anew
    before = carrier.nbytes
    x.copy_(torch.tensor([10.0, 20.0, -30.0]))
    step.replay()
    step.replay()
    assert carrier.nbytes - before < 150
    assert y.tolist() == [21, 41, 0]
    assert kept.tolist() == [41, 0]
    assert total.tolist() == [43, 85, 5]


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("mlp", "adamw-fused"), ("cnn", "sgd"), ("encoder", "adam-capturable")],
)
def test_training_goes_on_as_it_would(model: str, optimizer: str, d: torch.device) -> None:
    make, shape = MODELS[model]
    batches = [torch.randn(shape) for _ in range(5)]
    labels = torch.randint(0, 10, (shape[0],))

    def train(device: torch.device, *, captured: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        network = make().to(device)
        choose: Callable[..., torch.optim.Optimizer] = OPTIMIZERS.get(
            optimizer, lambda p: torch.optim.Adam(p, lr=1e-3, capturable=device.type == "mesh")
        )
        chosen = choose(network.parameters())
        x, y = batches[0].clone().to(device), labels.to(device)
        losses = []

        def step() -> torch.Tensor:
            chosen.zero_grad()
            loss = F.cross_entropy(network(x), y)
            loss.backward()
            chosen.step()
            return loss.detach()

        torch.manual_seed(2)
        losses.append(step().cpu())  # makes the optimizer's state
        x.copy_(batches[1])
        if captured:
            with mesh.device.capture(device) as again:
                loss = step()
            losses.append(loss.cpu())
        else:
            losses.append(step().cpu())
        for batch in batches[2:]:
            x.copy_(batch)
            if captured:
                again.replay()
                losses.append(loss.cpu())
            else:
                losses.append(step().cpu())
        return [*losses, *(each.cpu() for each in network.state_dict().values())]

    # Adam that can be captured computes in another order than the other does, here as there.
    reference = d if optimizer == "adam-capturable" else torch.device("cpu")
    for expected, found in zip(
        train(reference, captured=False), train(d, captured=True), strict=True
    ):
        assert torch.equal(expected, found)


def test_nothing_is_left_of_what_was_captured(loopback: Opened) -> None:
    carrier, (d, _) = loopback
    gc.collect()
    mesh.device.synchronize(d)
    handles = carrier.machine.handles
    x = torch.ones(4).to(d)
    with mesh.device.capture(d) as step:
        y = x + 1
        z = y * 2
    del y  # what was made and let go of afterwards is made again all the same
    step.replay()
    step.replay()
    del x
    gc.collect()
    mesh.device.synchronize(d)
    step.replay()
    assert z.tolist() == [4, 4, 4, 4]
    assert len(carrier.machine._sequences) == 1
    del z
    step.close()
    mesh.device.synchronize(d)
    assert carrier.machine.handles == handles
    assert len(carrier.machine._sequences) == 0
    with pytest.raises(DeviceError, match="nothing is captured"):
        step.replay()


def test_what_can_not_be_captured_is_refused(d: torch.device) -> None:
    x, counts = torch.ones(4).to(d), torch.nn.Linear(2, 2).to(d)
    adam = torch.optim.Adam(counts.parameters())
    counts(torch.ones(1, 2).to(d)).sum().backward()
    for what, why in (
        (lambda: x.sum().item(), "while operations are captured"),
        (lambda: x.nonzero(), "while operations are captured"),
        (adam.step, "capturable=True"),
    ):
        with pytest.raises(UnsupportedOnDevice, match=why), mesh.device.capture(d):
            what()
    with (
        pytest.raises(UnsupportedOnDevice, match="elements were moved"),
        mesh.device.capture(d) as step,
    ):
        x += torch.ones(4).to(d)
    with pytest.raises(DeviceError, match="nothing is captured"):
        step.replay()

    def let_go(gone: list[torch.Tensor]) -> None:
        x.add_(gone.pop())

    held = [torch.ones(4).to(d)]
    with pytest.raises(DeviceError, match="were let go of"), mesh.device.capture(d):
        let_go(held)
    with (
        pytest.raises(DeviceError, match="others are captured now"),
        mesh.device.capture(d),
        mesh.device.capture(d),
    ):
        pass
    assert device_of(d).session._recording is None
    assert x.sum().item() == 12


def test_a_failure_in_a_replay_is_told_and_does_not_stay(d: torch.device) -> None:
    index, x = torch.tensor([1]).to(d), torch.arange(3.0).to(d)
    with mesh.device.capture(d) as step:
        y = x.index_select(0, index)
    index.fill_(9)
    step.replay()
    with pytest.raises(DeviceError, match="index out of range"):
        y.cpu()
    index.fill_(2)
    step.replay()
    assert y.tolist() == [2]
