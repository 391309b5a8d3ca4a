"""``rpc``: `mesh.rpc` beside ``torch.distributed.rpc``, one program by the names that both have.

A small add, a large argument, calls that call back 200 deep, and many calls of one peer beside
another's. TensorPipe runs with its defaults, which on one host are shared memory.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import anyio

from tests.benchmarks.compare import Options, Row, Shown, compare, ratio, ready
from tests.benchmarks.harness import Contender, Pipe, Site, median

if TYPE_CHECKING:
    import torch

__all__ = ["RemoteCalls", "missing", "run"]

PART = "rpc"
MIB = 1 << 20
NBYTES = 64 * MIB
OURS, TENSORPIPE = "mesh.rpc", "TensorPipe"
SERVER, CLIENT = "server", "client"

DEPTH, AT_ONCE = 200, 8
CALLS, OTHERS = 1000, 50
"""Calls of one peer at once, and of another meanwhile, one after another."""


class RemoteCalls:
    """One contender: a worker that calls another.

    Args:
        ours: `mesh.rpc`; otherwise torch's own.
    """

    most = math.inf

    def __init__(self, *, ours: bool) -> None:
        self._ours = ours
        self.spins = not ours

    def missing(self) -> str | None:
        """Return why it can't take part here, None if it can."""
        from torch.distributed import rpc

        return None if self._ours or rpc.is_available() else "this torch has no rpc"

    def serve(self, pipe: Pipe, site: Site) -> None:
        """Answer calls."""
        with socket.create_server((site.address, 0)) as probe:
            where = probe.getsockname()[:2]
        pipe.send(where)
        self._join(site, where, SERVER, 0)
        time.sleep(1e9)

    def dial(self, pipe: Pipe, site: Site, where: Any) -> None:
        """Make them."""
        import torch

        rpc = self._join(site, where, CLIENT, 1)
        small, data = torch.ones(2), torch.zeros(0, dtype=torch.uint8)

        def add(count: int) -> list[float]:
            trips = []
            for _ in range(count):
                began = time.perf_counter()
                rpc.rpc_sync(SERVER, torch.add, args=(small, 1))
                trips.append(time.perf_counter() - began)
            return trips

        def bulk(nbytes: int) -> float:
            nonlocal data
            if len(data) != nbytes:
                data = torch.ones(nbytes, dtype=torch.uint8)
            began = time.perf_counter()
            rpc.rpc_sync(SERVER, sink, args=(data,))
            return time.perf_counter() - began

        orders = {"small": add, "bulk": bulk, "nested": nested}
        pipe.send("ready")
        while True:
            order, number = pipe.recv()
            pipe.send(orders[order](number))

    def _join(self, site: Site, where: tuple[str, int], name: str, rank: int) -> Any:
        import torch

        torch.set_num_threads(1)
        os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = site.interface
        method = f"tcp://{where[0]}:{where[1]}"
        rpc: Any
        if self._ours:
            from auth import SecretKey, allow_any
            from mesh import blocking, rpc
            from tests.benchmarks.ours import configuration

            node = blocking.Node.embedded(
                key=SecretKey.generate(), authorizer=allow_any(), config=configuration(site)
            ).open()
            rpc.expose(__name__)
            options: Any = rpc.MeshRpcBackendOptions(init_method=method, node=node)
        else:
            from torch.distributed import rpc

            options = rpc.TensorPipeRpcBackendOptions(init_method=method)
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
        return rpc


def sink(tensor: torch.Tensor) -> int:
    """Take a tensor."""
    return len(tensor)


def nested(depth: int) -> float:
    """Return how long `AT_ONCE` calls take that call back, so deep. For `mesh.rpc`."""
    ends: list[int] = []
    began = time.perf_counter()
    threads = [
        threading.Thread(target=lambda: ends.append(bounce(depth, CLIENT))) for _ in range(AT_ONCE)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert ends == [depth] * AT_ONCE
    return time.perf_counter() - began


def bounce(depth: int, here: str) -> int:
    """Call the other worker, which does the same."""
    from mesh import rpc

    if depth == 0:
        return 0
    there = SERVER if here == CLIENT else CLIENT
    return 1 + int(rpc.rpc_sync(there, bounce, args=(depth - 1, there)))


CONTENDERS: dict[str, Contender] = {
    OURS: RemoteCalls(ours=True),
    TENSORPIPE: RemoteCalls(ours=False),
}


def missing() -> str | None:
    """Return None: this can always be measured."""
    return None


def run(options: Options) -> tuple[list[Row], list[Shown]]:
    """Measure; return the rows and the ratios."""
    nbytes = max(MIB, int(NBYTES * options.scale))
    add, bulk = "rpc_sync of a small add", f"an argument of {nbytes / MIB:g} MiB"
    with ready(CONTENDERS, options) as sessions:
        rows = compare(PART, add, sessions, options, lambda it: it.small(options.calls))
        rows += compare(PART, bulk, sessions, options, lambda it: it.bulk(nbytes))
        seconds = None
        if OURS in sessions:
            sessions[OURS].ask("nested", 10)
            depth = max(10, int(DEPTH * options.scale))
            seconds = sessions[OURS].ask("nested", depth)
    slowest = {row.contender: row.p99 for row in rows if row.p99}
    tail = slowest[OURS] / slowest[TENSORPIPE] if len(slowest) == 2 else None
    shown = [
        Shown(PART, f"{add}: {OURS} / {TENSORPIPE}", ratio(rows, OURS, TENSORPIPE, add), 1.0, True),
        Shown(PART, f"{add}, p99: {OURS} / {TENSORPIPE}", tail, 1.0, True),
        Shown(PART, f"{bulk}: {OURS} / {TENSORPIPE}", ratio(rows, OURS, TENSORPIPE, bulk), 1.5),
    ]
    if seconds is not None:
        what = f"{AT_ONCE} calls that call back {depth} deep: / 10 s"
        shown.append(Shown(PART, what, seconds / 10, 1.0, True))
        slowdown = anyio.run(_beside_many, max(50, int(CALLS * options.scale)))
        what = "a peer's call beside many of another's: / the time that all of those take"
        shown.append(Shown(PART, what, slowdown, 0.25, True))
    return rows, shown


async def _beside_many(count: int) -> float:
    """Let one peer make `count` calls at once, and another some one by one.

    Returns the median of the other's calls, over what the many took in all.
    """
    from mesh import rpc
    from tests.mesh.rpc.nodes import agents

    rpc.expose(__name__)
    took: list[float] = []
    async with agents(3) as (many, callee, other):
        for each in (many, other):
            await each.call(callee.node_id, pause)
        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(many.call, callee.node_id, pause)
            for _ in range(max(3, count * OTHERS // CALLS)):
                start = time.perf_counter()
                await other.call(callee.node_id, pause)
                took.append(time.perf_counter() - start)
        return median(took) / (time.perf_counter() - began)


def pause() -> None:
    """Take a millisecond of a thread's time."""
    time.sleep(0.001)
