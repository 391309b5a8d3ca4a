"""Strategies train to what one device trains to, whatever the devices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mesh.device.errors import DeviceError
from mesh.train import CheckpointError, Strategy, ddp, sharded_optimizer, single
from mesh.train.batches import moved, rows, split
from mesh.train.buckets import FIRST_BYTES, buckets_of
from tests.mesh.train.models import OPTIMIZERS, batches, compute, encoder, mlp, plain


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are small, and threads would wait for each other's turns."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "single": lambda: single("cpu"),
    "ddp-1": lambda: ddp(["cpu"]),
    "ddp-3": lambda: ddp(["cpu"] * 3),
    "sharded-1": lambda: sharded_optimizer(["cpu"]),
    "sharded-4": lambda: sharded_optimizer(["cpu"] * 4),
}


def trained(
    strategy: Strategy, model: nn.Module, make, data, clip: float | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    with strategy:
        strategy.prepare(copy.deepcopy(model), make)
        losses = []
        for batch in data:
            losses.append(strategy.backward(batch, compute))
            strategy.step(clip=clip)
        return [loss.item() for loss in losses], strategy.state()["model"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_training_is_that_of_one_device(name: str, optimizer: str, clip: float | None) -> None:
    model, data, make = mlp().double(), batches(20, 6), OPTIMIZERS[optimizer]
    losses, weights = trained(STRATEGIES[name](), model, make, data, clip)
    wanted, reference = plain(model, make, data, clip)
    assert losses == pytest.approx(wanted, abs=1e-6)
    torch.testing.assert_close(weights, reference, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["ddp-3", "sharded-4"])
def test_a_transformer_trains_the_same(name: str) -> None:
    model, data = encoder().double(), batches(5, 5, 16)
    losses, weights = trained(STRATEGIES[name](), model, OPTIMIZERS["adam"], data)
    wanted, reference = plain(model, OPTIMIZERS["adam"], data)
    assert losses == pytest.approx(wanted, abs=1e-6)
    torch.testing.assert_close(weights, reference, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", STRATEGIES)
def test_gradients_of_several_batches_make_one_step(name: str) -> None:
    model, (whole,) = mlp().double(), batches(1, 6, size=12)
    with STRATEGIES[name]() as strategy:
        strategy.prepare(copy.deepcopy(model), OPTIMIZERS["sgd"])
        parts = [part for _, part in split(whole, 3)]
        for number, part in enumerate(parts):
            strategy.backward(part, compute, weight=1 / 3, last=number == 2)
        strategy.confirm()
        strategy.step()
        found = strategy.state()["model"]
    _, reference = plain(model, OPTIMIZERS["sgd"], [whole])
    torch.testing.assert_close(found, reference, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["ddp-3", "sharded-4"])
def test_a_batch_smaller_than_the_devices(name: str) -> None:
    model, data = mlp().double(), batches(3, 6, size=2)
    losses, weights = trained(STRATEGIES[name](), model, OPTIMIZERS["sgd"], data)
    wanted, reference = plain(model, OPTIMIZERS["sgd"], data)
    assert losses == pytest.approx(wanted)
    torch.testing.assert_close(weights, reference, atol=1e-9, rtol=0)


class Partial(nn.Module):
    """A layer is used where the first input is positive, another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.now_and_then, self.never = (nn.Linear(6, 3) for _ in range(3))
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x) * self.fixed
        return y + self.now_and_then(x) if x[0, 0] > 0 else y


def test_parameters_without_gradients_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model = Partial().double()
    data = batches(6, 6)
    with ddp(["cpu"] * 2) as strategy:
        strategy.prepare(copy.deepcopy(model), OPTIMIZERS["adam"])
        for batch in data:
            strategy.backward(batch, compute)
            strategy.step()
        found = strategy.state()["model"]
    assert torch.equal(found["never.weight"], model.never.weight)
    assert torch.equal(found["fixed"], model.fixed)
    assert not torch.equal(found["now_and_then.weight"], model.now_and_then.weight)


def test_running_statistics_are_those_of_all_devices() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    (batch,) = batches(1, 6, size=8)
    with ddp(["cpu"] * 2) as strategy:
        strategy.prepare(model, OPTIMIZERS["sgd"])
        inputs = model[0](batch[0]).detach()
        strategy.backward(batch, compute)
        strategy.step()
        state = strategy.state()["model"]
        replicas = [each.state_dict() for each in strategy._models]  # type: ignore[attr-defined]
    halves = inputs[:4].mean(0), inputs[4:].mean(0)
    torch.testing.assert_close(state["1.running_mean"], 0.1 * (halves[0] + halves[1]) / 2)
    assert state["1.num_batches_tracked"] == 1
    for name, value in state.items():
        assert all(torch.equal(replica[name], value) for replica in replicas)


@pytest.mark.parametrize("name", STRATEGIES)
def test_evaluation_is_the_mean_over_all_examples(name: str) -> None:
    model, (batch,) = mlp().double(), batches(1, 6, size=7)
    with STRATEGIES[name]() as strategy:
        strategy.prepare(copy.deepcopy(model), OPTIMIZERS["sgd"])

        def measure(net: nn.Module, part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            right = (net(part[0]).argmax(1) == part[1]).double().mean()
            return torch.stack([compute(net, part), right])

        found = strategy.evaluate(batch, measure)
        torch.testing.assert_close(found, measure(model, batch).detach())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ddp-3", "single"),
        ("single", "ddp-3"),
        ("sharded-4", "sharded-1"),
        ("sharded-1", "sharded-4"),
        ("sharded-4", "ddp-3"),
        ("sharded-4", "single"),
        ("ddp-3", "sharded-4"),
        ("single", "sharded-1"),
    ],
)
def test_a_state_goes_on_over_other_devices(before: str, after: str, optimizer: str) -> None:
    model, data, make = mlp().double(), batches(8, 6), OPTIMIZERS[optimizer]
    with STRATEGIES[before]() as strategy:
        strategy.prepare(copy.deepcopy(model), make)
        for batch in data[:4]:
            strategy.backward(batch, compute)
            strategy.step()
        state = strategy.state()
    with STRATEGIES[after]() as strategy:
        strategy.prepare(copy.deepcopy(model), make)
        strategy.load(state)
        for batch in data[4:]:
            strategy.backward(batch, compute)
            strategy.step()
        found = strategy.state()["model"]
    _, reference = plain(model, make, data)
    torch.testing.assert_close(found, reference, atol=1e-6, rtol=0)


@pytest.mark.parametrize("choose", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.RAdam])
@pytest.mark.parametrize(("before", "after"), [("ddp-3", "sharded-4"), ("sharded-4", "single")])
def test_a_state_with_values_of_all_elements_goes_on(before: str, after: str, choose: Any) -> None:
    model, data = mlp().double(), batches(5, 6)

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = choose(parameters, 0.01)
        return optimizer

    state = state_after(before, model, make, data[:3])
    with STRATEGIES[after]() as strategy:
        strategy.prepare(copy.deepcopy(model), make)
        strategy.load(state)
        for batch in data[3:]:
            strategy.backward(batch, compute)
            strategy.step()
        found = strategy.state()["model"]
    _, reference = plain(model, make, data)
    torch.testing.assert_close(found, reference, atol=1e-6, rtol=0)


def state_after(name: str, model: nn.Module, make: Any, data: list[Any]) -> dict[str, Any]:
    with STRATEGIES[name]() as strategy:
        strategy.prepare(copy.deepcopy(model), make)
        for batch in data:
            strategy.backward(batch, compute)
            strategy.step()
        return strategy.state()


def test_a_state_that_an_optimizer_can_not_have_says_why() -> None:
    model, data = Partial().double(), batches(3, 6)
    data[0][0][0, 0], data[1][0][0, 0] = 1, -1
    adam = OPTIMIZERS["adam"]

    def trainable(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return adam([each for each in parameters if each.requires_grad])

    def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:]}])

    sharded = state_after("sharded-4", model, adam, data)
    apart = state_after("single", model, adam, data)
    grouped = state_after("ddp-3", mlp().double(), two_groups, data)
    with STRATEGIES["ddp-3"]() as strategy:
        strategy.prepare(copy.deepcopy(model), trainable)
        with pytest.raises(CheckpointError, match=r"groups of 7 parameters, .* groups of 6"):
            strategy.load(sharded)
    with STRATEGIES["sharded-4"]() as strategy:
        strategy.prepare(copy.deepcopy(model), adam)
        with pytest.raises(CheckpointError, match="never had a gradient"):
            strategy.load(apart)
        strategy.load(sharded)
        strategy.backward(data[0], compute)
        strategy.step()
    with STRATEGIES["sharded-4"]() as strategy:
        strategy.prepare(mlp().double(), adam)
        with pytest.raises(CheckpointError, match="2 groups of options"):
            strategy.load(grouped)
        ungrouped = state_after("single", mlp().double(), adam, data)
        ungrouped["optimizer"]["state"][1]["step"] += 1
        with pytest.raises(CheckpointError, match="'step' differs"):
            strategy.load(ungrouped)
        ungrouped["optimizer"]["param_groups"][0]["params"].pop()
        with pytest.raises(CheckpointError, match="of 5 parameters, and the model has 6"):
            strategy.load(ungrouped)


def test_a_sharded_optimizer_takes_a_state_of_the_parameters_that_are_trained() -> None:
    model, data, adam = mlp().double(), batches(6, 6), OPTIMIZERS["adam"]
    model[0].weight.requires_grad_(False)

    def trainable(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return adam([each for each in parameters if each.requires_grad])

    state = state_after("single", model, trainable, data[:3])
    with STRATEGIES["sharded-4"]() as strategy:
        strategy.prepare(copy.deepcopy(model), adam)
        strategy.load(state)
        for batch in data[3:]:
            strategy.backward(batch, compute)
            strategy.step()
        found = strategy.state()["model"]
    _, reference = plain(model, trainable, data)
    torch.testing.assert_close(found, reference, atol=1e-6, rtol=0)


def test_options_of_the_one_optimizer_hold_for_all() -> None:
    with ddp(["cpu"] * 2) as strategy:
        strategy.prepare(mlp().double(), OPTIMIZERS["sgd"])
        strategy.optimizer.param_groups[0]["lr"] = 0.0
        before = copy.deepcopy(strategy.state()["model"])
        strategy.backward(batches(1, 6)[0], compute)
        strategy.step()
        for model in strategy._models:  # type: ignore[attr-defined]
            torch.testing.assert_close(dict(model.state_dict()), before)


def test_what_is_used_too_early_or_too_late_says_so() -> None:
    strategy = ddp(["cpu"] * 2)
    with strategy:
        assert strategy.main_device == torch.device("cpu")
        with pytest.raises(RuntimeError, match="prepare"):
            _ = strategy.model
        with pytest.raises(RuntimeError, match="prepare"):
            strategy.backward(batches(1, 6)[0], compute)
        strategy.prepare(mlp().double(), OPTIMIZERS["sgd"])
    with pytest.raises(DeviceError, match="the context is closed"):
        strategy.backward(batches(1, 6)[0], compute)


@pytest.mark.parametrize("name", ["ddp-3", "sharded-4"])
def test_gradients_that_would_be_wrong_are_refused(name: str) -> None:
    data = batches(2, 6)
    with STRATEGIES[name]() as strategy:
        strategy.prepare(mlp().double(), OPTIMIZERS["sgd"])
        strategy.backward(data[0], compute)
        with pytest.raises(RuntimeError, match="last=False"):
            strategy.backward(data[1], compute)
        strategy.step()
        strategy.backward(data[1], compute)

    def twice(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs = batch[0].clone().requires_grad_()
        once = checkpoint(model, inputs, use_reentrant=True)
        return (once + checkpoint(model, inputs, use_reentrant=True)).mean()

    with STRATEGIES[name]() as strategy:
        strategy.prepare(mlp().double(), OPTIMIZERS["sgd"])
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            strategy.backward(data[0], twice)


def test_splitting() -> None:
    batch = {"x": torch.arange(7), "y": [torch.arange(7), "kept"]}
    parts = split(batch, 3)
    assert [count for count, _ in parts] == [3, 2, 2]
    assert torch.equal(torch.cat([part["y"][0] for _, part in parts]), torch.arange(7))
    assert parts[1][1]["y"][1] == "kept"
    assert [count for count, _ in split(torch.ones(1), 3)] == [1, 0, 0]
    assert rows(moved(batch, torch.device("cpu"))) == 7
    for strange in (torch.tensor(1.0), "text", (torch.ones(2), torch.ones(3))):
        with pytest.raises(ValueError, match="a batch is tensors"):
            rows(strange)


def test_buckets_are_filled_from_the_last_parameter_on() -> None:
    size = FIRST_BYTES // 4 // 2
    parameters = [nn.Parameter(torch.ones(size)) for _ in range(5)]
    parameters.append(nn.Parameter(torch.ones(3, dtype=torch.float64)))
    buckets = buckets_of(parameters, 2)
    assert [bucket.indices for bucket in buckets] == [(4, 3), (5,), (2, 1, 0)]
    assert [bucket.padded for bucket in buckets] == [2 * size, 4, 3 * size]
    flat = buckets[1].flat([None], parameters[5])
    assert flat.tolist() == [0.0] * 4
    assert buckets[1].views(flat)[0].shape == (3,)
