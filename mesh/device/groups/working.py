"""What one member does for an operation of its group: its own ranks first, then with the others.

Contributions are folded in the order of a member's ranks and then of the members, in the type that
`mesh.collective` accumulates in: a result depends on the inputs alone, and is bitwise the same on
every rank. Between members it is what moves between ranks of ``torch.distributed``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from mesh import collective
from mesh.collective import Operation, Reduction, Signature
from mesh.collective.reduction import accumulator, average, reduce_into
from mesh.device.groups.wire import MAX_RANKS
from tensor_bridge import dtype_name
from transport import ProtocolError

__all__ = ["REDUCTIONS", "Call", "Ranks", "check_call", "contribution", "signature", "work"]

KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")

REDUCTIONS = {
    "sum": Reduction.SUM,
    "mean": Reduction.AVG,
    "min": Reduction.MIN,
    "max": Reduction.MAX,
}
"""The reductions of groups of devices, by the names that programs use."""

Tensors = Sequence[torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What was called.

    Attributes:
        kind: one of `KINDS`.
        op: one of `REDUCTIONS`; empty where nothing is reduced.
        root: the rank that a broadcast comes from; else 0.
    """

    kind: str
    op: str = ""
    root: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """Which member has which ranks.

    Attributes:
        of: for each member.
        index: this one.
    """

    of: tuple[tuple[int, ...], ...]
    index: int

    @property
    def own(self) -> tuple[int, ...]:
        """This member's."""
        return self.of[self.index]

    @property
    def count(self) -> int:
        """How many there are in all."""
        return sum(map(len, self.of))

    def member(self, rank: int) -> int:
        """Return who has `rank`."""
        return next(index for index, ranks in enumerate(self.of) if rank in ranks)


def check_call(kind: object, op: object, root: object) -> Call:
    """Return a call as a client writes it in a template.

    Raises:
        ProtocolError: it is none.
    """
    is_known = kind in KINDS and (op in REDUCTIONS if "reduce" in str(kind) else op == "")
    if not is_known or type(root) is not int or not 0 <= root < MAX_RANKS:
        raise ProtocolError("an operation of a group of devices", why="there is none such")
    return Call(str(kind), str(op), root)


def contribution(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of what a rank contributes, as `work` takes it."""
    # A tensor of one element counts as contiguous whatever its strides are, and a copy keeps them.
    return tensor.contiguous().view(-1).clone(memory_format=torch.contiguous_format)


def signature(call: Call, tensor: torch.Tensor) -> Signature:
    """Return what all members must agree on."""
    detail = call.op or (f"root {call.root}" if call.kind == "broadcast" else "")
    return Signature(call.kind, dtype_name(tensor.dtype), tensor.numel(), detail)


def work(call: Call, ranks: Ranks, operation: Operation | None, parts: Tensors) -> Tensors:
    """Return the results of this member's ranks.

    Args:
        call: what was called.
        ranks: of all members.
        operation: with the other members, entered by the caller; None if there are none.
        parts: what this member's ranks contribute, in their order, each one-dimensional and
            contiguous on its device. They are written to. Of a broadcast only the root's counts.

    Returns:
        one-dimensional tensors of the devices of `parts`.

    Raises:
        CollectiveError: as from `Operation.wait`.
    """
    match call.kind:
        case "all_reduce":
            return _all_reduce(REDUCTIONS[call.op], ranks, operation, parts)
        case "reduce_scatter":
            return _reduce_scatter(REDUCTIONS[call.op], ranks, operation, parts)
        case "all_gather":
            return _all_gather(ranks, operation, parts)
        case _:
            return _broadcast(call.root, ranks, operation, parts)


def _all_reduce(
    op: Reduction, ranks: Ranks, operation: Operation | None, parts: Tensors
) -> Tensors:
    partial, total = _folded(op, parts)
    if operation is not None:
        total = total.cpu()
        collective.all_reduce(operation, total, partial)
    if op is Reduction.AVG:
        average(total, ranks.count)
    return _spread(total.to(parts[0].dtype), parts)


def _reduce_scatter(
    op: Reduction, ranks: Ranks, operation: Operation | None, parts: Tensors
) -> Tensors:
    partial, total = _folded(op, parts)
    chunks = total.view(ranks.count, -1)
    out = chunks[list(ranks.own)].view(-1)
    if operation is not None:
        out = out.cpu()
        theirs = [chunks[list(each)].view(-1).cpu() for each in ranks.of]
        collective.reduce_scatter(operation, out, theirs, partial)
    if op is Reduction.AVG:
        average(out, ranks.count)
    mine = out.to(parts[0].dtype).view(len(parts), -1).unbind()
    return [one.to(part.device).clone() for one, part in zip(mine, parts, strict=True)]


def _all_gather(ranks: Ranks, operation: Operation | None, parts: Tensors) -> Tensors:
    # As bytes: not every type has kernels of its own.
    plain = [part.view(torch.uint8) for part in parts]
    nbytes = plain[0].numel()
    place = plain[0].device if operation is None else torch.device("cpu")
    whole = torch.empty(ranks.count, nbytes, dtype=torch.uint8, device=place)
    for rank, one in zip(ranks.own, plain, strict=True):
        whole[rank] = one
    if operation is not None:
        own = whole[list(ranks.own)].view(-1)
        found = [torch.empty(len(each) * nbytes, dtype=torch.uint8) for each in ranks.of]
        collective.all_gather(operation, found, own)
        for each, theirs in zip(ranks.of, found, strict=True):
            whole[list(each)] = theirs.view(len(each), nbytes)
    return _spread(whole.view(-1).view(parts[0].dtype), parts)


def _broadcast(root: int, ranks: Ranks, operation: Operation | None, parts: Tensors) -> Tensors:
    source = ranks.member(root)
    here = parts[ranks.own.index(root)] if source == ranks.index else parts[0]
    if operation is not None:
        here = here.cpu()
        collective.broadcast(operation, here.view(torch.uint8), source)
    return _spread(here, parts)


def _folded(op: Reduction, parts: Tensors) -> tuple[Reduction, torch.Tensor]:
    """Return what partial results are folded by, and that of `parts`."""
    partial = Reduction.SUM if op is Reduction.AVG else op
    kind = accumulator(parts[0].dtype, op)
    total = parts[0].to(kind)
    if len(parts) > 1:
        reduce_into(total, [total, *(part.to(total.device, kind) for part in parts[1:])], partial)
    return partial, total


def _spread(one: torch.Tensor, parts: Tensors) -> Tensors:
    """Return a copy of `one` for each of `parts`, on its device."""
    first = one.to(parts[0].device)
    return [first, *(one.to(part.device, copy=True) for part in parts[1:])]
