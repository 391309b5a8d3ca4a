"""One rank as a real process: ``python -m tests.mesh.distributed.worker SCENARIO RANK SIZE FILE``.

A scenario returns what the test compares; it goes to standard output as one line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import mesh.blocking
import mesh.distributed
from auth import SecretKey, allow_any
from tests.mesh.distributed.nodes import LOOPBACK

STEPS = 4

LIVENESS = 2.0
"""Seconds until a rank that is silent is lost."""


class Model(nn.Module):
    """A small network with batch statistics and buffers of unusual types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)
        self.register_buffer("mask", torch.tensor([True, False] * 4))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs)).relu()
        return self.last(hidden * self.mask) * self.scale.float()


def batches(rank: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a rank's part of the data; rank -1 stands for all of it."""
    generator = torch.Generator().manual_seed(5)
    whole = [
        (torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator))
        for _ in range(STEPS)
    ]
    return whole if rank < 0 else [(x.chunk(size)[rank], y.chunk(size)[rank]) for x, y in whole]


def train(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp(rank: int, size: int) -> Any:
    model = Model()
    if rank:
        with torch.no_grad():  # the wrapper must bring rank 0's state to all
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    train(wrapped, batches(rank, size))
    state = {name: value.double().flatten().tolist() for name, value in model.state_dict().items()}
    dist.destroy_process_group()
    return state


def ddp_static_buckets(rank: int, size: int) -> Any:
    """Average gradients over many small buckets, twice; compare with the mean of both ranks'."""
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    inputs = torch.randn(size, 4, 16, generator=torch.Generator().manual_seed(2))
    wrapped(inputs[rank]).square().mean().backward()
    mine = [parameter.grad.clone() for parameter in model.parameters()]
    local = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    local.load_state_dict(model.state_dict())
    for each in inputs:
        (local(each).square().mean() / size).backward()
    pairs = zip(mine, local.parameters(), strict=True)
    return max((got - parameter.grad).abs().max().item() for got, parameter in pairs)


def stack(rank: int, size: int) -> Any:
    logging.disable()  # torch warns of this and that
    warnings.simplefilter("ignore")
    from tests.mesh.distributed import stack as parts  # loads much

    found = parts.stack(rank, size)
    dist.destroy_process_group()
    return found


def objects(rank: int, size: int) -> Any:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (rank * 1000)})
    sent = [{"from": rank}, [rank] * 3]
    dist.broadcast_object_list(sent, src=size - 1)
    dist.destroy_process_group()
    return [[one["rank"] for one in gathered], [len(one["text"]) for one in gathered], sent]


def subgroups(rank: int, size: int) -> Any:
    """Reduce in groups of some ranks and of all, that have options of their own."""
    node = dist.group.WORLD.options.node
    links = node.endpoint.connections
    options = mesh.distributed.Options(node, "test", objects=False)
    limit = timedelta(seconds=0.5)
    evens = dist.new_group(list(range(0, size, 2)), timeout=limit, pg_options=options)
    everyone = dist.new_group()
    found: list[Any] = []
    tensor = torch.tensor([float(rank + 1)])
    if rank % 2 == 0:
        dist.all_reduce(tensor, group=evens)
        assert [dist.get_group_rank(evens, each) for each in range(0, size, 2)] == [0, 1]
        try:
            dist.all_gather_object([None] * 2, rank, group=evens)
        except ValueError as error:
            found.append("object" in str(error))
    found.append(tensor.item())
    again = torch.tensor([1.0])
    dist.all_reduce(again, group=everyone)
    dist.destroy_process_group(everyone)
    if rank == 0:
        began = time.monotonic()
        try:
            dist.barrier(evens)
        except RuntimeError as error:
            found += [error.ranks, 0.4 < time.monotonic() - began < 5]  # type: ignore[attr-defined]
    dist.all_reduce(again)
    found.append(again.item())
    assert len(links) == size - 1
    assert node.endpoint.connections == links, "a group dialled anew"
    dist.destroy_process_group()
    return found


def meet(rank: int, size: int) -> Any:
    """Form the group; return how long that took after the imports."""
    seconds = time.monotonic() - _imported
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return [seconds, tensor.item(), time.process_time() - _imported_cpu]


def flat_memory(rank: int, size: int) -> Any:
    """Gather 8 MiB of each rank 200 times; return by how many bytes the process has grown."""
    outs, mine = [torch.empty(2 << 20) for _ in range(size)], torch.ones(2 << 20)
    for turn in range(220):
        if turn == 20:
            before = resident()
        dist.all_gather(outs, mine)
    grown = resident() - before
    dist.destroy_process_group()
    return grown


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def device_mesh(rank: int, size: int) -> Any:
    """Reduce along each dimension of a mesh whose groups have gloo inside hosts."""
    from torch.distributed.device_mesh import init_device_mesh

    node, found = dist.group.WORLD.options.node, []
    dist.destroy_process_group()
    with mesh.distributed.use(node, job="test", inside={"cpu": "gloo"}):
        form(rank, size)
        grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("rows", "columns"))
    for name in ("rows", "columns"):
        group = grid.get_group(name)
        tensor = torch.tensor([float(10**rank)])
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, group=group, group_src=0)
        found += [tensor.item(), "cpu" in group._inside]
    dist.destroy_process_group()
    return found


def again(rank: int, size: int) -> Any:
    """Leave the group and form it anew, over the same store and under the same name."""
    found = []
    for turn in range(3):
        tensor = torch.tensor([float(rank + turn)])
        dist.all_reduce(tensor)
        found.append(tensor.item())
        dist.destroy_process_group()
        if turn < 2:
            form(rank, size)
    return found


def doomed_backward(rank: int, size: int) -> Any:
    """Rank 1 goes away in the middle of a training: rank 0's backward must raise."""
    model = nn.Linear(64, 64)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for step in range(10):
        loss = wrapped(torch.ones(2, 64)).sum()
        if rank == 1 and step == 2:
            dist.group.WORLD.abort()
            return "aborted"
        try:
            loss.backward()
        except Exception as error:
            return [step, type(error).__name__, str(error)]
    return "nothing raised"


def killed(rank: int, size: int) -> Any:
    """All-reduce for ever; the test kills the last rank, or of four the last two."""
    tensor = torch.ones(200_000)
    dist.all_reduce(tensor)
    print("ready", flush=True)
    try:
        while True:
            dist.all_reduce(tensor)
    except Exception as error:
        raised_at = time.time()
        time.sleep(0.5)  # what was on its way arrives and is dropped
        cpu, began = time.process_time(), time.monotonic()
        time.sleep(1.0)
        burnt = (time.process_time() - cpu) / (time.monotonic() - began)
        ranks = list(getattr(error, "ranks", ()))
        shared = dist.group.WORLD._engine.exchange.board is not None
        dist.destroy_process_group()
        survivors = [each for each in range(size) if each not in ranks]
        store = dist.FileStore(sys.argv[4] + "-again", len(survivors))
        dist.init_process_group(
            "mesh", store=store, rank=survivors.index(rank), world_size=len(survivors)
        )
        after = torch.ones(1)
        dist.all_reduce(after)
        dist.destroy_process_group()
        return [type(error).__name__, str(error), ranks, raised_at, burnt, shared, after.item()]


class Meddling(Dataset[tuple[torch.Tensor, int]]):
    """Items of which each comes with whether a process that makes them may use the group."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            return torch.full((6,), float(index)), int("was forked" in str(error))
        return torch.zeros(6), 0


def load_data(rank: int, size: int) -> Any:
    """Train beside forked workers of a loader, of which each has a try at the group."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 2))
    loader = DataLoader(Meddling(), 2, num_workers=2, multiprocessing_context="fork")
    refused, seen = 0, torch.zeros(6)
    for inputs, said in loader:
        model(inputs).sum().backward()
        total = inputs.sum(0)
        dist.all_reduce(total)
        seen += total
        refused += int(said.sum())
    dist.destroy_process_group()
    return [refused, seen.tolist()]


def fall_off(rank: int, size: int) -> Any:
    """Leave neither the group nor the node: the interpreter must still end well, and soon."""
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True)
    return [tensor[0].item() >= size, time.time()]


def send_large(rank: int, size: int) -> Any:
    """Send 2.1 GiB."""
    count = (2 << 30) + (1 << 30) // 10
    tensor = torch.arange(count // 8 + 1).view(torch.uint8)[:count]
    if rank == 0:
        dist.send(tensor, 1)
        dist.destroy_process_group()
        return True
    out = torch.zeros_like(tensor)
    dist.recv(out, 0)
    dist.destroy_process_group()
    return torch.equal(out, tensor)


def send_and_leave(rank: int, size: int, *, leave: bool = True) -> Any:
    """Rank 0 sends 64 MiB, far more than any buffer holds, and leaves the group at once."""
    tensor = torch.arange(1 << 24, dtype=torch.int32)
    if rank == 0:
        dist.isend(tensor, 1)
        if leave:
            dist.destroy_process_group()
        return "gone"
    time.sleep(0.5)
    out = torch.zeros_like(tensor)
    dist.recv(out, 0)
    return torch.equal(out, tensor)


def send_and_fall_off(rank: int, size: int) -> Any:
    """Rank 0 sends as much and comes to the end of its program."""
    return send_and_leave(rank, size, leave=False)


def bandwidth(rank: int, size: int) -> Any:
    found = {}
    for numel in (256, 1 << 18, 1 << 22):
        tensor = torch.ones(numel)
        dist.all_reduce(tensor)
        turns = 100 if numel == 256 else 5
        began = time.monotonic()
        for _ in range(turns):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        found[numel * 4] = (time.monotonic() - began) / turns
    dist.destroy_process_group()
    return found


def form(rank: int, size: int) -> None:
    dist.init_process_group(
        "mesh",
        store=_store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds={"send_large": 900, "meet": 200}.get(sys.argv[1], 30)),
    )


def main(scenario: str, rank: int, size: int, path: str, way: str) -> None:
    global _store
    torch.set_num_threads(1)
    _store = dist.FileStore(str(Path(path)), size)
    node = mesh.blocking.Node.embedded(
        key=SecretKey.generate(),
        authorizer=allow_any(),
        config=LOOPBACK if scenario == "meet" else dataclasses.replace(LOOPBACK, liveness=LIVENESS),
        tensors=False,
        shared_memory=way == "host",
    )
    node.open()
    with mesh.distributed.use(node, job="test"):
        form(rank, size)
        result = globals()[scenario](rank, size)
    print(json.dumps(result), flush=True)
    if not scenario.endswith("fall_off"):
        node.close()


_store: dist.Store
_imported = time.monotonic()
_imported_cpu = time.process_time()

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6])
