"""How long a process takes to wake that has waited for another for a while, asleep.

One sleeps, the other stores and rings; a trip lasts from before the ring until the sleeper's own
program goes on. Beside ours: a read of an eventfd that blocks, in a process that does nothing else,
which is the least that it can take.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from tensor_bridge.lanes.shared.doorbell import LINE_WORDS, Bell, Gone, Waiter
from tests.benchmarks.harness import Pipe, Site, obey

__all__ = ["BareWake", "Wake"]

COUNTER, FLAG, WOKEN = 0, LINE_WORDS, 2 * LINE_WORDS
"""Words: what is raised, whether the other sleeps, and when it woke, in nanoseconds."""

IDLE_SECONDS = 0.02
"""How long it has slept: long enough for the processor to have gone to sleep, or to others."""

MOST_TRIPS = 100
LONGEST_TRIP = 5.0


class Wake:
    """One contender: `Waiter` and `Bell`, as ranks of one host wait for each other."""

    most = math.inf
    spins = False
    blocks = False
    """Whether a read of the eventfd waits."""

    def missing(self) -> str | None:
        """Return why it can't take part here, None if it can."""
        return None

    def serve(self, pipe: Pipe, site: Site) -> None:
        """Sleep, and wake, for one who dials."""
        memory, bell = os.memfd_create("wakes"), os.eventfd(0, self._flags())
        os.ftruncate(memory, mmap.PAGESIZE)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # a name of the system's choice
            listener.listen()
            pipe.send(listener.getsockname())
            with listener.accept()[0] as dialler:
                socket.send_fds(dialler, [b"."], [memory, bell])
                words = memoryview(mmap.mmap(memory, mmap.PAGESIZE)).cast("Q")
                self.sleep(words, bell, dialler)

    def dial(self, pipe: Pipe, site: Site, where: Any) -> None:
        """Ring."""
        with socket.socket(socket.AF_UNIX) as sleeper:
            sleeper.connect(where)
            _, (memory, bell), *_ = socket.recv_fds(sleeper, 1, 2)
            words = memoryview(mmap.mmap(memory, mmap.PAGESIZE)).cast("Q")
            ring, rung = self.ringer(words, bell), 0

            def trips(count: int) -> list[float]:
                nonlocal rung
                taken = []
                for _ in range(min(count, MOST_TRIPS)):
                    time.sleep(IDLE_SECONDS)
                    rung += 1
                    taken.append(_trip(words, ring, rung))
                return taken

            obey(pipe, trips, lambda nbytes: 0.0)

    def sleep(self, words: memoryview, bell: int, dialler: socket.socket) -> None:
        """Say each time when it woke."""
        waiter, count = Waiter(words, FLAG, bell, [dialler.fileno()]), 0

        def is_rung() -> bool:
            return words[COUNTER] > count

        with contextlib.suppress(Gone):
            while True:
                waiter.wait(is_rung, math.inf)
                words[WOKEN] = time.perf_counter_ns()
                count += 1

    def ringer(self, words: memoryview, bell: int) -> Callable[[int], None]:
        """Return what rings for the time of that number."""
        return Bell(words, COUNTER, [(FLAG, bell)]).ring

    def _flags(self) -> int:
        return os.EFD_CLOEXEC | (0 if self.blocks else os.EFD_NONBLOCK)


class BareWake(Wake):
    """A read and a write of an eventfd."""

    blocks = True

    def sleep(self, words: memoryview, bell: int, dialler: socket.socket) -> None:
        """Say each time when it woke."""
        while True:
            os.eventfd_read(bell)
            words[WOKEN] = time.perf_counter_ns()

    def ringer(self, words: memoryview, bell: int) -> Callable[[int], None]:
        """Return what rings for the time of that number."""

        def ring(_: int) -> None:
            os.eventfd_write(bell, 1)

        return ring


def _trip(words: memoryview, ring: Callable[[int], None], number: int) -> float:
    before = words[WOKEN]
    began = time.perf_counter_ns()
    ring(number)
    while (woken := words[WOKEN]) == before:
        if time.perf_counter_ns() - began > LONGEST_TRIP * 1e9:
            raise TimeoutError("the sleeper does not wake")
        time.sleep(1e-3)  # keeps still: it is the other whose time is taken
    return (woken - began) / 1e9
