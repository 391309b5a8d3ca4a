"""Waiting for another process without burning a core.

Whoever has written bytes for others raises a counter in shared memory and rings (`Bell.ring`).
Whoever waits (`Waiter.wait`) looks for about 50 microseconds, letting others run in between, unless
those have lately kept the processor for long; then it puts up a flag beside its counter, looks once
more, and sleeps on its eventfd. A bell makes a system call only for those whose flag is up.

A sleep that turned out to be short has cost more than it spared: an idle processor takes a hundred
microseconds to wake up. The next wait looks for twice as long, within bounds, until one takes
longer than any look would have.

No ring is lost. The ringer stores the counter and then loads the flag; the waiter stores the flag
and then loads the counter. If neither store could overtake the load after it, one of the two sees
the other's. Processors do let it overtake, x86 included, so that each stores with a
lock held: in CPython of every version, to take it and to release it are atomic read-modify-writes,
which on x86 are full barriers. Elsewhere the one lets nothing before it pass, and the other nothing
after it, so that the lock is taken once more between the store and the load: a release and an
acquisition after it are in order on Arm. Should a processor know less order than that, a sleep of
`Waiter.wait` lasts one millisecond at first, and each further one twice as long as the one before.
The counter is stored after the bytes,
and the bytes are loaded after the counter: x86 keeps both orders by itself, and elsewhere the lock
does, which a waiter takes twice when it is done: what comes after the second time it is taken comes
after what was before the first time it was released.

What the other processes store here is not believed: it makes a waiter wake, look, and sleep again.
Nor are they trusted with the eventfds: whether a read or a write of one blocks is a property that
all who have it can change, so that neither is done where it would.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import platform
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from transport import ProtocolError

__all__ = ["LINE_WORDS", "Bell", "Gone", "Waiter", "check_eventfd", "make_eventfd"]

LINE_WORDS = 8
"""Words of a cache line. Counters and flags of two processes on one line would slow both."""

YIELD_SECONDS = 50e-6
"""How long a waiter looks before it sleeps, at least: about what going to sleep and waking up takes
on a busy processor."""

LONGEST_LOOK = 0.4e-3
"""The most that short sleeps bring it to."""

HOGGED_SECONDS = 1e-3
"""How long others may keep the processor that they are let have. Beyond, there is more to run than
there are processors: who yields there waits for a turn of it, while who sleeps and is woken goes
before those that have run all the time."""

WARY_FACTOR = 50
"""For how many times as long as that took a waiter then sleeps at once, before it yields again."""

FIRST_SLEEP = 1e-3
LONGEST_SLEEP = 0.25

_KEEPS_ORDER = platform.machine() in {"x86_64", "AMD64"}
"""Whether loads of the processor keep their order, and stores theirs."""

_NOWHERE = -1
"""The offset that preadv2(2) takes for what has none."""

_EVENTFD = "anon_inode:[eventfd]"


class Gone(Exception):
    """What was watched has ended: the processes behind these descriptors are gone.

    Args:
        descriptors: those of `Waiter`'s `watched` that are readable or hung up.
    """

    def __init__(self, descriptors: tuple[int, ...]) -> None:
        super().__init__(descriptors)
        self.descriptors = descriptors


class Bell:
    """A counter that this process alone raises, and those who wait for it.

    Args:
        words: shared memory as words of 8 bytes (``memoryview.cast("Q")``).
        at: index of the counter in it.
        waiters: for each waiter the index of its flag, and its eventfd, which stay the caller's.
    """

    def __init__(self, words: memoryview, at: int, waiters: Iterable[tuple[int, int]] = ()) -> None:
        self._words = words
        self._at = at
        self._waiters = tuple((flag, _Knocker(descriptor)) for flag, descriptor in waiters)
        self._fence = threading.Lock()

    def ring(self, count: int) -> None:
        """Raise the counter to `count`, after what was written before, and wake who sleeps."""
        words = self._words
        with self._fence:
            words[self._at] = count
        if not _KEEPS_ORDER:
            with self._fence:
                pass
        for flag, knocker in self._waiters:
            if words[flag]:
                knocker.knock()


class Waiter:
    """Where one thread of this process at a time waits for the counters of others.

    Args:
        words: shared memory as words of 8 bytes.
        flag: index of this waiter's flag in it.
        descriptor: its eventfd, nonblocking; it stays the caller's.
        watched: descriptors that become readable, or hang up, when another process ends: a pidfd, a
            socket on which nothing else comes.
    """

    def __init__(
        self, words: memoryview, flag: int, descriptor: int, watched: Collection[int] = ()
    ) -> None:
        self._words = words
        self._flag = flag
        self._descriptor = descriptor
        self._knocker = _Knocker(descriptor)
        self._fence = threading.Lock()
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        for each in watched:
            self._poll.register(each, select.POLLIN | select.POLLRDHUP)
        self._wary_until = 0.0
        self._patience = YIELD_SECONDS

    def wait(self, is_ready: Callable[[], bool], deadline: float) -> None:
        """Return once `is_ready` does return true, or raise what it raises.

        It is called again and again: when another process may have rung, and after `wake`.

        Args:
            is_ready: looks at the counters.
            deadline: on the clock of ``time.monotonic``.

        Raises:
            TimeoutError: the deadline passed first.
            Gone: a watched process ended first. What it had told before still counts.
        """
        if not is_ready() and not self._look(is_ready):
            began = time.monotonic()
            self._sleep(is_ready, deadline)
            is_short = time.monotonic() - began < LONGEST_LOOK
            self._patience = min(2 * self._patience, LONGEST_LOOK) if is_short else YIELD_SECONDS
        if not _KEEPS_ORDER:
            for _ in range(2):
                with self._fence:
                    pass

    def wake(self) -> None:
        """Have `wait` call its `is_ready` now; from any thread."""
        self._knocker.knock()

    def arm(self) -> None:
        """Have bells write to the eventfd from here on, for one who waits for it in an event loop.

        Look at the counters after this and after each `drain`, before waiting for the descriptor.
        """
        with self._fence:
            self._words[self._flag] = 1
        if not _KEEPS_ORDER:
            with self._fence:
                pass

    def disarm(self) -> None:
        """Have bells make no system call any more."""
        self._words[self._flag] = 0

    def drain(self) -> None:
        """Make the eventfd unreadable until the next ring."""
        try:
            os.preadv(self._descriptor, [bytearray(8)], _NOWHERE, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:  # before Linux 5.8
                raise
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._descriptor)

    def _look(self, is_ready: Callable[[], bool]) -> bool:
        """Look for a while, letting others run in between; return whether that was enough."""
        now = time.monotonic()
        end = now + self._patience if now >= self._wary_until else now
        while now < end:
            os.sched_yield()
            if is_ready():
                return True
            before, now = now, time.monotonic()
            if now - before > HOGGED_SECONDS:
                self._wary_until = now + WARY_FACTOR * (now - before)
        return False

    def _sleep(self, is_ready: Callable[[], bool], deadline: float) -> None:
        nap, poll = FIRST_SLEEP, self._poll.poll
        self.arm()
        try:
            while not is_ready():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                # Rounded up, for a wait that ends a moment too soon would only begin again.
                found = poll(math.ceil(min(nap, left) * 1000))
                if is_ready():
                    return  # at once: what the eventfd still holds is drained before the next sleep
                nap = min(2 * nap, LONGEST_SLEEP)
                ended = tuple(each for each, _ in found if each != self._descriptor)
                if ended:
                    raise Gone(ended)
                if found:
                    self.drain()
        finally:
            self._words[self._flag] = 0


class _Knocker:
    """Makes an eventfd readable, unless it could not be more readable. For any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        self._has_room = poll.poll
        self._lock = threading.Lock()
        """A poll object refuses a second thread, whose wake-up would be lost."""

    def knock(self) -> None:
        with self._lock:
            if self._has_room(0):
                # Not contextlib.suppress: whoever rings after a while finds nothing in the caches,
                # and each call of a function takes microseconds, which the sleeper waits for.
                try:
                    os.eventfd_write(self._descriptor, 1)
                except BlockingIOError:
                    pass


def make_eventfd() -> int:
    """Return a new eventfd for a `Waiter`, which the caller closes."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def check_eventfd(descriptors: Sequence[int]) -> None:
    """Return if `descriptors`, of another process, are eventfds, on which a ring does not block.

    Raises:
        ProtocolError: they are something else.
    """
    for descriptor in descriptors:
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()) != _EVENTFD or os.get_blocking(
            descriptor
        ):
            raise ProtocolError("shared memory", why="a descriptor that is no eventfd")
