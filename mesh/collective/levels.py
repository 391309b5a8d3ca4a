"""Operations of a group on several hosts: in shared memory inside each, and between one of each.

The *leader* of a host is the first of its ranks. What all ranks of a host have, it alone exchanges
with the other leaders, so that a network carries it once for each host and not for each rank.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import torch

from mesh.collective import host
from mesh.collective.host import Board
from mesh.collective.operation import Operation
from mesh.collective.reduction import Reduction, accumulator, average

__all__ = ["Hosts", "all_reduce", "barrier", "broadcast"]

GRACE_SECONDS = 0.5
"""How much longer than its leader a rank waits for it: whom the leader has missed, it tells."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hosts:
    """Which ranks run on one host.

    Attributes:
        board: the memory that the ranks of this host share; None if there is one alone.
        leader_of: for each rank the first rank of its host.
    """

    board: Board | None
    leader_of: tuple[int, ...]

    @property
    def leaders(self) -> tuple[int, ...]:
        """One rank of each host, in order."""
        return tuple(sorted(set(self.leader_of)))


def all_reduce(
    hosts: Hosts,
    operation: Operation,
    elements: torch.Tensor,
    op: Reduction,
    between: Callable[[Operation, torch.Tensor, Reduction], None],
) -> None:
    """Reduce inside each host, then between the leaders by `between`, and hand on the result.

    Partial results are of the type that contributions are accumulated in. They are folded in the
    order of the ranks of a host, and then of the leaders: the same at any time, on every rank.
    """
    total = elements.to(accumulator(elements.dtype, op))
    partial = Reduction.SUM if op is Reduction.AVG else op
    if hosts.board is not None:
        host.all_reduce(hosts.board, operation, total, partial)
    if operation.rank in hosts.leaders:
        between(operation.among(hosts.leaders), total, partial)
    if hosts.board is not None:
        host.broadcast(hosts.board, _patient(operation), total, 0)
    if op is Reduction.AVG:
        average(total, operation.size)
    if total is not elements:
        elements.copy_(total)


def broadcast(
    hosts: Hosts,
    operation: Operation,
    elements: torch.Tensor,
    root: int,
    between: Callable[[Operation, torch.Tensor, int], None],
) -> None:
    """Hand the root's elements to its host, from its leader to the others, and on from those."""
    board, first = hosts.board, hosts.leader_of[root]
    is_here = hosts.leader_of[operation.rank] == first
    if board is not None and is_here:
        host.broadcast(board, operation, elements, board.ranks.index(root))
    if operation.rank in hosts.leaders:
        between(operation.among(hosts.leaders), elements, hosts.leaders.index(first))
    if board is not None and not is_here:
        host.broadcast(board, _patient(operation), elements, 0)


def barrier(hosts: Hosts, operation: Operation, between: Callable[[Operation], None]) -> None:
    """Meet inside each host, then between the leaders, and inside each host again."""
    if hosts.board is not None:
        host.barrier(hosts.board, operation)
    if operation.rank in hosts.leaders:
        between(operation.among(hosts.leaders))
    if hosts.board is not None:
        host.barrier(hosts.board, _patient(operation))


def _patient(operation: Operation) -> Operation:
    patient = copy.copy(operation)
    patient.deadline += GRACE_SECONDS
    return patient
