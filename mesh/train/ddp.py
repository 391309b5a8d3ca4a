"""A replica of the model on each device, the batch split among them, the gradients averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mesh.device.groups.context import Collective
from mesh.train.optimizers import set_state
from mesh.train.replicated import Replicated
from mesh.train.strategy import MakeOptimizer, Strategy, share_options

__all__ = ["ddp"]


def ddp(
    devices: Sequence[torch.device | str], *, timeout: float = 300.0, repeats: bool = False
) -> Strategy:
    """Train a replica on each device, of the same parameters after each step.

    The gradient of a step is that of the mean over the whole batch, however its examples divide
    among the devices: the same as on one device, but for rounding. It goes between the devices in
    buckets while the backward goes on.

    A layer that looks at more than one example, as batch normalization, sees those of its device
    alone. Running statistics are each replica's own while training; `Strategy.settle`, and so each
    evaluation and each `Strategy.state`, sets all of them to their mean.

    Args:
        devices: as for `mesh.DistributedContext`; the first is the main one.
        timeout: seconds for one exchange.
        repeats: whether a step that is as it was before may be done again by the peers alone: the
            loss and the model are not called then, so that nothing which they do beside computing,
            such as printing or looking at the time, is done either. See docs/train.md.
    """
    return _Ddp(devices, timeout, repeats=repeats)


class _Ddp(Replicated):
    @property
    def survives(self) -> bool:
        return True

    def _make_optimizers(self, make: MakeOptimizer) -> list[Optimizer]:
        return [make(list(parameters)) for parameters in self._parameters]

    def _take(self, reduced: Sequence[Collective]) -> None:
        for bucket, collective in zip(self._buckets, reduced, strict=True):
            used = [
                any(parameters[index].grad is not None for parameters in self._parameters)
                for index in bucket.indices
            ]
            for parameters, flat in zip(self._parameters, collective.resolve(), strict=True):
                views = bucket.views(flat)
                for index, is_used, view in zip(bucket.indices, used, views, strict=True):
                    parameters[index].grad = view if is_used else None

    def _clip(self, clip: float) -> None:
        for rank, parameters in enumerate(self._parameters):
            with self._surviving(rank):
                nn.utils.clip_grad_norm_(parameters, clip)

    def _finish_step(self) -> None:
        pass

    def _go_on_with(self, left: Sequence[int]) -> None:
        # A schedule may have changed those of the one that is lost since the last step.
        share_options(self.optimizer, self._optimizers[1:])
        self._optimizers = [self._optimizers[rank] for rank in left]

    def _optimizer_state(self) -> Any:
        return self.optimizer.state_dict()

    def _set_states(self, state: Any) -> None:
        for optimizer in self._optimizers:
            set_state(optimizer, state)
