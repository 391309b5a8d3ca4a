"""What programs have met with on other backends: sizes, forks, idle times, stuck and failing ranks.

Ranks are threads, each with a node of its own, in shared memory or over QUIC.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from mesh.collective import GroupAborted, RankFailed
from mesh.distributed import ProcessGroupMesh, steps
from tensor_bridge.lanes.shared.host import unavailable
from tests.mesh.collective.exchange_memory import outcomes, run_ranks
from tests.mesh.distributed.nodes import LOOPBACK, LoopbackNode, loopback_node, process_group
from transport import EndpointConfig

MIB = 1 << 20


class Ranks:
    """Nodes, and groups among them."""

    def __init__(self, stack: ExitStack, *, shared: bool) -> None:
        self.stack = stack
        self.shared = shared
        self.nodes: list[LoopbackNode] = []

    def form(
        self,
        size: int,
        *,
        timeout: float = 10.0,
        config: EndpointConfig = LOOPBACK,
        first: int = 0,
        job: str = "test",
    ) -> list[ProcessGroupMesh]:
        """Form a group of `size` nodes, from the node `first` on."""
        while len(self.nodes) < first + size:
            node = loopback_node(config=config, shared_memory=self.shared)
            self.nodes.append(self.stack.enter_context(node))
        return self.among(self.nodes[first : first + size], timeout=timeout, job=job)

    def among(
        self, nodes: list[LoopbackNode], *, timeout: float = 10.0, job: str = "test"
    ) -> list[ProcessGroupMesh]:
        store, size = dist.HashStore(), len(nodes)
        groups = run_ranks(
            size, lambda r: process_group(nodes[r], store, r, size, timeout=timeout, job=job)
        )
        self.stack.callback(run_ranks, size, lambda r: groups[r].shutdown())
        return groups


@pytest.fixture(params=["host", "quic"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if request.param == "host" and unavailable() is not None:
        pytest.skip(str(unavailable()))
    with ExitStack() as stack:
        yield Ranks(stack, shared=request.param == "host")


def total(group: ProcessGroupMesh, value: float = 1.0) -> float:
    tensor = torch.tensor([value])
    group.allreduce([tensor]).wait()
    return tensor.item()


@pytest.mark.parametrize(
    "nbytes", [8 * MIB, pytest.param(200 * MIB, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_all_to_all_with_large_uneven_splits(ranks: Ranks, nbytes: int) -> None:
    groups = ranks.form(4, timeout=120.0)
    weights = torch.rand(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    splits = (weights / weights.sum() * nbytes).long()
    parts = [
        [_noise(4 * source + to, int(splits[source, to])) for to in range(4)] for source in range(4)
    ]

    def body(rank: int) -> bool:
        out = torch.empty(int(splits[:, rank].sum()), dtype=torch.uint8)
        sent, came = splits[rank].tolist(), splits[:, rank].tolist()
        groups[rank].all_to_all_single(out, torch.cat(parts[rank]), came, sent).wait()
        return torch.equal(out, torch.cat([parts[source][rank] for source in range(4)]))

    assert run_ranks(4, body, timeout=200) == [True] * 4


def _noise(seed: int, nbytes: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), generator=made, dtype=torch.uint8)


def test_gather_of_a_transposed_numpy_array(ranks: Ranks) -> None:
    groups = ranks.form(2)

    def body(rank: int) -> list[Any]:
        array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3) + 10 * rank
        outs = [torch.zeros(3, 2) for _ in range(2)] if rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        groups[rank].gather([outs] if outs else [], [torch.from_numpy(array.T)], options).wait()
        return [out.tolist() for out in outs]

    assert run_ranks(2, body)[0] == [
        [[0, 3], [1, 4], [2, 5]],
        [[10, 13], [11, 14], [12, 15]],
    ]


def test_ranks_abort_what_one_never_joins_and_go_on_without_it(ranks: Ranks) -> None:
    groups = ranks.form(4, timeout=60.0)
    stuck = groups[2].recv([torch.ones(1)], 0, 5)  # and never comes to the collective
    others = [0, 1, 3]
    works = [groups[rank].allreduce([torch.ones(1)]) for rank in others]
    began = time.monotonic()
    run_ranks(3, lambda each: groups[others[each]].abort())
    for work in (*works, stuck):
        with pytest.raises(GroupAborted):
            work.wait()
    assert time.monotonic() - began < 2
    again = ranks.among([ranks.nodes[rank] for rank in others])
    assert run_ranks(3, lambda rank: total(again[rank])) == [3.0] * 3


def test_two_jobs_on_one_host_do_not_meet(ranks: Ranks) -> None:
    pairs = [
        ranks.form(2, config=EndpointConfig(), first=2 * job, job=f"job-{job}") for job in (0, 1)
    ]
    found = run_ranks(4, lambda each: total(pairs[each // 2][each % 2], 10.0 ** (each // 2)))
    assert found == [2.0, 2.0, 20.0, 20.0]


def test_after_an_idle_time_all_goes_on(ranks: Ranks) -> None:
    config = EndpointConfig(bind="127.0.0.1:0", idle_timeout=0.5, liveness=0.3)
    groups = ranks.form(2, config=config)
    assert run_ranks(2, lambda rank: total(groups[rank])) == [2.0] * 2
    time.sleep(1.2)  # it is time itself that is tested
    assert run_ranks(2, lambda rank: total(groups[rank])) == [2.0] * 2
    sent = torch.zeros(1)
    work = groups[1].recv([sent], 0)
    groups[0].send([torch.ones(1)], 1).wait()
    work.wait()
    assert sent.item() == 1


def test_repeated_all_gathers_keep_memory_flat(ranks: Ranks) -> None:
    groups, part = ranks.form(2), torch.ones(1 * MIB // 4)
    outs = [torch.empty(2 * MIB // 4) for _ in range(2)]

    def turns(count: int) -> None:
        def body(rank: int) -> None:
            for _ in range(count):
                groups[rank].all_gather_single(outs[rank], part).wait()

        run_ranks(2, body)

    turns(10)
    gc.collect()
    before = _resident()
    turns(40)
    gc.collect()
    assert _resident() - before < 16 * MIB


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused_and_its_parent_goes_on(ranks: Ranks) -> None:
    groups = ranks.form(2)
    assert run_ranks(2, lambda rank: total(groups[rank])) == [2.0] * 2
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for call in (groups[0].barrier, lambda: groups[0].send([torch.ones(1)], 1)):
                try:
                    call()
                except GroupAborted as error:
                    os.write(writing, str(error.why).encode() + b"\n")
            groups[0].shutdown()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    assert said == ["it belongs to the process from which this one was forked"] * 2
    assert run_ranks(2, lambda rank: total(groups[rank])) == [2.0] * 2


def test_the_failure_of_a_rank_reaches_who_waits_for_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = ranks.form(3, timeout=60.0)
    read = steps.gathered

    def failing(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 7 and threading.current_thread().name == "fails":
            raise MemoryError("no room for 7")
        return read(tensor)

    monkeypatch.setattr(steps, "gathered", failing)

    def body(rank: int) -> None:
        options = dist.AllreduceOptions()
        options.asyncOp = False
        if rank == 1:
            threading.current_thread().name = "fails"
            time.sleep(0.1)  # the others wait by now
        groups[rank].allreduce([torch.ones(7)], options).wait()

    began = time.monotonic()
    errors = outcomes(3, body)
    assert time.monotonic() - began < 2
    assert isinstance(errors[1], MemoryError)
    for rank in (0, 2):
        assert isinstance(errors[rank], RankFailed)
        assert errors[rank].ranks == (1,)
        assert "MemoryError: no room for 7" in str(errors[rank])


def test_chains_of_forwards_in_opposite_directions(ranks: Ranks) -> None:
    groups, hops = ranks.form(3), 20
    chains = [(0, 1, 2), (2, 1, 0), (1, 2, 0)]

    def forward(rank: int, tag: int) -> float:
        chain = chains[tag]
        place, tensor = chain.index(rank), torch.zeros(1000)
        for turn in range(hops):
            if place == 0:
                tensor.fill_(turn + tag)
            else:
                groups[rank].recv([tensor], chain[place - 1], tag).wait()
            if place < 2:
                groups[rank].send([tensor], chain[place + 1], tag).wait()
        return tensor.mean().item()

    found = run_ranks(9, lambda each: forward(each // 3, each % 3))
    assert found == [float(hops - 1 + each % 3) for each in range(9)]


def test_several_groups_at_once_from_several_threads(ranks: Ranks) -> None:
    groups = [ranks.form(2), ranks.form(2), ranks.form(2)]
    turns = 30

    def body(each: int) -> float:
        rank, number = each % 2, each // 2
        tensor = torch.full((3000,), float(number + 1))
        for turn in range(turns):
            options = dist.AllreduceOptions()
            options.asyncOp = turn % 2 == 0
            options.reduceOp = dist.ReduceOp.AVG
            groups[number][rank].allreduce([tensor], options).wait()
        return tensor.mean().item()

    assert run_ranks(6, body) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_one_group_from_several_threads(ranks: Ranks) -> None:
    """By tags: collectives need one order, which is the program's to give."""
    (first, second), count = ranks.form(2), 4

    def body(each: int) -> float:
        tensor = torch.full((100,), float(each))
        if each < count:
            first.send([tensor], 1, each).wait()
        else:
            second.recv([tensor], 0, each - count).wait()
        return tensor.mean().item()

    assert run_ranks(2 * count, body) == [0.0, 1.0, 2.0, 3.0] * 2


def test_every_operation_has_a_deadline(ranks: Ranks) -> None:
    groups = ranks.form(2, timeout=3.0)
    work = groups[0].allreduce([torch.ones(1)], timeout=timedelta(seconds=0.2))
    assert work.deadline - time.monotonic() <= 0.2
    with pytest.raises(RuntimeError, match=r"all_reduce #0 .* rank 1 \("):
        work.wait()
    late = ranks.form(2, timeout=3.0)[0].recv([torch.ones(1)], 1)
    assert late.deadline - time.monotonic() <= 3.0
