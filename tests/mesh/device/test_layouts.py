"""Results lie in memory as those of local tensors do, whatever the layout of what goes in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

CL, CL3 = torch.channels_last, torch.channels_last_3d

Work = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation of an input and weights, of those that are laid out in several ways."""

    name: str
    dims: int
    work: Work
    weights: tuple[tuple[int, ...], ...] = ()


CASES = [
    Case("conv1d", 3, functional.conv1d, ((3, 4, 3),)),
    Case("conv2d", 4, functional.conv2d, ((3, 4, 3, 3), (3,))),
    Case("conv2d 1x1", 4, functional.conv2d, ((3, 4, 1, 1),)),
    Case(
        "depthwise", 4, lambda x, w: functional.conv2d(x, w, padding=1, groups=4), ((4, 1, 3, 3),)
    ),
    Case(
        "dilated", 4, lambda x, w: functional.conv2d(x, w, padding=2, dilation=2), ((3, 4, 3, 3),)
    ),
    Case("strided", 4, lambda x, w: functional.conv2d(x, w, stride=2), ((3, 4, 3, 3),)),
    Case("transposed", 4, functional.conv_transpose2d, ((4, 3, 3, 3),)),
    Case("conv3d", 5, functional.conv3d, ((3, 4, 2, 3, 3),)),
    Case("transposed 3d", 5, functional.conv_transpose3d, ((4, 3, 2, 3, 3),)),
    *(
        case
        for dims in (3, 4, 5)
        for case in (
            Case("batch_norm", dims, lambda x: functional.batch_norm(x, None, None, training=True)),
            Case("batch_norm in use", dims, functional.batch_norm, ((4,), (4,))),
            Case("layer_norm", dims, lambda x: functional.layer_norm(x, x.shape[-1:])),
        )
    ),
    Case("max_pool2d", 4, lambda x: functional.max_pool2d(x, 2)),
    Case("avg_pool2d", 4, lambda x: functional.avg_pool2d(x, 2)),
    Case("adaptive_avg_pool2d", 4, lambda x: functional.adaptive_avg_pool2d(x, 2)),
    Case("global average", 4, lambda x: functional.adaptive_avg_pool2d(x, 1)),
    Case("adaptive_max_pool2d", 4, lambda x: functional.adaptive_max_pool2d(x, 2)),
    Case("max_pool3d", 5, lambda x: functional.max_pool3d(x, 2)),
    Case("avg_pool3d", 5, lambda x: functional.avg_pool3d(x, 2)),
    Case("adaptive_avg_pool3d", 5, lambda x: functional.adaptive_avg_pool3d(x, 2)),
    Case("nearest", 4, lambda x: functional.interpolate(x, scale_factor=2)),
    Case("bilinear", 4, lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear")),
    Case("reflected", 4, lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect")),
    Case("replicated", 4, lambda x: functional.pad(x, (1, 1, 1, 1), mode="replicate")),
    Case("reflected", 5, lambda x: functional.pad(x, (1,) * 6, mode="reflect")),
    Case("replicated", 5, lambda x: functional.pad(x, (1,) * 6, mode="replicate")),
    Case("relu", 4, functional.relu),
    Case("log_softmax", 4, lambda x: functional.log_softmax(x, 1)),
    Case("joined", 4, lambda x: torch.cat((x, x), 1)),
    Case("rolled", 4, lambda x: x.roll(1, 1)),
    Case("shuffled", 4, lambda x: functional.channel_shuffle(x, 2)),
    Case("glu", 4, lambda x: functional.glu(x, 1)),
    Case("elu", 4, functional.elu),
    Case("hardsigmoid", 4, functional.hardsigmoid),
    Case("hardswish", 4, functional.hardswish),
    Case("softplus", 4, functional.softplus),
    Case("logsigmoid", 4, functional.logsigmoid),
    *(
        Case(work.__name__, 4, lambda x, work=work: work(x, torch.ones_like(x), reduction="none"))
        for work in (functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss)
    ),
]


def layouts(dims: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield inputs of one shape, or of one example of it, with their names."""
    shape = (2, 4, 3, 6, 5)[:2] + (3, 6, 5)[5 - dims :]
    last = CL if dims == 4 else CL3
    order = list(range(dims))
    yield "contiguous", torch.randn(shape)
    yield "permuted", torch.randn(shape[::-1]).permute(order[::-1])
    yield "expanded", torch.randn(2, 1, *shape[2:]).expand(shape)
    if dims > 3:
        yield "channels last", torch.randn(shape).to(memory_format=last)
        yield "one example", torch.randn(1, *shape[1:]).to(memory_format=last)
        yield "expanded examples", torch.randn(1, *shape[1:]).to(memory_format=last).expand(shape)
        yield "some channels", torch.randn(2, 8, *shape[2:]).to(memory_format=last)[:, ::2]


def there(tensor: torch.Tensor, d: torch.device) -> torch.Tensor:
    """Return the same on a device, as it lies in memory, to be differentiated by."""
    whole = tuple(slice(0, 1) if not step else slice(None) for step in tensor.stride())
    base = tensor.detach()[whole]
    made = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device=d).copy_(base)
    return made.expand(tensor.shape).requires_grad_(tensor.requires_grad)


def strides(tensor: torch.Tensor) -> list[int]:
    """Return those that count: nobody steps along what there is one of."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} of {case.dims}")
def test_results_and_gradients_lie_as_local_ones(
    case: Case, dtype: torch.dtype, d: torch.device
) -> None:
    torch.manual_seed(0)
    for name, tensor in layouts(case.dims):
        for last in (False, True) if case.weights and case.dims > 3 else (False,):
            inputs: list[Any] = [tensor.to(dtype).requires_grad_()]
            for shape in case.weights:
                weight = torch.rand(shape, dtype=dtype)
                if last and weight.dim() > 3:
                    weight = weight.to(memory_format=CL if weight.dim() == 4 else CL3)
                inputs.append(weight.requires_grad_(case.work is not functional.batch_norm))
            remote = [there(each, d) for each in inputs]
            assert strides(remote[0]) == strides(inputs[0])
            here, other = case.work(*inputs), case.work(*remote)
            assert strides(other) == strides(here), name
            torch.testing.assert_close(other.cpu(), here)
            wanted = [at for at, each in enumerate(inputs) if each.requires_grad]
            for gradient in (torch.ones_like(here), torch.ones(here.shape, dtype=dtype)):
                mine, theirs = (
                    torch.autograd.grad(made, [of[at] for at in wanted], by, retain_graph=True)
                    for made, of, by in (
                        (here, inputs, gradient),
                        (other, remote, there(gradient, d)),
                    )
                )
                assert list(map(strides, theirs)) == list(map(strides, mine)), name
                for one, another in zip(mine, theirs, strict=True):
                    torch.testing.assert_close(another.cpu(), one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [None, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w: functional.layer_norm(x, (4,), w, w),
        lambda x, w: functional.group_norm(x, 2, w, w),
        lambda x, w: functional.batch_norm(x, None, None, w, w, training=True),
        lambda x, w: functional.instance_norm(x, weight=w, bias=w),
    ],
    ids=["layer", "group", "batch", "instance"],
)
def test_normalizations_in_half_precision(
    norm: Work, weights: torch.dtype | None, dtype: torch.dtype, d: torch.device
) -> None:
    if weights is torch.float16:
        weights = dtype
    x, w = torch.randn(2, 4, 4), torch.rand(4)
    here: list[torch.Tensor] = [x.to(dtype).requires_grad_()]
    if weights is not None:
        here.append(w.to(weights).requires_grad_())
    there = [each.detach().to(d).requires_grad_() for each in here]
    mine, other = (norm(of[0], of[1] if weights is not None else None) for of in (here, there))
    torch.testing.assert_close(other.cpu(), mine)
    gradient = torch.randn(mine.shape).to(mine.dtype)
    wanted = torch.autograd.grad(mine, here, gradient)
    for one, another in zip(torch.autograd.grad(other, there, gradient.to(d)), wanted, strict=True):
        assert one.dtype is another.dtype
        torch.testing.assert_close(one.cpu(), another)


@pytest.mark.parametrize("work", [functional.silu, functional.mish])
def test_gradients_in_half_precision_are_rounded_once(work: Work, d: torch.device) -> None:
    x = torch.linspace(-4, 4, 100).to(torch.bfloat16)
    here, there = x.clone().requires_grad_(), x.to(d).requires_grad_()
    work(here).sum().backward()
    work(there).sum().backward()
    assert here.grad is not None
    assert there.grad is not None
    assert torch.equal(there.grad.cpu(), here.grad)
