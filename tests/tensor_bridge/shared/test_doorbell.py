"""One waits and another rings: in threads, in processes, and when the other is gone."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tensor_bridge.lanes.shared import doorbell
from tensor_bridge.lanes.shared.doorbell import (
    FIRST_SLEEP,
    LINE_WORDS,
    Bell,
    Gone,
    Waiter,
    check_eventfd,
    make_eventfd,
)
from tensor_bridge.lanes.shared.host import unavailable
from transport import ProtocolError

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

COUNT, FLAG, OTHER = 0, LINE_WORDS, 2 * LINE_WORDS


@pytest.fixture
def words() -> memoryview:
    return memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = make_eventfd()
    yield descriptor
    os.close(descriptor)


def soon() -> float:
    return time.monotonic() + 10


def readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def when_asleep(words: memoryview, act: Callable[[], object]) -> threading.Thread:
    """Do `act` once the waiter has put its flag up."""

    def run() -> None:
        while not words[FLAG]:
            time.sleep(0.001)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_what_has_been_rung_is_not_waited_for(words: memoryview, descriptor: int) -> None:
    Bell(words, COUNT, [(FLAG, descriptor)]).ring(3)
    Waiter(words, FLAG, descriptor).wait(lambda: words[COUNT] == 3, 0.0)
    assert not readable(descriptor)  # nobody slept


def test_a_sleeper_is_woken(words: memoryview, descriptor: int) -> None:
    bell, waiter = Bell(words, COUNT, [(FLAG, descriptor)]), Waiter(words, FLAG, descriptor)
    looks = 0

    def is_ready() -> bool:
        nonlocal looks
        looks += 1
        return words[COUNT] == 1

    thread = when_asleep(words, lambda: (time.sleep(0.3), bell.ring(1)))
    before = time.process_time()
    waiter.wait(is_ready, soon())
    thread.join()
    assert words[FLAG] == 0
    assert looks < 2000  # of a microsecond each, at the beginning
    assert time.process_time() - before < 0.15


def test_only_whose_flag_is_up_is_woken(words: memoryview, descriptor: int) -> None:
    other = make_eventfd()
    try:
        Waiter(words, OTHER, other).arm()
        Bell(words, COUNT, [(FLAG, descriptor), (OTHER, other)]).ring(1)
        assert not readable(descriptor)
        assert readable(other)
    finally:
        os.close(other)


def test_time_runs_out(words: memoryview, descriptor: int) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        Waiter(words, FLAG, descriptor).wait(lambda: False, began + 0.02)
    assert 0.02 <= time.monotonic() - began < 1
    assert words[FLAG] == 0


def test_a_lost_ring_costs_milliseconds(words: memoryview, descriptor: int) -> None:
    def lose() -> None:
        words[COUNT] = 1

    thread = when_asleep(words, lose)
    Waiter(words, FLAG, descriptor).wait(lambda: words[COUNT] == 1, soon())
    thread.join()
    assert FIRST_SLEEP <= 0.001


def test_another_thread_makes_it_look(words: memoryview, descriptor: int) -> None:
    waiter, is_over = Waiter(words, FLAG, descriptor), False

    def is_ready() -> bool:
        if is_over:
            raise InterruptedError("over")
        return False

    def end() -> None:
        nonlocal is_over
        is_over = True
        waiter.wake()

    thread = when_asleep(words, end)
    with pytest.raises(InterruptedError, match="over"):
        waiter.wait(is_ready, soon())
    thread.join()
    assert words[FLAG] == 0


def test_who_is_gone_is_named(words: memoryview, descriptor: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        waiter = Waiter(words, FLAG, descriptor, [ours.fileno()])
        thread = when_asleep(words, theirs.close)
        with pytest.raises(Gone) as caught:
            waiter.wait(lambda: False, soon())
        thread.join()
        assert caught.value.descriptors == (ours.fileno(),)
        # What it rang before it went still counts.
        words[COUNT] = 1
        waiter.wait(lambda: words[COUNT] == 1, soon())
        late = iter((False, False))
        waiter.wait(lambda: next(late, True) and not readable(descriptor), soon())


def test_who_was_kept_from_running_sleeps_at_once(
    words: memoryview, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, yields = [1000.0], []

    def let_run(seconds: float) -> None:
        yields.append(seconds)
        now[0] += seconds

    cost = [5 * doorbell.HOGGED_SECONDS]
    monkeypatch.setattr(doorbell.os, "sched_yield", lambda: let_run(cost[0]))
    monkeypatch.setattr(doorbell.time, "monotonic", lambda: now[0])
    waiter = Waiter(words, FLAG, descriptor)

    def waits() -> int:
        """Return how often others are let run in a wait that takes some looks."""
        yields.clear()
        looks = iter((False, False, False, False, False))
        os.eventfd_write(descriptor, 1)
        waiter.wait(lambda: next(looks, True), now[0] + 10)
        return len(yields)

    assert waits() == 1  # and is kept waiting
    assert waits() == 0
    now[0] += doorbell.WARY_FACTOR * cost[0]
    cost[0] = doorbell.YIELD_SECONDS / 10
    assert waits() > 1  # so there are processors again
    assert waits() > 1


def test_who_slept_in_vain_looks_for_longer(
    words: memoryview, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(doorbell.os, "sched_yield", lambda: pass_by(1e-6))
    monkeypatch.setattr(doorbell.time, "monotonic", lambda: now[0])
    waiter = Waiter(words, FLAG, descriptor)

    def looked(slept: float) -> float:
        """Return for how long it looks before it sleeps, which takes `slept` seconds."""
        began, sleeps = now[0], []

        def is_ready() -> bool:
            if words[FLAG] and not sleeps:
                sleeps.append(now[0] - began)
                pass_by(slept)
                return False
            return bool(sleeps)

        os.eventfd_write(descriptor, 1)
        waiter.wait(is_ready, now[0] + 10)
        return sleeps[0]

    usual = doorbell.YIELD_SECONDS
    found = [looked(50e-6) for _ in range(6)]
    assert found == pytest.approx(
        [usual, 2 * usual, 4 * usual, 8 * usual, *[doorbell.LONGEST_LOOK] * 2], abs=2e-6
    )
    assert looked(0.1) == pytest.approx(doorbell.LONGEST_LOOK, abs=2e-6)
    assert looked(0.1) == pytest.approx(usual, abs=2e-6)  # idle ranks burn no core


def test_a_killed_process_is_named(words: memoryview, descriptor: int) -> None:
    process = os.fork()
    if process == 0:
        signal.pause()
        os._exit(0)
    watched = os.pidfd_open(process)
    try:
        thread = when_asleep(words, lambda: os.kill(process, signal.SIGKILL))
        with pytest.raises(Gone) as caught:
            Waiter(words, FLAG, descriptor, [watched]).wait(lambda: False, soon())
        thread.join()
        assert caught.value.descriptors == (watched,)
    finally:
        os.close(watched)
        os.waitpid(process, 0)


def test_no_ring_is_lost_between_processes(words: memoryview) -> None:
    # Each waits now shorter and now longer than it looks before it sleeps.
    rounds, descriptors = 3000, (make_eventfd(), make_eventfd())

    def side(me: int) -> None:
        at, flag = (COUNT, OTHER)[me], FLAG + me
        theirs = (OTHER, COUNT)[me]
        bell = Bell(words, at, [(FLAG + 1 - me, descriptors[1 - me])])
        waiter, pauses = Waiter(words, flag, descriptors[me]), random.Random(me)
        for count in range(1, rounds):
            bell.ring(count)
            waiter.wait(lambda count=count: words[theirs] >= count, soon())  # type: ignore[misc]
            for _ in range(pauses.randrange(0, 60)):
                os.sched_yield()

    process = os.fork()
    if process == 0:
        try:
            side(1)
        finally:
            os._exit(0)
    try:
        began = time.monotonic()
        side(0)
        # A lost ring costs a millisecond or two: not one in a hundred is.
        assert time.monotonic() - began < 5
    finally:
        os.waitpid(process, 0)
        for each in descriptors:
            os.close(each)


class Ringer:
    """A thread that rings, one store, load or system call of it at a time."""

    def __init__(self, words: memoryview, descriptor: int) -> None:
        self.words = words
        self.steps = 0
        self.is_over = False
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._bell = Bell(self, COUNT, [(FLAG, descriptor)])  # type: ignore[arg-type]
        ((_, self._knocker),) = self._bell._waiters
        self._bell._waiters = ((FLAG, self),)  # type: ignore[assignment]
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self._done.acquire()

    def step(self) -> None:
        if not self.is_over:
            self.steps += 1
            self._go.release()
            self._done.acquire()

    def __setitem__(self, at: int, value: int) -> None:
        self._pause()
        self.words[at] = value

    def __getitem__(self, at: int) -> int:
        self._pause()
        return self.words[at]

    def knock(self) -> None:
        self._pause()
        self._knocker.knock()

    def _pause(self) -> None:
        self._done.release()
        self._go.acquire()

    def _run(self) -> None:
        self._bell.ring(1)
        self.is_over = True
        self._done.release()


class Interleaved:
    """The words, and the eventfd, of a waiter amid whose accesses a ringer makes its steps."""

    def __init__(self, ringer: Ringer, descriptor: int, schedule: tuple[int, ...]) -> None:
        self._ringer = ringer
        self._descriptor = descriptor
        self._schedule = schedule
        """Before which accesses the ringer makes its first step, its second, and so on."""
        self.accesses = 0

    def __setitem__(self, at: int, value: int) -> None:
        self._access()
        self._ringer.words[at] = value

    def __getitem__(self, at: int) -> int:
        self._access()
        return self._ringer.words[at]

    def poll(self, _: int) -> list[tuple[int, int]]:
        self._access()
        while not readable(self._descriptor):
            if self._ringer.is_over:
                raise AssertionError("the ring was lost")
            self._ringer.step()
        return [(self._descriptor, select.POLLIN)]

    def _access(self) -> None:
        due = sum(before <= self.accesses for before in self._schedule)
        while self._ringer.steps < due and not self._ringer.is_over:
            self._ringer.step()
        self.accesses += 1


MOST_ACCESSES, MOST_STEPS = 8, 3


@pytest.mark.parametrize("first", range(MOST_ACCESSES))
def test_no_ring_is_lost_in_whatever_order(
    first: int, words: memoryview, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbell, "YIELD_SECONDS", 0.0)
    accesses, steps = 0, set()
    for rest in itertools.combinations_with_replacement(
        range(first, MOST_ACCESSES), MOST_STEPS - 1
    ):
        words[COUNT] = words[FLAG] = 0
        ringer = Ringer(words, descriptor)
        amid = Interleaved(ringer, descriptor, (first, *rest))
        waiter = Waiter(amid, FLAG, descriptor)  # type: ignore[arg-type]
        waiter._poll = amid  # type: ignore[assignment]
        try:
            waiter.wait(lambda amid=amid: amid[COUNT] == 1, soon())  # type: ignore[misc]
        finally:
            while not ringer.is_over:
                ringer.step()
            ringer.thread.join()
        assert words[FLAG] == 0
        accesses, _ = max(accesses, amid.accesses), steps.add(ringer.steps)
        waiter.drain()  # a knock that came late makes the next wait look once more, and no harm
    assert accesses <= MOST_ACCESSES
    assert max(steps) <= MOST_STEPS


def test_two_threads_wake_at_once(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    is_within, may_leave = threading.Event(), threading.Event()

    class Slow:
        """A poll object: it refuses a second thread while the first is within."""

        def register(self, *_: int) -> None:
            pass

        def poll(self, _: int) -> list[tuple[int, int]]:
            if is_within.is_set() and not may_leave.is_set():
                raise RuntimeError("concurrent poll() invocation")
            is_within.set()
            may_leave.wait(5)
            return [(descriptor, select.POLLOUT)]

    monkeypatch.setattr(doorbell.select, "poll", Slow)
    failures: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda it: failures.append(it.exc_value))
    waiter = Waiter(memoryview(bytearray(mmap.PAGESIZE)).cast("Q"), FLAG, descriptor)
    threads = [threading.Thread(target=waiter.wake) for _ in range(2)]
    threads[0].start()
    assert is_within.wait(5)
    threads[1].start()
    threads[1].join(0.02)
    assert threads[1].is_alive()  # it waits for its turn
    may_leave.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert os.eventfd_read(descriptor) == 2


def test_a_full_eventfd_does_not_block(words: memoryview, descriptor: int) -> None:
    os.eventfd_write(descriptor, (1 << 64) - 2)
    waiter = Waiter(words, FLAG, descriptor)
    waiter.arm()
    Bell(words, COUNT, [(FLAG, descriptor)]).ring(1)
    waiter.wake()
    waiter.drain()
    assert not readable(descriptor)
    waiter.drain()
    waiter.disarm()
    assert words[FLAG] == 0


@pytest.mark.attack
@pytest.mark.parametrize("full", [True, False])
def test_an_eventfd_that_was_made_to_block_does_not(
    words: memoryview, descriptor: int, full: bool
) -> None:
    check_eventfd([descriptor])
    theirs = os.dup(descriptor)  # as another process has it: the flags are of both
    os.set_blocking(theirs, True)
    waiter, bell = Waiter(words, FLAG, descriptor), Bell(words, COUNT, [(FLAG, descriptor)])
    waiter.arm()

    def use() -> None:
        if full:
            os.eventfd_write(theirs, (1 << 64) - 2)
            bell.ring(1)
            waiter.wake()
        waiter.drain()
        waiter.drain()

    using = threading.Thread(target=use, daemon=True)
    using.start()
    using.join(2)
    assert not using.is_alive()
    bell.ring(2)
    assert readable(descriptor)  # the control
    os.close(theirs)


@pytest.mark.attack
def test_only_eventfds_are_taken(descriptor: int) -> None:
    check_eventfd([descriptor])  # the control
    blocking, pipe = os.eventfd(0), os.pipe()
    try:
        for bad in (blocking, *pipe):
            with pytest.raises(ProtocolError, match="no eventfd"):
                check_eventfd([descriptor, bad])
    finally:
        for each in (blocking, *pipe):
            os.close(each)
