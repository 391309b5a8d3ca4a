"""Gradients in a few large tensors, which go on their way during the backward.

Parameters are put into buckets from the last to the first, which is about the order in which their
gradients are found. A device contributes a bucket as soon as it has all gradients of it, and all
those of the buckets before; an operation over all devices takes place once all have contributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

__all__ = ["Bucket", "Filling", "buckets_of"]

FIRST_BYTES = 1 << 20
"""The first bucket is small, so that the exchange begins early."""

BUCKET_BYTES = 16 << 20
"""Later ones are large enough for what an operation costs not to show."""


class Bucket:
    """Parameters of one type whose gradients go together.

    Attributes:
        indices: which parameters of the model, in order.
        shapes: of those.
        numel: elements of all of them.
        padded: the same, rounded up to what divides among the devices.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], indices: Sequence[int], devices: int
    ) -> None:
        self.indices = tuple(indices)
        self.shapes = [parameters[index].shape for index in indices]
        self.numel = sum(parameters[index].numel() for index in indices)
        self.padded = -(-self.numel // devices) * devices

    def flat(self, tensors: Sequence[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
        """Return tensors of the parameters' shapes as one; those that are missing as zeros."""
        parts = [
            like.new_zeros(shape.numel()) if tensor is None else tensor.detach().reshape(-1)
            for tensor, shape in zip(tensors, self.shapes, strict=True)
        ]
        if self.padded > self.numel:
            parts.append(like.new_zeros(self.padded - self.numel))
        return torch.cat(parts)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of what `flat` returned."""
        found, start = [], 0
        for shape in self.shapes:
            found.append(flat[start : start + shape.numel()].view(shape))
            start += shape.numel()
        return found


def buckets_of(parameters: Sequence[nn.Parameter], devices: int) -> list[Bucket]:
    """Return the buckets of all parameters that have gradients."""
    buckets: list[Bucket] = []
    open_ones: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}

    def finish(dtype: torch.dtype) -> None:
        buckets.append(Bucket(parameters, open_ones.pop(dtype), devices))
        del sizes[dtype]

    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        if not parameter.requires_grad:
            continue
        dtype = parameter.dtype
        open_ones.setdefault(dtype, []).append(index)
        sizes[dtype] = sizes.get(dtype, 0) + parameter.numel() * dtype.itemsize
        if sizes[dtype] >= (BUCKET_BYTES if buckets else FIRST_BYTES):
            finish(dtype)
    for dtype in list(open_ones):
        finish(dtype)
    return buckets


class Filling:
    """One replica's gradients of one step, handed on bucket by bucket, in order.

    Args:
        buckets: of the model.
        parameters: of the replica.
        hand: is given each bucket's number and its gradients as one tensor.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Sequence[nn.Parameter],
        hand: Callable[[int, torch.Tensor], object],
    ) -> None:
        self._buckets = buckets
        self._parameters = parameters
        self._hand = hand
        self._missing = [set(bucket.indices) for bucket in buckets]
        self._of = {
            index: number for number, bucket in enumerate(buckets) for index in bucket.indices
        }
        self._next = 0

    def found(self, index: int) -> None:
        """Take note that a parameter has its gradient.

        Raises:
            RuntimeError: it was handed on, and has got another one since.
        """
        if self._of[index] < self._next:
            raise RuntimeError(
                f"parameter {index}, of shape {tuple(self._parameters[index].shape)}, got a second "
                "gradient in one backward pass, after the first was on its way to the other "
                "devices: checkpoint with use_reentrant=False"
            )
        self._missing[self._of[index]].discard(index)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._hand_next()

    def finish(self) -> None:
        """Hand on what is left, with zeros where there is no gradient."""
        while self._next < len(self._buckets):
            self._hand_next()

    def _hand_next(self) -> None:
        number, self._next = self._next, self._next + 1
        bucket = self._buckets[number]
        parameters = [self._parameters[index] for index in bucket.indices]
        with torch.no_grad():
            flat = bucket.flat([each.grad for each in parameters], parameters[0])
        self._hand(number, flat)
