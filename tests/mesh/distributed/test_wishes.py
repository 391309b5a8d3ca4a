"""What users of collectives elsewhere have complained of, each a test under its row's number.

Those that other files have: A04, A14, A24, A31 and A34 in `test_processes`, A05 in `test_exchange`
and `test_group`, A06, A08, A23, A27, A32, A33 and H03 in `test_programs`, A12 and A15 in
`test_group`. Ranks are threads, among an exchange in memory where nodes add nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ReduceOp

from mesh.collective import CollectiveError, CollectiveTimeout, UnsupportedCollective
from mesh.distributed import ProcessGroupMesh
from tensor_bridge.lanes.shared.host import unavailable
from tests.mesh.collective.exchange_memory import MemoryNetwork, outcomes, run_ranks
from tests.mesh.distributed.nodes import loopback_node, process_group


class Ranks:
    """Groups over an exchange in memory, which copies nothing before it is received."""

    def __init__(self, *, shared: bool) -> None:
        self._box_bytes = 4096 if shared else None
        self._networks: list[MemoryNetwork] = []
        self._groups: list[ProcessGroupMesh] = []

    def __call__(self, size: int, *, timeout: float = 10.0) -> list[ProcessGroupMesh]:
        network = MemoryNetwork(size, box_bytes=self._box_bytes)
        limit = timedelta(seconds=timeout)
        made = [ProcessGroupMesh(each, dist.HashStore(), limit) for each in network.ranks]
        self._networks.append(network)
        self._groups += made
        return made

    def close(self) -> None:
        for group in self._groups:
            group.shutdown()
        for network in self._networks:
            network.close()


@pytest.fixture(params=["messages", "host"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(shared=request.param == "host")
    yield made
    made.close()


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


# -- who is awaited


@pytest.mark.parametrize("way", ["host", "quic"])
def test_a01_a_timeout_says_what_was_awaited_from_whom_and_blames_nobody_else(way: str) -> None:
    if way == "host" and unavailable() is not None:
        pytest.skip(str(unavailable()))
    with ExitStack() as stack:
        nodes = [stack.enter_context(loopback_node(shared_memory=way == "host")) for _ in range(3)]
        names = [node.endpoint.node_id.short for node in nodes]
        store, over = dist.HashStore(), threading.Event()
        groups = run_ranks(3, lambda rank: process_group(nodes[rank], store, rank, 3, name="job"))
        stack.callback(run_ranks, 3, lambda rank: groups[rank].shutdown())

        def body(rank: int) -> None:
            groups[rank].barrier().wait()
            if rank == 2:
                over.wait(10)
                return
            try:
                limit = timedelta(seconds=0.3 + rank)  # the other one hears of it from rank 0
                groups[rank].allreduce([torch.ones(1000)], None, limit).wait()
            finally:
                over.set()

        for rank, error in enumerate(outcomes(3, body)[:2]):
            assert isinstance(error, CollectiveTimeout)
            told = str(error)
            assert f"all_reduce #1 of group 'job' on rank {rank} after 0." in told
            assert f"rank 2 ({names[2]}) is still awaited" in told
            assert error.ranks == (2,)
            assert names[0] not in told
            assert names[1] not in told


def everything(group: ProcessGroupMesh, rank: int, size: int, limit: timedelta) -> dict[str, Any]:
    """Every operation of a group, in which rank 2 is needed by some."""
    x, joined = torch.ones(6), torch.ones(6 * size)
    every = [torch.ones(6) for _ in range(size)]
    out = torch.zeros(6)
    at_root = rank == 0
    equal = [1] * size

    def of(kind: Any, **fields: Any) -> Any:
        return options(kind, timeout=limit, **fields)

    return {
        "allreduce": lambda: group.allreduce([x], of(c10d.AllreduceOptions)),
        "coalesced": lambda: group.allreduce_coalesced([x], of(c10d.AllreduceCoalescedOptions)),
        "reduce": lambda: group.reduce([x], of(c10d.ReduceOptions, rootRank=0)),
        "broadcast": lambda: group.broadcast([x], of(c10d.BroadcastOptions, rootRank=2)),
        "allgather": lambda: group.allgather([every], [x], of(c10d.AllgatherOptions)),
        "all_gather_single": lambda: group.all_gather_single(joined, x, of(c10d.AllgatherOptions)),
        "gather": lambda: group.gather([every] if at_root else [], [x], of(c10d.GatherOptions)),
        "scatter": lambda: group.scatter([out], [], of(c10d.ScatterOptions, rootRank=2)),
        "reduce_scatter": lambda: group.reduce_scatter(
            [out], [every], of(c10d.ReduceScatterOptions)
        ),
        "reduce_scatter_single": lambda: group.reduce_scatter_single(
            out, joined, of(c10d.ReduceScatterOptions)
        ),
        "alltoall": lambda: group.alltoall(every, every, of(c10d.AllToAllOptions)),
        "all_to_all_single": lambda: group.all_to_all_single(
            torch.empty(size), torch.ones(size), equal, equal, of(c10d.AllToAllOptions)
        ),
        "barrier": lambda: group.barrier(of(c10d.BarrierOptions)),
        "sparse": lambda: group.allreduce([torch.eye(3).to_sparse()], of(c10d.AllreduceOptions)),
    }


OPERATIONS = tuple(
    everything(ProcessGroupMesh.__new__(ProcessGroupMesh), 0, 3, timedelta(seconds=1))
)


@pytest.mark.parametrize("name", OPERATIONS)
def test_h04_every_operation_takes_a_time_limit_and_names_who_is_missing(
    ranks: Ranks, name: str
) -> None:
    groups, limit = ranks(3, timeout=60), timedelta(seconds=0.2)

    def body(rank: int) -> None:
        if rank < 2:
            everything(groups[rank], rank, 3, limit)[name]().wait()

    began = time.monotonic()
    errors = [error for error in outcomes(3, body) if error is not None]
    assert time.monotonic() - began < 5
    assert errors, "rank 2 is not needed"
    for error in errors:
        assert isinstance(error, CollectiveTimeout)
        assert error.ranks == (2,)
        assert "rank 2 (node-2) is still awaited" in str(error)


def test_h04_without_one_of_its_own_it_has_the_groups(ranks: Ranks) -> None:
    (group,) = ranks(1, timeout=7)
    unset = timedelta(milliseconds=-1)  # as torch has it
    for name, call in everything(group, 0, 1, unset).items():
        if name not in ("broadcast", "scatter"):  # whose root is another
            assert 6 < call().deadline - time.monotonic() <= 7, name


# -- layouts


def strided(rank: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Views that may be read and that all have the same twelve elements."""
    rows = (torch.arange(12) + 100 * rank).to(dtype).view(3, 4)
    apart = torch.zeros(3, 8, dtype=dtype)
    apart[:, ::2] = rows
    return {
        "contiguous": rows,
        "columns": apart[:, ::2],
        "transposed": rows.t().contiguous().t(),
        "flipped": rows.flip(0, 1).flip(0, 1),
        "channels_last": rows.view(1, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "conjugated": torch.complex(rows.float(), -rows.float()).conj().imag,
    }


READ = {
    "expanded": lambda rank: torch.full((1, 3), rank + 1.0).expand(4, 3),
    "unfolded": lambda rank: (torch.arange(6.0) * (rank + 1)).unfold(0, 3, 1),
    "a place for all": lambda rank: torch.tensor(rank + 1.0).expand(12),
}


@pytest.mark.parametrize("layout", strided(0))
def test_a07_every_layout_is_read_and_written_as_a_contiguous_one(
    ranks: Ranks, layout: str
) -> None:
    groups = ranks(3)
    plain = [strided(rank)["contiguous"].flatten() for rank in range(3)]

    def body(rank: int) -> list[torch.Tensor]:
        group, mine = groups[rank], lambda: strided(rank)[layout]
        out = [strided(9)[layout] for _ in range(3)]
        summed, reduced, spread, part = mine(), mine(), mine(), strided(9)[layout]
        group.allreduce([summed]).wait()
        group.reduce([reduced], options(c10d.ReduceOptions, rootRank=rank * 0)).wait()
        group.broadcast([spread], options(c10d.BroadcastOptions, rootRank=1)).wait()
        given = [[strided(each)[layout] for each in range(3)]] if rank == 2 else []
        group.scatter([part], given, options(c10d.ScatterOptions, rootRank=2)).wait()
        group.allgather([out], [mine()]).wait()
        there = [strided(9)[layout] for _ in range(3)]
        group.gather([there] if rank == 0 else [], [mine()], c10d.GatherOptions()).wait()
        found = [summed, spread, part, *out, *([reduced, *there] if rank == 0 else [])]
        return [each.flatten() for each in found]

    sums = plain[0] + plain[1] + plain[2]
    for rank, found in enumerate(run_ranks(3, body)):
        expected = [sums, plain[1], plain[rank], *plain, *([sums, *plain] if rank == 0 else [])]
        assert all(map(torch.equal, found, [e.float() for e in expected]))


@pytest.mark.parametrize("make", READ.values(), ids=READ)
def test_a07_elements_in_one_place_are_read_and_never_written(
    ranks: Ranks, make: Callable[[int], torch.Tensor]
) -> None:
    groups = ranks(2)
    plain = [make(rank).clone() for rank in range(2)]

    def body(rank: int) -> list[torch.Tensor]:
        group, there = groups[rank], 1 - rank

        def room(count: int = 1) -> list[torch.Tensor]:
            return [torch.zeros_like(plain[0]) for _ in range(count)]

        every, gathered, part, swapped, (summed,), (come,) = (
            room(2), room(2), room(), room(2), room(), room(),
        )  # fmt: skip
        group.allgather([every], [make(rank)]).wait()
        group.gather([gathered] if rank == 0 else [], [make(rank)], c10d.GatherOptions()).wait()
        group.scatter(part, [[make(0), make(1)]] if rank == 0 else [], c10d.ScatterOptions()).wait()
        group.alltoall(swapped, [make(rank)] * 2).wait()
        group.reduce_scatter([summed], [[make(rank)] * 2]).wait()
        spread = make(0) if rank == 0 else room()[0]
        group.broadcast([spread], c10d.BroadcastOptions()).wait()
        sent = group.send([make(rank)], there, 0)
        group.recv([come], there, 0).wait()
        sent.wait()
        found = [*every, *(gathered if rank == 0 else plain), *part, *swapped, summed, spread, come]

        into = make(rank)
        for call in (
            lambda: group.allreduce([into]),
            lambda: group.reduce([into], c10d.ReduceOptions()),
            lambda: group.broadcast([into], options(c10d.BroadcastOptions, rootRank=there)),
            lambda: group.allgather([[into, room()[0]]], [plain[rank]]),
            lambda: group.scatter([into], [], options(c10d.ScatterOptions, rootRank=there)),
            lambda: group.alltoall([into, room()[0]], room(2)),
            lambda: group.reduce_scatter([into], [room(2)]),
            lambda: group.recv([into], there, 0),
            lambda: group.all_to_all_single(into, into, [], []),
        ):
            with pytest.raises(UnsupportedCollective, match="share one place in memory"):
                call()
        return found

    for rank, found in enumerate(run_ranks(2, body)):
        expected = [
            *plain, *plain, plain[rank], *plain, plain[0] + plain[1], plain[0], plain[1 - rank],
        ]  # fmt: skip
        assert all(map(torch.equal, found, expected))


def test_a07_steps_that_cross_without_meeting_are_no_hindrance(ranks: Ranks) -> None:
    (group,) = ranks(1)
    crossing = torch.arange(12.0).as_strided((2, 3), (3, 2))  # 0 2 4, 3 5 7
    group.allreduce([crossing], ReduceOp.AVG).wait()
    meeting = torch.arange(12.0).as_strided((3, 3), (2, 2))
    with pytest.raises(UnsupportedCollective, match="share one place"):
        group.allreduce([meeting])


def test_a09_slices_of_a_chunked_tensor_are_told_apart(ranks: Ranks) -> None:
    groups = ranks(3)
    whole = torch.arange(24.0).view(6, 4)

    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = whole.chunk(3)[rank]
        assert rank == 0 or mine.storage_offset() > 0
        out = torch.zeros(8, 12).t()[:6, ::2]  # whose chunks have offsets, and steps
        groups[rank].allgather([list(out.chunk(3))], [mine]).wait()
        come = torch.zeros(2, 4)
        sent = groups[rank].send([mine], (rank + 1) % 3, 1)
        groups[rank].recv([come], (rank - 1) % 3, 1).wait()
        sent.wait()
        return out, come

    for rank, (out, come) in enumerate(run_ranks(3, body)):
        assert torch.equal(out, whole)
        assert torch.equal(come, whole.chunk(3)[(rank - 1) % 3])


# -- tensors that share memory


def test_a10_outputs_that_share_memory_are_refused_by_their_numbers(ranks: Ranks) -> None:
    group = ranks(3)[0]
    x, t, u = torch.ones(4), torch.zeros(4), torch.zeros(4)
    long, whole = torch.zeros(10), torch.zeros(4, 6)
    for outs, which in (
        ([t] * 3, "0 and 1"),
        ([t, u, t], "0 and 2"),
        ([t, u, u.view(2, 2)], "1 and 2"),
        ([long[:4], u, long[3:7]], "0 and 2"),
        ([whole[:, 1], u, whole.view(-1)[1:20:6]], "0 and 2"),
    ):
        for call in (
            lambda outs=outs: group.allgather([outs], [x]),
            lambda outs=outs: group.gather([outs], [x], c10d.GatherOptions()),
            lambda outs=outs: group.alltoall(outs, [x] * 3),
        ):
            with pytest.raises(ValueError, match=f"outputs {which} share memory"):
                call()


def numbers(rank: int, size: int, length: int) -> torch.Tensor:
    """What each rank has for each: ten times its own number, and the other's."""
    return torch.cat([torch.full((length,), 10.0 * rank + peer) for peer in range(size)])


@pytest.mark.parametrize("length", [3, 5000])
def test_a10_what_is_sent_from_where_results_go_is_sent_as_it_was(
    ranks: Ranks, length: int
) -> None:
    size = 3
    groups = ranks(size)

    def body(rank: int) -> dict[str, torch.Tensor]:
        group, found = groups[rank], {}

        def parts() -> list[torch.Tensor]:
            return list(numbers(rank, size, length).chunk(size))

        x = numbers(rank, size, length)
        group.all_to_all_single(x, x, [], []).wait()
        found["all to all in place"] = x
        x = parts()
        group.alltoall(x, x).wait()
        found["lists in place"] = torch.cat(x)
        x = parts()
        group.alltoall(x, x[::-1]).wait()
        found["lists reversed"] = torch.cat(x)
        for shift in range(size):
            at = (rank + shift) % size
            x = numbers(rank, size, length)
            group.reduce_scatter_single(x.chunk(size)[at], x).wait()
            found[f"reduced to part {shift}"] = x.chunk(size)[at]
            x = parts()
            group.reduce_scatter([x[at]], [x]).wait()
            found[f"reduced to list's part {shift}"] = x[at]
            x = torch.zeros(size * length)
            mine = x.chunk(size)[at].fill_(rank)
            group.all_gather_single(x, mine).wait()
            found[f"gathered from part {shift}"] = x
            x = torch.zeros(size * length)
            mine = x.chunk(size)[at].fill_(rank)
            group.allgather([list(x.chunk(size))], [mine]).wait()
            found[f"gathered from list's part {shift}"] = x
            x = list(torch.zeros(size * length).chunk(size))
            mine = x[shift].fill_(rank)
            group.gather([x] if rank == 0 else [], [mine], c10d.GatherOptions()).wait()
            if rank == 0:
                found[f"gathered at one from part {shift}"] = torch.cat(x)
            x = [torch.full((length,), float(each)) for each in range(size)]
            group.scatter([x[shift]], [x] if rank == 0 else [], c10d.ScatterOptions()).wait()
            found[f"scattered to part {shift}"] = x[shift]
        return found

    def spread(of: Callable[[int], float]) -> torch.Tensor:
        return torch.cat([torch.full((length,), of(peer)) for peer in range(size)])

    for rank, found in enumerate(run_ranks(size, body)):
        for name, got in found.items():
            if "reversed" in name:
                expected = spread(lambda peer, rank=rank: 10.0 * peer + size - 1 - rank)
            elif "place" in name:
                expected = spread(lambda peer, rank=rank: 10.0 * peer + rank)
            elif "reduced" in name:
                expected = torch.full((length,), 10.0 * sum(range(size)) + size * rank)
            elif "scattered" in name:
                expected = torch.full((length,), float(rank))
            else:
                expected = spread(float)
            assert torch.equal(got, expected), name


def test_a06_a_part_that_a_rank_keeps_has_one_length(ranks: Ranks) -> None:
    group = ranks(2)[0]
    with pytest.raises(UnsupportedCollective, match=r"part 0.* 1 elements in the input, and 3 in"):
        group.all_to_all_single(torch.empty(4), torch.ones(4), [3, 1], [1, 3])


# -- types and sizes


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a13_complex_numbers_are_moved_and_summed_and_have_no_order(
    ranks: Ranks, dtype: torch.dtype
) -> None:
    groups = ranks(2)

    def of(rank: int) -> torch.Tensor:
        return torch.complex(torch.arange(6.0), -torch.arange(6.0) - rank).to(dtype).view(2, 3).t()

    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        group, there, summed, conjugated = groups[rank], of(rank), of(rank), of(rank).conj()
        group.broadcast([there], c10d.BroadcastOptions()).wait()
        group.allreduce([summed]).wait()
        group.allreduce([conjugated]).wait()
        chunks = [of(rank), of(rank)]
        for op in (ReduceOp.MAX, ReduceOp.MIN):
            for call in (
                lambda op=op: group.allreduce(
                    [of(rank)], options(c10d.AllreduceOptions, reduceOp=op)
                ),
                lambda op=op: group.reduce([of(rank)], options(c10d.ReduceOptions, reduceOp=op)),
                lambda op=op: group.reduce_scatter(
                    [of(rank)], [chunks], options(c10d.ReduceScatterOptions, reduceOp=op)
                ),
            ):
                with pytest.raises(UnsupportedCollective, match=rf"M[AI][XN] of {dtype}"):
                    call()
        return there, summed, conjugated

    for there, summed, conjugated in run_ranks(2, body):
        assert torch.equal(there, of(0))
        assert torch.equal(summed, of(0) + of(1))
        assert torch.equal(conjugated, (of(0) + of(1)).conj())


def test_a16_some_ranks_have_nothing_to_send_or_to_get(ranks: Ranks) -> None:
    groups, sizes = ranks(4), [0, 3, 0, 5]

    def of(rank: int, count: int) -> torch.Tensor:
        return torch.full((count, 2), float(rank))

    def body(rank: int) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
        group = groups[rank]
        gathered = [of(9, count) for count in sizes]
        root = options(c10d.GatherOptions, rootRank=2)  # which has nothing itself
        group.gather([gathered] if rank == 2 else [], [of(rank, sizes[rank])], root).wait()
        part = of(9, sizes[rank])
        given = [[of(each, sizes[each]) for each in range(4)]] if rank == 2 else []
        group.scatter([part], given, options(c10d.ScatterOptions, rootRank=2)).wait()
        swapped = [of(9, sizes[rank]) for _ in range(4)]
        group.alltoall(swapped, [of(rank, sizes[each]) for each in range(4)]).wait()
        return gathered if rank == 2 else [], part, swapped

    for rank, (gathered, part, swapped) in enumerate(run_ranks(4, body)):
        if rank == 2:
            assert all(map(torch.equal, gathered, [of(r, sizes[r]) for r in range(4)]))
        assert torch.equal(part, of(rank, sizes[rank]))
        assert all(map(torch.equal, swapped, [of(each, sizes[rank]) for each in range(4)]))


def test_a23_a_group_that_was_aborted_refuses_at_once(ranks: Ranks) -> None:
    groups = ranks(2)
    groups[0].abort()
    for group in groups:
        began = time.monotonic()
        with pytest.raises(CollectiveError, match=r"abort|left"):
            group.barrier().wait()
        assert time.monotonic() - began < 1
