"""All-reduce of sparse tensors: only what is not zero moves."""

from __future__ import annotations

import math

import torch

from mesh.collective.errors import CollectiveMismatch, UnsupportedCollective
from mesh.collective.layout import gathered, raw
from mesh.collective.operation import Operation
from mesh.collective.reduction import Reduction

__all__ = ["all_reduce_sparse", "refuse_unless_sparse_reducible"]

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_EXACT = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_DTYPES = _EXACT | {
    *_WIDER,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}


def refuse_unless_sparse_reducible(tensor: torch.Tensor, op: Reduction) -> None:
    """Raise unless `op` can be done on a sparse tensor like `tensor`.

    Raises:
        UnsupportedCollective: it is no COO tensor on the CPU, or not SUM or AVG of numbers.
    """
    what = f"all_reduce on a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
    if tensor.device.type != "cpu" or tensor.layout is not torch.sparse_coo:
        raise UnsupportedCollective(
            what,
            why=f"its layout is {tensor.layout} on device '{tensor.device}'",
            fix="Convert it to sparse COO on the CPU, or to dense.",
        )
    if op not in (Reduction.SUM, Reduction.AVG) or tensor.dtype not in _DTYPES:
        raise UnsupportedCollective(
            f"{what}, reduction {op}",
            why="sparse tensors can be summed or averaged, of ordinary numbers",
            fix="Convert it to dense.",
        )


def all_reduce_sparse(operation: Operation, tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
    """Return the reduction of all ranks' sparse tensors, folded in the order of the ranks.

    Args:
        operation: entered by the caller; its signature has shape and number of sparse dimensions.
        tensor: permitted by `refuse_unless_sparse_reducible`.
        op: likewise.

    Raises:
        CollectiveMismatch: a rank sent what can't be part of such a tensor.
        CollectiveError: as from `Operation.wait`.
    """
    own = tensor.detach().coalesce()
    indices, values = own.indices().contiguous(), own.values().contiguous()
    mine = torch.tensor([indices.shape[1]])
    counts = {peer: torch.zeros(1, dtype=torch.int64) for peer in operation.others}
    arrivals = [operation.receive(peer, raw(count)) for peer, count in counts.items()]
    for peer in operation.others:
        for part in (mine, indices, values):
            operation.send(peer, raw(gathered(part)))
    operation.wait(arrivals)
    most = math.prod(own.shape[: own.sparse_dim()])
    parts = {operation.rank: (indices, values)}
    for peer, count in counts.items():
        entries = int(count)
        if not 0 <= entries <= most:
            raise _mismatch(operation, peer, f"it has {entries} entries where {most} have room")
        parts[peer] = (
            torch.empty(own.sparse_dim(), entries, dtype=torch.int64),
            torch.empty(entries, *values.shape[1:], dtype=values.dtype),
        )
        for part in parts[peer]:
            operation.receive(peer, raw(part.view(-1)))
    operation.finish()
    return _sum(operation, own, parts, op)


def _sum(
    operation: Operation,
    own: torch.Tensor,
    parts: dict[int, tuple[torch.Tensor, torch.Tensor]],
    op: Reduction,
) -> torch.Tensor:
    wide = _WIDER.get(own.dtype, own.dtype)
    total = None
    for rank in range(operation.size):
        indices, values = parts[rank]
        try:
            part = torch.sparse_coo_tensor(
                indices, values.to(wide), own.shape, check_invariants=True
            )
        except RuntimeError as error:
            raise _mismatch(operation, rank, f"its indices are out of range ({error})") from error
        total = part if total is None else total + part
    assert total is not None
    total = total.coalesce()
    if op is Reduction.AVG:
        rounding = "trunc" if own.dtype in _EXACT else None
        total.values().div_(operation.size, rounding_mode=rounding)
    return total.to(own.dtype)


def _mismatch(operation: Operation, rank: int, why: str) -> CollectiveMismatch:
    label = operation.exchange.label(rank)
    return CollectiveMismatch(str(operation), ranks=(rank,), why=f"{label}: {why}")
