"""Upstream's own samples of every operator (OpInfo), run on a device and on the CPU.

A sample counts if torch's CPU passes it; it is right if the device gives results of the same types
and shapes, and the same values, to the last bit. Operators whose results are memory as it was found
have no values.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as tree

__all__ = ["DTYPES", "Outcome", "names", "outcome"]

DTYPES = (torch.float32, torch.bool, torch.int64)
"""What the operators are tried with."""

SEED = 5

WITHOUT_VALUES = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)


@dataclasses.dataclass(slots=True)
class Outcome:
    """What became of one operator's samples of one type.

    Attributes:
        counted: samples that the CPU passes.
        right: those of them that the device passes with equal results.
        why: of the first that it does not.
    """

    counted: int = 0
    right: int = 0
    why: str = ""


def _database() -> list[Any]:
    # Upstream's module of helpers wants it, for tests of another kind.
    stand_in: Any = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def names() -> list[str]:
    """Return the names of all operators, which may come several times in variants."""
    return sorted({_name(each) for each in _database()})


def outcome(
    name: str, dtype: torch.dtype, device: torch.device, most: int | None = None
) -> Outcome:
    """Run an operator's samples of one type, the first `most` of each variant."""
    found = Outcome()
    for operator in _database():
        if _name(operator) == name and operator.supports_dtype(dtype, "cpu"):
            for sample in itertools.islice(_samples(operator, dtype), most):
                _try(operator, sample, device, found)
    return found


def _name(operator: Any) -> str:
    variant = operator.variant_test_name
    return f"{operator.name}.{variant}" if variant else str(operator.name)


def _samples(operator: Any, dtype: torch.dtype) -> Iterator[Any]:
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield from operator.sample_inputs("cpu", dtype, requires_grad=False)
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            return  # upstream has none for it here


def _try(operator: Any, sample: Any, device: torch.device, found: Outcome) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = (sample.input, sample.args, sample.kwargs)
        here, there = _copied(arguments, None), _copied(arguments, device)
        try:
            torch.manual_seed(SEED)
            expected = operator(here[0], *here[1], **here[2])
        except Exception:
            return
        found.counted += 1
        try:
            torch.manual_seed(SEED)
            result = operator(there[0], *there[1], **there[2])
            why = _difference(expected, result, operator.name not in WITHOUT_VALUES)
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if why is None:
            found.right += 1
        elif not found.why:
            found.why = why


def _copied(arguments: Any, device: torch.device | None) -> Any:
    """Return arguments with tensors of their own, on `device` if that is given."""

    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            copy = value.detach().clone()
            return copy if device is None else copy.to(device)
        if device is not None and (value == "cpu" or value == torch.device("cpu")):
            return device
        return value

    return tree.tree_map(one, arguments)


def _difference(expected: Any, found: Any, has_values: bool) -> str | None:
    ours, theirs = tree.tree_flatten(expected)[0], tree.tree_flatten(found)[0]
    if len(ours) != len(theirs):
        return f"{len(theirs)} results where {len(ours)} were expected"
    for one, other in zip(ours, theirs, strict=True):
        if not isinstance(one, torch.Tensor):
            if one != other and not (one != one and other != other):
                return f"{other!r} where {one!r} was expected"
            continue
        if one.dtype is not other.dtype or one.shape != other.shape:
            return f"{other.dtype} {tuple(other.shape)}, not {one.dtype} {tuple(one.shape)}"
        if has_values and one.layout is torch.strided and not _equal(one, other.cpu()):
            return "other values"
    return None


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = (each.resolve_conj().resolve_neg().detach() for each in (one, other))
    if one.dtype is torch.complex32:  # which the CPU can't compare
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if torch.equal(one, other):
        return True
    return (
        one.numel() > 0
        and (one.is_floating_point() or one.is_complex())
        and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
    )
