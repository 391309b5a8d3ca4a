"""How ranks find out who runs on their host, and get the memory: in order, and when it fails."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mesh.collective import CollectiveMismatch, GroupAborted, RankLeft
from mesh.distributed import ProcessGroupMesh, hosting, neighbours
from tensor_bridge.lanes.shared.host import Facts, here, unavailable
from tests.mesh.collective.exchange_memory import outcomes, run_ranks
from tests.mesh.distributed.nodes import LoopbackNode, loopback_node, process_group

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


class Ranks:
    """Nodes, and a group among them at a time."""

    def __init__(self, stack: ExitStack, backend: str) -> None:
        self.stack = stack
        self.backend = backend
        self.nodes: list[LoopbackNode] = []

    def form(self, size: int, *, off: tuple[int, ...] = ()) -> list[ProcessGroupMesh]:
        while len(self.nodes) < size:
            self.nodes.append(self.stack.enter_context(loopback_node(backend=self.backend)))
        for rank, node in enumerate(self.nodes):
            node.shared_memory = rank not in off
        store = dist.HashStore()
        groups = run_ranks(size, lambda r: process_group(self.nodes[r], store, r, size))
        self.stack.callback(run_ranks, size, lambda r: groups[r].shutdown())
        return groups


@pytest.fixture(params=["asyncio", "trio"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(stack, request.param)


def shared(groups: list[ProcessGroupMesh]) -> list[bool]:
    return [group._engine.exchange.board is not None for group in groups]


def sums(groups: list[ProcessGroupMesh]) -> list[float]:
    def body(rank: int) -> float:
        opts = dist.AllreduceOptions()
        opts.asyncOp = rank % 2 == 0  # on the caller's thread, and on the group's
        tensor = torch.full((30_000,), float(rank + 1))
        groups[rank].allreduce([tensor], opts).wait()
        assert torch.equal(tensor, tensor[:1].expand(30_000))
        return float(tensor[0])

    return run_ranks(len(groups), body)


def test_one_host(ranks: Ranks) -> None:
    groups = ranks.form(3)
    assert shared(groups) == [True] * 3
    assert sums(groups) == [6.0] * 3
    assert not any(thread.name.startswith("mesh-done") for thread in threading.enumerate())


def test_one_that_shares_none_is_as_if_elsewhere(ranks: Ranks) -> None:
    groups = ranks.form(3, off=(1,))
    hosts = [group._engine.exchange.hosts for group in groups]
    assert [each.leader_of for each in hosts if each] == [(0, 1, 0)] * 3
    assert [each.board is not None for each in hosts if each] == [True, False, True]
    assert sums(groups) == [6.0] * 3
    groups = ranks.form(2, off=(0, 1))
    assert shared(groups) == [False] * 2
    assert groups[0]._engine.exchange.hosts is None
    assert sums(groups) == [3.0] * 2


def test_two_hosts(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    place = threading.local()

    def somewhere() -> Facts:
        found = here()
        return found._replace(boot=found.boot + place.host)

    monkeypatch.setattr(neighbours, "here", somewhere)
    form = process_group

    def form_there(node: Any, store: Any, rank: int, *arguments: Any) -> ProcessGroupMesh:
        place.host = b"b" if rank in (1, 2) else b"a"
        return form(node, store, rank, *arguments)

    monkeypatch.setitem(globals(), "process_group", form_there)
    groups = ranks.form(4)
    hosts = [group._engine.exchange.hosts for group in groups]
    assert [each.leader_of for each in hosts if each] == [(0, 1, 1, 0)] * 4
    assert [each.board.ranks for each in hosts if each and each.board] == [
        (0, 3), (1, 2), (1, 2), (0, 3)
    ]  # fmt: skip
    assert sums(groups) == [10.0] * 4

    def body(rank: int) -> list[float]:
        opts = dist.BroadcastOptions()
        found = []
        for opts.rootRank in range(4):
            tensor = torch.full((5,), float(rank))
            groups[rank].broadcast([tensor], opts).wait()
            found.append(float(tensor.mean()))
        groups[rank].barrier().wait()
        return found

    assert run_ranks(4, body) == [[0.0, 1.0, 2.0, 3.0]] * 4

    def mistake(rank: int) -> None:
        groups[rank].allreduce([torch.ones(2 + (rank == 2))]).wait()

    for error in outcomes(4, mistake):
        assert isinstance(error, CollectiveMismatch)
        assert "rank 2 (" in str(error)


@pytest.mark.parametrize("failing", ["join", "host"])
def test_a_rank_that_does_not_get_the_memory_leaves_all_without(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    real, count = hosting.map_segment, iter(range(10))

    def no_room(*arguments: Any) -> Any:
        if failing == "host" or next(count) == 0:
            raise OSError(24, "Too many open files")
        return real(*arguments)

    if failing == "host":
        monkeypatch.setattr(hosting, "make_segment", no_room)
        monkeypatch.setattr(neighbours, "MEETING_SECONDS", 0.3)  # the others wait for it in vain
    else:
        monkeypatch.setattr(hosting, "map_segment", no_room)
    with caplog.at_level(logging.WARNING, "quicmesh.collective"):
        groups = ranks.form(3)
    assert shared(groups) == [False] * 3
    assert sum("Too many open files" in each.getMessage() for each in caplog.records) == 1
    assert len(caplog.records) == 3
    assert sums(groups) == [6.0] * 3


@pytest.mark.attack
def test_who_does_not_know_the_secret_gets_nothing(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hosting.introduce

    async def guess(address: bytes, secret: bytes) -> Any:
        return await real(address, bytes(len(secret)))

    monkeypatch.setattr(neighbours, "MEETING_SECONDS", 0.3)
    monkeypatch.setattr(hosting, "introduce", guess)
    assert shared(ranks.form(2)) == [False] * 2
    monkeypatch.undo()
    assert shared(ranks.form(2)) == [True] * 2  # the control


@pytest.mark.attack
@pytest.mark.parametrize("what", ["bell", "memory", "size"])
def test_what_is_not_what_it_should_be_is_not_taken(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "bell":
        monkeypatch.setattr(hosting, "make_eventfd", lambda: os.eventfd(0))  # on which a ring waits
    elif what == "memory":

        def unsealed(nbytes: int) -> Any:
            descriptor = os.memfd_create("test")
            os.ftruncate(descriptor, nbytes)
            return memoryview(b""), descriptor

        monkeypatch.setattr(hosting, "make_segment", unsealed)
        monkeypatch.setattr(hosting._Descriptors, "board", lambda *_: None)
    else:
        real = hosting.make_segment
        monkeypatch.setattr(hosting, "make_segment", lambda nbytes: real(nbytes + 4096))
    monkeypatch.setattr(neighbours, "MEETING_SECONDS", 0.5)
    assert shared(ranks.form(2)) == [False] * 2


def test_an_abort_ends_the_wait_of_all(ranks: Ranks) -> None:
    groups = ranks.form(3)

    def body(rank: int) -> None:
        if rank == 2:
            time.sleep(0.05)
            groups[2].abort()
            return
        opts = dist.BarrierOptions()
        opts.asyncOp = rank == 0
        groups[rank].barrier(opts).wait()

    began = time.monotonic()
    errors = outcomes(3, body)
    assert time.monotonic() - began < 4
    for rank in (0, 1):
        assert isinstance(errors[rank], GroupAborted)
        assert "aborted it" in str(errors[rank])
        assert "rank 2 (" in str(errors[rank])


def test_a_rank_that_leaves_is_not_waited_for(ranks: Ranks) -> None:
    groups = ranks.form(2)
    assert sums(groups) == [3.0] * 2
    thread = threading.Thread(target=groups[1].shutdown)
    thread.start()
    with pytest.raises(RankLeft, match=r"rank 1 \(.*left the group"):
        groups[0].barrier().wait()
    thread.join()


def test_a_node_that_is_closed_ends_the_wait_of_its_peers() -> None:
    with ExitStack() as stack:
        mine = stack.enter_context(loopback_node())
        with contextlib.ExitStack() as inner:
            theirs = inner.enter_context(loopback_node())
            store = dist.HashStore()
            groups = run_ranks(2, lambda r: process_group((mine, theirs)[r], store, r, 2))
            assert shared(groups) == [True] * 2
            work = groups[0].barrier()
        with pytest.raises(RankLeft):
            work.wait()
        run_ranks(2, lambda r: groups[r].shutdown())


def test_memory_and_descriptors_go_with_the_group(ranks: Ranks) -> None:
    def held() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def once() -> None:
        groups = ranks.form(3)
        assert held() > before
        assert sums(groups) == [6.0] * 3
        run_ranks(3, lambda r: groups[r].shutdown())

    before = 0
    once()
    before = held()
    for _ in range(3):
        once()
    assert held() == before
