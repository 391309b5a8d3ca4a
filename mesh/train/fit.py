"""A training loop over a strategy. All it does a program's own loop could do as well."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from auth import MeshError
from mesh.train.artifacts import write_metrics
from mesh.train.batches import rows
from mesh.train.checkpoint import load_checkpoint, save_checkpoint
from mesh.train.strategy import Loss, MakeOptimizer, Strategy

__all__ = ["EarlyStop", "History", "fit"]

READ_STEPS = 10
"""Steps whose losses are read together: each reading waits for the devices."""

MAX_FRUITLESS = 3
"""How often a step is tried again though no device is lost: connections break, and come back."""

CHECKPOINT = "checkpoint.mesh"

_log = logging.getLogger("quicmesh.train")


@dataclasses.dataclass(frozen=True, slots=True)
class EarlyStop:
    """End when a metric has not improved for some epochs.

    Attributes:
        metric: one of a record's, such as ``"valid_loss"``.
        patience: how many epochs.
        largest: whether more of it is better.
    """

    metric: str = "valid_loss"
    patience: int = 3
    largest: bool = False


@dataclasses.dataclass(slots=True)
class History:
    """What has come of a training.

    Attributes:
        records: of each epoch: ``epoch``, ``train_loss``, ``lr``, and what validation has measured
            as ``valid_NAME``.
        losses: of each step.
        lost: devices that were lost on the way.
        stopped_early: whether it ended before its last epoch.
    """

    records: list[dict[str, float]] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    lost: list[torch.device] = dataclasses.field(default_factory=list)
    stopped_early: bool = False


def fit(
    strategy: Strategy,
    model: nn.Module,
    *,
    optimizer: MakeOptimizer,
    loss: Loss,
    train: Iterable[Any],
    validate: Iterable[Any] | None = None,
    measures: Mapping[str, Loss] | None = None,
    epochs: int = 1,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    directory: Path | str | None = None,
    checkpoint_steps: int | None = None,
    early_stop: EarlyStop | None = None,
    on_lost: Literal["raise", "continue"] = "raise",
    progress: bool = False,
) -> History:
    """Train a model.

    Args:
        strategy: over which devices, entered by the caller.
        model: on the CPU.
        optimizer: makes one of a list of parameters.
        loss: ``loss(model, batch)``: the mean over the batch's examples.
        train, validate: batches of an epoch, anew each time they are iterated over.
        measures: what else validation measures, by name, as `loss` does: ``{"accuracy": ...}``.
        epochs: how many in all, those before a checkpoint included.
        scheduler: makes a learning-rate schedule, which goes on with each epoch.
        accumulate: batches that make one step.
        clip: largest norm of the gradients.
        directory: for checkpoints, metrics and a plot. If it has a checkpoint, training goes on
            from there, to the same losses as if it had not been interrupted, if the order of the
            batches depends on torch's own random numbers alone.
        checkpoint_steps: write a checkpoint after so many steps, too, and not only after epochs.
        early_stop: when to end before that.
        on_lost: what to do when a device is lost: raise, naming it, or go on with those that are
            left, from the last completed step. In the step that is done again, random numbers may
            be drawn, and running statistics updated, twice. A strategy whose devices don't each
            have all that training needs goes back to the last checkpoint.
        progress: show a progress bar.

    Raises:
        CollectiveError: a device is lost, by name, or none is left.
        ValueError: a batch can't be split, or an epoch has none.
        CheckpointError: the directory's checkpoint is none.
    """
    strategy.prepare(model.train(), optimizer)
    run = _Run(
        strategy=strategy,
        loss=loss,
        train=train,
        validate=validate,
        measures=measures or {},
        epochs=epochs,
        schedule=scheduler(strategy.optimizer) if scheduler is not None else None,
        accumulate=accumulate,
        clip=clip,
        directory=None if directory is None else Path(directory),
        checkpoint_steps=checkpoint_steps,
        early_stop=early_stop,
        goes_on=on_lost == "continue",
    )
    with _bar(progress) as show:
        return run.all(show)


class _Rewound(Exception):
    """Training goes on from the last checkpoint."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Run:
    """One call of `fit`."""

    strategy: Strategy
    loss: Loss
    train: Iterable[Any]
    validate: Iterable[Any] | None
    measures: Mapping[str, Loss]
    epochs: int
    schedule: LRScheduler | None
    accumulate: int
    clip: float | None
    directory: Path | None
    checkpoint_steps: int | None
    early_stop: EarlyStop | None
    goes_on: bool
    history: History = dataclasses.field(default_factory=History)
    epoch: int = 0
    steps: int = 0
    """Completed in this epoch."""
    step_losses: list[tuple[int, torch.Tensor]] = dataclasses.field(default_factory=list)
    """Those that were not read yet, each with the number of its examples."""
    total: float = 0.0
    examples: int = 0
    began: torch.Tensor | None = None
    """State of the random numbers when the epoch began."""
    saved: dict[str, Any] | None = None

    def all(self, show: Callable[[int, int, float], None]) -> History:
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            if (self.directory / CHECKPOINT).exists():
                self._restore(load_checkpoint(self.directory / CHECKPOINT))
        if self.goes_on and not self.strategy.survives and self.saved is None:
            self.saved = self._state()
        while self.epoch < self.epochs and not self._is_enough():
            try:
                self._train_epoch(show)
                self._end_epoch()
            except _Rewound:
                continue
        return self.history

    # An epoch.

    def _train_epoch(self, show: Callable[[int, int, float], None]) -> None:
        skipped = self.steps * self.accumulate
        now = torch.get_rng_state()
        if self.began is None:
            self.began = now
        else:
            torch.set_rng_state(self.began)  # the batches come as they did before
        batches = iter(self.train)
        for _ in range(skipped):
            if next(batches, None) is None:
                raise _no_batches("train", self.epoch)
        if skipped:
            torch.set_rng_state(now)
        for group in _grouped(batches, self.accumulate):
            self._step(group)
            self.steps += 1
            if len(self.step_losses) >= READ_STEPS:
                self._surviving(self._read_losses)
                show(
                    self.epoch, self.steps, self.history.losses[-1] if self.history.losses else 0.0
                )
            if self.checkpoint_steps and self.steps % self.checkpoint_steps == 0:
                self._surviving(self._read_losses)
                self._surviving(self._save)
        self._surviving(self._read_losses)

    def _step(self, group: Sequence[Any]) -> None:
        """Do one step with all batches of `group`, with whatever devices there are."""
        value = self._surviving(lambda: self._gradients(group))
        self._surviving(lambda: self.strategy.step(clip=self.clip))
        self.step_losses.append((sum(map(rows, group)), value))

    def _gradients(self, group: Sequence[Any]) -> torch.Tensor:
        total = sum(map(rows, group))
        value: torch.Tensor | None = None
        for number, batch in enumerate(group):
            weight = rows(batch) / total
            last = number == len(group) - 1
            found = self.strategy.backward(batch, self.loss, weight=weight, last=last) * weight
            value = found if value is None else value + found
        assert value is not None
        if self.goes_on:
            self.strategy.confirm()
            value = value.cpu()  # the main device may be the next that is lost
        return value

    def _end_epoch(self) -> None:
        if not self.examples:
            raise _no_batches("train", self.epoch)
        record = {"epoch": float(self.epoch), "train_loss": self.total / self.examples}
        record["lr"] = float(self.strategy.optimizer.param_groups[0]["lr"])
        if self.validate is not None:
            record |= self._surviving(self._validated)
        if self.schedule is not None:
            self.schedule.step()
        self.history.records.append(record)
        self.epoch, self.steps, self.began = self.epoch + 1, 0, None
        self.total, self.examples = 0.0, 0
        self._surviving(self._save)
        if self.directory is not None:
            write_metrics(self.directory, self.history.records)

    def _validated(self) -> dict[str, float]:
        names = ["loss", *self.measures]

        def measure(model: nn.Module, batch: Any) -> torch.Tensor:
            model.eval()
            try:
                found = [
                    self.loss(model, batch),
                    *(m(model, batch) for m in self.measures.values()),
                ]
                return torch.stack([each.to(found[0].dtype) for each in found])
            finally:
                model.train()

        assert self.validate is not None
        total, sums = 0, torch.zeros(len(names), dtype=torch.float64)
        for batch in self.validate:
            count = rows(batch)
            sums += self.strategy.evaluate(batch, measure).cpu().to(torch.float64) * count
            total += count
        if not total:
            raise _no_batches("validate", self.epoch)
        means = (sums / total).tolist()
        return {f"valid_{name}": mean for name, mean in zip(names, means, strict=True)}

    def _read_losses(self) -> None:
        if self.step_losses:
            numbers = torch.stack([value for _, value in self.step_losses]).tolist()
            for (count, _), value in zip(self.step_losses, numbers, strict=True):
                self.history.losses.append(value)
                self.total += value * count
                self.examples += count
            self.step_losses = []

    def _is_enough(self) -> bool:
        stop, records = self.early_stop, self.history.records
        if stop is None or len(records) <= stop.patience:
            return False
        sign = -1.0 if stop.largest else 1.0
        values = [sign * record.get(stop.metric, math.inf) for record in records]
        if min(values[-stop.patience :]) < min(values[: -stop.patience]):
            return False
        self.history.stopped_early = True
        return True

    # Devices that are lost.

    def _surviving(self, work: Callable[[], Any]) -> Any:
        """Do some work, again without the devices that are lost meanwhile."""
        fruitless = 0
        while True:
            try:
                return work()
            except MeshError as error:
                if not self.goes_on or fruitless >= MAX_FRUITLESS:
                    reason = self.strategy.reason(error)
                    if reason is error:
                        raise
                    raise reason from error
                survives = self.strategy.survives
                fruitless = 0 if self._recover(error) else fruitless + 1
                if not survives:
                    assert self.saved is not None
                    self._restore(self.saved)
                    raise _Rewound from error

    def _recover(self, error: MeshError) -> bool:
        """Go on without the devices that are lost; return whether any is."""
        try:
            lost = self.strategy.recover()
        except MeshError:
            raise error from None
        self.history.lost.extend(lost)
        _log.warning(
            "training goes on over %s without the devices that are lost (%s): %s",
            ", ".join(map(str, self.strategy.devices)),
            ", ".join(map(str, lost)) or "none",
            error,
        )
        if self.schedule is not None:
            self._adopt_optimizer(self.schedule)
        return bool(lost)

    def _adopt_optimizer(self, schedule: LRScheduler) -> None:
        """Have the schedule be of the optimizer that is the main one now."""
        schedule.optimizer = self.strategy.optimizer

    # What training goes on from.

    def _save(self) -> None:
        if self.directory is None and (not self.goes_on or self.strategy.survives):
            return
        self.saved = self._state()
        if self.directory is not None:
            save_checkpoint(self.directory / CHECKPOINT, self.saved)

    def _state(self) -> dict[str, Any]:
        return {
            **self.strategy.state(),
            "epoch": self.epoch,
            "steps": self.steps,
            "total": self.total,
            "examples": self.examples,
            "schedule": None if self.schedule is None else _plain(self.schedule.state_dict()),
            "records": [dict(record) for record in self.history.records],
            "losses": list(self.history.losses),
            "random": torch.get_rng_state(),
            "began": self.began,
            "device_random": [_random_state(device) for device in self.strategy.devices],
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.strategy.load(state)
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(dict(state["schedule"]))
            self._adopt_optimizer(self.schedule)
        self.epoch, self.steps = state["epoch"], state["steps"]
        self.total, self.examples = state["total"], state["examples"]
        self.history.records = [dict(record) for record in state["records"]]
        self.history.losses = list(state["losses"])
        self.step_losses = []
        self.began = state["began"]
        torch.set_rng_state(state["random"])
        if len(state["device_random"]) == len(self.strategy.devices):
            for device, random in zip(self.strategy.devices, state["device_random"], strict=True):
                _set_random_state(device, random)


def _no_batches(name: str, epoch: int) -> ValueError:
    return ValueError(
        f"`{name}` has no batches, or too few, in epoch {epoch}: it has to yield them anew each "
        "time it is iterated over, as a list or a DataLoader does and a generator does not"
    )


def _grouped(batches: Iterator[Any], count: int) -> Iterator[list[Any]]:
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if len(group) == count:
            yield group
            group = []
    if group:
        yield group


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return what of a schedule's state is plain: the rest is as its maker has made it."""
    kinds = (bool, int, float, str, list, tuple, type(None))
    return {name: value for name, value in state.items() if isinstance(value, kinds)}


def _random_state(device: torch.device) -> torch.Tensor | None:
    if device.type == "cpu":
        return None  # the program's own
    state: torch.Tensor = _module(device).get_rng_state(device)
    return state.clone()


def _set_random_state(device: torch.device, state: torch.Tensor | None) -> None:
    if device.type != "cpu" and state is not None:
        _module(device).set_rng_state(state, device)


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)


@contextlib.contextmanager
def _bar(is_shown: bool) -> Iterator[Callable[[int, int, float], None]]:
    if not is_shown:
        yield lambda epoch, step, loss: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=None)

        def show(epoch: int, step: int, loss: float) -> None:
            bar.update(task, description=f"epoch {epoch}  step {step}  loss {loss:.4f}")

        yield show
