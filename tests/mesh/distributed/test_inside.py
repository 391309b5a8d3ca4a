"""Groups that have gloo among the ranks of each host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from mesh.collective import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    UnsupportedCollective,
)
from mesh.distributed import Options, ProcessGroupMesh, neighbours
from mesh.distributed.inside import Inside
from tensor_bridge.lanes.shared.host import Facts, here, unavailable
from tests.mesh.collective.exchange_memory import outcomes, run_ranks
from tests.mesh.distributed.nodes import LoopbackNode, loopback_node, process_group

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


class Ranks:
    """Nodes of two hosts, and the calls that went to gloo."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stack = stack
        self.nodes: list[LoopbackNode] = []
        self.calls: list[str] = []
        self.host = threading.local()
        monkeypatch.setattr(neighbours, "here", self._here)
        for name in ("all_reduce", "broadcast"):
            monkeypatch.setattr(Inside, name, self._counted(name, getattr(Inside, name)))

    def form(self, hosts: str, timeout: float = 10.0) -> list[ProcessGroupMesh]:
        """Form a group of as many ranks as `hosts` has letters, one for each's host."""
        while len(self.nodes) < len(hosts):
            self.nodes.append(self.stack.enter_context(loopback_node()))
        store, size = dist.HashStore(), len(hosts)

        def one(rank: int) -> ProcessGroupMesh:
            self.host.name = hosts[rank].encode()
            inside = {"cpu": "gloo"}
            return process_group(
                self.nodes[rank], store, rank, size, timeout=timeout, inside=inside
            )

        groups = run_ranks(size, one)
        self.stack.callback(run_ranks, size, lambda r: groups[r].shutdown())
        return groups

    def _here(self) -> Facts:
        found = here()
        return found._replace(boot=found.boot + self.host.name)

    def _counted(self, name: str, method: Any) -> Any:
        def counted(*arguments: Any) -> None:
            self.calls.append(name)
            method(*arguments)

        return counted


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    with ExitStack() as stack:
        yield Ranks(stack, monkeypatch)


OPERATIONS = {
    "SUM": (ReduceOp.SUM, lambda values: sum(values)),
    "AVG": (ReduceOp.AVG, lambda values: sum(values) / len(values)),
    "PRODUCT": (ReduceOp.PRODUCT, lambda values: torch.tensor(values).prod().item()),
    "MIN": (ReduceOp.MIN, min),
    "MAX": (ReduceOp.MAX, max),
}


@pytest.mark.parametrize("hosts", ["aaa", "abba", "aab"])
def test_values(ranks: Ranks, hosts: str) -> None:
    groups, size = ranks.form(hosts), len(hosts)
    values = [float(rank + 2) for rank in range(size)]

    def body(rank: int) -> list[list[float]]:
        found = []
        for op, _ in OPERATIONS.values():
            tensor = torch.full((3, 2), values[rank]).t()  # not contiguous
            options = dist.AllreduceOptions()
            options.reduceOp = op
            groups[rank].allreduce([tensor], options).wait()
            found.append(tensor.flatten().unique().tolist())
        for root in range(size):
            tensor = torch.full((3, 2), values[rank]).t()
            options = dist.BroadcastOptions()
            options.rootRank = root
            groups[rank].broadcast([tensor], options).wait()
            found.append(tensor.flatten().unique().tolist())
        return found

    expected = [[pytest.approx(reduce(values))] for _, reduce in OPERATIONS.values()]
    for found in run_ranks(size, body):
        assert found == expected + [[value] for value in values]
    with_others = sum(hosts.count(host) > 1 for host in hosts)
    assert ranks.calls.count("all_reduce") == len(OPERATIONS) * with_others
    assert ranks.calls.count("broadcast") == size * with_others


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_hosts_with_and_without_gloo_come_to_the_same(ranks: Ranks, dtype: torch.dtype) -> None:
    groups = ranks.form("aab")  # the last is alone on its host

    def body(rank: int) -> list[torch.Tensor]:
        found = []
        for op, _ in OPERATIONS.values():
            tensor = (torch.arange(64) % 7 + rank / 3).to(dtype)
            options = dist.AllreduceOptions()
            options.reduceOp = op
            groups[rank].allreduce([tensor], options).wait()
            found.append(tensor)
        return found

    results = run_ranks(3, body)
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))
    inputs = torch.stack([torch.arange(64) % 7 + rank / 3 for rank in range(3)])
    close = {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(results[0][0].float(), inputs.sum(0), **close)
    torch.testing.assert_close(results[0][1].float(), inputs.mean(0), **close)


def test_numbers_that_are_only_marked_as_negative(ranks: Ranks) -> None:
    groups = ranks.form("aa")

    def body(rank: int) -> float:
        tensor = torch._neg_view(torch.tensor([rank + 1.0]))
        options = dist.AllreduceOptions()
        options.reduceOp = ReduceOp.MAX
        groups[rank].allreduce([tensor], options).wait()
        return tensor.item()

    assert run_ranks(2, body) == [-1.0] * 2


def test_what_gloo_does_not_know_goes_over_the_mesh(ranks: Ranks) -> None:
    groups = ranks.form("aa")

    def body(rank: int) -> list[Any]:
        truth, bits = torch.tensor([rank == 1]), torch.tensor([rank + 1])
        small = torch.tensor([200], dtype=torch.uint8)  # the sum of two is none of its kind
        groups[rank].allreduce([truth]).wait()
        options = dist.AllreduceOptions()
        options.reduceOp = ReduceOp.BXOR
        groups[rank].allreduce([bits], options).wait()
        options.reduceOp = ReduceOp.AVG
        groups[rank].allreduce([small], options).wait()
        return [truth.item(), bits.item(), small.item()]

    assert run_ranks(2, body) == [[True, 3, 200]] * 2
    assert ranks.calls == []


def test_differing_calls_and_missing_ranks_are_named(ranks: Ranks) -> None:
    groups = ranks.form("aab")

    def differ(rank: int) -> None:
        groups[rank].allreduce([torch.ones(2 + (rank == 1))]).wait()

    for error in outcomes(3, differ):
        assert isinstance(error, CollectiveMismatch)
        assert "rank 1 (" in str(error)
    groups = ranks.form("aa", timeout=1.0)
    late = outcomes(2, lambda rank: rank or groups[0].allreduce([torch.ones(2)]).wait())[0]
    assert isinstance(late, CollectiveTimeout)
    assert late.ranks == (1,)


def test_an_error_of_gloo_breaks_the_group(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ranks.form("aab")

    class Broken:
        def allreduce(self, *arguments: object) -> None:
            raise RuntimeError("no such wire")

        def abort(self) -> None: ...

    groups[0]._inside["cpu"]._backend.abort()
    monkeypatch.setattr(groups[0]._inside["cpu"], "_backend", Broken())
    errors = outcomes(3, lambda rank: groups[rank].allreduce([torch.ones(2)]).wait())
    assert all(isinstance(error, CollectiveError) for error in errors)
    assert "inside the host: no such wire" in str(errors[0])
    assert "no such wire" in str(errors[2])


def test_only_what_there_is_can_be_asked_for(ranks: Ranks) -> None:
    for inside in ({"cpu": "nccl"}, {"cuda": "mpi"}, {"tpu": "gloo"}):
        with pytest.raises(UnsupportedCollective, match="inside hosts"):
            Options(ranks.nodes, inside=inside)  # type: ignore[arg-type]
