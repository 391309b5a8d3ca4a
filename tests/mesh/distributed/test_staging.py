"""Tensors of an accelerator, as far as a CPU can show: which copies are made, and in which order.

The elements of an `Elsewhere` lie on the CPU; it says that it is on ``cuda:0``, and refuses to be
read there but by copies. Streams are a list of what they were given. Nothing here runs on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from mesh.collective import CollectiveTimeout, UnsupportedCollective
from mesh.distributed import ProcessGroupMesh, streams, work
from tests.mesh.collective.exchange_memory import MemoryNetwork, run_ranks

CUDA = torch.device("cuda:0")


class Elsewhere(torch.Tensor):
    """A tensor of an accelerator that is not there."""

    held: torch.Tensor
    log: list[str]

    @staticmethod
    def __new__(cls, held: torch.Tensor, log: list[str]) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=CUDA,
        )
        made.held, made.log = held, log
        return made

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Elsewhere:
        self.log.append("to the device")
        self.held.copy_(source)
        return self

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        (log,) = {id(each.log): each.log for each in args if isinstance(each, cls)}.values()
        inner = tree_map_only(cls, lambda each: each.held, (args, kwargs or {}))
        found = function(*inner[0], **inner[1])
        if function is torch.ops.aten.copy_.default:
            log.append("to the CPU")
            return args[0]
        return tree_map_only(torch.Tensor, lambda each: cls(each, log), found)


class FakeTurn:
    def __init__(self, log: list[str]) -> None:
        self.device = CUDA
        self._log = log
        log.append("called")

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        self._log.append("taken")
        yield
        self._log.append("over")

    def follow(self) -> None:
        self._log.append("followed")


class Rank:
    """One rank's group, and the log of its device."""

    def __init__(self, group: ProcessGroupMesh) -> None:
        self.group = group
        self.log: list[str] = []

    def on_device(self, tensor: torch.Tensor) -> Elsewhere:
        return Elsewhere(tensor, self.log)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    network = MemoryNetwork(2)
    limit = timedelta(seconds=5)
    made = [Rank(ProcessGroupMesh(each, dist.HashStore(), limit)) for each in network.ranks]
    logs = iter([made[0].log])
    monkeypatch.setattr(streams, "turn", lambda device: FakeTurn(next(logs)))
    yield made
    for each in made:
        each.group.shutdown()


def test_an_operation_keeps_its_place_among_the_streams(ranks: list[Rank]) -> None:
    def body(rank: int) -> list[float]:
        if rank == 1:
            tensor = torch.full((2, 3), 2.0)
            ranks[1].group.allreduce([tensor]).wait()
            return tensor.flatten().tolist()
        held = torch.ones(3, 2).t()
        ranks[0].group.allreduce([ranks[0].on_device(held)]).wait()
        return held.flatten().tolist()

    assert run_ranks(2, body) == [[3.0] * 6] * 2
    order = ["called", "taken", "to the CPU", "to the device", "over", "followed"]
    assert ranks[0].log == order


def test_what_is_only_written_is_not_read(ranks: list[Rank]) -> None:
    def body(rank: int) -> list[float]:
        own = torch.full((2,), float(rank))
        if rank == 1:
            outs = [torch.zeros(2) for _ in range(2)]
            ranks[1].group.allgather([outs], [own]).wait()
            return torch.cat(outs).tolist()
        held = torch.zeros(2), torch.zeros(2)
        outs = [ranks[0].on_device(each) for each in held]
        ranks[0].group.allgather([outs], [ranks[0].on_device(own)]).wait()
        return torch.cat(held).tolist()

    assert run_ranks(2, body) == [[0, 0, 1, 1]] * 2
    assert ranks[0].log.count("to the CPU") == 1
    assert ranks[0].log.count("to the device") == 2


def test_messages_and_their_futures(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []

    def future_of(given: list[torch.device]) -> torch.futures.Future[Any]:
        devices.extend(given)
        return torch.futures.Future()  # those of a device can't be made here

    monkeypatch.setattr(work, "_future_of", future_of)

    def body(rank: int) -> list[float]:
        if rank == 1:
            ranks[1].group.send([torch.tensor([7.0])], 0).wait()
            return []
        held = torch.zeros(1)
        receipt = ranks[0].group.recv([ranks[0].on_device(held)], 1)
        receipt.get_future()
        receipt.wait()
        return held.tolist()

    assert run_ranks(2, body)[0] == [7.0]
    assert devices == [CUDA]
    assert ranks[0].log == ["called", "taken", "to the device", "over", "followed", "followed"]


def test_nothing_is_written_by_what_fails(ranks: list[Rank]) -> None:
    held = torch.ones(2)
    late = ranks[0].group.allreduce([ranks[0].on_device(held)], timeout=timedelta(seconds=0.05))
    with pytest.raises(CollectiveTimeout):
        late.wait()
    assert "to the device" not in ranks[0].log
    assert "over" not in ranks[0].log


def test_tensors_of_one_call_are_on_one_device(ranks: list[Rank]) -> None:
    mixed = [torch.ones(1), ranks[0].on_device(torch.ones(1))]
    with pytest.raises(UnsupportedCollective, match="different devices: cpu, cuda:0"):
        ranks[0].group.alltoall(mixed, [torch.ones(1), torch.ones(1)])


def test_other_devices_are_refused(ranks: list[Rank]) -> None:
    with pytest.raises(UnsupportedCollective, match="it is on device 'meta'"):
        ranks[0].group.allreduce([torch.ones(1, device="meta")])
