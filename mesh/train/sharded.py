"""A replica of the model on each device, and a part of the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mesh.device.groups.context import Collective
from mesh.train.optimizers import of_buckets, of_parameters, set_state
from mesh.train.replicated import Replicated
from mesh.train.strategy import MakeOptimizer, Strategy, prepared

__all__ = ["sharded_optimizer"]


def sharded_optimizer(
    devices: Sequence[torch.device | str], *, timeout: float = 300.0, repeats: bool = False
) -> Strategy:
    """Train as `ddp` does, with the optimizer's state split among the devices.

    Each device gets its part of the summed gradients, updates its part of the parameters, and gets
    the other parts of those from the others: as many bytes as `ddp` moves, and 1/n of its memory
    for the optimizer.

    Parts are of the elements of many parameters, one after the other: the optimizer has to treat
    each element by itself, as SGD, Adam and their like do, and all with the same options. A
    parameter without a gradient is updated as with one of zeros.

    Args:
        devices, timeout, repeats: as for `ddp`.
    """
    return _Sharded(devices, timeout, repeats=repeats)


class _Sharded(Replicated):
    exchange = "reduce_scatter"

    def __init__(
        self, devices: Sequence[torch.device | str], timeout: float, *, repeats: bool
    ) -> None:
        super().__init__(devices, timeout, repeats=repeats)
        self._shards: list[list[nn.Parameter]] = []
        """For each device its part of each bucket."""

    @property
    def survives(self) -> bool:
        return len(self.devices) == 1

    def _make_optimizers(self, make: MakeOptimizer) -> list[Optimizer]:
        self._shards = []
        with torch.no_grad():
            for rank, parameters in enumerate(self._parameters):
                shards = []
                for bucket in self._buckets:
                    values = [parameters[index] for index in bucket.indices]
                    flat = bucket.flat(values, values[0])
                    shard = flat.view(len(self.devices), -1)[rank].clone()
                    shards.append(nn.Parameter(shard))
                self._shards.append(shards)
        return [make(list(shards)) for shards in self._shards]

    def _holders(self) -> Iterator[nn.Parameter]:
        yield from super()._holders()
        for shards in self._shards:
            yield from shards

    def _take(self, reduced: Sequence[Collective]) -> None:
        for number, collective in enumerate(reduced):
            for shards, part in zip(self._shards, collective.resolve(), strict=True):
                shards[number].grad = part
        for model in self._models:
            model.zero_grad()

    def _clip(self, clip: float) -> None:
        squares = [
            torch.stack([each.grad.square().sum() for each in shards if each.grad is not None])
            for shards in self._shards
        ]
        total = self._context.all_reduce([each.sum().view(1) for each in squares]).resolve()
        for shards, square in zip(self._shards, total, strict=True):
            scale = (clip / (square.sqrt() + 1e-6)).clamp(max=1.0)  # as torch.nn.utils
            for shard in shards:
                if shard.grad is not None:
                    shard.grad.mul_(scale)

    def _finish_step(self) -> None:
        gathered = [
            self._context.all_gather([shards[number].detach() for shards in self._shards])
            for number in range(len(self._buckets))
        ]
        for bucket, collective in zip(self._buckets, gathered, strict=True):
            for parameters, flat in zip(self._parameters, collective.resolve(), strict=True):
                targets = [parameters[index].detach() for index in bucket.indices]
                torch._foreach_copy_(targets, bucket.views(flat))

    def _go_on_with(self, left: Sequence[int]) -> None:
        self._optimizers = self._make_optimizers(prepared(self._make))

    def _optimizer_state(self) -> Any:
        """Return the state as it would be of whole parameters: what is a part is joined."""
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        joined: dict[int, Any] = {}
        for number, bucket in enumerate(self._buckets):
            parts = [state["state"].get(number, {}) for state in states]
            joined[number] = {
                name: torch.cat([part[name].cpu() for part in parts])[: bucket.numel]
                if _is_part(value, bucket.padded // len(parts))
                else value
                for name, value in parts[0].items()
            }
        whole = {"state": joined, "param_groups": states[0]["param_groups"]}
        return of_parameters(whole, self._buckets, len(self._parameters[0]))

    def _set_states(self, state: Any) -> None:
        count = len(self.devices)
        whole = of_buckets(state, self._buckets, len(self._parameters[0]))
        fresh = self._make_optimizers(prepared(self._make))
        for rank, optimizer in enumerate(fresh):
            split: dict[int, Any] = {}
            for number, bucket in enumerate(self._buckets):
                split[number] = {
                    name: _part(value, bucket.padded, count, rank)
                    if _is_part(value, bucket.numel)
                    else value
                    for name, value in whole["state"].get(number, {}).items()
                }
            set_state(optimizer, whole | {"state": split})
        self._optimizers = fresh


def _is_part(value: Any, numel: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == numel


def _part(value: torch.Tensor, padded: int, count: int, rank: int) -> torch.Tensor:
    whole = value.new_zeros(padded)
    whole[: value.numel()] = value
    return whole.view(count, -1)[rank].clone()
