"""Every reduction of every element type, against a reference in Python numbers or torch itself."""

from __future__ import annotations

import functools
import operator

import pytest
import torch

from mesh.collective import Reduction, UnsupportedCollective, refuse_unless_reducible
from mesh.collective.reduction import reduce_into

INTS = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
BITWISE = {Reduction.BAND, Reduction.BOR, Reduction.BXOR}
ORDER = {Reduction.MIN, Reduction.MAX}


def reduce(parts: list[torch.Tensor], op: Reduction) -> torch.Tensor:
    refuse_unless_reducible(parts[0].dtype, op)
    out = torch.empty_like(parts[0])
    reduce_into(out, parts, op)
    return out


@pytest.mark.parametrize("op", Reduction)
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integers_equal_python(op: Reduction, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    columns = [[info.max, info.min, 1, 5, 0], [info.max, 3, 7, 2, 0], [2, 1, info.max, 12, 1]]
    parts = [torch.tensor(column, dtype=dtype) for column in columns]
    if dtype is torch.uint64 and op in ORDER | {Reduction.AVG}:
        with pytest.raises(UnsupportedCollective, match=f"{op} of torch.uint64"):
            reduce(parts, op)
        return
    fold = {
        Reduction.SUM: operator.add,
        Reduction.AVG: operator.add,
        Reduction.PRODUCT: operator.mul,
        Reduction.MIN: min,
        Reduction.MAX: max,
        Reduction.BAND: operator.and_,
        Reduction.BOR: operator.or_,
        Reduction.BXOR: operator.xor,
    }[op]
    expected = []
    for row in zip(*columns, strict=True):
        value = functools.reduce(fold, row)
        if op is Reduction.AVG:
            if dtype is torch.int64:  # its sum wraps as SUM's does
                value = (value + 2**63) % 2**64 - 2**63
            value = abs(value) // 3 * (1 if value >= 0 else -1)
        span = info.max - info.min + 1
        expected.append((value - info.min) % span + info.min)
    assert reduce(parts, op).tolist() == expected


@pytest.mark.parametrize("op", Reduction)
@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
def test_real_and_complex_numbers_in_order_of_ranks(op: Reduction, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    parts = [torch.randn(1000, dtype=torch.complex128) * 3 for _ in range(4)]
    parts = [(p if dtype.is_complex else p.real).to(dtype) for p in parts]
    if op in BITWISE or (dtype.is_complex and op in ORDER):
        with pytest.raises(UnsupportedCollective, match=rf"{op} of {dtype}"):
            reduce(parts, op)
        return
    wide = [p.float() if dtype.itemsize == 2 else p for p in parts]
    if op in (Reduction.SUM, Reduction.AVG):
        expected = ((wide[0] + wide[1]) + wide[2]) + wide[3]
        expected = expected / 4 if op is Reduction.AVG else expected
    elif op is Reduction.PRODUCT:
        expected = ((wide[0] * wide[1]) * wide[2]) * wide[3]
    else:
        pick = torch.amin if op is Reduction.MIN else torch.amax
        expected = pick(torch.stack(wide), 0)
    assert torch.equal(reduce(parts, op), expected.to(dtype))


def test_sixteen_bits_are_rounded_once() -> None:
    parts = [torch.tensor([256.0], dtype=torch.bfloat16)] + [
        torch.tensor([1.0], dtype=torch.bfloat16) for _ in range(8)
    ]
    assert reduce(parts, Reduction.SUM).item() == 264.0
    naive = functools.reduce(operator.add, parts)
    assert naive.item() == 256.0  # what rounding after each contribution gives


@pytest.mark.parametrize("op", Reduction)
def test_truth_values(op: Reduction) -> None:
    parts = [torch.tensor(column) for column in ([False, False, True], [False, True, True])]
    if op is Reduction.AVG:
        with pytest.raises(UnsupportedCollective, match=r"AVG of torch\.bool"):
            reduce(parts, op)
        return
    expected = {
        "SUM": [False, True, True],
        "MAX": [False, True, True],
        "BOR": [False, True, True],
        "PRODUCT": [False, False, True],
        "MIN": [False, False, True],
        "BAND": [False, False, True],
        "BXOR": [False, True, False],
    }[op]
    assert reduce(parts, op).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bits8, torch.uint4], ids=str)
def test_elements_without_arithmetic_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedCollective, match=f"SUM of {dtype}.*moved, not reduced"):
        refuse_unless_reducible(dtype, Reduction.SUM)


def test_result_may_be_a_part() -> None:
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    reduce_into(parts[1], parts, Reduction.SUM)
    assert parts[1].tolist() == [11.0, 22.0]
    assert parts[0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("op", [Reduction.SUM, Reduction.AVG, Reduction.MAX], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("shift", [0, 3])
def test_the_result_may_lie_where_a_contribution_does(shift, dtype, op) -> None:
    for at in range(4):
        rows = torch.arange(4 * 20).reshape(4, 20).mul(37).remainder(53).to(dtype)
        parts = [row[:10] for row in rows]
        expected = torch.empty(10, dtype=dtype)
        reduce_into(expected, [part.clone() for part in parts], op)
        out = rows[at, shift : shift + 10]  # the same elements, or some of them
        reduce_into(out, parts, op)
        assert torch.equal(out, expected)
