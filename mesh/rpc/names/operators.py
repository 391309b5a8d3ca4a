"""The operators of torch that a peer may call here without anybody exposing them.

A positive list: functions that compute tensors from tensors and numbers, and touch nothing else,
not even memory that was not written to (``empty_like``), where others' tensors may have been. A
peer's grant bounds how large a result may be. Of most operators a bound is plain from the shapes
that go in. Where that is too much, the result's size is found out on the device ``meta``, where
tensors have a shape and no elements, before anything is computed; the first time costs seconds,
since torch then imports what it compiles with.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from auth import Grant
from mesh.rpc.errors import NotExposed
from tensor_bridge import QuotaExceeded

__all__ = [
    "call_operator",
    "check_operator",
    "is_prompt",
    "operator_name",
    "prompt_operator",
    "result_bound",
]

MAX_RESULT_BYTES = 1 << 30
"""Largest result of one operator where the peer's grant names no bound."""

_NAMES = """
    abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr all allclose amax
    amin aminmax angle any arange argmax argmin argsort argwhere asin asinh atan atan2 atanh
    atleast_1d atleast_2d atleast_3d baddbmm bitwise_and bitwise_not bitwise_or bitwise_xor
    bmm broadcast_to bucketize cat cdist ceil celu chunk clamp clone column_stack complex
    concat conj copysign cos cosh count_nonzero cov cross cummax cummin cumprod cumsum
    deg2rad det diag diag_embed diagonal diff digamma dist div divide dot dstack einsum
    eq equal erf erfc erfinv exp exp2 expm1 eye flatten flip fliplr flipud
    float_power floor floor_divide fmax fmin fmod frac full full_like gather ge greater gt
    heaviside hstack hypot imag index_add index_select inner inverse isclose isfinite isinf
    isnan kron kthvalue le lerp less lgamma linspace log log10 log1p log2 log_softmax
    logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or logical_xor
    logspace logsumexp lt masked_fill masked_select matmul matrix_power max maximum mean
    median meshgrid min minimum mm mode movedim mul multiply mv nan_to_num nanmean nanmedian
    nansum narrow ne neg negative nonzero norm normal numel ones ones_like outer permute
    poisson polar pow prod quantile rad2deg rand rand_like randint randn randn_like randperm
    real reciprocal relu remainder renorm reshape roll rot90 round rsqrt rsub scatter
    scatter_add searchsorted selu sigmoid sign signbit sin sinc sinh softmax sort split sqrt
    square squeeze stack std std_mean sub subtract sum swapaxes t take take_along_dim tan
    tanh tensordot tile topk trace transpose tril triu true_divide trunc unbind unflatten
    unique unsqueeze var var_mean vdot vstack where xlogy zeros zeros_like
"""

_BROADCASTING_NAMES = """
    abs absolute acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and
    bitwise_not bitwise_or bitwise_xor ceil celu clamp clone complex conj copysign cos cosh cross
    deg2rad digamma div divide eq erf erfc erfinv exp exp2 expm1 float_power floor
    floor_divide fmax fmin fmod frac full_like ge greater gt heaviside hypot imag isclose isfinite
    isinf isnan le lerp less lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
    logical_not logical_or logical_xor lt masked_fill maximum minimum mul multiply nan_to_num ne neg
    negative ones_like polar pow rad2deg rand_like randn_like real reciprocal relu remainder round
    rsqrt rsub selu sigmoid sign signbit sin sinc sinh sqrt square sub subtract tan tanh true_divide
    trunc xlogy zeros_like
"""
"""Those that make one tensor, of the shape to which all that go in are broadcast."""

_NO_LARGER_NAMES = """
    all allclose amax amin aminmax any argmax argmin argsort bucketize cat chunk column_stack
    concat count_nonzero cummax cummin cumprod cumsum diagonal dist dot dstack equal flatten flip
    fliplr flipud gather hstack index_select kthvalue log_softmax logcumsumexp logsumexp mean
    median mode movedim nanmean nanmedian nansum narrow norm permute prod renorm reshape roll
    rot90 scatter scatter_add searchsorted softmax sort split squeeze stack std std_mean sum
    swapaxes t topk trace transpose tril triu unbind unflatten unsqueeze var var_mean vdot vstack
"""
"""Those whose results have no more elements than what goes in, twice where they tell places too.

`index_select` and `gather` select by tensors, whose elements count as well.
"""

_EITHER_NAMES = "max min"
"""Those that broadcast two tensors, and reduce one."""

_PRODUCT_NAMES = "addmm baddbmm bmm matmul mm mv"
"""Products of the last two matrices that go in."""


def _named(names: str) -> frozenset[str]:
    return frozenset(f"torch.{name}" for name in names.split())


_OPERATORS: Mapping[str, Callable[..., Any]] = {
    f"torch.{name}": getattr(torch, name) for name in _NAMES.split()
}
_NAME_OF = {id(function): name for name, function in _OPERATORS.items()}

_BROADCASTING, _NO_LARGER, _EITHER, _PRODUCTS = map(
    _named, (_BROADCASTING_NAMES, _NO_LARGER_NAMES, _EITHER_NAMES, _PRODUCT_NAMES)
)

_SIZED = frozenset(
    f"torch.{name}"
    for name in [
        "arange",
        "broadcast_to",
        "diag",
        "diag_embed",
        "eye",
        "full",
        "linspace",
        "logspace",
        "normal",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "tile",
        "zeros",
    ]
)
"""Those whose result is as large as a number says. That of any other has at most as many elements
as the product of its tensors' numbers of them, squared."""

_PROMPT_NAMES = """
    abs add clone cos div eq exp full_like ge gt le log lt maximum mean minimum mul ne neg numel
    ones_like reciprocal relu reshape rsqrt sigmoid sin sqrt square squeeze sub sum t tan tanh
    transpose unsqueeze where zeros_like
"""

_PROMPT = frozenset(f"torch.{name}" for name in _PROMPT_NAMES.split())
"""Those that take some microseconds for little: fewer than a thread would need to begin."""

_PROMPT_ELEMENTS = 1 << 14
"""Elements that such a result may have, all arguments broadcast against each other."""

_CHECKED = frozenset({"out", "pin_memory", "device"})
"""Arguments by name that `call_operator` looks at."""

_LARGEST_ELEMENT = 16


def operator_name(function: Callable[..., Any]) -> str | None:
    """Return what one of these operators is called on the wire, None if it is none."""
    name = _NAME_OF.get(id(function))
    return name if name is not None and _OPERATORS[name] is function else None


def call_operator(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    max_bytes: int,
    place: Callable[[str], torch.device],
) -> Any:
    """Return what an operator makes of its arguments.

    Args:
        name: as `operator_name` returns it.
        args, kwargs: what the caller gave; ``out`` and ``pin_memory`` are refused.
        max_bytes: largest result, all its tensors together.
        place: returns the device of a name, if callers may have tensors there; raises if not.

    Raises:
        NotExposed: there is no such operator.
        QuotaExceeded: the result would be too large; nothing was computed.
        Exception: what the operator raises.
    """
    check_operator(name)
    if "out" in kwargs:
        raise NotExposed(f"call of {name!r}", why="an operator writes to nothing that is given")
    if kwargs.get("pin_memory"):
        raise NotExposed(f"call of {name!r}", why="peers pin no memory")
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": place(str(kwargs["device"]))}
    function = _OPERATORS[name]
    if name in _SIZED or _bound(name, args, kwargs) > max_bytes:
        _check_size(name, function, args, kwargs, max_bytes)
    return function(*args, **kwargs)


def prompt_operator(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], int] | None:
    """Return an operator that for such arguments takes a moment, and how many bytes it returns.

    That is the most that may be, whatever the tensors' content. None if it takes longer, or if
    `call_operator` would do more than to call it.
    """
    if not is_prompt(name, args, kwargs) or not kwargs.keys().isdisjoint(_CHECKED):
        return None
    return _OPERATORS[name], _bound(name, args, kwargs)


def is_prompt(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether calling an operator takes so little time that an event loop may."""
    if name not in _PROMPT:
        return False
    elements = 1
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                return False
            elements *= _count(value.shape)  # which of a reduction may be the result's
        elif value is not None and not isinstance(value, bool | int | float):
            return False
    return elements <= _PROMPT_ELEMENTS


def result_bound(grant: Grant | None) -> int:
    """Return how many bytes an operator's result may have for a peer with this grant."""
    granted = None if grant is None else grant.quotas.max_bytes
    return MAX_RESULT_BYTES if granted is None else min(MAX_RESULT_BYTES, granted)


def check_operator(name: str) -> None:
    """Return if there is such an operator.

    Raises:
        NotExposed: there is none.
    """
    if name not in _OPERATORS:
        raise NotExposed(
            f"call of {name!r:.80}",
            why="it is not among the operators that peers may call",
            fix="Call it in a function that the callee exposes.",
        )


def _bound(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return how many bytes the result may have at most, for all but the sized operators."""
    tensors = _tensors((args, kwargs))
    if name in _BROADCASTING or (name in _EITHER and len(tensors) > 1):
        try:
            count = _count(_broadcast([each.shape for each in tensors]))
        except ValueError:
            count = 0  # which the operator will say
    elif name in _NO_LARGER or name in _EITHER:
        count = 2 * sum(_count(each.shape) for each in tensors)
    elif name in _PRODUCTS and len(tensors) > 1:
        one, other = tensors[-2:]
        count = _count(one.shape[:-1]) * _count((*other.shape[:-2], *other.shape[-1:]))
    else:
        count = math.prod(max(2, _count(each.shape)) for each in tensors) ** 2
    return _LARGEST_ELEMENT * count


def _broadcast(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the shape that others are broadcast to.

    ``torch.broadcast_shapes`` would import what torch compiles with, which takes most of a second.

    Raises:
        ValueError: they can't be.
    """
    found: list[int] = []
    for sizes in itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        others = {size for size in sizes if size != 1} or {1}
        if len(others) > 1:
            raise ValueError("shapes that don't go together")
        found.insert(0, *others)
    return found


def _count(shape: Sequence[int]) -> int:
    """Return how many elements a tensor has, or a reduction of it over dimensions of no size."""
    return math.prod(max(1, size) for size in shape)


def _indices(tensors: list[torch.Tensor]) -> int:
    """Return how many bytes the result may have of an operator whose elements decide that.

    It selects or counts: some numbers for each element of its arguments, broadcast to each other,
    one for each dimension where it tells places.
    """
    try:
        count = math.prod(_broadcast([each.shape for each in tensors]))
    except ValueError:
        count = sum(tensor.numel() for tensor in tensors)
    dims = max([3, *(tensor.dim() for tensor in tensors)])
    return _LARGEST_ELEMENT * dims * count


def _tensors(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _check_size(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    max_bytes: int,
) -> None:
    given = dict(kwargs)
    given.pop("device", None)
    try:
        with torch.device("meta"), torch.no_grad():
            shapes = function(*tree_map(_shape_of, list(args)), **tree_map(_shape_of, given))
        nbytes = sum(each.numel() * each.dtype.itemsize for each in _tensors(shapes))
    except NotImplementedError:
        nbytes = _indices(_tensors((args, kwargs)))
    if nbytes > max_bytes:
        raise QuotaExceeded(
            f"call of {name!r}",
            why=f"its result would take {nbytes} bytes, and at most {max_bytes} are granted",
        )


def _shape_of(value: Any) -> Any:
    return value.detach().to("meta") if isinstance(value, torch.Tensor) else value
