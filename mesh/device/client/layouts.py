"""What results are like, where torch on meta tensors has them otherwise than on its CPU.

How they lie in memory makes no difference to their elements, and the peer lays them out as it was
told. But a program that asks for strides, or views a result, is to see what it would see of a local
tensor; and a peer whose torch makes what was told need not copy it. The type of statistics that a
normalization keeps for its backward does make a difference: the peer refuses another one.

Formats are those that strides suggest (``c10::TensorImpl::compute_strides_like_channels_last_2d``):
``channels_last`` also of what was cut out of such a tensor, and contiguous of what is in any other
order, or was expanded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch._prims_common import suggest_memory_format

__all__ = ["dtype_of", "strides_of"]

_Choose: TypeAlias = Callable[[Sequence[Any]], torch.memory_format]


def strides_of(
    name: str, position: int, args: Sequence[Any], result: torch.Tensor
) -> Sequence[int]:
    """Return the strides of a result.

    Args:
        name: of the operator, ``aten::NAME``, without the overload.
        position: of the result among those of the operator.
        args: the positional arguments, tensors of which may be meta tensors.
        result: as torch's inference has made it.
    """
    if name in _ITERATED:
        first, second, *_ = (each for each in args if isinstance(each, torch.Tensor))
        return torch.empty_like(first, device="meta").add(second.to("meta")).stride()
    chosen = _FORMATS.get(name)
    if chosen is None or position >= chosen[0]:
        return result.stride()
    form = chosen[1](args)
    if form is torch.channels_last and result.dim() != 4:
        form = torch.contiguous_format
    if form is torch.channels_last_3d and result.dim() != 5:
        form = torch.contiguous_format
    return torch.empty(result.shape, device="meta", memory_format=form).stride()


def dtype_of(
    name: str, position: int, args: Sequence[Any], result: torch.Tensor, *, on_cpu: bool
) -> torch.dtype:
    """Return the type of a result.

    Statistics of inputs in half precision are in double that where a weight, or a running
    statistic, is (``is_mixed_type`` of mixed_data_type.h), and of the input's type otherwise.

    Args:
        name, position, args, result: as for `strides_of`.
        on_cpu: whether the peer computes it on a CPU. Other hardware has most statistics in double
            the precision whatever the weight is, as torch infers.
    """
    if position == 0 and name == "aten::native_group_norm_backward":
        gradient: torch.dtype = args[1].dtype
        return gradient
    if position == 0 or name not in (_STATISTICS if on_cpu else _STATISTICS_ANYWHERE):
        return result.dtype
    dtype: torch.dtype = args[0].dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return result.dtype
    others = (each for each in args[1:] if isinstance(each, torch.Tensor))
    return torch.float32 if any(each.dtype is torch.float32 for each in others) else dtype


def _as(index: int) -> _Choose:
    """Return what has a result be as an argument suggests."""
    return lambda args: suggest_memory_format(args[index])


def _contiguous(args: Sequence[Any]) -> torch.memory_format:
    return torch.contiguous_format


def _of_convolution(first: int) -> _Choose:
    """Return what has results be as the input or the weight of a convolution suggests.

    As ``mkldnn_conv_use_channels_last`` and ``thnn_conv_use_channels_last`` have it; convolutions
    of three dimensions that MKL-DNN does not do (``use_mkldnn`` of Convolution.cpp) have no such
    format.

    Args:
        first: which argument the input is; the weight comes next.
    """

    def choose(args: Sequence[Any]) -> torch.memory_format:
        tensor, weight = args[first : first + 2]
        if tensor.dim() == 5 and not _is_for_mkldnn(tensor, weight, groups=args[first + 8]):
            return torch.contiguous_format
        suggested = suggest_memory_format(tensor)
        return suggest_memory_format(weight) if suggested is torch.contiguous_format else suggested

    return choose


def _is_for_mkldnn(tensor: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    return tensor.dtype is torch.float32 and (
        groups > 1
        or min(weight.shape[-2:]) > 3
        or tensor.shape[0] > 1
        or math.prod(tensor.shape[:4]) > 20480
    )


_FORMATS: dict[str, tuple[int, _Choose]] = {
    f"aten::{name}": (count, choose)
    for count, choose, names in (
        (1, _of_convolution(0), ("convolution", "_convolution")),
        (2, _of_convolution(1), ("convolution_backward",)),
        (
            *(1, _as(0)),
            (
                *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_no_update"),
                *("_native_batch_norm_legit_no_training", "_batch_norm_with_update"),
                *("reflection_pad2d", "replication_pad2d", "channel_shuffle", "roll"),
                *("reflection_pad3d", "replication_pad3d"),
            ),
        ),
        (
            *(1, _as(1)),
            (
                *("native_batch_norm_backward", "batch_norm_backward"),
                *("reflection_pad2d_backward", "replication_pad2d_backward"),
                *("reflection_pad3d_backward", "replication_pad3d_backward"),
            ),
        ),
        (
            *(1, _contiguous),
            (
                *("_log_softmax_backward_data", "im2col", "glu_backward"),
                *("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"),
            ),
        ),
        (2, _contiguous, ("log_sigmoid_forward",)),
    )
    for name in names
}
"""How many of the first results of an operator have which format."""

_ITERATED = frozenset(
    f"aten::{name}_backward" for name in ("elu", "hardsigmoid", "hardswish", "softplus")
)
"""Operators of two tensors, element by element: the first says how the result lies, if it can."""

_STATISTICS_ANYWHERE = frozenset({"aten::native_group_norm"})
_STATISTICS = _STATISTICS_ANYWHERE | {
    f"aten::{name}"
    for name in (
        *("native_layer_norm", "native_batch_norm", "_native_batch_norm_legit"),
        *("_native_batch_norm_legit_no_training", "_batch_norm_no_update"),
        "_batch_norm_with_update",
    )
}
"""Operators whose results after the first are statistics."""
