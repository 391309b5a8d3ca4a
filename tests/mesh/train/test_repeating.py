"""Steps on a peer's devices that are done again without the program, and those that must not be."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mesh
from mesh import blocking
from mesh.device.client import backend
from mesh.device.client.tensors import device_of, devices
from mesh.train import ddp, sharded_optimizer
from tests.mesh.device.peer import client, peer
from tests.mesh.train.models import batches, compute, mlp

STEPS = 9
IN_FULL = 3
"""Steps of a kind before one is done again: to make what there will be, and to see it twice."""


@pytest.fixture(scope="module")
def two() -> Iterator[list[torch.device]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with peer(liveness=8.0) as one, client(8.0) as node:
        yield _opened(one.ticket, node)
        gc.collect()
    devices.clear()
    torch.set_num_threads(before)


def _opened(ticket: Any, node: blocking.Node) -> list[torch.device]:
    return [mesh.device(ticket, number, node=node) for number in (0, 1)]


class Net(nn.Module):
    """Has all that a step may change beside parameters, and options to do things otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
        )
        self.doubles = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y * 2 if self.doubles else y


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-2, fused=True)


class Run:
    """A training, and how often the program had a part in it."""

    def __init__(
        self, chosen: list[torch.device], make: Any, choose: Any = ddp, *, repeats: bool
    ) -> None:
        torch.manual_seed(0)
        self.net = Net().double()
        self.strategy = choose(chosen, repeats=repeats)
        self.make = make
        self.calls = 0
        self.losses: list[torch.Tensor] = []

    def __enter__(self) -> Run:
        torch.manual_seed(1)
        self.strategy.__enter__()
        self.strategy.prepare(self.net, self.make)
        return self

    def __exit__(self, *exception: Any) -> None:
        self.strategy.__exit__(*exception)

    def step(self, batch: Any, loss: Any = compute, clip: float | None = None) -> None:
        self.losses.append(self.strategy.backward(batch, loss))
        self.strategy.step(clip=clip)

    def found(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        return [each.item() for each in self.losses], self.strategy.state()["model"]


def alike(go: Callable[[bool], Any]) -> Any:
    """Train with and without repeating; return what came of it, which must be the same."""
    plain_losses, plain_state = go(False)
    losses, state = go(True)
    assert losses == plain_losses
    assert len(set(losses)) > len(losses) // 2
    assert all(torch.equal(state[name], value) for name, value in plain_state.items())
    return losses


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each forward of the net that this program takes part in."""
    calls: list[int] = []
    forward = nn.BatchNorm1d.forward

    def count(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return forward(self, x)

    monkeypatch.setattr(nn.BatchNorm1d, "forward", count)
    return calls


@pytest.mark.parametrize("choose", [ddp, sharded_optimizer])
@pytest.mark.parametrize("make", [sgd, fused])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_step_is_the_same_to_the_last_bit(
    choose: Any, make: Any, clip: float | None, two: list[torch.device], monkeypatch: Any
) -> None:
    calls = counted(monkeypatch)

    def go(repeats: bool) -> Any:
        calls.clear()
        with Run(two, make, choose, repeats=repeats) as run:
            for batch in batches(STEPS, 6):
                run.step(batch, clip=clip)
            assert len(calls) == 2 * (IN_FULL if repeats else STEPS)
            return run.found()

    alike(go)


def test_batches_of_several_shapes_and_parts(two: list[torch.device], monkeypatch: Any) -> None:
    calls = counted(monkeypatch)
    kinds = [batches(12, 6, size=size) for size in (10, 7, 4)]

    def go(repeats: bool) -> Any:
        calls.clear()
        with Run(two, fused, repeats=repeats) as run:
            for number in range(12):
                for kind in kinds:  # of which two are kept
                    run.step(kind[number])
            assert (len(calls) < 2 * 24) == repeats
            return run.found()

    alike(go)


def test_gradients_of_several_batches(two: list[torch.device], monkeypatch: Any) -> None:
    calls = counted(monkeypatch)

    def go(repeats: bool) -> Any:
        calls.clear()
        with Run(two, sgd, repeats=repeats) as run:
            for one, other in zip(batches(STEPS, 6), batches(STEPS, 6, size=8), strict=True):
                run.losses.append(run.strategy.backward(one, compute, weight=0.5, last=False))
                run.losses.append(run.strategy.backward(other, compute, weight=0.5))
                grads = [each.grad for each in run.strategy.model.parameters()]
                assert all(each is not None for each in grads)
                run.losses.append(torch.stack([each.norm() for each in grads]).sum())
                run.strategy.step()
            assert len(calls) == 4 * (IN_FULL if repeats else STEPS)
            return run.found()

    alike(go)


BETA = 1.0


def with_beta(model: Any, batch: Any) -> torch.Tensor:
    return compute(model, batch) * BETA


def sometimes(model: Any, batch: Any) -> torch.Tensor:
    value = compute(model, batch)
    return value * 2 if random.random() < 0.5 else value


def looks(model: Any, batch: Any) -> torch.Tensor:
    value = compute(model, batch)
    return value * 2 if value.item() > 1.1 else value


def change_nothing(run: Run, number: int) -> None:
    pass


def change_attribute(run: Run, number: int) -> None:
    for model in run.strategy._models:
        model.doubles = number == 5


def change_mode(run: Run, number: int) -> None:
    for model in run.strategy._models:
        model.train(number != 5)


def change_rate(run: Run, number: int) -> None:
    run.strategy.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number // 5)


def change_rate_each_time(run: Run, number: int) -> None:
    run.strategy.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)


def change_global(run: Run, number: int) -> None:
    globals()["BETA"] = 1.0 if number < 6 else 0.5


def load_state(run: Run, number: int) -> None:
    if number == 5:
        run.strategy.load(copy.deepcopy(run.strategy.state()))


def replace_elements(run: Run, number: int) -> None:
    if number == 5:
        for model in run.strategy._models:
            for each in model.parameters():
                each.data = each.data * 0.5


def freeze(run: Run, number: int) -> None:
    if number in (5, 8):
        for model in run.strategy._models:
            model.layers[0].weight.requires_grad_(number == 8)


def hook(run: Run, number: int) -> None:
    if number == 5:
        for model in run.strategy._models:
            model.layers[0].weight.register_hook(lambda grad: grad * 0.5)


SLOPES: dict[torch.device, torch.Tensor] = {}


def with_slope(model: Any, batch: Any) -> torch.Tensor:
    slope = SLOPES[batch[0].device]
    return compute(model, batch) * slope.exp()


def step_slopes(run: Run, number: int) -> None:
    for device in run.strategy.devices:
        slope = SLOPES.setdefault(device, torch.zeros((), device=device, requires_grad=True))
        if number == 0:
            slope.data = torch.zeros((), device=device)
        elif slope.grad is not None:
            slope.data -= slope.grad * 0.1
        slope.grad = None


CASES: dict[str, tuple[Any, Callable[[Run, int], None], bool]] = {
    "an attribute": (compute, change_attribute, True),
    "the mode": (compute, change_mode, True),
    "the rate": (compute, change_rate, True),
    "the rate each time": (compute, change_rate_each_time, True),
    "a global": (with_beta, change_global, True),
    "the state": (compute, load_state, True),
    "the elements": (compute, replace_elements, True),
    "what is frozen": (compute, freeze, True),
    "a hook of a parameter": (compute, hook, True),
    "a parameter of the program's own": (with_slope, step_slopes, False),
    "by chance": (sometimes, change_nothing, False),
    "by the elements": (looks, change_nothing, False),
}
"""A loss, what changes before a step, and whether any step is done again."""


@pytest.mark.parametrize("what", CASES)
def test_whatever_changes_changes_the_step(
    what: str, two: list[torch.device], monkeypatch: Any
) -> None:
    loss, change, some = CASES[what]
    calls = counted(monkeypatch)

    def go(repeats: bool) -> Any:
        calls.clear()
        random.seed(3)
        monkeypatch.setitem(globals(), "BETA", 1.0)
        with Run(two, sgd, repeats=repeats) as run:
            for number, batch in enumerate(batches(12, 6)):
                change(run, number)
                run.step(batch, loss)
            assert (len(calls) < 2 * 12) == (repeats and some)
            return run.found()

    alike(go)


def test_a_function_that_has_effects_here_is_called_each_time(two: list[torch.device]) -> None:
    seen: list[int] = []

    def collects(model: Any, batch: Any) -> torch.Tensor:
        seen.append(len(batch[0]))
        return compute(model, batch)

    with Run(two, sgd, repeats=True) as run:
        for batch in batches(STEPS, 6):
            run.step(batch, collects)
    assert seen == [5] * 2 * STEPS


def test_gradients_that_others_have_set_are_used(two: list[torch.device]) -> None:
    def go(repeats: bool) -> Any:
        with Run(two, sgd, repeats=repeats) as run:
            for number, batch in enumerate(batches(12, 6)):
                if number == 6:  # it adds to what the replicas have
                    for model in run.strategy._models:
                        for each in model.parameters():
                            each.grad = torch.ones_like(each) / 8
                run.losses.append(run.strategy.backward(batch, compute))
                if number == 8:
                    for model in run.strategy._models:
                        for each in model.parameters():
                            each.grad = each.grad * 0.5
                if number == 10:
                    for model in run.strategy._models:
                        model.layers[0].weight.grad = None
                run.strategy.step()
            return run.found()

    alike(go)


def test_what_fails_is_told_and_leaves_a_step_that_can_be_done(two: list[torch.device]) -> None:
    def fails(model: Any, batch: Any) -> torch.Tensor:
        raise ZeroDivisionError

    with Run(two, sgd, repeats=True) as run:
        for batch in batches(5, 6):
            run.step(batch)
        with pytest.raises(ZeroDivisionError):
            run.strategy.backward(batches(1, 6)[0], fails)


def test_the_peer_keeps_nothing_in_the_end(two: list[torch.device]) -> None:
    def handles() -> int:
        gc.collect()
        answer = backend.ask_wait(device_of(two[0])).future.result()
        assert isinstance(answer, dict)
        return int(answer["handles"])  # type: ignore[arg-type]

    def go() -> None:
        with Run(two, fused, repeats=True) as run:
            for batch in batches(STEPS, 6):
                run.step(batch)

    go()
    before = handles()
    go()
    assert handles() == before


def test_local_devices_repeat_nothing() -> None:
    with ddp(["cpu"] * 2, repeats=True) as strategy:
        strategy.prepare(mlp().double(), sgd)
        calls = []
        for batch in batches(STEPS, 6):
            strategy.backward(batch, lambda m, b: calls.append(1) or compute(m, b))
            strategy.step()
        assert len(calls) == 2 * STEPS
