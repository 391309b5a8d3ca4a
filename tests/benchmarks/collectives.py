"""``collectives``: ``torch.distributed`` among ranks of one host, beside gloo.

Synchronous calls as a training program makes them, through all of torch's own layers. Each turn is
as many calls as fit into a fraction of a second; what is shown is the time of one. A step of a
training is one with gradients of `PARAMETERS` numbers, in torch's own buckets, and no optimizer.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from auth import SecretKey, allow_any
from tests.benchmarks.compare import Options, Row, Shown, ratio
from tests.benchmarks.harness import LOOPBACK, Pipe, Site, child, median
from transport import EndpointConfig

__all__ = ["OURS", "OURS_LOOP", "group", "measure", "missing", "run", "size_name"]

PART, OURS, GLOO = "collectives", "quicmesh", "gloo (plain TCP)"
OURS_LOOP = "quicmesh in the loop"
KIB, MIB = 1 << 10, 1 << 20
TURN_SECONDS = 0.25
ANSWER_SECONDS = 120.0
PARAMETERS = 25 << 20
LAYERS = 25

GOALS: dict[tuple[int, str, int], float] = {
    (2, "all_reduce", KIB): 15.0,
    (2, "all_reduce", MIB): 10.0,
    (2, "all_reduce", 64 * MIB): 2.0,
    (2, "all_gather", 64 * MIB): 2.0,
    (2, "reduce_scatter", 64 * MIB): 2.0,
    (2, "DDP step", 4 * PARAMETERS): 1.0,
    (4, "all_reduce", KIB): 2.0,
    (4, "all_reduce", MIB): 2.0,
    (4, "all_reduce", 64 * MIB): 2.0,
    (4, "all_gather", 64 * MIB): 2.0,
    (4, "reduce_scatter", 64 * MIB): 2.0,
}
"""For a number of ranks, an operation, and the bytes of its larger tensor: how many times as fast
as gloo it is to be."""


def missing() -> str | None:
    """Return why processes of this host can't share memory, None if they can."""
    from tensor_bridge.lanes.shared.host import unavailable

    return unavailable()


def run(options: Options) -> tuple[list[Row], list[Shown]]:
    """Measure; return the rows and the ratios."""
    rows: list[Row] = []
    shown: list[Shown] = []
    for size in (2, 4):
        with contextlib.ExitStack() as stack:
            groups = {
                name: stack.enter_context(group(name, (LOOPBACK,) * size))
                for name in (OURS, GLOO)
                if name == OURS or options.wants(name)
            }
            for (ranks, operation, full), goal in GOALS.items():
                if ranks != size:
                    continue
                nbytes = max(KIB, int(full * options.scale) // KIB * KIB)
                figure = f"{operation} of {size_name(nbytes)}, {size} ranks"
                rows += measure(PART, figure, groups, operation, nbytes, options)
                times = ratio(rows, GLOO, OURS, figure)
                shown.append(Shown(PART, f"{figure}: {GLOO} / {OURS}", times, goal))
    return rows, shown


def measure(
    part: str,
    figure: str,
    groups: dict[str, list[Pipe]],
    operation: str,
    nbytes: int,
    options: Options,
) -> list[Row]:
    """Let groups take turns at one operation; return a row for each."""
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    counts: dict[str, int] = {}
    for name, pipes in groups.items():  # warm, and how many calls a turn takes
        once = _ask(pipes, operation, nbytes, 1)  # and another before it: large ones take seconds
        counts[name] = max(1, min(options.calls, int(TURN_SECONDS / once)))
    for _ in range(options.rounds):
        for name, pipes in groups.items():
            seconds[name].append(_ask(pipes, operation, nbytes, counts[name]) * 1e6)
    return [
        Row(
            part,
            figure,
            name,
            "us",
            median(times),
            min(times),
            max(times),
            len(times),
            nbytes=nbytes,
        )
        for name, times in seconds.items()
    ]


def _ask(pipes: list[Pipe], operation: str, nbytes: int, count: int) -> float:
    """Return the seconds that a call takes, by the first rank's clock."""
    for pipe in pipes:
        pipe.send((operation, nbytes, count))
    return max(_answer(pipe) for pipe in pipes)


def _answer(pipe: Pipe) -> Any:
    if not pipe.poll(ANSWER_SECONDS):
        raise TimeoutError(f"no answer within {ANSWER_SECONDS:.0f} s")
    return pipe.recv()


@contextlib.contextmanager
def group(name: str, sites: Sequence[Site]) -> Iterator[list[Pipe]]:
    """Run the ranks of a group, one at each site, for the block.

    They are ours by the names `OURS` and `OURS_LOOP`, whose packets are moved by a thread of the
    rank's and not by a process of its own, and gloo's by others.
    """
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        store = str(Path(directory) / "store")
        pipes = [
            stack.enter_context(child(_rank, site, name, rank, len(sites), store))[2]
            for rank, site in enumerate(sites)
        ]
        for pipe in pipes:
            _answer(pipe)
        yield pipes


def _rank(pipe: Pipe, site: Site, name: str, rank: int, size: int, path: str) -> None:
    pipe.send("here")  # others may start meanwhile
    import os

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(path, size)
    if name not in (OURS, OURS_LOOP):
        os.environ["GLOO_SOCKET_IFNAME"] = site.interface
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        _obey(pipe, size)
        return
    import mesh.blocking
    import mesh.distributed

    node = mesh.blocking.Node.embedded(
        key=SecretKey.generate(),
        authorizer=allow_any(),
        config=EndpointConfig(
            bind=f"{site.address}:0", placement="loop" if name == OURS_LOOP else None
        ),
        tensors=False,
        shared_memory=site.namespace is None,
    )
    with node, mesh.distributed.use(node, job="bench"):
        dist.init_process_group("mesh", store=store, rank=rank, world_size=size)
        _obey(pipe, size)


def _obey(pipe: Pipe, size: int) -> None:
    import torch.distributed as dist

    pipe.send("ready")
    while True:
        operation, nbytes, count = pipe.recv()
        call = _call(operation, nbytes // 4 // size * size, size)
        call()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            call()
        pipe.send((time.perf_counter() - began) / count)


def _call(operation: str, numel: int, size: int) -> Callable[[], object]:
    """Return a call whose larger tensor has `numel` numbers."""
    import torch
    import torch.distributed as dist

    if operation == "DDP step":
        return _step(numel)
    whole, part = torch.ones(numel), torch.ones(numel // size)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX)
    if operation == "all_gather":
        return lambda: dist.all_gather_single(whole, part)
    return lambda: dist.reduce_scatter_single(part, whole, op=dist.ReduceOp.MAX)


def _step(numel: int) -> Callable[[], object]:
    """Return a forward and a backward pass of a model with about `numel` parameters."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    width = max(8, int((numel / LAYERS) ** 0.5))
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    inputs = torch.ones(4, width)

    def step() -> None:
        model.zero_grad()
        model(inputs).sum().backward()

    return step


def size_name(nbytes: int) -> str:
    """Return a size as people write it."""
    return f"{nbytes / MIB:g} MiB" if nbytes >= MIB else f"{nbytes / KIB:g} KiB"
