"""``host``: tensors and calls between two processes of one host, through memory that they share.

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
from tests.benchmarks.harness import SMALL, Contender, Pipe, Site, obey_async
from tests.benchmarks.ours import configuration
from tests.benchmarks.tensorpipe import TensorPipe
from tests.benchmarks.waking import BareWake, Wake
from transport import Incoming

__all__ = ["Moves", "missing", "run"]

PART = "host"
MIB = 1 << 20
NBYTES = 64 * MIB
GLOO = "gloo (plain TCP)"
WAYS = ("put", "get")
NEW = "quicmesh put, new length"
NEW_STEP = 4096
MADE = "quicmesh get, made there"
HANDED = "quicmesh get, handed over"
CALL = "quicmesh call"
WAKE, BARE_WAKE = "quicmesh wake", "a bare eventfd"
TENSORPIPE = "TensorPipe"
HANDED_SIZES = (MIB, 64 * MIB, 1024 * MIB)
WARM_UP = 8
"""Hand-overs before those that are measured: the interpreter takes as many to know the way."""


class Moves:
    """One contender: tensors moved one way, as a program that uses `mesh` moves them.

    Args:
        way: "put", from the process that orders it to the other, "new": a put of a length that none
            had before, "get" of what was put before, "made": a get of what the other has made, or
            "map": of what lies in memory that is handed over.
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
            node.endpoint.register_call("echo", _echo, scope="bench")
            pipe.send(node.ticket().encode())
            await anyio.sleep_forever()

    async def _dial(self, pipe: Pipe, site: Site, where: str) -> None:
        import torch

        tensor = torch.zeros(0, dtype=torch.uint8)
        refs: dict[int, Any] = {}
        news = 0
        async with self._node(site, tensors=False) as node:
            peer = await node.connect(where)

            async def small(count: int) -> list[float]:
                connection = await peer.connection()
                if self._shared_memory and connection.carrier is None:
                    await (await peer.put(torch.ones(MIB))).delete()  # which has them meet
                trips = []
                for _ in range(count):
                    began = time.perf_counter()
                    await connection.call("echo", SMALL)
                    trips.append(time.perf_counter() - began)
                return trips

            async def mapped(nbytes: int) -> float:
                if nbytes not in refs:
                    refs[nbytes] = await peer.put(
                        torch.ones(nbytes, dtype=torch.uint8), shareable=True
                    )
                    for _ in range(WARM_UP):
                        await refs[nbytes].get(copy=False)
                began = time.perf_counter()
                await refs[nbytes].get(copy=False)
                return time.perf_counter() - began

            async def bulk(nbytes: int) -> float:
                nonlocal tensor, news
                if self._way == "new":
                    news += 1
                    nbytes -= news * NEW_STEP
                if len(tensor) != nbytes:
                    tensor = torch.ones(nbytes, dtype=torch.uint8)
                began = time.perf_counter()
                if self._way == "made":
                    ref = await peer.create("ones", (nbytes,), dtype=torch.uint8)
                else:
                    ref = await peer.put(tensor)
                if self._way in ("get", "made"):
                    began = time.perf_counter()
                    await ref.get()
                seconds = time.perf_counter() - began
                await ref.delete()
                return seconds

            move = mapped if self._way == "map" else bulk
            await obey_async(pipe, {"bulk": move, "small": small})

    def _node(self, site: Site, *, tensors: bool) -> Any:
        from mesh import Node

        return Node.embedded(
            key=SecretKey.generate(),
            authorizer=allow_any(),
            config=configuration(site),
            tensors=tensors,
            shared_memory=self._shared_memory,
        )


async def _echo(request: Incoming) -> Any:
    return request.value


CONTENDERS: dict[str, Contender] = {
    **{f"quicmesh {way}": Moves(way) for way in WAYS},
    NEW: Moves("new"),
    MADE: Moves("made"),
    **{f"quicmesh {way} over QUIC": Moves(way, shared_memory=False) for way in WAYS},
    GLOO: Gloo(),
    TENSORPIPE: TensorPipe(over_tcp=False),
}
OF_MAPS: dict[str, Contender] = {HANDED: Moves("map")}
OF_CALLS: dict[str, Contender] = {
    CALL: Moves("put"),
    f"{CALL} over QUIC": Moves("put", shared_memory=False),
    TENSORPIPE: TensorPipe(over_tcp=False),
}

OF_WAKES: dict[str, Contender] = {WAKE: Wake(), BARE_WAKE: BareWake()}


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
        for other, goal in ((GLOO, 2.5), (TENSORPIPE, None), (f"{one} over QUIC", None))
    ]
    pairs += [(NEW, GLOO, None), (MADE, GLOO, None)]
    maps, shown = _run_maps(options)
    calls, more = _run_calls(options)
    wakes, how_much_longer = _run_wakes(options)
    return [*rows, *maps, *calls, *wakes], [
        *(
            Shown(PART, f"{figure}: {one} / {other}", ratio(rows, one, other), goal)
            for one, other, goal in pairs
        ),
        *shown,
        *more,
        *how_much_longer,
    ]


def _run_maps(options: Options) -> tuple[list[Row], list[Shown]]:
    """Hand memory over at several sizes; the ratio is to a millisecond."""
    rows: list[Row] = []
    shown = []
    with ready(OF_MAPS, options) as sessions:
        for size in HANDED_SIZES:
            nbytes = max(MIB, int(size * options.scale))
            figure = f"handed over, {nbytes / MIB:g} MiB"
            found = compare(PART, figure, sessions, options, lambda it, n=nbytes: it.bulk(n))
            rows += found
            for row in found:
                milliseconds = nbytes / row.median / 1e3
                shown.append(Shown(PART, f"{figure}: / 1 ms", milliseconds, 1.0, at_most=True))
    return rows, shown


def _run_calls(options: Options) -> tuple[list[Row], list[Shown]]:
    figure = f"round trip, {len(SMALL)} B"
    with ready(OF_CALLS, options) as sessions:
        rows = compare(PART, figure, sessions, options, lambda it: it.small(options.calls))
    slowest = {row.contender: row.p99 for row in rows}
    theirs, ours = slowest.get(TENSORPIPE), slowest.get(CALL)
    tail = ours / theirs if ours and theirs else None
    if not rows:
        return [], []
    return rows, [
        Shown(PART, f"{figure}: {CALL} / {TENSORPIPE}", ratio(rows, CALL, TENSORPIPE), 0.5, True),
        Shown(PART, f"{figure}, p99: {CALL} / {TENSORPIPE}", tail, 0.5, True),
        Shown(
            PART,
            f"{figure}: {CALL} / {CALL} over QUIC",
            ratio(rows, CALL, f"{CALL} over QUIC"),
        ),
    ]


def _run_wakes(options: Options) -> tuple[list[Row], list[Shown]]:
    """Wake who has waited; what a bare eventfd takes is the machine's, the rest is ours."""
    figure = "woken from an idle wait"
    with ready(OF_WAKES, options) as sessions:
        rows = compare(PART, figure, sessions, options, lambda it: it.small(options.calls))
    medians = {row.contender: row.median for row in rows}
    if WAKE not in medians or BARE_WAKE not in medians:
        return rows, []
    return rows, [
        Shown(PART, f"{figure}: {WAKE} / 50 us", medians[WAKE] / 50, 1.0, at_most=True),
        Shown(PART, f"{figure}: {WAKE} / {BARE_WAKE}", medians[WAKE] / medians[BARE_WAKE]),
    ]
