"""Which operators ``torch.autocast("mesh")`` runs in lower precision, and which in float32.

torch has these lists for its own devices in C++ alone (aten/src/ATen/autocast_mode.h, version 2.13:
``AT_FORALL_LOWER_PRECISION_FP``, ``AT_FORALL_FP32``).
"""

from __future__ import annotations

from typing import Any

import torch

from mesh.device.client.tensors import BACKEND, is_mesh

__all__ = ["register"]

LOWER = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution
    linear matmul mm mv bmm addmm addmv addr addbmm baddbmm chain_matmul linalg_multi_dot prelu
    scaled_dot_product_attention gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell
"""

FULL = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm
    norm.Scalar norm.ScalarOpt_dim nuclear_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss
    huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp softmax.int log_softmax.int cumprod cumsum prod prod.dim_int sum sum.dim_IntList
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d
"""

PROMOTED = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add"
"""Run in the widest type of their arguments."""

_KEY: Any = torch._C.DispatchKey
_EXCLUDED = torch._C.DispatchKeySet(_KEY.AutocastPrivateUse1)


def register(library: Any, everything: Any) -> None:
    """Register a kernel for each, and for all other operators none.

    Args:
        library: of ``aten``.
        everything: of ``_``, for fallbacks.
    """
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, target in ((LOWER, _lower), (FULL, _full), (PROMOTED, _widest)):
        for name in names.split():
            base, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            library.impl(name, _kernel(operator, target), "AutocastPrivateUse1")


def _lower(values: list[torch.Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype(BACKEND)


def _full(values: list[torch.Tensor]) -> torch.dtype:
    return torch.float32


def _widest(values: list[torch.Tensor]) -> torch.dtype:
    kinds = {value.dtype for value in values}
    return torch.float32 if torch.float32 in kinds else torch.get_autocast_dtype(BACKEND)


def _kernel(operator: Any, target: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        _collect((*args, *kwargs.values()), tensors)
        if not tensors:
            with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
                return operator(*args, **kwargs)
        dtype = target(tensors)
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            return operator(
                *(_cast(value, dtype) for value in args),
                **{name: _cast(value, dtype) for name, value in kwargs.items()},
            )

    return run


def _is_castable(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and is_mesh(value)
    )


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
    elif _is_castable(value):
        found.append(value)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value.to(dtype) if _is_castable(value) else value
