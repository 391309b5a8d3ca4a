"""What a training loop is written against, and the strategy for one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from mesh.collective import CollectiveError
from mesh.train.batches import moved
from mesh.train.optimizers import set_state

__all__ = ["Loss", "MakeOptimizer", "Strategy", "single"]

Loss = Callable[[nn.Module, Any], torch.Tensor]
"""Returns what to minimize, as a mean over the examples of a batch: ``loss(model, batch)``."""

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
"""Returns an optimizer of those parameters. It is called once for each device."""


class Strategy(Protocol):
    """How a model is trained over devices.

    A loop::

        with strategy:
            strategy.prepare(model, lambda parameters: torch.optim.Adam(parameters, 1e-3))
            for batch in loader:
                loss = strategy.backward(batch, compute)
                strategy.step()

    Entering it makes what the devices need of each other, leaving it lets go of that. The model is
    made without regard to it.
    """

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices, in order."""

    @property
    def main_device(self) -> torch.device:
        """Where results are: losses, and the model that is read."""

    @property
    def model(self) -> nn.Module:
        """The model on the main device: the one that was given."""

    @property
    def optimizer(self) -> Optimizer:
        """The one whose learning rate and other options hold for all."""

    def __enter__(self) -> Self:
        """Make what the devices need of each other."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let go of it."""

    def prepare(self, model: nn.Module, optimizer: MakeOptimizer) -> None:
        """Move a model to the devices, and make its optimizers."""

    def backward(
        self, batch: Any, loss: Loss, *, weight: float = 1.0, last: bool = True
    ) -> torch.Tensor:
        """Add to the gradients those of `weight` times the loss of a batch, and return the loss.

        Args:
            batch: tensors, in lists, tuples or dicts, with examples along the first dimension.
            loss: the mean over a batch's examples.
            weight: of this batch in the step.
            last: whether the step has no further batch: `step` comes next.

        Returns:
            the loss of the whole batch, a tensor without dimensions on the main device.

        Raises:
            RuntimeError: the last batch of the step was there, or a parameter gets several
                gradients in one backward pass (reentrant checkpointing).
        """

    @property
    def survives(self) -> bool:
        """Whether each device has all that training needs, so that others may be lost."""

    def confirm(self) -> None:
        """Wait until the gradients of the step are there, on all devices.

        Raises:
            CollectiveError: a device is lost; names it.
        """

    def step(self, *, clip: float | None = None) -> None:
        """Have the optimizers use the gradients, and let go of those.

        Args:
            clip: largest norm of all gradients together; larger ones are scaled down.
        """

    def evaluate(self, batch: Any, measure: Loss) -> torch.Tensor:
        """Return the mean over a batch of whatever `measure` returns, without gradients."""

    def settle(self) -> None:
        """Have the main device's model be what the devices have found: its running statistics."""

    def reason(self, error: BaseException) -> BaseException:
        """Return the error that names the devices at fault, where `error` is what came of them."""

    def recover(self) -> tuple[torch.device, ...]:
        """Go on without the devices that are lost, from the last completed step; return those.

        Where the strategy does not survive them, the optimizer begins anew until `load` is called.

        Raises:
            MeshError: none is left, or none is lost.
        """

    def state(self) -> dict[str, Any]:
        """Return what training can go on from, as tensors on the CPU and plain values."""

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned, also of another strategy, or over other devices.

        Raises:
            CheckpointError: the optimizer is of other parameters, or can't have such a state.
        """


def single(device: torch.device | str) -> Strategy:
    """Train on one device: of this process or of a peer."""
    return _Single(torch.device(device))


class _Single:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return (self._device,)

    @property
    def main_device(self) -> torch.device:
        return self._device

    @property
    def model(self) -> nn.Module:
        return prepared(self._model)

    @property
    def optimizer(self) -> Optimizer:
        return prepared(self._optimizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def prepare(self, model: nn.Module, optimizer: MakeOptimizer) -> None:
        self._model = model.to(self._device)
        self._optimizer = optimizer(list(model.parameters()))

    def backward(
        self, batch: Any, loss: Loss, *, weight: float = 1.0, last: bool = True
    ) -> torch.Tensor:
        value = loss(self.model, moved(batch, self._device))
        torch.autograd.backward(value * weight if weight != 1.0 else value)
        return value.detach()

    @property
    def survives(self) -> bool:
        return True

    def confirm(self) -> None:
        pass

    def step(self, *, clip: float | None = None) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, batch: Any, measure: Loss) -> torch.Tensor:
        with torch.no_grad():
            return measure(self.model, moved(batch, self._device))

    def settle(self) -> None:
        pass

    def reason(self, error: BaseException) -> BaseException:
        return error

    def recover(self) -> tuple[torch.device, ...]:
        raise CollectiveError("going on without lost devices", why="there is one alone")

    def state(self) -> dict[str, Any]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {name: on_cpu(value) for name, value in state.items()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        set_state(self.optimizer, state["optimizer"])


T = TypeVar("T")


def prepared(value: T | None) -> T:
    """Return `value`, which is there once a strategy is prepared.

    Raises:
        RuntimeError: it is not.
    """
    if value is None:
        raise RuntimeError("the strategy has no model yet: call prepare(model, optimizer) first")
    return value


def on_cpu(state: Any) -> Any:
    """Return a state with its tensors on the CPU, each a copy."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(on_cpu(value) for value in state)
    return state


def share_options(source: Optimizer, targets: Sequence[Optimizer]) -> None:
    """Have optimizers use the learning rate, and all other options, of another one."""
    for target in targets:
        for mine, theirs in zip(source.param_groups, target.param_groups, strict=True):
            theirs.update({name: value for name, value in mine.items() if name != "params"})
