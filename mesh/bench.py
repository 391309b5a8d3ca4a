"""How fast tensors and small messages move between this node and a peer: ``mesh bench``.

Bytes go by `Peer.put` and come back by `TensorRef.get`, as those of any program: who may put and
read tensors at a peer may measure it, within its quotas, and nobody else. Two small calls go with
that:

===============  ==============  ================================================================
call             scope           answers
===============  ==============  ================================================================
``bench.echo``   ``tensor:put``  the bytes it was sent, at most 1 KiB
``bench.usage``  ``tensor:put``  CPU seconds that the node's process has used so far, those that
                                 its machine had and was busy for, and the size of the datagrams
                                 that the node sends to whoever asks
===============  ==============  ================================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import psutil

from auth import MeshError
from mesh.errors import ProtocolError
from transport import CborValue, Connection, Endpoint, Incoming

if TYPE_CHECKING:
    import torch

    from mesh.peer import Peer, TensorRef
    from tensor_bridge import Progress

__all__ = [
    "Link",
    "Plan",
    "Result",
    "Transfer",
    "Trips",
    "Usage",
    "Way",
    "measure",
    "register_calls",
]

SCOPE = "tensor:put"
"""What a peer is asked for: the figures say nothing that its answers to puts don't show."""

ECHO_CALL, USAGE_CALL = "bench.echo", "bench.usage"

MIB = 1 << 20
SIZES = (64 << 10, 1 * MIB, 16 * MIB, 256 * MIB)
"""Bytes of the tensors that are moved."""

SMALL = b"x" * 64
MAX_ECHO = 1024

WARM_UP = 1 * MIB
"""Bytes that go each way before anything is measured, or as many as the largest size: by then both
ends know what datagrams the path carries, and how fast."""

LOOK_SECONDS = 0.5
"""How long to look at what else the two machines do."""

QUIET_SHARE = 0.05
"""A quiet machine: less than this share of it is in use before the measurement."""

MIN_SECONDS = 0.25
MAX_ROUNDS = 100
"""Small tensors are moved more often than was asked for: one move alone says little."""

PATIENCE = 5.0
"""A size is left out if one move of it would take this many times the seconds given to all."""

CLEANUP_SECONDS = 2.0
"""How long to try to delete what lies at the peer once the measurement has failed or ended."""


class Way(StrEnum):
    """Where the bytes of a transfer go."""

    PUT = "put"
    """From here to the peer."""
    GET = "get"
    """From the peer to here."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure: bytes of the tensors, moves of each, small messages, and seconds.

    `seconds` are for all moves of one size one way, of which there is always one; `timeout` is for
    each move and each answer.
    """

    sizes: Sequence[int] = SIZES
    rounds: int = 5
    calls: int = 200
    seconds: float = 10.0
    timeout: float = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What one end has used so far. Seconds; `datagram` in bytes of UDP payload."""

    cpu: float
    machine: float
    busy: float
    datagram: int

    def as_message(self) -> dict[str, CborValue]:
        """Return the form for the wire."""
        return dataclasses.asdict(self)

    @classmethod
    def from_message(cls, value: CborValue) -> Usage:
        """Return what `as_message` was made of.

        Raises:
            ProtocolError: something is missing, or is no number that can be.
        """
        match value:
            case {
                "cpu": float(cpu),
                "machine": float(machine),
                "busy": float(busy),
                "datagram": int(datagram),
            } if all(0 <= each < math.inf for each in (cpu, machine, busy, datagram)):
                return cls(cpu, machine, busy, datagram)
        raise ProtocolError(USAGE_CALL, why="the answer is malformed")


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """What lies between the two: who, where, by which lane, in datagrams of how many bytes.

    The loads are shares of either machine that were in use before anything was measured; `rtt` is
    the transport's own smoothed round trip in seconds.
    """

    label: str
    path: str
    lane: str
    rtt: float | None
    datagram_there: int
    datagram_back: int
    busy_here: float
    busy_there: float

    @property
    def noise(self) -> tuple[str, ...]:
        """Which of the two machines is not quiet."""
        loads = (("this machine", self.busy_here), (self.label, self.busy_there))
        return tuple(f"{name} is {load:.0%} busy" for name, load in loads if load > QUIET_SHARE)


@dataclasses.dataclass(frozen=True, slots=True)
class Trips:
    """Round trips of `nbytes` each way, in seconds: the median, and what 99 of 100 keep to."""

    nbytes: int
    count: int
    p50: float
    p99: float


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """Moves of one size one way. Rates are bytes a second, the median and the range.

    The CPU figures are seconds for 10^9 bytes, of the whole process at either end. `why` says why
    there are no figures.
    """

    way: Way
    nbytes: int
    rounds: int = 0
    rate: float = 0.0
    least: float = 0.0
    most: float = 0.0
    cpu_here: float = 0.0
    cpu_there: float = 0.0
    why: str | None = None


Result = Link | Trips | Transfer


def register_calls(endpoint: Endpoint) -> None:
    """Answer the two calls on `endpoint`."""
    endpoint.register_call(ECHO_CALL, _echo, scope=SCOPE)
    endpoint.register_call(USAGE_CALL, _tell_usage, scope=SCOPE)


async def measure(
    peer: Peer,
    plan: Plan,
    *,
    found: Callable[[Result], object],
    moved: Callable[[str, float], object] = lambda what, share: None,
) -> None:
    """Measure the way to a peer and back.

    Args:
        peer: an open node's.
        plan: what to measure.
        found: called in the event loop with each result, the `Link` first.
        moved: called in the event loop with what is being done and the share of it that is done.

    Raises:
        AccessDenied: the peer does not let this node put or read tensors.
        QuotaExceeded: the peer has no room even to warm up.
        ServiceUnknown: the peer offers no tensors, or its version has no such calls.
        DeadlineExceeded, Unreachable, PeerLost: as `Peer.put`.
    """
    run = _Run(peer, plan, moved)
    try:
        found(await run.link())
        if plan.calls:
            found(await run.trips())
        for nbytes in sorted(plan.sizes):
            for result in await run.transfers(nbytes):
                found(result)
    finally:
        with anyio.move_on_after(CLEANUP_SECONDS, shield=True), contextlib.suppress(MeshError):
            await run.drop()


class _Run:
    """One measurement."""

    def __init__(self, peer: Peer, plan: Plan, moved: Callable[[str, float], object]) -> None:
        self._peer = peer
        self._plan = plan
        self._moved = moved
        self._rates = dict.fromkeys(Way, math.inf)
        """Bytes a second, as last measured."""
        self._kept: list[TensorRef] = []
        """What lies at the peer now: one tensor at most."""

    async def link(self) -> Link:
        self._moved("looking at the load", 0.0)
        before = await self._usages()
        await anyio.sleep(LOOK_SECONDS)
        loads = [
            (late.busy - early.busy) / max(late.machine - early.machine, 1e-9)
            for early, late in zip(before, await self._usages(), strict=True)
        ]
        nbytes = min(WARM_UP, max(self._plan.sizes))
        await self._put(await _filled(nbytes), "warming up")
        await self._get("warming up")
        await self.drop()
        here, there = await self._usages()
        connection = await self._peer.connection()
        info = connection.info
        return Link(
            self._peer.label,
            info.remote,
            # What the warm-up went by, if it was large enough to look for one.
            self._peer._node.lanes.status(connection).name,
            info.rtt,
            here.datagram,
            there.datagram,
            *loads,
        )

    async def trips(self) -> Trips:
        connection = await self._peer.connection()
        times = []
        for number in range(self._plan.calls):
            if not number % 10:
                self._moved("round trips", number / self._plan.calls)
            began = time.perf_counter()
            await connection.call(ECHO_CALL, SMALL, timeout=self._plan.timeout)
            times.append(time.perf_counter() - began)
        times.sort()
        return Trips(
            len(SMALL), len(times), statistics.median(times), times[-1 - len(times) // 100]
        )

    async def transfers(self, nbytes: int) -> list[Transfer]:
        """Return how `nbytes` move, there and back, or why they don't."""
        from tensor_bridge import QuotaExceeded

        slow = [way for way in Way if nbytes / self._rates[way] > PATIENCE * self._plan.seconds]
        if slow:
            why = f"takes {nbytes / min(self._rates[way] for way in slow):.0f} s"
            return [Transfer(way, nbytes, why=why) for way in Way]
        tensor = await _filled(nbytes)

        async def put() -> float:
            await self.drop()
            began = time.perf_counter()
            await self._put(tensor, f"put of {_size(nbytes)}")
            return time.perf_counter() - began

        async def get() -> float:
            began = time.perf_counter()
            await self._get(f"get of {_size(nbytes)}")
            return time.perf_counter() - began

        try:
            there = await self._repeat(Way.PUT, nbytes, put)
        except QuotaExceeded as error:
            why = error.why or error.what
            return [Transfer(way, nbytes, why=why) for way in Way]
        back = await self._repeat(Way.GET, nbytes, get)
        await self.drop()
        return [there, back]

    async def drop(self) -> None:
        """Delete what lies at the peer."""
        while self._kept:
            await self._kept.pop().delete(timeout=self._plan.timeout)

    async def _repeat(
        self, way: Way, nbytes: int, move: Callable[[], Awaitable[float]]
    ) -> Transfer:
        plan, rates = self._plan, list[float]()
        here, there = await self._usages()
        began = time.perf_counter()
        while len(rates) < MAX_ROUNDS:
            elapsed = time.perf_counter() - began
            is_enough = len(rates) >= plan.rounds and elapsed >= MIN_SECONDS
            if rates and (is_enough or elapsed >= plan.seconds):
                break
            rates.append(nbytes / await move())
        here_after, there_after = await self._usages()
        gigabytes = nbytes * len(rates) / 1e9
        self._rates[way] = statistics.median(rates)
        return Transfer(
            way,
            nbytes,
            len(rates),
            self._rates[way],
            min(rates),
            max(rates),
            (here_after.cpu - here.cpu) / gigabytes,
            (there_after.cpu - there.cpu) / gigabytes,
        )

    async def _put(self, tensor: torch.Tensor, what: str) -> None:
        progress = self._progress(what)
        self._kept.append(
            await self._peer.put(
                tensor, "mesh bench", timeout=self._plan.timeout, progress=progress
            )
        )

    async def _get(self, what: str) -> None:
        await self._kept[0].get(timeout=self._plan.timeout, progress=self._progress(what))

    def _progress(self, what: str) -> Callable[[Progress], object]:
        return lambda progress: self._moved(what, progress.moved / max(1, progress.total))

    async def _usages(self) -> tuple[Usage, Usage]:
        """Return what has been used here, and there."""
        connection = await self._peer.connection()
        answer = await connection.call(USAGE_CALL, timeout=self._plan.timeout)
        return _usage(connection), Usage.from_message(answer)


async def _echo(request: Incoming) -> CborValue:
    value = request.value
    if not isinstance(value, bytes) or len(value) > MAX_ECHO:
        raise ProtocolError(ECHO_CALL, why=f"it takes at most {MAX_ECHO} bytes")
    return value


async def _tell_usage(request: Incoming) -> CborValue:
    return _usage(request.connection).as_message()


def _usage(connection: Connection) -> Usage:
    times = psutil.cpu_times()
    total = sum(times)
    idle = times.idle + getattr(times, "iowait", 0.0)
    return Usage(time.process_time(), total, total - idle, connection.info.datagram_size)


def _size(nbytes: int) -> str:
    return f"{nbytes / MIB:g} MiB" if nbytes >= MIB else f"{nbytes / 1024:g} KiB"


async def _filled(nbytes: int) -> torch.Tensor:
    import torch

    # In a thread: a quarter of a gigabyte would keep the event loop waiting.
    return await anyio.to_thread.run_sync(lambda: torch.ones(nbytes, dtype=torch.uint8))
