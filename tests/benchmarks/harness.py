"""Two processes that carry out transfers between them on order, and what these cost.

A contender is a pair of functions: `serve` runs in one process and takes what comes, `dial` runs in
another and obeys orders, so that every contender stands ready, connected and warm, while the others
have their turns. Each process may live in a network namespace of its own. CPU time is read from
outside, of all threads of a process, so that no contender has to count its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import anyio
import psutil

from tests.lab.network import enter

__all__ = [
    "Filled",
    "LOOPBACK",
    "QUIET_SHARE",
    "SMALL",
    "Contender",
    "Pipe",
    "Session",
    "Site",
    "Turn",
    "child",
    "cpu_seconds",
    "filled",
    "median",
    "obey",
    "obey_async",
    "other_load",
    "session",
]

SMALL = b"x" * 64
"""What goes either way in a round trip."""

QUIET_SECONDS = 0.5
QUIET_SHARE = 0.05
"""A quiet machine: less than this share of it is used by anybody else."""

START_METHOD = "spawn"
"""How processes begin: none holds anything that another has loaded."""

START_SECONDS = 60.0
TURN_SECONDS = 120.0
"""How long a contender may take to stand ready, and for one turn."""

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """Where a process of a contender runs."""

    address: str = "127.0.0.1"
    interface: str = "lo"
    namespace: str | None = None
    helpers: tuple[int, ...] = ()
    """Processes that work for it there, such as the end of a tunnel: their CPU time is its own."""
    between: tuple[int, ...] = ()
    """Processes that are the way from there: their CPU time is neither its own nor others'."""


LOOPBACK = Site()


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One transfer, or one series of round trips. Seconds, and bytes one way."""

    seconds: float
    nbytes: int
    send_cpu: float
    receive_cpu: float
    trips: tuple[float, ...] = ()
    machine: float = 0.0
    """CPU seconds that the whole machine had, and ..."""
    others: float = 0.0
    """... those of them that went to nobody of the contender's."""


class Contender(Protocol):
    """Something that moves bytes. Its instances travel to the processes that they run in."""

    most: float
    """How many bytes it is given to move in a turn, for those that would take minutes."""

    spins: bool
    """Whether it keeps a core busy while it waits, and so has to be stopped meanwhile."""

    def missing(self) -> str | None:
        """Return why it can't take part here, None if it can."""

    def serve(self, pipe: Pipe, site: Site) -> None:
        """Send where it can be dialled, then serve until killed."""

    def dial(self, pipe: Pipe, site: Site, where: Any) -> None:
        """Connect, send something as a sign of it, then `obey`."""


class Session:
    """A contender that stands ready."""

    def __init__(
        self,
        contender: Contender,
        pipe: Pipe,
        sender: tuple[int, ...],
        receiver: tuple[int, ...],
        between: tuple[int, ...] = (),
    ) -> None:
        self._most = contender.most
        self._spins = contender.spins
        self.sender, self.receiver = sender, receiver
        """Processes at either end."""
        self._watched = (sender, receiver, (*between, os.getpid()))
        self._pipe = pipe

    def small(self, count: int) -> Turn:
        """Have it make `count` round trips of 64 bytes each way."""
        return self._turn(("small", count), 0)

    def bulk(self, nbytes: int) -> Turn:
        """Have it move `nbytes` one way, and hear that they have arrived."""
        nbytes = int(min(nbytes, self._most))
        return self._turn(("bulk", nbytes), nbytes)

    def ask(self, order: str, number: int) -> Any:
        """Give an order of the contender's own; return what it says."""
        self._pipe.send((order, number))
        if not self._pipe.poll(TURN_SECONDS):
            raise TimeoutError(f"no answer within {TURN_SECONDS:.0f} s")
        return self._pipe.recv()

    def both(self, nbytes: int) -> Turn:
        """Have it move `nbytes` either way at once. Only ours can."""
        return self._turn(("both", nbytes), nbytes)

    def rest(self) -> None:
        """Have it keep still until its next turn."""
        if self._spins:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in (*self.sender, *self.receiver):
            os.kill(pid, number)

    def _turn(self, order: tuple[str, int], nbytes: int) -> Turn:
        if self._spins:
            self._signal(signal.SIGCONT)
        machine, busy = _machine_seconds()
        before = [cpu_seconds(pids) for pids in self._watched]
        answer = self.ask(*order)
        after = [cpu_seconds(pids) for pids in self._watched]
        machine_after, busy_after = _machine_seconds()
        self.rest()
        used = [late - early for late, early in zip(after, before, strict=True)]
        trips = tuple(answer) if isinstance(answer, list) else ()
        return Turn(
            seconds=sum(trips) if trips else answer,
            nbytes=nbytes,
            send_cpu=used[0],
            receive_cpu=used[1],
            trips=trips,
            machine=machine_after - machine,
            others=max(0.0, busy_after - busy - sum(used)),
        )


@contextlib.contextmanager
def session(
    contender: Contender, sender: Site = LOOPBACK, receiver: Site = LOOPBACK
) -> Iterator[Session]:
    """Run both processes of `contender` for the block, connected."""
    with (
        child(contender.serve, receiver) as (where, serving, _),
        child(contender.dial, sender, where) as (_, dialling, pipe),
    ):
        made = Session(
            contender,
            pipe,
            (dialling.pid or 0, *sender.helpers),
            (serving.pid or 0, *receiver.helpers),
            (*sender.between, *receiver.between),
        )
        made.rest()
        yield made


@contextlib.contextmanager
def child(
    work: Callable[..., None], site: Site, *arguments: Any
) -> Iterator[tuple[Any, BaseProcess, Pipe]]:
    """Run `work(pipe, site, *arguments)` as a process at `site`; yield its first word, it, a pipe.

    Raises:
        RuntimeError: it ended without a word, or said none in time.
    """
    context = multiprocessing.get_context(START_METHOD)
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, work, site, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        try:
            word = ours.recv() if ours.poll(START_SECONDS) else None
        except EOFError:
            word = None
        if word is None:
            raise RuntimeError(f"{work.__module__}.{work.__qualname__} did not start")
        yield word, process, ours
    finally:
        ours.close()
        process.kill()  # which also ends one that has been stopped
        process.join()


def _run(pipe: Pipe, work: Callable[..., None], site: Site, *arguments: Any) -> None:
    if site.namespace is not None:
        enter(site.namespace)
    # What torch has to say of its own interfaces, and of peers that leave, is no part of a table.
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    warnings.simplefilter("ignore")
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        work(pipe, site, *arguments)


def obey(pipe: Pipe, small: Callable[[int], list[float]], bulk: Callable[[int], float]) -> None:
    """Carry out orders until nobody gives any; for contenders that block."""
    pipe.send("ready")
    while True:
        order, number = pipe.recv()
        pipe.send(small(number) if order == "small" else bulk(number))


async def obey_async(pipe: Pipe, orders: dict[str, Callable[[int], Any]]) -> None:
    """Do the same in an event loop, which goes on while there is nothing to do."""
    pipe.send("ready")
    while True:
        await anyio.wait_readable(pipe)
        order, number = pipe.recv()
        pipe.send(await orders[order](number))


class Filled:
    """One block of memory, made anew when another size is asked for."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def __call__(self, nbytes: int) -> bytearray:
        if len(self._memory) != nbytes:
            self._memory = bytearray()
            # Not zeros: the kernel would back all of them by one page, which stays in the cache.
            self._memory = bytearray(b"\x5a") * nbytes
        return self._memory


filled = Filled()
"""Return memory of so many bytes, the same each time for the same size: contenders are measured
moving bytes, not asking the kernel for memory."""


def median(values: list[float]) -> float:
    """Return the middle of `values`, of an even number the upper."""
    return sorted(values)[len(values) // 2] if values else math.nan


def other_load() -> float:
    """Return the share of the machine's CPU time used by others while we do nothing."""
    return psutil.cpu_percent(QUIET_SECONDS) / 100


def cpu_seconds(pids: tuple[int, ...]) -> float:
    """Return the CPU time of all threads of some processes."""
    # The clock of another process, as clock_getcpuclockid(3) makes its name.
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def _machine_seconds() -> tuple[float, float]:
    """Return the CPU seconds that the machine had since it booted, and was busy for."""
    with open("/proc/stat") as stat:  # noqa: PTH123 - read hundreds of times
        ticks = [int(word) for word in stat.readline().split()[1:9]]
    total = sum(ticks)
    return total / _TICKS, (total - ticks[3] - ticks[4]) / _TICKS
