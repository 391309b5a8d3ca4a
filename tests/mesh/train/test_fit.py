"""The loop: what it leaves, where it goes on from, when it ends."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mesh.collective import RankLost
from mesh.train import (
    CheckpointError,
    EarlyStop,
    History,
    Strategy,
    ddp,
    fit,
    load_checkpoint,
    save_checkpoint,
    sharded_optimizer,
    single,
)
from tests.mesh.train.models import OPTIMIZERS, batches, compute, mlp, plain

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "single": lambda: single("cpu"),
    "ddp": lambda: ddp(["cpu"] * 2),
    "sharded": lambda: sharded_optimizer(["cpu"] * 2),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def noisy() -> nn.Module:
    """A model that draws random numbers as it trains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
    return model.double()


def loader(size: int = 8) -> DataLoader[Any]:
    data = TensorDataset(*(torch.cat(each) for each in zip(*batches(5, 6), strict=True)))
    return DataLoader(data, size, shuffle=True)


def accuracy(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).double().mean()


def trained(strategy: Strategy, **more: Any) -> History:
    options: dict[str, Any] = {
        "optimizer": OPTIMIZERS["adam"],
        "loss": compute,
        "train": loader(),
        "epochs": 3,
    }
    torch.manual_seed(5)
    with strategy:
        return fit(strategy, noisy(), **(options | more))


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_does_what_a_plain_loop_does(name: str) -> None:
    data = batches(6, 6)
    with STRATEGIES[name]() as strategy:
        history = fit(
            strategy,
            mlp().double(),
            optimizer=OPTIMIZERS["sgd"],
            loss=compute,
            train=data,
            epochs=2,
            clip=1.0,
        )
    wanted, _ = plain(mlp().double(), OPTIMIZERS["sgd"], data * 2, 1.0)
    assert history.losses == pytest.approx(wanted)
    assert [record["train_loss"] for record in history.records] == pytest.approx(
        [sum(wanted[:6]) / 6, sum(wanted[6:]) / 6]
    )
    assert not history.stopped_early


def test_several_batches_make_a_step() -> None:
    whole = batches(4, 6, size=12)
    parts = [(x[at : at + 4], y[at : at + 4]) for x, y in whole for at in (0, 4, 8)]
    with ddp(["cpu"] * 2) as strategy:
        history = fit(
            strategy,
            mlp().double(),
            optimizer=OPTIMIZERS["adam"],
            loss=compute,
            train=parts,
            accumulate=3,
        )
    wanted, _ = plain(mlp().double(), OPTIMIZERS["adam"], whole)
    assert history.losses == pytest.approx(wanted)


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("every", [None, 2])
def test_a_checkpoint_goes_on_to_the_same_losses(
    name: str, every: int | None, tmp_path: Path
) -> None:
    schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # noqa: E731
    wanted = trained(STRATEGIES[name](), scheduler=schedule)
    seen = 0

    def interrupted(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if seen > 11 * (1 if name == "single" else 2):  # in the midst of the second epoch
            raise Stop
        return compute(model, batch)

    with pytest.raises(Stop):
        trained(
            STRATEGIES[name](),
            scheduler=schedule,
            directory=tmp_path,
            checkpoint_steps=every,
            loss=interrupted,
        )
    torch.manual_seed(99)
    with STRATEGIES[name]() as strategy:
        history = fit(
            strategy,
            noisy(),
            optimizer=OPTIMIZERS["adam"],
            loss=compute,
            train=loader(),
            epochs=3,
            scheduler=schedule,
            directory=tmp_path,
        )
    assert history.losses == pytest.approx(wanted.losses, rel=1e-12)
    assert history.records == [pytest.approx(record) for record in wanted.records]
    assert [record["lr"] for record in history.records] == [0.01, 0.005, 0.0025]


def test_it_leaves_a_table_and_a_plot(tmp_path: Path) -> None:
    history = trained(
        ddp(["cpu"] * 2),
        validate=batches(2, 6),
        measures={"accuracy": accuracy},
        directory=tmp_path / "run",
    )
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["valid_accuracy"]) for row in rows] == [
        record["valid_accuracy"] for record in history.records
    ]
    assert list(rows[0]) == ["epoch", "train_loss", "lr", "valid_loss", "valid_accuracy"]
    root = ElementTree.parse(tmp_path / "run" / "metrics.svg").getroot()
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"loss", "accuracy", "train_loss", "valid_loss"} <= set(texts)


def test_validation_leaves_training_alone() -> None:
    with_it = trained(single("cpu"), validate=batches(2, 6))
    assert with_it.losses == trained(single("cpu")).losses


def test_an_epoch_without_batches_is_none(tmp_path: Path) -> None:
    def attempt(train: Any, validate: Any = None, directory: Path | None = None) -> None:
        with single("cpu") as strategy:
            fit(
                strategy,
                mlp().double(),
                optimizer=OPTIMIZERS["sgd"],
                loss=compute,
                train=train,
                validate=validate,
                epochs=2,
                directory=directory,
                checkpoint_steps=2,
            )

    data = batches(3, 6)
    for train, validate, name, epoch in (
        (iter(data), None, "train", 1),
        (data, iter(data), "validate", 1),
        ([], None, "train", 0),
    ):
        with pytest.raises(ValueError, match=f"`{name}` has no batches.* in epoch {epoch}"):
            attempt(train, validate)
    with pytest.raises(RuntimeError, match="it ends"):
        attempt(_ending(data), directory=tmp_path)
    with pytest.raises(ValueError, match="`train` has no batches"):
        attempt(data[:1], directory=tmp_path)  # of an epoch of which two steps are done


def _ending(data: list[Any]) -> Iterator[Any]:
    yield from data[:2]
    raise RuntimeError("it ends")


def test_it_ends_early() -> None:
    history = trained(
        single("cpu"),
        epochs=50,
        validate=batches(1, 6),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.0),
        early_stop=EarlyStop(patience=2),
    )
    assert history.stopped_early
    assert len(history.records) == 3
    history = trained(
        single("cpu"),
        epochs=4,
        validate=batches(1, 6),
        measures={"steps": lambda model, batch: model[0].weight.new_tensor(next(counts))},
        early_stop=EarlyStop("valid_steps", 1, largest=True),
    )
    assert not history.stopped_early
    assert len(history.records) == 4


counts = iter(range(100))


def test_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    trained(single("cpu"), progress=True, epochs=4, train=loader(4))
    assert "epoch" in capsys.readouterr().out


class Losing:
    """Loses a device in the midst of a step, as far as a strategy can tell."""

    def __init__(self, strategy: Any, after: int, kept: int = 0) -> None:
        self.strategy = strategy
        self.kept = kept
        self.left = after
        strategy.confirm, strategy.recover = self.confirm, self.recover

    def confirm(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise RankLost("all_reduce", ranks=(1,), why="'mesh:1' is lost")

    def recover(self) -> Any:
        strategy = self.strategy
        kept, gone = strategy.devices[:1], strategy.devices[1:]  # all have the same name
        strategy._let_go()
        strategy._context.close()
        strategy._context = type(strategy._context)(kept, op="sum")
        strategy._context.open()
        strategy._adopt([strategy._models[self.kept]])
        strategy._go_on_with([self.kept])
        strategy.model.zero_grad()
        strategy._reduced = []
        return gone


@pytest.mark.parametrize("name", ["ddp", "sharded"])
def test_it_goes_on_without_a_device_that_is_lost(name: str, tmp_path: Path) -> None:
    data = batches(7, 6)
    with STRATEGIES[name]() as strategy:
        Losing(strategy, after=10)
        history = fit(
            strategy,
            mlp().double(),
            optimizer=OPTIMIZERS["adam"],
            loss=compute,
            train=data,
            epochs=3,
            on_lost="continue",
        )
        weights = strategy.state()["model"]
    wanted, reference = plain(mlp().double(), OPTIMIZERS["adam"], data * 3)
    assert history.losses == pytest.approx(wanted)
    assert history.lost == [torch.device("cpu")]
    torch.testing.assert_close(weights, reference, atol=1e-9, rtol=0)


def test_a_schedule_goes_on_if_the_main_device_is_lost_just_after_it() -> None:
    data = batches(4, 6)
    with ddp(["cpu"] * 2) as strategy:
        Losing(strategy, after=5, kept=1)  # the first step of the second epoch
        history = fit(
            strategy,
            mlp().double(),
            optimizer=OPTIMIZERS["adam"],
            loss=compute,
            train=data,
            epochs=3,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            on_lost="continue",
        )
        rate = strategy.optimizer.param_groups[0]["lr"]
    first = history.records[0]["lr"]
    assert [record["lr"] / first for record in history.records] == [1, 0.5, 0.25]
    assert rate == first / 8


def test_a_device_that_is_lost_ends_it_by_default() -> None:
    with ddp(["cpu"] * 2) as strategy:
        Losing(strategy, after=0)
        strategy.step = lambda clip=None: strategy.confirm()  # type: ignore[method-assign]
        strategy.confirm = _lose  # type: ignore[method-assign]
        with pytest.raises(RankLost, match="'mesh:1' is lost"):
            fit(
                strategy,
                mlp().double(),
                optimizer=OPTIMIZERS["adam"],
                loss=compute,
                train=batches(3, 6),
            )


def _lose() -> None:
    raise RankLost("all_reduce", ranks=(1,), why="'mesh:1' is lost")


def test_checkpoints_keep_what_they_are_given(tmp_path: Path) -> None:
    state = {
        "tensors": [torch.arange(6.0).view(2, 3).t(), torch.ones(0, 2), torch.tensor(True)],
        "types": {"half": torch.ones(3, dtype=torch.bfloat16), 7: torch.ones(2, dtype=torch.int8)},
        "plain": (1, 2.5, None, "text", b"bytes", [False], {(1, 2): float("inf")}),
    }
    path = tmp_path / "x.mesh"
    save_checkpoint(path, state)
    found = load_checkpoint(path)
    assert found["plain"] == state["plain"]
    for one, other in zip(found["tensors"], state["tensors"], strict=True):
        assert torch.equal(one, other)
    assert list(found["types"]) == ["half", 7]
    assert found["types"]["half"].dtype is torch.bfloat16
    assert [each.name for each in tmp_path.iterdir()] == ["x.mesh"]
    with pytest.raises(CheckpointError, match="it holds a Linear"):
        save_checkpoint(path, {"model": nn.Linear(1, 1)})
    assert load_checkpoint(path)["plain"] == state["plain"], "what was there stays"


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.mesh"
    save_checkpoint(path, {"x": torch.ones(100)})
    whole = path.read_bytes()
    for damaged in (b"", b"PK\x03\x04", whole[:30], whole[:-1], whole[:22] + bytes(8) + whole[30:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"checkpoint .*x\.mesh"):
            load_checkpoint(path)
    path.write_bytes(whole.replace(b"float32", b"float99"))
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
