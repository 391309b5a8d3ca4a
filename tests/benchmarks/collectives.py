"""``collectives``: ``torch.distributed`` among ranks of one host, beside gloo.

Synchronous calls as a training program makes them, through all of torch's own layers. Each turn is
as many calls as fit into a fraction of a second; what is shown is the time of one.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from auth import SecretKey, allow_any
from tests.benchmarks.compare import Options, Row, Shown, ratio
from tests.benchmarks.harness import LOOPBACK, Pipe, Site, child, median
from transport import EndpointConfig

__all__ = ["missing", "run"]

PART, OURS, GLOO = "collectives", "quicmesh", "gloo (plain TCP)"
KIB, MIB = 1 << 10, 1 << 20
TURN_SECONDS = 0.25
ANSWER_SECONDS = 120.0

GOALS: dict[tuple[int, str, int], float] = {
    (2, "all_reduce", KIB): 15.0,
    (2, "all_reduce", MIB): 10.0,
    (2, "all_reduce", 64 * MIB): 2.0,
    (2, "all_gather", 64 * MIB): 2.0,
    (2, "reduce_scatter", 64 * MIB): 2.0,
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
                name: stack.enter_context(_group(name, size))
                for name in (OURS, GLOO)
                if name == OURS or options.wants(name)
            }
            for (ranks, operation, full), goal in GOALS.items():
                if ranks != size:
                    continue
                nbytes = max(KIB, int(full * options.scale) // KIB * KIB)
                figure = f"{operation} of {_size(nbytes)}, {size} ranks"
                rows += _compare(figure, groups, operation, nbytes, options)
                times = ratio(rows, GLOO, OURS, figure)
                shown.append(Shown(PART, f"{figure}: {GLOO} / {OURS}", times, goal))
    return rows, shown


def _compare(
    figure: str, groups: dict[str, list[Pipe]], operation: str, nbytes: int, options: Options
) -> list[Row]:
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    counts: dict[str, int] = {}
    for name, pipes in groups.items():  # warm, and how many calls a turn takes
        once = _ask(pipes, operation, nbytes, 3)
        counts[name] = max(1, min(options.calls, int(TURN_SECONDS / once)))
    for _ in range(options.rounds):
        for name, pipes in groups.items():
            seconds[name].append(_ask(pipes, operation, nbytes, counts[name]) * 1e6)
    return [
        Row(
            PART,
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
def _group(name: str, size: int) -> Iterator[list[Pipe]]:
    """Run the ranks of a group for the block."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        store = str(Path(directory) / "store")
        pipes = [
            stack.enter_context(child(_rank, LOOPBACK, name, rank, size, store))[2]
            for rank in range(size)
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
    if name == GLOO:
        os.environ["GLOO_SOCKET_IFNAME"] = site.interface
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        _obey(pipe, size)
        return
    import mesh.blocking
    import mesh.distributed

    node = mesh.blocking.Node.embedded(
        key=SecretKey.generate(),
        authorizer=allow_any(),
        config=EndpointConfig(bind=f"{site.address}:0"),
        tensors=False,
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

    whole, part = torch.ones(numel), torch.ones(numel // size)
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX)
    if operation == "all_gather":
        return lambda: dist.all_gather_single(whole, part)
    return lambda: dist.reduce_scatter_single(part, whole, op=dist.ReduceOp.MAX)


def _size(nbytes: int) -> str:
    return f"{nbytes / MIB:g} MiB" if nbytes >= MIB else f"{nbytes / KIB:g} KiB"
