"""``host``: tensors put and got between two processes of one host, through memory that they share.

All of a move is measured: what is agreed over QUIC, the copies, and the memory that it lands in.
"""

from __future__ import annotations

import math
import time
from typing import Any

import anyio

from auth import SecretKey, allow_any
from tests.benchmarks.compare import Options, Row, Shown, compare, ratio, ready
from tests.benchmarks.gloo import Gloo
from tests.benchmarks.harness import Contender, Pipe, Site, obey_async
from tests.benchmarks.ours import configuration
from tests.benchmarks.tensorpipe import TensorPipe

__all__ = ["Moves", "missing", "run"]

PART = "host"
MIB = 1 << 20
NBYTES = 64 * MIB
GLOO = "gloo (plain TCP)"
WAYS = ("put", "get")


class Moves:
    """One contender: tensors moved one way, as a program that uses `mesh` moves them.

    Args:
        way: "put", from the process that orders it to the other, or "get".
        shared_memory: whether the two may share memory; over QUIC, otherwise.
    """

    most = math.inf
    spins = False

    def __init__(self, way: str, *, shared_memory: bool = True) -> None:
        self._way = way
        self._shared_memory = shared_memory

    def missing(self) -> str | None:
        """Return why it can't take part here, None if it can."""
        from tensor_bridge.lanes.shared.host import unavailable

        return unavailable() if self._shared_memory else None

    def serve(self, pipe: Pipe, site: Site) -> None:
        """Serve tensors."""
        anyio.run(self._serve, pipe, site)

    def dial(self, pipe: Pipe, site: Site, where: Any) -> None:
        """Move them."""
        anyio.run(self._dial, pipe, site, where)

    async def _serve(self, pipe: Pipe, site: Site) -> None:
        async with self._node(site, tensors=True) as node:
            pipe.send(node.ticket().encode())
            await anyio.sleep_forever()

    async def _dial(self, pipe: Pipe, site: Site, where: str) -> None:
        import torch

        tensor = torch.zeros(0, dtype=torch.uint8)
        async with self._node(site, tensors=False) as node:
            peer = await node.connect(where)

            async def bulk(nbytes: int) -> float:
                nonlocal tensor
                if len(tensor) != nbytes:
                    tensor = torch.ones(nbytes, dtype=torch.uint8)
                began = time.perf_counter()
                ref = await peer.put(tensor)
                if self._way == "get":
                    began = time.perf_counter()
                    await ref.get()
                seconds = time.perf_counter() - began
                await ref.delete()
                return seconds

            await obey_async(pipe, {"bulk": bulk})

    def _node(self, site: Site, *, tensors: bool) -> Any:
        from mesh import Node

        return Node.embedded(
            key=SecretKey.generate(),
            authorizer=allow_any(),
            config=configuration(site),
            tensors=tensors,
            shared_memory=self._shared_memory,
        )


CONTENDERS: dict[str, Contender] = {
    **{f"quicmesh {way}": Moves(way) for way in WAYS},
    **{f"quicmesh {way} over QUIC": Moves(way, shared_memory=False) for way in WAYS},
    GLOO: Gloo(),
    "TensorPipe": TensorPipe(over_tcp=False),
}


def missing() -> str | None:
    """Return why processes of this host can't share memory, None if they can."""
    return Moves("put").missing()


def run(options: Options) -> tuple[list[Row], list[Shown]]:
    """Measure; return the rows and the ratios."""
    nbytes = max(MIB, int(NBYTES * options.scale))
    figure = f"one way, {nbytes / MIB:g} MiB"
    with ready(CONTENDERS, options) as sessions:
        rows = compare(PART, figure, sessions, options, lambda it: it.bulk(nbytes))
    ours = [f"quicmesh {way}" for way in WAYS]
    pairs = [
        (one, other, goal)
        for one in ours
        for other, goal in ((GLOO, 2.5), ("TensorPipe", None), (f"{one} over QUIC", None))
    ]
    return rows, [
        Shown(PART, f"{figure}: {one} / {other}", ratio(rows, one, other), goal)
        for one, other, goal in pairs
    ]
