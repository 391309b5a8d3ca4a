"""Another backend among the ranks of one host, for tensors of some types of devices.

NCCL moves between the GPUs of a host what would have to go through the CPU's memory on the mesh. A
group whose options name it reduces with it inside each host; one rank of each then meets the others
on the mesh, and what comes out is handed on inside the host. Before all that, the ranks of a host
meet in their memory, where differing calls and missing ranks are known by name.

Which ranks are on one host is known from the memory that they share: where they share none, all of
it goes over the mesh. The other backend is trusted with what it is given: gloo, which proves no
identity, is bound to the loopback interface. It computes in the type of the elements.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from mesh import collective
from mesh.collective import (
    CollectiveError,
    Exchange,
    Operation,
    RankLost,
    Reduction,
    UnsupportedCollective,
    gathered,
    host,
    scatter_back,
)
from mesh.collective.host import Board
from mesh.collective.reduction import accumulator, average

__all__ = ["Inside", "backends_inside"]

DTYPES = frozenset(
    {
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
"""Element types that gloo and NCCL have in common. Others go over the mesh."""

_OPERATIONS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.AVG: dist.ReduceOp.SUM,  # divided once, at the end
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
}


class Inside:
    """One other backend among this rank and those of its host.

    Args:
        backend: torch's, formed of them; closed with this.
        board: the memory that they share.
        leader_of: for each rank of the group the first rank of its host.
    """

    def __init__(self, backend: Any, board: Board, leader_of: tuple[int, ...]) -> None:
        self._backend = backend
        self._board = board
        self._leader_of = leader_of
        self._leaders = tuple(sorted(set(leader_of)))
        self._process = os.getpid()

    def can_reduce(self, tensor: torch.Tensor, op: Reduction) -> bool:
        """Return whether the other backend knows the reduction, for elements of that type."""
        if op is Reduction.AVG and not tensor.is_floating_point():
            return False  # it would sum small integers in their own type, which is too small
        return op in _OPERATIONS and self.can_move(tensor)

    def can_move(self, tensor: torch.Tensor) -> bool:
        """Return whether the other backend knows the elements' type."""
        return tensor.dtype in DTYPES and tensor.layout is torch.strided

    def all_reduce(self, operation: Operation, tensor: torch.Tensor, op: Reduction) -> None:
        """Replace `tensor` by its reduction over all ranks of the group."""
        host.barrier(self._board, operation)
        dense = _dense(tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_OPERATIONS[op])
        self._do(operation, lambda: self._backend.allreduce([dense], options))
        if len(self._leaders) > 1:
            if operation.rank in self._leaders:
                self._all_reduce_between(operation, dense, op)
            self._hand_on(operation, dense, 0)
        elif op is Reduction.AVG:
            average(dense, operation.size)
        _keep(dense, tensor)

    def broadcast(self, operation: Operation, tensor: torch.Tensor, root: int) -> None:
        """Replace `tensor` by that of rank `root` of the group."""
        host.barrier(self._board, operation)
        dense = _dense(tensor)
        first = self._leader_of[root]
        is_here = self._leader_of[operation.rank] == first
        if is_here:
            self._hand_on(operation, dense, self._board.ranks.index(root))
        if len(self._leaders) > 1:
            if operation.rank in self._leaders:
                elements = gathered(dense)
                leaders = operation.among(self._leaders)
                collective.broadcast(leaders, elements, self._leaders.index(first))
                if not is_here:
                    scatter_back(elements, dense)
            if not is_here:
                self._hand_on(operation, dense, 0)
        if operation.rank != root:
            _keep(dense, tensor)

    def close(self) -> None:
        """Leave the ranks of this host, without waiting for anything.

        In a forked child nothing is done: the connections are the parent's.
        """
        if os.getpid() != self._process:
            return
        for name in ("abort", "shutdown"):  # which of them a backend has differs
            try:
                getattr(self._backend, name)()
            except (AttributeError, RuntimeError):
                continue
            return

    def _all_reduce_between(self, operation: Operation, dense: torch.Tensor, op: Reduction) -> None:
        """Reduce what each host has come to, as `mesh.collective.levels` does where it is alone."""
        elements = gathered(dense)
        total = elements.to(accumulator(dense.dtype, op))
        partial = Reduction.SUM if op is Reduction.AVG else op
        collective.all_reduce(operation.among(self._leaders), total, partial)
        if op is Reduction.AVG:
            average(total, operation.size)
        scatter_back(total.to(dense.dtype), dense)

    def _hand_on(self, operation: Operation, tensor: torch.Tensor, place: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = place
        options.rootTensor = 0
        self._do(operation, lambda: self._backend.broadcast([tensor], options))

    def _do(self, operation: Operation, call: Callable[[], Any]) -> None:
        """Do the part inside the host; an error of the other backend names the ranks it is from."""
        try:
            call().wait()
        except RuntimeError as error:
            failure = operation.exchange.failure
            if failure is not None:
                raise failure.during(str(operation), after=operation.elapsed()) from error
            places = self._board.lost()
            if not places:
                raise CollectiveError(
                    str(operation), after=operation.elapsed(), why=f"inside the host: {error}"
                ) from error
            ranks = tuple(self._board.ranks[place] for place in places)
            names = ", ".join(map(operation.exchange.label, ranks))
            raise RankLost(
                str(operation),
                ranks=ranks,
                after=operation.elapsed(),
                why=f"{names}: the process has ended or is stopped",
                fix="Leave the group and form a new one without it.",
            ) from error


def backends_inside(
    wanted: Mapping[str, str], exchange: Exchange, store: Store, timeout: timedelta
) -> dict[str, Inside]:
    """Form the other backends of a group, by types of devices; none where a rank is alone.

    Args:
        wanted: for types of devices the name of a backend, ``"nccl"`` or ``"gloo"``.
        exchange: of the group, formed.
        store: the group's, for the ranks to meet.
        timeout: of the group.
    """
    hosts = exchange.hosts
    board = exchange.board if hosts is None else hosts.board
    if not wanted or board is None:
        return {}
    leader_of = (0,) * exchange.size if hosts is None else hosts.leader_of
    made: dict[str, Inside] = {}
    for device, name in wanted.items():
        # Names of groups repeat in a store when a group is left and formed again.
        life = store.add(f"mesh/inside/{device}/{exchange.rank}", 1)
        own = PrefixStore(f"mesh/inside/{device}/{board.ranks[0]}/{life}", store)
        backend = _MAKERS[name](own, board.place, board.layout.size, timeout)
        made[device] = Inside(backend, board, leader_of)
    return made


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    maker: Any = dist.ProcessGroupGloo
    options = maker._Options()
    options._devices = [maker.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return maker(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    maker: Any = getattr(dist, "ProcessGroupNCCL", None)
    if maker is None:
        raise UnsupportedCollective("a group with NCCL inside hosts", why="this torch has no NCCL")
    options = maker.Options()
    options._timeout = timeout
    return maker(store, rank, size, options)


_MAKERS: dict[str, Callable[[Store, int, int, timedelta], Any]] = {"gloo": _gloo, "nccl": _nccl}


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in row order, as numbers: a contiguous tensor may owe them a sign."""
    return tensor.detach().contiguous().resolve_neg()


def _keep(dense: torch.Tensor, tensor: torch.Tensor) -> None:
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)
    else:
        torch.autograd.graph.increment_version(tensor)
