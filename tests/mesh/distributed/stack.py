"""What torch builds on process groups, each against the same computation in a single process.

Every part returns the largest difference that it found, so that a test can say what is too much.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def stack(rank: int, size: int) -> Any:
    """Run all parts."""
    parts: list[Callable[[int, int], float]] = [
        data_parallel, compressed, power_sgd, zero, fewer, uneven, uneven_accumulating, sharded,
        distributed_tensor, functions, coalesced,
    ]  # fmt: skip
    return {part.__name__: float(part(rank, size)) for part in parts}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs, targets = batch(step, rank)
    return nn.functional.mse_loss(model(inputs), targets)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def reference(size: int, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> nn.Module:
    """Train on the mean of all ranks' losses."""
    model = build()
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([loss_of(model, step, rank) for rank in range(size)]).mean().backward()
        optimizer.step()
    return model


def apart(found: nn.Module, expected: nn.Module) -> float:
    pairs = zip(found.parameters(), expected.parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def data_parallel(rank: int, size: int) -> float:
    model = build()
    wrapped = DistributedDataParallel(model)
    train(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    assert apart(model, build()) > 0.01  # it has learned something at all
    return apart(model, reference(size))


def compressed(rank: int, size: int) -> float:
    model = build()
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    return apart(model, reference(size))


def power_sgd(rank: int, size: int) -> float:
    """With as many ranks as a matrix has, nothing is lost."""
    model = build()
    wrapped = DistributedDataParallel(model)
    state = power.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    wrapped.register_comm_hook(state, power.powerSGD_hook)
    train(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    return apart(model, reference(size))


def zero(rank: int, size: int) -> float:
    model = build()
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    train(wrapped, optimizer, rank)
    optimizer.consolidate_state_dict(0)  # by object collectives
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == 6
    return apart(model, reference(size, torch.optim.Adam))


def uneven(rank: int, size: int) -> float:
    """Ranks that have no more inputs take part with nothing."""
    model = build()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([wrapped]):
        for step in range(1 + rank):
            optimizer.zero_grad()
            loss_of(wrapped, step, rank).backward()
            optimizer.step()
    expected = build()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(size):
        optimizer.zero_grad()
        for each in range(step, size):  # who has an input for this step
            (loss_of(expected, step, each) / size).backward()
        optimizer.step()
    return apart(model, expected)


def uneven_accumulating(rank: int, size: int) -> float:
    """The same, each step with the gradients of two inputs, of which one alone is exchanged."""
    model = build()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([wrapped]):
        for step in range(1 + rank):
            optimizer.zero_grad()
            with wrapped.no_sync():
                loss_of(wrapped, 2 * step, rank).backward()
            loss_of(wrapped, 2 * step + 1, rank).backward()
            optimizer.step()
    expected = build()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(size):
        optimizer.zero_grad()
        for each in range(step, size):
            for part in (2 * step, 2 * step + 1):
                (loss_of(expected, part, each) / size).backward()
        optimizer.step()
    return apart(model, expected)


def fewer(rank: int, size: int) -> float:
    """The state of an optimizer that is split among all ranks goes on among fewer, and at one."""
    model = build()
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    train(wrapped, optimizer, rank)
    optimizer.consolidate_state_dict(0)
    states = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(states, 0)
    found = [0.0]
    for count in (1, size - 1):
        group = dist.new_group(list(range(count)))
        if rank >= count:
            continue
        copies = [copy.deepcopy(model) for _ in range(2)]
        optimizers = (
            ZeroRedundancyOptimizer(
                copies[0].parameters(), torch.optim.Adam, process_group=group, lr=0.1
            ),
            torch.optim.Adam(copies[1].parameters(), lr=0.1),
        )
        for each, one in zip(copies, optimizers, strict=True):
            one.load_state_dict(copy.deepcopy(states[0]))
            one.zero_grad()
            loss_of(each, STEPS, 0).backward()
            one.step()
        assert apart(copies[1], model) > 0.001
        found.append(apart(*copies))
        dist.destroy_process_group(group)
    return max(found)


def sharded(rank: int, size: int) -> float:
    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    full = [parameter.full_tensor() for parameter in model.parameters()]
    pairs = zip(full, reference(size).parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def distributed_tensor(rank: int, size: int) -> float:
    devices = init_device_mesh("cpu", (size,))
    torch.manual_seed(1)
    left, right = torch.randn(6, 4 * size), torch.randn(4 * size, 5)
    product = distribute_tensor(left, devices, [Shard(1)]) @ distribute_tensor(
        right, devices, [Shard(0)]
    )
    rows = product.redistribute(devices, [Shard(0)])
    turned = rows.redistribute(devices, [Shard(1)]).redistribute(devices, [Replicate()])
    return (turned.to_local() - left @ right).abs().max().item()


def functions(rank: int, size: int) -> float:
    group = dist.group.WORLD
    mine = torch.arange(4.0 * size) + rank
    everyone = torch.stack([torch.arange(4.0 * size) + each for each in range(size)])
    inputs = [size - abs(rank - each) for each in range(size)]
    sent = torch.arange(float(sum(inputs))) + 100 * rank
    came = functional.all_to_all_single(sent, inputs, inputs, group)
    expected = []
    for each in range(size):
        sizes = [size - abs(each - other) for other in range(size)]
        start = sum(sizes[:rank])
        expected.append(torch.arange(float(sum(sizes)))[start : start + sizes[rank]] + 100 * each)
    found = [
        functional.all_reduce(mine.clone(), "sum", group) - everyone.sum(0),
        functional.all_gather_single(mine, 0, group) - everyone.flatten(),
        functional.reduce_scatter_single(mine, "sum", 0, group) - everyone.sum(0).chunk(size)[rank],
        functional.broadcast(mine.clone(), 1, group) - everyone[1],
        came - torch.cat(expected),
    ]
    return max(difference.abs().max().item() for difference in found)


def coalesced(rank: int, size: int) -> float:
    tensors = [torch.full((3,), float(rank + at)) for at in range(3)]
    expected = [sum(each + at for each in range(size)) for at in range(3)]
    first = copy.deepcopy(tensors)
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as works:
        for tensor in first:
            dist.all_reduce(tensor)
    works.wait()
    pairs = zip(tensors + first, expected * 2, strict=True)
    return max((tensor - value).abs().max().item() for tensor, value in pairs)
