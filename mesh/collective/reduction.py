"""Reductions: which exist for which element types, and one way to do them.

Contributions are always folded in the order of the ranks, by one fold for all algorithms and sizes,
so that a result depends on the inputs alone: not on timing, nor on who computes it.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence

import torch

from mesh.collective.errors import UnsupportedCollective

__all__ = ["Reduction", "accumulator", "average", "reduce_into", "refuse_unless_reducible"]


class Reduction(enum.StrEnum):
    """How contributions are combined. Names as in ``torch.distributed.ReduceOp``."""

    SUM = "SUM"
    AVG = "AVG"
    PRODUCT = "PRODUCT"
    MIN = "MIN"
    MAX = "MAX"
    BAND = "BAND"
    BOR = "BOR"
    BXOR = "BXOR"

    __hash__ = str.__hash__  # an enumeration's own runs Python for every look into a table


_BITWISE = frozenset({Reduction.BAND, Reduction.BOR, Reduction.BXOR})
_ORDER = frozenset({Reduction.MIN, Reduction.MAX})

_SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
_UNSIGNED = frozenset({torch.uint8, torch.uint16, torch.uint32, torch.uint64})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})

_WIDER = {
    # Rounded once, at the end, instead of after each contribution.
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    # torch has no arithmetic on these; modulo 2^16 and 2^32 the results are the same.
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
}


@functools.lru_cache(maxsize=1024)
def refuse_unless_reducible(dtype: torch.dtype, op: Reduction) -> None:
    """Raise unless `op` makes sense for elements of `dtype`.

    ====================  =======================================================
    bool                  SUM MAX BOR as or; PRODUCT MIN BAND as and; BXOR
    integers              all; sums wrap around; AVG rounds toward zero
    uint64                all but AVG MIN MAX
    floating point        SUM AVG PRODUCT MIN MAX; 16 bits accumulated in 32
    complex               SUM AVG PRODUCT
    all others (float8)   none: they can be moved, not reduced
    ====================  =======================================================

    Raises:
        UnsupportedCollective: it doesn't, with the reason.
    """
    if dtype is torch.bool:
        why = "an average of truth values is none" if op is Reduction.AVG else None
    elif dtype is torch.uint64:
        wide = op is Reduction.AVG or op in _ORDER
        why = "torch can't order or divide numbers of this type" if wide else None
    elif dtype in _SIGNED or dtype in _UNSIGNED:
        why = None
    elif dtype in _FLOATS:
        why = "its bits are no number" if op in _BITWISE else None
    elif dtype in _COMPLEX:
        bitwise = "its bits are no number" if op in _BITWISE else None
        why = "complex numbers have no order" if op in _ORDER else bitwise
    else:
        why = "elements of this type can be moved, not reduced"
    if why is not None:
        raise UnsupportedCollective(
            f"reduction {op} of {dtype} tensors", why=why, fix="Convert the tensor first."
        )


def reduce_into(
    out: torch.Tensor, parts: Sequence[torch.Tensor], op: Reduction, *, is_apart: bool = False
) -> None:
    """Write the reduction of `parts`, folded from the first to the last, to `out`.

    Args:
        out: one-dimensional; may be one of the parts.
        parts: at least one, of the dtype and length of `out`.
        op: permitted for this dtype by `refuse_unless_reducible`.
        is_apart: no part lies where `out` does, but for one of the first two: not looked for then.
    """
    fold, kind, as_integers = _way(out.dtype, op)
    if as_integers:
        out = out.view(torch.int64)
        parts = [part.view(torch.int64) for part in parts]
    is_direct = kind is out.dtype and len(parts) > 1
    if is_direct and (is_apart or _can_hold_total(out, parts)):
        total, rest = out, parts[2:]
        fold(parts[0], parts[1], out=total)
    else:
        total, rest = parts[0].to(kind, copy=True), parts[1:]
    for part in rest:
        fold(total, part if part.dtype is kind else part.to(kind), out=total)
    if op is Reduction.AVG:
        average(total, len(parts))
    if total is not out:
        out.copy_(total)


def _can_hold_total(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Return whether contributions can be folded in `out` itself: none of it is read later."""
    place, nbytes = out.data_ptr(), out.numel() * out.dtype.itemsize
    starts = [part.data_ptr() for part in parts]
    if place in starts[:2]:
        starts.remove(place)
    return all(abs(start - place) >= nbytes for start in starts)


def average(total: torch.Tensor, count: int) -> None:
    """Turn the sum of `count` contributions into their average."""
    exact = total.is_floating_point() or total.is_complex()
    total.div_(count, rounding_mode=None if exact else "trunc")


def accumulator(dtype: torch.dtype, op: Reduction) -> torch.dtype:
    """Return the type in which contributions of `dtype` are folded."""
    if op is Reduction.AVG and (dtype in _SIGNED or dtype in _UNSIGNED):
        return torch.int64  # the sum of small integers fits here, if not there
    return _WIDER.get(dtype, dtype)


_Fold = Callable[..., torch.Tensor]


@functools.lru_cache(maxsize=1024)
def _way(dtype: torch.dtype, op: Reduction) -> tuple[_Fold, torch.dtype, bool]:
    """Return what folds two contributions, as which type, and whether as the bits of integers."""
    as_integers = dtype is torch.uint64  # which torch has no arithmetic on
    kind = accumulator(torch.int64 if as_integers else dtype, op)
    return (_FOLDS_OF_BOOL if dtype is torch.bool else _FOLDS)[op], kind, as_integers


_FOLDS: dict[Reduction, _Fold] = {
    Reduction.SUM: torch.add,
    Reduction.AVG: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.BAND: torch.bitwise_and,
    Reduction.BOR: torch.bitwise_or,
    Reduction.BXOR: torch.bitwise_xor,
}

_FOLDS_OF_BOOL: dict[Reduction, _Fold] = {
    Reduction.SUM: torch.logical_or,
    Reduction.PRODUCT: torch.logical_and,
    Reduction.MIN: torch.logical_and,
    Reduction.MAX: torch.logical_or,
    Reduction.BAND: torch.logical_and,
    Reduction.BOR: torch.logical_or,
    Reduction.BXOR: torch.logical_xor,
}
