"""The c10d face: a process group whose ranks talk over the mesh.

Method names and arguments are torch 2.13's, with the older names beside them. torch reaches the
group from Python and, for DistributedDataParallel and functional collectives, from C++, under two
sets of names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Never

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from mesh.collective import CollectiveTimeout, Exchange, Reduction, UnsupportedCollective
from mesh.collective.staging import STAGED
from mesh.distributed import steps
from mesh.distributed.engine import Engine
from mesh.distributed.forming import form_group
from mesh.distributed.inside import Inside, backends_inside
from mesh.distributed.options import Options
from mesh.distributed.steps import Step
from mesh.distributed.work import MeshWork

if TYPE_CHECKING:

    class _ProcessGroup:
        """What is used of torch's class, whose stubs give each method several signatures."""

        def __init__(self, rank: int, size: int) -> None: ...
else:
    from torch.distributed import ProcessGroup as _ProcessGroup

__all__ = ["BACKEND", "ProcessGroupMesh"]

BACKEND = "mesh"
"""The backend's name in ``init_process_group``."""

MONITOR_GRACE = timedelta(seconds=2)
"""How much longer than rank 0 the others stay in a monitored barrier, to hear from it."""

Tensor = torch.Tensor


class ProcessGroupMesh(_ProcessGroup):
    """A ``torch.distributed.ProcessGroup`` over an exchange of messages.

    Every operation runs in the order of its issue on a thread of the group, with a deadline.
    Tensors live on the CPU, or on a CUDA device; their layouts are free. Operations check their
    arguments at the call; what goes wrong later is raised by the work's ``wait()`` and by its
    future, and breaks the group: leave it with ``destroy_process_group`` and form a new one.

    Args:
        exchange: the group's messages; gives rank and size.
        store: the group's own store, handed out again by ``get_group_store``.
        timeout: default for one operation.
        options: what it was formed with; new groups of this one take them over.
    """

    def __init__(
        self,
        exchange: Exchange,
        store: Store,
        timeout: timedelta,
        options: Options | None = None,
    ) -> None:
        super().__init__(exchange.rank, exchange.size)
        self.options = options
        self._rank, self._size = exchange.rank, exchange.size
        self._store = store
        self._engine = Engine(exchange, timeout.total_seconds())
        try:
            asked = options.inside if options else {}
            self._inside = backends_inside(asked, exchange, store, timeout)
        except BaseException:
            self._engine.abort()
            raise
        self._name = exchange.group
        self._desc = "undefined"

    # Collectives that reduce.

    def allreduce(
        self, tensors: Tensor | Sequence[Tensor], opts: Any = None, timeout: timedelta | None = None
    ) -> MeshWork:
        """Replace each tensor by its reduction over all ranks."""
        tensors, op = _listed(tensors), _reduction(opts)
        inside = self._inside_for(tensors) if self._inside else None
        todo = [steps.all_reduce(tensor, op, inside) for tensor in tensors]
        return self._run("all_reduce", tensors, todo, opts, timeout)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> MeshWork:
        """Do as `allreduce`."""
        return self.allreduce(tensors, opts)

    def reduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
    ) -> MeshWork:
        """Replace each tensor of the root by its reduction over all ranks."""
        tensors, root = _listed(tensors), self._root(opts)
        kind = _reduction(opts if op is None else op)
        todo = [steps.reduce(tensor, root, kind) for tensor in tensors]
        return self._run("reduce", tensors, todo, opts, timeout)

    def reduce_scatter(
        self,
        outs: Tensor | Sequence[Tensor],
        chunks: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> MeshWork:
        """Write to each output the reduction over all ranks of their chunks for this rank."""
        lists = [chunks] if isinstance(outs, Tensor) else chunks
        outs, op = _listed(outs), _reduction(opts)
        pairs = zip(outs, lists, strict=True)
        todo = [steps.reduce_scatter(out, ins, op, self._rank, self._size) for out, ins in pairs]
        return self._run("reduce_scatter", outs, todo, opts, timeout)

    def reduce_scatter_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> MeshWork:
        """Write to `out` this rank's part of the reduction of `tensor`."""
        return self.reduce_scatter_single_coalesced([out], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = None
    ) -> MeshWork:
        """Do as `reduce_scatter_single`, for each pair."""
        op, pairs = _reduction(opts), zip(outs, tensors, strict=True)
        todo = [steps.reduce_scatter_single(out, tensor, op, self._size) for out, tensor in pairs]
        return self._run("reduce_scatter_single", list(outs), todo, opts)

    # Collectives that move.

    def broadcast(
        self, tensors: Tensor | Sequence[Tensor], opts: Any = None, timeout: timedelta | None = None
    ) -> MeshWork:
        """Replace each tensor by the root's."""
        tensors, root = _listed(tensors), self._root(opts)
        inside = self._inside_for(tensors)
        todo = [steps.broadcast(tensor, root, self._rank, inside) for tensor in tensors]
        return self._run("broadcast", tensors, todo, opts, timeout)

    def allgather(
        self,
        outs: Sequence[Any],
        tensors: Tensor | Sequence[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> MeshWork:
        """Fill the list of outputs of each tensor with the tensors of all ranks."""
        lists = [outs] if isinstance(tensors, Tensor) else list(outs)
        tensors = _listed(tensors)
        pairs = zip(lists, tensors, strict=True)
        todo = [steps.all_gather(out, one, self._rank, self._size) for out, one in pairs]
        return self._run("all_gather", outs, todo, opts, timeout)

    def allgather_coalesced(
        self, lists: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = None
    ) -> MeshWork:
        """Fill ``lists[r][i]`` with rank ``r``'s tensor ``i``."""
        by_tensor = list(zip(*lists, strict=True))
        pairs = zip(by_tensor, tensors, strict=True)
        todo = [steps.all_gather(outs, one, self._rank, self._size) for outs, one in pairs]
        return self._run("all_gather_coalesced", lists, todo, opts)

    def all_gather_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> MeshWork:
        """Fill `out` with the tensors of all ranks, one after the other."""
        return self.all_gather_single_coalesced([out], [tensor], opts)

    def all_gather_single_coalesced(
        self, outs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = None
    ) -> MeshWork:
        """Do as `all_gather_single`, for each pair."""
        pairs = zip(outs, tensors, strict=True)
        todo = [steps.all_gather_single(out, tensor, self._size) for out, tensor in pairs]
        return self._run("all_gather_single", list(outs), todo, opts)

    def gather(
        self,
        outs: Sequence[Any],
        tensors: Tensor | Sequence[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> MeshWork:
        """Fill the root's list of outputs with the tensors of all ranks."""
        lists = [outs] if isinstance(tensors, Tensor) else outs
        (tensor,) = _listed(tensors)
        root = self._root(opts)
        at_root = lists[0] if lists else None
        todo = [steps.gather(at_root, tensor, root, self._rank, self._size)]
        return self._run("gather", outs, todo, opts, timeout)

    def scatter(
        self,
        outs: Tensor | Sequence[Tensor],
        chunks: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> MeshWork:
        """Fill the output with the chunk that the root has for this rank."""
        lists = [chunks] if isinstance(outs, Tensor) else chunks
        outs, root = _listed(outs), self._root(opts)
        at_root = lists[0] if lists else None
        todo = [steps.scatter(outs[0], at_root, root, self._rank, self._size)]
        return self._run("scatter", outs, todo, opts, timeout)

    def alltoall(
        self,
        outs: Sequence[Tensor],
        chunks: Sequence[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> MeshWork:
        """Fill ``outs[r]`` with the chunk that rank ``r`` has for this rank."""
        todo = [steps.all_to_all(outs, chunks, self._rank, self._size)]
        return self._run("all_to_all", outs, todo, opts, timeout)

    def all_to_all_single(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> MeshWork:
        """Send parts of `tensor` to all ranks, and join what comes from them in `out`."""
        todo = [steps.all_to_all_single(out, tensor, out_splits, in_splits, self._rank, self._size)]
        return self._run("all_to_all_single", [out], todo, opts, timeout)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> MeshWork:
        """Complete once every rank has come here."""
        return self._run("barrier", [], [steps.barrier()], opts, timeout)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return once every rank has come here.

        ``torch.distributed.monitored_barrier`` refuses every backend but gloo: call this one, on
        the group itself.

        Args:
            timeout: for this call; the group's by default. Ranks other than 0 wait for rank 0 by
                `MONITOR_GRACE` longer.
            wait_all_ranks: let rank 0's message begin with all missing ranks, and not with the
                first alone; the error's ``ranks`` has all of them either way.

        Raises:
            CollectiveTimeout: on rank 0: ranks did not come in time, and the group is broken; or
                `timeout` is none.
            CollectiveError: on other ranks: rank 0 gave up.
        """
        if timeout is not None and timeout <= timedelta(0):
            raise CollectiveTimeout(
                f"monitored_barrier of group '{self._name}'",
                why=f"Rank {self._rank} timed out in monitoredBarrier after 0 ms",
                fix="Give it some time.",
            )
        limit = timeout or timedelta(seconds=self._engine.timeout)
        if self._rank != 0:  # which knows who is missing, and is to be the first to say so
            limit += MONITOR_GRACE
        todo = [steps.monitored_barrier(name_all=wait_all_ranks)]
        self._run("monitored_barrier", [], todo, None, limit).wait()

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Point to point.

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> MeshWork:
        """Send a tensor to rank `peer`. Messages of a tag arrive in order, those of two in any."""
        tensor = self._one(tensors, "send", peer, tag)
        return self._engine.send(tensor, peer, tag, steps.message(tensor, "send"))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> MeshWork:
        """Receive the next tensor of this tag from rank `peer`."""
        tensor = self._one(tensors, "recv", peer, tag)
        return self._engine.receive(tensor, peer, tag, steps.message(tensor, "recv"))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> MeshWork:
        """Receive the next tensor of this tag from any rank; ``source_rank`` tells which.

        Receives that name a rank come first where both would do.
        """
        tensor = self._one(tensors, "recv from any rank", None, tag)
        return self._engine.receive(tensor, None, tag, steps.message(tensor, "recv"))

    # Several operations as one work.

    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the operations that this thread starts, until `_end_coalescing`."""
        self._engine.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> MeshWork:
        """Return one work for all that were collected. They ran in order as ever."""
        return self._engine.end_coalescing()

    # Groups of groups.

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ProcessGroupMesh | None:
        """Form a group of some ranks of this one, over the same connections.

        Called by its members; others may, and get None.

        Args:
            ranks: this group's numbers of the members, in their order in the new one.
            timeout: of the new group; this one's by default.
            opts: options of the new group; this one's by default.
            group_name, group_desc: of the new group, the same on all members.
            device_types: taken for torch's sake; there is one backend for all.

        Raises:
            UnsupportedCollective: `ranks` repeat or are out of range.
            CollectiveError, AccessDenied: as from the forming of any group.
        """
        members = [self._member(rank, "split") for rank in ranks]
        if len(set(members)) != len(members):
            raise UnsupportedCollective(f"split into ranks {members}", why="a rank comes twice")
        if self._rank not in members:
            return None
        name = group_name or f"{self._name}:{','.join(map(str, members))}"
        store = PrefixStore(f"split/{name}", self._store)
        place = members.index(self._rank), len(members)
        return self._formed(store, *place, timeout, opts, name, group_desc)

    def merge_remote_group(
        self,
        store: Store,
        size: int,
        timeout: timedelta | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> ProcessGroupMesh:
        """Form a group with the ranks of other groups, all of which call this.

        Ranks of the new group are those of arrival at `store`.

        Args:
            store: one that all of them reach.
            size: number of ranks of the new group.
            timeout, group_name, group_desc: as for `split_group`.

        Raises:
            UnsupportedCollective: more ranks came than `size`.
            CollectiveError, AccessDenied: as from the forming of any group.
        """
        name = group_name or "merged"
        store = PrefixStore(f"merge/{name}", store)
        rank = store.add("mesh/arrivals", 1) - 1
        if rank >= size:
            raise UnsupportedCollective(
                f"merging into a group of {size} ranks", why=f"{rank + 1} have come"
            )
        return self._formed(store, rank, size, timeout, None, name, group_desc)

    splitGroup, mergeRemoteGroup = split_group, merge_remote_group  # noqa: N815

    def _formed(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta | None,
        opts: Options | None,
        name: str,
        desc: str | None,
    ) -> ProcessGroupMesh:
        options = opts or self.options
        if options is None:
            raise UnsupportedCollective(f"group '{name}'", why="there is no node to run it on")
        limit = timeout or timedelta(seconds=self._engine.timeout)
        exchange = form_group(
            options, store, group=name, rank=rank, size=size, timeout=limit.total_seconds()
        )
        group = ProcessGroupMesh(exchange, store, limit, options)
        group._set_group_name(name)
        group._set_group_desc(desc or self._desc)
        return group

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: ranks are connected since the group was formed."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: only its members take part in the forming of a group."""

    def flight_record(self) -> dict[str, Any]:
        """Return the last operations on this rank, as a timeout leaves them in a file.

        With sequence numbers, states and times; see `mesh.distributed.flight`.
        """
        return self._engine.flights.record()

    # The end.

    def abort(self) -> None:
        """Fail everything in flight, here and on the other ranks, and leave the group."""
        self._leave_inside()
        self._engine.abort()

    def shutdown(self) -> None:
        """Finish what is queued and leave the group; what takes longer than seconds is aborted."""
        self._engine.shutdown()
        self._leave_inside()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default for one operation, from the next one on."""
        self._engine.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # Who this is.

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def name(self) -> str:
        """Return the backend's name."""
        return BACKEND

    getRank, getSize, getBackendName, _get_backend_name = rank, size, name, name  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802  # C++ looks it up under this name
        """Return the group's name."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the group is for."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc  # noqa: N815
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> Store:
        """Return the store that the group was formed with."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        found = ["cpu", *STAGED] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(each) for each in found]

    def _get_backend(self, device: torch.device) -> ProcessGroupMesh:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._engine.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: numbers start at zero on every rank."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Return when every operation is over."""
        self._engine.wait_for_all()

    def _enable_collectives_timing(self) -> None:
        """Do nothing: works are always timed."""

    supports_splitting = True
    supports_coalescing = True
    supports_time_estimate = False
    supports_shrinking = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: tensors come from torch's own allocators."""
        return False

    def _run(
        self,
        name: str,
        result: Any,
        todo: Sequence[Step],
        opts: Any,
        timeout: timedelta | None = None,
    ) -> MeshWork:
        here = getattr(opts, "asyncOp", True) is False
        return self._engine.run(name, result, todo, _seconds(opts, timeout), here=here)

    def _inside_for(self, tensors: Sequence[Tensor]) -> Inside | None:
        if not self._inside or not tensors:
            return None
        return self._inside.get(tensors[0].device.type)

    def _leave_inside(self) -> None:
        for each in self._inside.values():
            each.close()

    def _root(self, opts: Any) -> int:
        root = opts if isinstance(opts, int) else opts.rootRank
        return self._member(root, "root")

    def _member(self, rank: int, what: str) -> int:
        if not 0 <= rank < self._size:
            raise UnsupportedCollective(
                f"{what} rank {rank}", why=f"group '{self._name}' has ranks 0 to {self._size - 1}"
            )
        return rank

    def _one(self, tensors: Sequence[Tensor], name: str, peer: int | None, tag: int) -> Tensor:
        if peer is None:
            if self._size == 1:
                raise UnsupportedCollective(name, why="there is no other")
        elif self._member(peer, name) == self._rank:
            raise UnsupportedCollective(f"{name} with rank {peer}", why="that is this rank itself")
        if not 0 <= tag < 1 << 63:
            raise UnsupportedCollective(f"{name} with tag {tag}", why="tags are from 0 to 2^63 - 1")
        if len(tensors) != 1:
            raise UnsupportedCollective(name, why=f"one tensor at a time, not {len(tensors)}")
        return tensors[0]


_REFUSED = {
    "_register_backend": "its one backend serves all devices that it can serve",
    "_register_on_completion_hook": "works have futures: use get_future().then()",
    "allocate_tensor": "tensors come from torch's own allocators",
    "shrink": "leave the group, and form one of the ranks that are left",
    "suspend": "a group without operations takes no time; leave it to give back its memory",
    "resume": "groups are not suspended",
    "memory_stats": "tensors come from torch's own allocators",
}
"""Methods of torch's process groups and backends that make no sense here, and why."""


def _refusal(method: str, why: str) -> Callable[..., Never]:
    def refuse(self: ProcessGroupMesh, *args: object, **kwargs: object) -> Never:
        raise UnsupportedCollective(f"{method} of a group with backend '{BACKEND}'", why=why)

    refuse.__name__ = method
    refuse.__doc__ = f"Refuse: {why}."
    return refuse


for _method, _why in _REFUSED.items():
    setattr(ProcessGroupMesh, _method, _refusal(_method, _why))


_RedOpType = dist.ReduceOp.RedOpType
_REDUCTIONS = {
    kind.value: Reduction(name)
    for name, kind in _RedOpType.__members__.items()
    if name in Reduction.__members__
}
"""By torch's numbers: its enumeration takes long to be looked up."""


def _listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _reduction(opts: Any) -> Reduction:
    """Return the reduction that a c10d argument names: an options object, a ReduceOp, or None."""
    kind = getattr(opts, "reduceOp", opts)
    kind = getattr(kind, "op", kind)  # ReduceOp wraps RedOpType
    if isinstance(kind, _RedOpType) and (known := _REDUCTIONS.get(kind.value)) is not None:
        return known
    name = "SUM" if kind is None or isinstance(kind, int) else str(kind).rpartition(".")[2]
    if name not in Reduction.__members__:
        raise UnsupportedCollective(
            f"reduction {name}", why=f"backend '{BACKEND}' has {', '.join(Reduction)}"
        )
    return Reduction(name)


def _seconds(opts: Any, timeout: timedelta | None) -> float | None:
    """Return the time limit of one call, or None for the group's. Unset ones are negative."""
    given = timeout if timeout is not None else getattr(opts, "timeout", None)
    seconds = given.total_seconds() if isinstance(given, timedelta) else 0.0
    return seconds if seconds > 0 else None
