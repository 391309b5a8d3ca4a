"""``train``: a training step of `mesh.train.ddp` over two peers, beside torch's own.

An encoder, AdamW, and a batch that is there: by `ddp` over a device of each of two peers of this
host, driven by this program, and by ``DistributedDataParallel`` over gloo in two processes, which
compute as the peers do. The program of `ddp` is a third process, so what it takes of the CPU counts
where there are no more cores than peers.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import anyio
import psutil

from auth import SecretKey, allow_any
from tests.benchmarks.compare import Options, Row, Shown
from tests.benchmarks.harness import LOOPBACK, Pipe, Site, child, cpu_seconds, median
from tests.benchmarks.ours import configuration

PART, OURS, TORCH = "train", "quicmesh", "gloo"
FIGURE = "step of ddp over two peers"
STEPS = 20
BATCH, LENGTH, WIDTH = 32, 32, 128
MOST = 1.3
TURN_SECONDS = 120.0

WARM_STEPS = 5
"""Steps before any is timed: what repeats is found out meanwhile."""


def missing() -> str | None:
    """Return why it can't be measured here, None if it can."""
    import torch.distributed as dist

    from mesh.device.server.nursery import CAN_FORK

    if not CAN_FORK:
        return "devices are not offered on this platform"
    return None if dist.is_available() and dist.is_gloo_available() else "torch has no gloo here"


def run(options: Options) -> tuple[list[Row], list[Shown]]:
    """Measure; return the rows and the ratio."""
    steps = max(2, int(STEPS * options.scale))
    with ExitStack() as stack:
        enter = stack.enter_context
        peers = [enter(child(_serve, LOOPBACK)) for _ in range(2)]
        _, client, ours = enter(child(_use, LOOPBACK, [ticket for ticket, _, _ in peers]))
        with socket.create_server((LOOPBACK.address, 0)) as probe:
            place = probe.getsockname()[:2]
        ranks = [enter(child(_rank, LOOPBACK, place, rank)) for rank in range(2)]
        processes = {
            f"{OURS}, client": [client.pid],
            **{f"{OURS}, peer {n}": _tree(process.pid) for n, (_, process, _) in enumerate(peers)},
            **{f"{TORCH}, rank {n}": [process.pid] for n, (_, process, _) in enumerate(ranks)},
        }
        pipes = {OURS: [ours], TORCH: [pipe for _, _, pipe in ranks]}
        for pipe in pipes[TORCH]:
            _answer(pipe)  # it is ready
        seconds: dict[str, list[float]] = {name: [] for name in pipes}
        used: dict[str, list[float]] = {name: [] for name in processes}
        for turn in range(-1, options.rounds):  # the first to warm up
            for name, ways in pipes.items():
                watched = [who for who in processes if who.startswith(name)]
                before = [cpu_seconds(tuple(processes[who])) for who in watched]
                took = _ordered(ways, steps)
                after = [cpu_seconds(tuple(processes[who])) for who in watched]
                if turn >= 0:
                    seconds[name].append(took)
                    for who, late, early in zip(watched, after, before, strict=True):
                        used[who].append((late - early) / steps)
    rows = [
        *(_row(FIGURE, name, times) for name, times in seconds.items()),
        *(_row("CPU time of a step", who, times) for who, times in used.items()),
    ]
    ratio = median(seconds[OURS]) / median(seconds[TORCH])
    return rows, [Shown(PART, f"{FIGURE} / {TORCH}", ratio, MOST, at_most=True)]


def _ordered(ways: list[Pipe], steps: int) -> float:
    """Have all of a contender's processes do some steps; return the seconds of one."""
    for way in ways:
        way.send(steps)
    return max(map(_answer, ways)) / steps


def _answer(way: Pipe) -> Any:
    if not way.poll(TURN_SECONDS):
        raise TimeoutError(f"no answer within {TURN_SECONDS:.0f} s")
    return way.recv()


def _tree(pid: int | None) -> list[int]:
    process = psutil.Process(pid)
    return [process.pid, *(each.pid for each in process.children(recursive=True))]


def _row(figure: str, who: str, times: list[float]) -> Row:
    values = [1e3 * each for each in times]
    return Row(PART, figure, who, "ms", median(values), min(values), max(values), len(values))


def _encoder() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2), nn.Flatten(1), nn.Linear(WIDTH * LENGTH, 10)
    )


def _optimizer(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, fused=True)


def _batch(rows: int) -> tuple[Any, Any]:
    import torch

    return torch.randn(rows, LENGTH, WIDTH), torch.randint(0, 10, (rows,))


def _loss(model: Any, batch: Any) -> Any:
    from torch import nn

    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _obey(pipe: Pipe, step: Callable[[], Any], wait: Callable[[], object]) -> None:
    """Time steps on order; the loss of the last one is read."""
    for _ in range(WARM_STEPS):
        step().item()
    pipe.send("ready")
    while True:
        steps = pipe.recv()
        wait()
        began = time.perf_counter()
        for _ in range(steps):
            loss = step()
        loss.item()
        wait()
        pipe.send(time.perf_counter() - began)


def _serve(pipe: Pipe, site: Site) -> None:
    from mesh import Node
    from mesh.device import DeviceLimits, DeviceService
    from mesh.device.server.executor import ExecutorLimits

    async def main() -> None:
        node = Node.embedded(
            key=SecretKey.generate(), authorizer=allow_any(), config=configuration(site)
        )
        limits = DeviceLimits(executor=ExecutorLimits(threads=1))
        async with node, DeviceService(node.endpoint, ["cpu"], limits, store=node.store):
            pipe.send(node.ticket().encode())
            await anyio.sleep_forever()

    anyio.run(main)


def _use(pipe: Pipe, site: Site, tickets: list[str]) -> None:
    import torch

    import mesh
    import mesh.train
    from mesh import blocking

    torch.set_num_threads(1)
    with blocking.Node.embedded(
        key=SecretKey.generate(),
        authorizer=allow_any(),
        config=configuration(site),
        tensors=False,
    ) as node:
        devices = [mesh.device(ticket, node=node) for ticket in tickets]
        with mesh.train.ddp(devices) as strategy:
            strategy.prepare(_encoder(), _optimizer)
            batch = _batch(BATCH)

            def step() -> Any:
                loss = strategy.backward(batch, _loss)
                strategy.step()
                return loss

            def wait() -> None:
                for device in devices:
                    mesh.device.synchronize(device)

            _obey(pipe, step, wait)


def _rank(pipe: Pipe, site: Site, place: tuple[str, int], rank: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    store = functools.partial(dist.TCPStore, *place, 2, wait_for_workers=False)
    kept = store(is_master=rank == 0)
    pipe.send("listening")  # so that the other one may begin
    dist.init_process_group("gloo", store=kept, rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(_encoder())
    optimizer = _optimizer(model.parameters())
    batch = _batch(BATCH // 2)

    def step() -> Any:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    _obey(pipe, step, dist.barrier)
