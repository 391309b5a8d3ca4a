"""The c10d face over an exchange in memory: values, layouts, Work and Future."""

from __future__ import annotations

import copy
import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from mesh import threads
from mesh.collective import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    UnsupportedCollective,
)
from mesh.distributed import ProcessGroupMesh, engine
from tests.mesh.collective.exchange_memory import MemoryNetwork, outcomes, run_ranks

SIZES = [1, 2, 3, 4, 5]
DTYPES = [torch.float32, torch.bool, torch.bfloat16, torch.int64, torch.complex64]
LAYOUTS = {
    "contiguous": lambda base: base,
    "transposed": lambda base: base.transpose(0, 3),
    "column": lambda base: base[..., 1],
    "channels_last": lambda base: base.contiguous(memory_format=torch.channels_last),
    "offset": lambda base: base.reshape(-1)[5:17],
    "every other": lambda base: base.reshape(-1)[1::2],
    "scalar": lambda base: base.reshape(-1)[7],
    "empty": lambda base: base[:, :, :0],
}


class Ranks:
    """The groups of all ranks, left at the end of the test."""

    def __init__(self) -> None:
        self.groups: list[ProcessGroupMesh] = []
        self.network = MemoryNetwork(1)

    def __call__(
        self, size: int, *, timeout: float = 10.0, eager: bool = True, **kinds: Any
    ) -> list[Any]:
        self.network = MemoryNetwork(size, eager=eager, **kinds)
        limit = timedelta(seconds=timeout)
        self.groups = [ProcessGroupMesh(x, dist.HashStore(), limit) for x in self.network.ranks]
        return self.groups


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    for group in made.groups:
        group.shutdown()


def base_of(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5) % (11 + rank)
    return (drawn > 4) if dtype is torch.bool else drawn.to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_layout_through_every_collective(ranks, size, dtype, layout) -> None:
    groups = ranks(size)
    inputs = [layout(base_of(rank, dtype)) for rank in range(size)]
    sources = [tensor.clone() for tensor in inputs]
    total = torch.stack(sources).any(0) if dtype is torch.bool else torch.stack(sources).sum(0)

    def fresh(rank: int) -> torch.Tensor:
        return layout(base_of(rank, dtype))

    def empty() -> list[torch.Tensor]:
        return [layout(torch.zeros_like(base_of(0, dtype))) for _ in range(size)]

    def body(rank: int) -> dict[str, Any]:
        group, found = groups[rank], {}
        found["allreduce"] = fresh(rank)
        group.allreduce([found["allreduce"]]).wait()
        found["reduce"] = fresh(rank)
        group.reduce([found["reduce"]], _options(dist.ReduceOptions(), rootRank=size - 1)).wait()
        found["broadcast"] = fresh(rank)
        root = dist.BroadcastOptions()
        root.rootRank = size - 1
        group.broadcast([found["broadcast"]], root).wait()
        found["allgather"] = empty()
        group.allgather([found["allgather"]], [fresh(rank)]).wait()
        found["gather"] = empty()
        outs = [found["gather"]] if rank == 0 else []
        group.gather(outs, [fresh(rank)], dist.GatherOptions()).wait()
        found["scatter"] = empty()[0]
        chunks = [[fresh(r) for r in range(size)]] if rank == 0 else []
        group.scatter([found["scatter"]], chunks, dist.ScatterOptions()).wait()
        found["alltoall"] = empty()
        group.alltoall(found["alltoall"], [fresh((rank + r) % size) for r in range(size)]).wait()
        found["reduce_scatter"] = empty()[0]
        group.reduce_scatter([found["reduce_scatter"]], [[fresh(rank)] * size]).wait()
        if size > 1:
            found["recv"] = empty()[0]
            sent = group.send([fresh(rank)], (rank + 1) % size, 5)
            group.recv([found["recv"]], (rank - 1) % size, 5).wait()
            sent.wait()
        return found

    for rank, found in enumerate(run_ranks(size, body)):
        assert torch.equal(found["allreduce"], total)
        assert torch.equal(found["reduce"], total if rank == size - 1 else sources[rank])
        assert torch.equal(found["broadcast"], sources[size - 1])
        assert all(map(torch.equal, found["allgather"], sources))
        if rank == 0:
            assert all(map(torch.equal, found["gather"], sources))
        assert torch.equal(found["scatter"], sources[rank])
        expected = [sources[(r + rank) % size] for r in range(size)]
        assert all(map(torch.equal, found["alltoall"], expected))
        assert torch.equal(found["reduce_scatter"], total)
        if size > 1:
            assert torch.equal(found["recv"], sources[(rank - 1) % size])


@pytest.mark.parametrize("shape", [(1, 0, 2), (0,)])
@pytest.mark.parametrize("size", SIZES)
def test_zero_elements_through_the_single_tensor_forms(ranks, size, shape) -> None:
    groups = ranks(size)
    joined = (shape[0] * size, *shape[1:])

    def body(rank: int) -> list[torch.Tensor]:
        group, mine = groups[rank], torch.empty(shape)
        outs = [torch.empty(joined), torch.empty(joined), torch.empty(shape), torch.empty(joined)]
        group.all_gather_single(outs[0], mine).wait()
        group._allgather_base(outs[1], mine).wait()
        group.reduce_scatter_single(outs[2], torch.empty(joined)).wait()
        group.alltoall_base(outs[3], torch.empty(joined), [], [], dist.AllToAllOptions()).wait()
        group.allreduce_coalesced([outs[0], outs[2]], dist.AllreduceCoalescedOptions()).wait()
        one = torch.ones(1)  # the control: the group still works, and what has elements arrives
        group.allreduce([one]).wait()
        return [*outs, one]

    for outs in run_ranks(size, body):
        assert [out.shape for out in outs[:4]] == [joined, joined, shape, joined]
        assert outs[4].item() == size


@pytest.mark.parametrize("size", SIZES)
def test_single_tensor_forms(ranks, size) -> None:
    groups = ranks(size)
    inputs = [torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(size)]

    def body(rank: int) -> dict[str, torch.Tensor]:
        group = groups[rank]
        joined = torch.empty(size * 2, 3)
        older = torch.empty(3, size * 2).t()
        summed, alike = torch.empty(2, 3), torch.empty(2, 3)
        group.all_gather_single(joined, inputs[rank]).wait()
        group._allgather_base(older, inputs[rank]).wait()
        whole = torch.cat([inputs[rank]] * size)
        group.reduce_scatter_single(summed, whole).wait()
        group._reduce_scatter_base(alike, whole, dist.ReduceScatterOptions()).wait()
        both = [torch.empty(size * 2, 3), torch.empty(size)]
        parts = [inputs[rank], torch.tensor([float(rank)])]
        group.allgather_into_tensor_coalesced(both, parts).wait()
        table = [[torch.empty(2, 3), torch.empty(1)] for _ in range(size)]
        group.allgather_coalesced(table, parts).wait()
        assert all(torch.equal(table[r][0], inputs[r]) for r in range(size))
        assert [row[1].item() for row in table] == list(range(size))
        assert both[1].tolist() == list(range(size))
        return {"joined": joined, "older": older, "both": both[0], "sum": summed, "alike": alike}

    for found in run_ranks(size, body):
        for name in ("joined", "older", "both"):
            assert torch.equal(found[name], torch.cat(inputs))
        assert torch.equal(found["sum"], sum(inputs))
        assert torch.equal(found["alike"], sum(inputs))


IN_PLACE: dict[str, Callable[[Any, torch.Tensor, slice], Any]] = {
    "all_to_all_single": lambda group, x, part: group.all_to_all_single(x, x, [], []),
    "all_to_all": lambda group, x, part: group.alltoall(list(x.chunk(3)), list(x.chunk(3))),
    "all_gather_single": lambda group, x, part: group.all_gather_single(x, x[part]),
    "all_gather": lambda group, x, part: group.allgather([list(x.chunk(3))], [x[part]]),
    "reduce_scatter_single": lambda group, x, part: group.reduce_scatter_single(x[part], x),
    "reduce_scatter": lambda group, x, part: group.reduce_scatter([x[part]], [list(x.chunk(3))]),
    "gather": lambda group, x, part: group.gather(
        [list(x.chunk(3))] if group.rank() == 0 else [], [x[part]], dist.GatherOptions()
    ),
    "scatter": lambda group, x, part: group.scatter(
        [x[part]], [list(x.chunk(3))] if group.rank() == 0 else [], dist.ScatterOptions()
    ),
}


@pytest.mark.parametrize("kind", [{"eager": False}, {"slow": 0}, {"box_bytes": 4096}], ids=str)
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_sent_may_lie_where_results_go(ranks, name, kind) -> None:
    """A part of one tensor is the input, and the rest or all of it the output, or the reverse."""
    chunk = 1024  # several boxes
    inputs = [torch.arange(3.0 * chunk) + 4096 * rank for rank in range(3)]

    def results(first: int, is_apart: bool) -> list[torch.Tensor]:
        groups = ranks(3, **kind)

        def body(rank: int) -> torch.Tensor:
            x, at = inputs[rank].clone(), first + rank * chunk // 2
            part = slice(at % (2 * chunk), at % (2 * chunk) + chunk)
            group = Apart(groups[rank], x) if is_apart else groups[rank]
            IN_PLACE[name](group, x, part).wait()
            return x

        return run_ranks(3, body)

    for first in (0, chunk // 2, chunk):
        assert all(map(torch.equal, results(first, False), results(first, True)))


class Apart:
    """A group that takes copies of the inputs, where they lie in the memory of a tensor."""

    def __init__(self, group: Any, whole: torch.Tensor) -> None:
        self.group = group
        self.whole = whole

    def __getattr__(self, name: str) -> Any:
        def call(outs: Any, inputs: Any, *rest: Any) -> Any:
            return getattr(self.group, name)(outs, copy.deepcopy(inputs), *rest)

        return self.group.rank if name == "rank" else call


def test_all_to_all_single_with_uneven_and_empty_splits(ranks) -> None:
    groups = ranks(3)
    splits = [[0, 3, 1], [2, 0, 0], [1, 1, 4]]  # splits[r][p]: rows from rank r to rank p

    def body(rank: int) -> torch.Tensor:
        rows = [torch.full((splits[rank][p], 2), 10.0 * rank + p) for p in range(3)]
        out = torch.empty(sum(splits[r][rank] for r in range(3)), 2)
        incoming = [splits[r][rank] for r in range(3)]
        groups[rank].all_to_all_single(out, torch.cat(rows), incoming, splits[rank]).wait()
        return out

    for rank, out in enumerate(run_ranks(3, body)):
        expected = [torch.full((splits[r][rank], 2), 10.0 * r + rank) for r in range(3)]
        assert torch.equal(out, torch.cat(expected))


@pytest.mark.parametrize("sizes", [[0, 3, 0, 5], [0, 0, 0, 0]])
def test_some_ranks_without_elements(ranks, sizes) -> None:
    groups = ranks(4)

    def body(rank: int) -> list[torch.Tensor]:
        outs = [torch.full((n, 2), -1.0) for n in sizes]
        groups[rank].allgather([outs], [torch.full((sizes[rank], 2), float(rank))]).wait()
        return outs

    for outs in run_ranks(4, body):
        assert [out.tolist() for out in outs] == [[[r, r]] * n for r, n in enumerate(sizes)]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, 9), (ReduceOp.AVG, 3), (ReduceOp.PRODUCT, 20), (ReduceOp.MIN, 2),
        (ReduceOp.MAX, 5), (ReduceOp.BAND, 0), (ReduceOp.BOR, 7), (ReduceOp.BXOR, 5),
    ],
)  # fmt: skip
def test_reductions_by_their_torch_names(ranks, op, expected) -> None:
    groups = ranks(3)
    values = [2, 2, 5]
    options = dist.AllreduceOptions()
    options.reduceOp = op

    def body(rank: int) -> list[int]:
        one, two = torch.tensor([values[rank]]), torch.tensor([values[rank]])
        groups[rank].allreduce([one], options).wait()
        groups[rank].allreduce(two, op).wait()
        return [one.item(), two.item()]

    assert run_ranks(3, body) == [[expected, expected]] * 3


def test_unknown_reductions_are_refused_by_name(ranks) -> None:
    (group,) = ranks(1)
    options = dist.AllreduceOptions()
    options.reduceOp = dist._make_nccl_premul_sum(2.0)
    with pytest.raises(UnsupportedCollective, match="PREMUL_SUM"):
        group.allreduce([torch.ones(1)], options)
    with pytest.raises(UnsupportedCollective, match=r"MAX of torch\.complex64"):
        group.allreduce(torch.ones(1, dtype=torch.complex64), ReduceOp.MAX)


def test_arguments_that_cannot_work_are_refused_at_the_call(ranks) -> None:
    groups = ranks(3)
    group, x = groups[0], torch.ones(2)
    one = torch.empty(2)
    for call, words in [
        (lambda: group.allgather([[one] * 3], [x]), "outputs 0 and 1 share memory"),
        (lambda: group.allgather([[one, x]], [x]), "2 outputs for a group of 3"),
        (lambda: group.allreduce([x.expand(3, 2)]), "expand"),
        (lambda: group.allreduce([torch.ones(2, device="meta")]), "device 'meta'"),
        (lambda: group.all_gather_single(torch.empty(5), x), "has 5 elements"),
        (lambda: group.all_gather_single(torch.empty(6).int(), x), "different types"),
        (lambda: group.alltoall([x], [x]), "1 outputs for a group of 3"),
        (lambda: group.all_to_all_single(one, x, [], []), "don't divide"),
        (lambda: group.all_to_all_single(one, x, [1, 1, 1], [2, 0, 0]), "don't add up"),
        (lambda: group.reduce_scatter([one], [[x, x]]), "2 inputs"),
        (lambda: group.broadcast(x, 3), "ranks 0 to 2"),
        (lambda: group.send([x], 0, 1), "this rank itself"),
        (lambda: group.send([x], 7, 1), "ranks 0 to 2"),
        (lambda: group.recv([x], 1, -3), "tags are from 0"),
        (lambda: group.split_group([0, 0]), "a rank comes twice"),
        (lambda: group.split_group([0, 5]), "ranks 0 to 2"),
        (lambda: group.split_group([0, 1]), "no node to run it on"),
        (lambda: group.shrink([1]), "leave the group"),
        (lambda: group._register_on_completion_hook(print), "get_future"),
    ]:
        with pytest.raises(UnsupportedCollective, match=words):
            call()
    # Nothing of it has reached the other ranks, or put this one out of step.
    run_ranks(3, lambda rank: groups[rank].barrier().wait())


@pytest.mark.parametrize("eager", [True, False])
def test_tags_match_in_any_order_and_number(ranks, eager) -> None:
    groups = ranks(2, eager=eager)
    count = 40

    def body(rank: int) -> list[float]:
        group = groups[rank]
        if rank == 0:
            order = [*range(count), *range(count)]
            sends = [group.send([torch.tensor([t + i / 4])], 1, t) for i, t in enumerate(order)]
            for work in sends:
                work.wait()
            return []
        outs = [(t, torch.empty(1)) for _ in range(2) for t in reversed(range(count))]
        works = [group.recv([out], 0, t) for t, out in outs]
        assert all(work.wait() for work in works)
        assert works[0]._source_rank() == 0
        return [out.item() for _, out in outs]

    found = run_ranks(2, body)[1]
    first = [t + t / 4 for t in reversed(range(count))]
    second = [t + (t + count) / 4 for t in reversed(range(count))]
    assert found == first + second


@pytest.mark.parametrize("eager", [True, False])
def test_receives_from_any_rank_tell_from_which(ranks, eager) -> None:
    groups = ranks(3, eager=eager)

    def body(rank: int) -> list[tuple[int, float]]:
        group = groups[rank]
        if rank:
            for value in (rank, rank + 0.5):
                group.send([torch.tensor([float(value)])], 0, 7).wait()
            return []
        found = []
        for _ in range(4):
            out = torch.empty(1)
            work = group.recv_anysource([out], 7)
            work.wait()
            found.append((work.source_rank(), out.item()))
        return found

    found = run_ranks(3, body)[0]
    assert sorted(found) == [(1, 1.0), (1, 1.5), (2, 2.0), (2, 2.5)]
    for source in (1, 2):  # in order of each sender
        assert [value for rank, value in found if rank == source] == [source, source + 0.5]


def test_a_receive_from_any_rank_times_out_naming_all(ranks) -> None:
    group = ranks(3, timeout=0.1)[0]
    with pytest.raises(CollectiveTimeout, match="still awaited"):
        group.recv_anysource([torch.empty(1)], 0).wait()
    with pytest.raises(UnsupportedCollective, match="there is no other"):
        ranks(1)[0].recv_anysource([torch.empty(1)], 0)


def test_a_timeout_leaves_a_record_of_what_went_before(ranks, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MESH_FLIGHT_DIR", str(tmp_path))
    groups = ranks(3, timeout=0.2)

    def body(rank: int) -> None:
        groups[rank].allreduce([torch.ones(2)]).wait()
        if rank != 1:
            groups[rank].barrier()  # queued behind nothing, awaited by nobody
            groups[rank].broadcast([torch.ones(3)], 0).wait()

    found = outcomes(3, body)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2  # one for each rank that timed out, for all its operations
    for rank, file in zip((0, 2), files, strict=True):
        assert str(file) in str(found[rank])
        assert file.stat().st_mode & 0o077 == 0
        record = json.loads(file.read_text())
        assert (record["rank"], record["size"], record["awaited_ranks"]) == (rank, 3, [1])
        assert (record["last_issued"], record["last_completed"]) == (2, 0)
        first, second, third = record["operations"]
        assert first["operation"] == "all_reduce(float32, 2 elements, SUM)"
        assert [one["state"] for one in (first, second, third)] == ["done", "failed", "queued"]
        assert "rank 1 (node-1)" in second["error"]
    assert groups[0].flight_record()["last_issued"] == 2


def test_the_record_is_bounded_and_a_full_disk_hides_no_error(ranks, monkeypatch) -> None:
    monkeypatch.setenv("MESH_FLIGHT_DIR", "/nonexistent")
    group = ranks(2, timeout=0.05)[0]
    assert group.flight_record()["operations"] == []
    for _ in range(300):
        group.barrier()
    assert len(group.flight_record()["operations"]) == 256
    with pytest.raises(CollectiveTimeout, match="rank 1"):
        group.barrier().wait()


@pytest.mark.parametrize("name_all", [True, False])
def test_a_monitored_barrier_names_who_is_missing(ranks, name_all) -> None:
    groups = ranks(4)

    def body(rank: int) -> None:
        groups[rank].monitored_barrier(timedelta(seconds=5), wait_all_ranks=name_all)
        if rank in (0, 2):
            groups[rank].monitored_barrier(timedelta(seconds=0.2), name_all)

    found = outcomes(4, body)
    assert found[1] is None
    assert found[3] is None
    named = "Ranks 1, 3" if name_all else "Rank 1"
    assert f"{named} failed to pass monitoredBarrier" in str(found[0])
    assert "rank 3 (node-3)" in str(found[0])
    assert found[0].ranks == found[2].ranks == (1, 3)
    assert "Rank 2 successfully reached monitoredBarrier, but received errors" in str(found[2])
    with pytest.raises(CollectiveTimeout, match="Rank 0 timed out in monitoredBarrier after 0 ms"):
        groups[0].monitored_barrier(timedelta(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.complex64])
@pytest.mark.parametrize("size", SIZES)
def test_sparse_tensors_are_summed_and_averaged(ranks, size, dtype) -> None:
    groups = ranks(size)

    def of(rank: int) -> torch.Tensor:
        dense = torch.zeros(5, 4, dtype=dtype)
        dense[rank % 5] = rank + 1
        dense[4, rank % 4] += 2
        return dense.to_sparse(1)  # rows, each dense

    def body(rank: int) -> list[torch.Tensor]:
        found = []
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            tensor = of(rank) if rank != 1 else torch.zeros(5, 4, dtype=dtype).to_sparse(1)
            groups[rank].allreduce([tensor], op).wait()
            found.append(tensor.to_dense())
        return found

    parts = [of(rank).to_dense() for rank in range(size) if rank != 1]
    total = torch.stack(parts).sum(0).to(dtype)
    mean = total.div(size, rounding_mode=None if dtype != torch.int32 else "trunc")
    for found in run_ranks(size, body):
        assert torch.equal(found[0], total)
        assert torch.allclose(found[1], mean.to(dtype))


def test_sparse_tensors_of_different_shapes_or_ops_are_refused(ranks) -> None:
    groups = ranks(2)
    one = torch.eye(3).to_sparse()
    with pytest.raises(UnsupportedCollective, match="summed or averaged"):
        groups[0].allreduce([one], ReduceOp.MAX)
    with pytest.raises(UnsupportedCollective, match="sparse"):
        groups[0].broadcast(one, 0)
    found = outcomes(
        2, lambda rank: groups[rank].allreduce([torch.eye(3 + rank).to_sparse()]).wait()
    )
    assert all(isinstance(error, CollectiveMismatch) for error in found)
    assert "shape (4, 4)" in str(found[0])


def test_coalesced_operations_are_one_work(ranks) -> None:
    groups = ranks(2)

    def body(rank: int) -> list[torch.Tensor]:
        group, tensors = groups[rank], [torch.full((2,), rank + i) for i in range(3)]
        group._start_coalescing(torch.device("cpu"))
        for tensor in tensors:
            group.allreduce([tensor])
        work = group._end_coalescing(torch.device("cpu"))
        assert work.wait()
        assert len(work.result()) == 3
        group._start_coalescing(torch.device("cpu"))
        assert group._end_coalescing(torch.device("cpu")).wait()  # nothing is over at once
        return tensors

    for found in run_ranks(2, body):
        assert [tensor.tolist() for tensor in found] == [[1, 1], [3, 3], [5, 5]]


def test_one_of_several_coalesced_operations_fails_them_all(ranks) -> None:
    groups = ranks(2, timeout=0.2)
    groups[0]._start_coalescing(torch.device("cpu"))
    groups[0].allreduce([torch.ones(1)])
    groups[0].send([torch.ones(1)], 1, 3)
    with pytest.raises(CollectiveTimeout, match="rank 1"):
        groups[0]._end_coalescing(torch.device("cpu")).wait()


def test_a_block_that_raises_coalesces_no_further(ranks) -> None:
    (group,) = ranks(1)
    held = []

    def start_one() -> None:
        tensor = torch.ones(4096)
        held.append(weakref.ref(tensor))
        group.allreduce([tensor]).wait()

    def fail() -> None:
        with dist._coalescing_manager(group, torch.device("cpu")):
            start_one()
            assert held[0]() is not None  # it is collected
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    dist.distributed_c10d._world.pg_coalesce_state.pop(group)  # which torch forgets
    start_one()
    gc.collect()
    assert [one() for one in held] == [None, None]


# Work and Future.


def test_the_future_gives_the_callers_tensors(ranks) -> None:
    groups = ranks(2)

    def body(rank: int) -> bool:
        tensor = torch.ones(3)
        work = groups[rank].allreduce([tensor])
        (found,) = work.get_future().wait()
        doubled = work.get_future().then(lambda future: future.value()[0] * 2).wait()
        return found is tensor and work.result()[0] is tensor and doubled.tolist() == [4.0] * 3

    assert run_ranks(2, body) == [True, True]


def test_after_wait_the_future_is_complete(ranks) -> None:
    groups = ranks(2)

    def body(rank: int) -> bool:
        for _ in range(300):
            work = groups[rank].allreduce([torch.ones(1)])
            work.wait()
            if not (work.is_completed() and work.get_future().done() and work.is_success()):
                return False
        return True

    assert run_ranks(2, body) == [True, True]


def test_a_failed_future_raises(ranks) -> None:
    groups = ranks(2)
    work = groups[0].allreduce([torch.ones(1)], None, timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match=r"rank 1 .* still awaited"):
        work.get_future().wait()
    with pytest.raises(CollectiveTimeout, match="rank 1"):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), CollectiveTimeout)
    chained = work.get_future().then(lambda future: future.value())
    with pytest.raises(RuntimeError, match="awaited"):
        chained.wait()


def test_callbacks_may_wait_for_further_collectives(ranks) -> None:
    """As the quantization hooks do: one nested collective in the callback of each of many."""
    groups = ranks(2)

    def body(rank: int) -> list[float]:
        group = groups[rank]

        def again(future: torch.futures.Future[Any]) -> torch.Tensor:
            (tensor,) = future.value()
            (found,) = group.allreduce([tensor]).get_future().wait()
            return found

        # In lockstep, since nested ones are issued in the order of completion.
        return [
            group.allreduce([torch.tensor([float(i)])]).get_future().then(again).wait().item()
            for i in range(50)
        ]

    assert run_ranks(2, body) == [[4.0 * i for i in range(50)]] * 2


def test_a_waiter_completes_what_it_waits_for(ranks, monkeypatch) -> None:
    """Callbacks that block may hold every completer: their own waits must still end."""
    monkeypatch.setattr(threads, "MAX_COMPLETERS", 1)
    groups = ranks(2)

    def body(rank: int) -> float:
        group, tensor = groups[rank], torch.ones(1)
        first = group.allreduce([tensor]).get_future()
        return first.then(lambda _: group.allreduce([tensor]).wait() and tensor.item()).wait()

    assert run_ranks(2, body) == [4.0, 4.0]


def test_wait_with_a_limit_of_its_own_leaves_the_operation_alone(ranks) -> None:
    groups = ranks(2)
    tensor = torch.ones(1)
    work = groups[0].allreduce([tensor])
    with pytest.raises(CollectiveTimeout, match=r"wait for all_reduce #0.*goes on"):
        work.wait(timedelta(seconds=0.05))
    groups[1].allreduce([torch.ones(1)]).wait()
    assert work.wait()
    assert tensor.item() == 2


def test_results_of_inference_tensors_and_of_leaves(ranks) -> None:
    groups = ranks(2)

    def body(rank: int) -> tuple[list[float], list[float], int]:
        with torch.inference_mode():
            inferred = torch.ones(3).view(3, 1).t()[:, ::2]
            groups[rank].allreduce([inferred]).wait()
            plain = torch.ones(3)
            groups[rank].allreduce([plain]).wait()
            assert plain.tolist() == [2.0] * 3
        leaf = torch.ones(2, requires_grad=True)
        groups[rank].allreduce([leaf]).wait()
        return inferred.flatten().tolist(), leaf.tolist(), leaf._version

    for inferred, leaf, version in run_ranks(2, body):
        assert inferred == [2.0, 2.0]
        assert leaf == [2.0, 2.0]
        assert version > 0


def test_no_thread_writes_to_tensors_with_gradients_on(
    ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, seen = ranks(2), []
    back = engine.scatter_back

    def watched(elements: torch.Tensor, tensor: torch.Tensor) -> None:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        back(elements, tensor)

    monkeypatch.setattr(engine, "scatter_back", watched)
    with torch.inference_mode():
        inferred = torch.ones(3)
    for into in (torch.zeros(3), inferred):
        got = groups[1].recv([into], 0, 5)
        groups[0].send([torch.full((3,), 7.0)], 1, 5).wait()
        got.wait()
        assert into.tolist() == [7.0] * 3
    assert seen == [(False, False), (False, True)]


def test_operations_run_in_the_order_of_issue(ranks) -> None:
    groups = ranks(2)

    def body(rank: int) -> list[float]:
        tensor = torch.ones(1)
        works = [groups[rank].allreduce([tensor]) for _ in range(10)]
        works[-1].wait()
        assert all(work.is_success() for work in works)
        return tensor.tolist()

    assert run_ranks(2, body) == [[1024.0]] * 2


def test_results_are_freed_with_their_last_holder(ranks) -> None:
    groups = ranks(2)

    def body(rank: int) -> list[weakref.ref[torch.Tensor]]:
        seen = []
        for _ in range(5):
            outs = [torch.empty(100_000) for _ in range(2)]
            work = groups[rank].allgather([outs], [torch.ones(100_000)])
            work.wait()
            work.get_future().value()
            seen += map(weakref.ref, outs)
        return seen

    found = run_ranks(2, body)
    # What has done the work lets go of it a moment after it has told.
    deadline = time.monotonic() + 5
    while any(reference() is not None for references in found for reference in references):
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)


# Failures.


def test_mismatch_breaks_the_group_for_both(ranks) -> None:
    groups = ranks(2)

    def body(rank: int) -> None:
        x = torch.ones(4 + rank)
        groups[rank].allreduce([x]).wait()

    for error in outcomes(2, body):
        assert isinstance(error, CollectiveMismatch)
        assert "all_reduce(float32, 5 elements, SUM)" in str(error)
    with pytest.raises(CollectiveMismatch):
        groups[0].barrier().wait()


def test_message_of_another_size_names_both(ranks) -> None:
    groups = ranks(2)

    def body(rank: int) -> None:
        if rank == 0:
            groups[0].send([torch.ones(10)], 1, 3)
        else:
            groups[1].recv([torch.ones(5)], 0, 3).wait()

    error = outcomes(2, body)[1]
    assert isinstance(error, CollectiveMismatch)
    assert "recv from rank 0 (node-0) with tag 3" in str(error)
    assert "10 elements" in str(error)
    assert "5 elements" in str(error)


def test_receive_times_out_and_names_the_sender(ranks) -> None:
    groups = ranks(2, timeout=0.2)
    with pytest.raises(CollectiveTimeout, match=r"recv from rank 1 .* with tag 9") as caught:
        groups[0].recv([torch.ones(1)], 1, 9).wait()
    assert caught.value.ranks == (1,)
    assert "rank 1 (node-1) is still awaited" in str(caught.value)


def test_set_timeout_holds_from_the_next_operation(ranks) -> None:
    groups = ranks(2, timeout=60)
    groups[0].set_timeout(timedelta(seconds=0.1))
    began = time.monotonic()
    with pytest.raises(CollectiveTimeout):
        groups[0].barrier().wait()
    assert time.monotonic() - began < 3


def test_abort_ends_what_is_in_flight_everywhere(ranks) -> None:
    groups = ranks(2, timeout=60)
    work = groups[0].allreduce([torch.ones(1)])
    queued = groups[0].barrier()
    groups[1].abort()
    for each in (work, queued):
        with pytest.raises(GroupAborted, match=r"rank 1 .* aborted"):
            each.wait()
    with pytest.raises(GroupAborted, match="has left the group"):
        groups[1].barrier()
    with pytest.raises(GroupAborted, match="has left the group"):
        groups[1].send([torch.ones(1)], 0, 0)


def test_shutdown_finishes_what_is_queued(ranks) -> None:
    groups = ranks(2)

    def body(rank: int) -> list[float]:
        tensor = torch.ones(1)
        for _ in range(5):
            groups[rank].allreduce([tensor])
        groups[rank].shutdown()
        return tensor.tolist()

    assert run_ranks(2, body) == [[32.0]] * 2


def test_shutdown_is_bounded_and_leaves_no_thread(ranks) -> None:
    groups = ranks(2, timeout=60)
    before = threading.active_count()
    work = groups[0].allreduce([torch.ones(1)])
    began = time.monotonic()
    groups[0].shutdown()
    assert time.monotonic() - began < 5
    with pytest.raises(CollectiveError):
        work.wait()
    assert threading.active_count() <= before


def test_who_it_is(ranks) -> None:
    group = ranks(3)[1]
    group._set_group_name("named")
    assert (group.rank(), group.size(), group.name()) == (1, 3, "mesh")
    assert (group.getRank(), group.getSize(), group.getBackendName()) == (1, 3, "mesh")
    assert group.group_name == "named"
    assert group._device_types == [torch.device("cpu")]


def _options(options: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(options, name, value)
    return options
