"""What strategies with a replica of the model on each device have in common."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import is_
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from auth import MeshError
from mesh.collective import CollectiveError, RankLost
from mesh.device.client.tensors import BACKEND, device_of
from mesh.device.errors import SessionLost
from mesh.device.groups.context import Collective, DistributedContext, Starting
from mesh.train.batches import kind_of, moved, split
from mesh.train.buckets import Bucket, Filling, buckets_of
from mesh.train.repeating import Repeater
from mesh.train.replicas import average_buffers, replicate
from mesh.train.strategy import Loss, MakeOptimizer, on_cpu, prepared, share_options
from mesh.train.watching import mode_of_torch

__all__ = ["Replicated"]


class Replicated(abc.ABC):
    """A replica on each device, the batch split among them; see `Strategy` for its methods.

    Args:
        devices: the first is the main one.
        timeout: seconds for one exchange.
        repeats: whether steps that are as before are done again without this program's part.
    """

    def __init__(
        self, devices: Sequence[torch.device | str], timeout: float, *, repeats: bool
    ) -> None:
        self._timeout = timeout
        self._repeats = repeats
        self._context = DistributedContext(devices, op="sum", timeout=timeout)
        self._repeater: Repeater | None = None
        self._models: list[nn.Module] = []
        self._parameters: list[list[nn.Parameter]] = []
        self._optimizers: list[Optimizer] = []
        self._buckets: list[Bucket] = []
        self._hooks: list[Any] = []
        self._fillings: list[Filling | None] = []
        self._reduced: list[Collective] = []
        self._gradients: list[torch.Tensor | None] = []
        """What the present step has found so far."""
        self._make: MakeOptimizer | None = None
        self._is_settled = True
        self._failed: BaseException | None = None
        """What a bucket could not be handed on for."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """See `Strategy`, and so for the others."""
        return self._context.devices

    @property
    def main_device(self) -> torch.device:
        """The first."""
        return self.devices[0]

    @property
    def model(self) -> nn.Module:
        """The replica on the first."""
        return prepared(self._models or None)[0]

    @property
    def optimizer(self) -> Optimizer:
        """That of the first."""
        return prepared(self._optimizers or None)[0]

    def __enter__(self) -> Self:
        self._context.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._let_go()
        self._context.close()

    def prepare(self, model: nn.Module, optimizer: MakeOptimizer) -> None:
        """Replicate a model, and make the optimizers."""
        self._make = optimizer
        self._let_go()
        self._adopt(replicate(self._context, model))
        self._optimizers = self._make_optimizers(optimizer)

    def backward(
        self, batch: Any, loss: Loss, *, weight: float = 1.0, last: bool = True
    ) -> torch.Tensor:
        """Split the batch, and have the gradients of each part go on their way when found."""
        prepared(self._models or None)
        with self._naming():
            return self._backward(batch, loss, weight, last=last)

    def _backward(self, batch: Any, loss: Loss, weight: float, *, last: bool) -> torch.Tensor:
        if self._reduced:
            raise RuntimeError(
                "the step has all of its gradients: call step(), and pass last=False with each "
                "batch of a step but the last"
            )
        parts = split(batch, len(self.devices))
        counts = [count for count, _ in parts]
        self._is_settled = False
        self._failed = None

        def work(inputs: list[Any]) -> _Found:
            return self._find(counts, inputs, loss, weight, last=last)

        found: _Found = self._repeating.run(
            _kind_of(batch, loss, weight, last) if self._may_repeat() else None,
            lambda: (loss, *self._models),
            [part for _, part in parts],
            work,
            lambda _: contextlib.nullcontext(),
        )
        self._reduced, self._gradients = found.reduced, found.gradients
        for parameter, gradient in zip(self._holders(), found.gradients, strict=True):
            parameter.grad = gradient
        return found.loss.clone()  # when it is done again, the next one is written there

    def _find(
        self, counts: Sequence[int], inputs: Sequence[Any], loss: Loss, weight: float, *, last: bool
    ) -> _Found:
        """Find the gradients of parts of a batch that are on their devices."""
        total = sum(counts)
        losses = self._context.start("all_reduce")
        buckets = [self._context.start(self.exchange) for _ in self._buckets if last]
        dtype = torch.get_default_dtype()
        for rank, (count, device) in enumerate(zip(counts, self.devices, strict=True)):
            share = count / total
            value = loss(self._models[rank], inputs[rank]) if count else None
            if value is None:
                losses.add(rank, torch.zeros(1, dtype=dtype, device=device))
            else:
                dtype = value.dtype
                losses.add(rank, value.detach().view(1) * share)
            filling = self._fillings[rank] = self._filling(rank, buckets) if last else None
            if value is not None:
                torch.autograd.backward(value * (weight * share))
            self._fillings[rank] = None
            failed, self._failed = self._failed, None
            if failed is not None:
                raise failed
            if filling is not None:
                filling.finish()
        reduced = [bucket.collective() for bucket in buckets]
        if last:
            self._take(reduced)
        gradients = [each.grad for each in self._holders()]
        return _Found(losses.collective().resolve()[0].view(()), reduced, gradients)

    def confirm(self) -> None:
        """Wait for the last bucket: they end in order."""
        if self._reduced:
            self._reduced[-1].wait()

    def step(self, *, clip: float | None = None) -> None:
        """Do the same on all devices."""
        share_options(self.optimizer, self._optimizers[1:])
        self._repeating.run(
            ("step", clip) if self._may_repeat() else None,
            lambda: self._optimizers,
            (),
            lambda _: self._use_gradients(clip),
            lambda part: self._surviving(part.ranks[0]),
        )
        self._begin_step()

    def _use_gradients(self, clip: float | None) -> None:
        if clip is not None:
            self._clip(clip)
        for rank, optimizer in enumerate(self._optimizers):
            with self._surviving(rank):
                optimizer.step()
        self._finish_step()

    def evaluate(self, batch: Any, measure: Loss) -> torch.Tensor:
        """Split the batch, and return the mean over all of its examples."""
        prepared(self._models or None)
        with self._naming():
            return self._evaluate(batch, measure)

    def _evaluate(self, batch: Any, measure: Loss) -> torch.Tensor:
        self.settle()
        parts = split(batch, len(self.devices))
        total = sum(count for count, _ in parts)
        results: list[torch.Tensor] = []
        with torch.no_grad():
            for model, device, (count, part) in zip(self._models, self.devices, parts, strict=True):
                if count:
                    results.append(measure(model, moved(part, device)) * (count / total))
                else:
                    results.append(torch.zeros_like(results[0], device=device))
            return self._context.all_reduce(results).resolve()[0]

    def settle(self) -> None:
        """Have the buffers of all replicas be the same."""
        if not self._is_settled:
            average_buffers(self._context, self._models)
            self._is_settled = True

    def reason(self, error: BaseException) -> BaseException:
        """Return why the group broke, where a lost session may be why something failed."""
        return self._context.reason(error) if isinstance(error, SessionLost) else error

    def recover(self) -> tuple[torch.device, ...]:
        """Form a group of the devices that are left."""
        devices, failure = self.devices, self._context.failure
        gone = self._context.find_lost()
        left = [rank for rank, device in enumerate(devices) if device not in gone]
        if not left or (not gone and not isinstance(failure, RankLost)):
            why = "none is left" if gone else "none is lost"
            raise failure or CollectiveError("going on without lost devices", why=why)
        self._context.close()
        self._let_go()
        while True:
            self._context = DistributedContext(
                [devices[rank] for rank in left], op="sum", timeout=self._timeout
            )
            try:
                self._context.open()
                break
            except RankLost as error:  # there is no way to it from another one of them
                unreached = {left[rank] for rank in error.ranks}
                left = [rank for rank in left if rank not in unreached]
                if not unreached or not left:
                    raise
        self._adopt([self._models[rank] for rank in left])
        self._go_on_with(left)
        self._begin_step()
        return tuple(device for rank, device in enumerate(devices) if rank not in left)

    def state(self) -> dict[str, Any]:
        """Return model and optimizer as they are on all devices."""
        self.settle()
        state = {"model": self.model.state_dict(), "optimizer": self._optimizer_state()}
        return {name: on_cpu(value) for name, value in state.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Have all devices go on from `state`."""
        for model in self._models:
            model.load_state_dict(state["model"])
        self._is_settled = True
        self._set_states(state["optimizer"])
        self._repeating.close()
        self._repeating.rewind()

    # What strategies differ in.

    exchange = "all_reduce"
    """What becomes of a bucket."""

    @property
    @abc.abstractmethod
    def survives(self) -> bool:
        """See `Strategy`."""

    @abc.abstractmethod
    def _make_optimizers(self, make: MakeOptimizer) -> list[Optimizer]:
        """Return an optimizer for each device."""

    @abc.abstractmethod
    def _take(self, reduced: Sequence[Collective]) -> None:
        """Have gradients be what the exchange of each bucket has made of them."""

    @abc.abstractmethod
    def _clip(self, clip: float) -> None:
        """Scale gradients down whose norm is larger."""

    @abc.abstractmethod
    def _finish_step(self) -> None:
        """Do what is left once all optimizers have done their step."""

    @abc.abstractmethod
    def _go_on_with(self, left: Sequence[int]) -> None:
        """Have optimizers for the replicas that are left, which had these ranks before."""

    @abc.abstractmethod
    def _optimizer_state(self) -> Any:
        """Return the state of all optimizers."""

    @abc.abstractmethod
    def _set_states(self, state: Any) -> None:
        """Take what `_optimizer_state` has returned."""

    def _holders(self) -> Iterator[nn.Parameter]:
        """Yield whatever has gradients."""
        for parameters in self._parameters:
            yield from parameters

    # Inside.

    @property
    def _repeating(self) -> Repeater:
        return prepared(self._repeater)

    def _may_repeat(self) -> bool:
        """Return whether gradients are those that were found here, and nobody has set others."""
        held = [each.grad for each in self._holders()]
        return self._repeating.is_on and all(map(is_, held, self._gradients or repeat(None)))

    def _begin_step(self) -> None:
        """Let go of all gradients."""
        for parameter in self._holders():
            parameter.grad = None
        self._reduced, self._gradients = [], []
        self._repeating.rewind()

    def _adopt(self, models: Sequence[nn.Module]) -> None:
        """Have these models be the replicas."""
        self._models = list(models)
        self._parameters = [list(model.parameters()) for model in models]
        self._buckets = buckets_of(self._parameters[0], len(models))
        self._fillings = [None] * len(models)
        for rank, parameters in enumerate(self._parameters):
            for index, parameter in enumerate(parameters):
                if parameter.requires_grad:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    self._hooks.append(register(partial(self._found, rank, index)))
        self._repeater = Repeater(self._context, is_on=self._repeats)
        self._repeater.rewind()

    def _let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._repeater is not None:
            self._repeater.close()

    def _found(self, rank: int, index: int, parameter: torch.Tensor) -> None:
        filling = self._fillings[rank]
        if filling is not None:
            try:
                filling.found(index)
            except BaseException as error:
                # torch ends the process where a hook like this one raises.
                self._fillings[rank] = None
                self._failed = error

    def _filling(self, rank: int, buckets: Sequence[Starting]) -> Filling:
        def hand(number: int, flat: torch.Tensor) -> None:
            buckets[number].add(rank, flat)

        return Filling(self._buckets, self._parameters[rank], hand)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Have what fails for a lost device say which one that is."""
        try:
            yield
        except SessionLost as error:
            raise self.reason(error) from error

    @contextlib.contextmanager
    def _surviving(self, rank: int) -> Iterator[None]:
        """Let a device that is lost not keep the others from doing what they all do."""
        try:
            yield
        except MeshError:
            if not _is_lost(self.devices[rank]) or len(self.devices) == 1:
                raise


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """What comes of a batch.

    Attributes:
        loss: of the whole batch, on the main device.
        reduced: the exchanges of the buckets, where it was the last batch of a step.
        gradients: of whatever has one after it, as `Replicated._holders` yields that.
    """

    loss: torch.Tensor
    reduced: list[Collective]
    gradients: list[torch.Tensor | None]


def _kind_of(batch: Any, loss: Loss, weight: float, last: bool) -> Hashable | None:
    """Return what a batch's gradients are told from others by before anything is looked at."""
    kind, mode = kind_of(batch), mode_of_torch()
    if kind is None or mode is None:
        return None
    function = getattr(loss, "__func__", loss)
    return (getattr(function, "__code__", loss), kind, weight, last, mode)


def _is_lost(device: torch.device) -> bool:
    return device.type == BACKEND and device_of(device).session.error is not None
