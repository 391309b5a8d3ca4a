"""Cancels operations at each of their awaits, and looks for what that has left behind.

A scenario is an async context manager: it prepares, yields the operation (a function that makes a
coroutine), and clears away what the operation made when nobody disturbed it. `at_each_await` runs
it again and again, cancelled one await later each time. After each time everything that the nodes
hold must be as it was, and the operation must work on the very same nodes.

Every day an await is cancelled in one way, the next await in the next way, and the same await on
the other event loop in another; with ``--slow`` each await in each way.

Helper tasks of the library are out of sight of that count. `at_each_turn` cancels from outside, one
turn of the event loop later each time, so that it finds those at each of *their* awaits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel
import sniffio

__all__ = [
    "Operation",
    "Scenarios",
    "Way",
    "at_each_await",
    "at_each_turn",
    "at_its_end",
    "entered",
    "look_everywhere",
    "public_async",
    "reaches",
    "ways",
]

_everywhere = False


def look_everywhere() -> None:
    """Cancel each await in each way from now on, and as often as it was asked for."""
    global _everywhere
    _everywhere = True


MOST_STEPS = 400
"""An operation that awaits more often than this would never end a test."""

FIRST = 8
"""Awaits that are looked at one by one whatever comes after them."""

SHORT = 2
"""Awaits that are looked at in each way every day: many an operation has no more."""

SOON = 3.0
"""Seconds in which nodes on loopback have told each other everything; nothing expires so soon."""

_DESCRIPTORS = Path("/proc/self/fd")
"""What is open in this process, where the system shows it."""

W = TypeVar("W", contravariant=True)
Operation = Callable[[], Coroutine[Any, Any, object]]
Holdings = Mapping[str, object]

LATE = "closing "
"""How the names of holdings begin that go by themselves after a while, and are looked at in the end
alone: QUIC repeats its farewell for some round trips."""

PASSING = ("tasks", "descriptors", "handlers ", "streams ")
"""... of which there may be some of an earlier time, that end meanwhile."""


class Way(Enum):
    """How a cancellation comes."""

    SCOPE = "a cancelled scope"
    TIMEOUT = "a time limit inside a shield in a cancelled scope"
    TASK = "Task.cancel() of asyncio, which comes once"


def ways() -> tuple[Way, ...]:
    """Return the ways that the running event loop knows."""
    if sniffio.current_async_library() == "asyncio":
        return (Way.SCOPE, Way.TIMEOUT, Way.TASK)
    return (Way.SCOPE, Way.TIMEOUT)


async def at_each_await(
    scenario: Callable[[], AbstractAsyncContextManager[Operation]],
    held: Callable[[], Holdings],
    *,
    stride: int = 1,
) -> int:
    """Run `scenario` cancelled at each await; return how many awaits there are.

    It is run to its end once more whenever a scope cancelled it, and in the end of each way.

    Args:
        scenario: makes what to run.
        held: what the nodes hold now.
        stride: looks at the first `FIRST` awaits and at every so manieth of the rest: for what
            awaits the same thing for each part of something long, or is made of operations that
            have scenarios of their own.
    """
    before = await _settled(held)
    await _undisturbed(scenario)
    await _restored(held, before, "undisturbed")
    most = 0
    for index, way in enumerate(ways()):
        step = count = 0
        while True:
            if _everywhere or step < SHORT or _turn(count) == index:
                async with scenario() as operation:
                    reached = await _cancelled(operation, step, way)
                await _restored(held, before, f"{way.value}, await {step}")
                if way is Way.SCOPE or not reached:
                    await _undisturbed(scenario)
                    await _restored(held, before, f"once more after {way.value}, await {step}")
                if not reached:
                    break
                most = max(most, step)
            step += 1 if step < FIRST else stride
            count += 1
            assert step < MOST_STEPS, "the operation never came to its end"
    await _restored(held, before, "in the end", late=True)
    return most


def _turn(count: int) -> int:
    """Return which way has its turn at an await: another one on each event loop."""
    known = ways()
    return (count + (Way.TASK in known)) % len(known)


async def at_each_turn(
    scenario: Callable[[], AbstractAsyncContextManager[Operation]],
    held: Callable[[], Holdings],
    *,
    samples: int = 20,
) -> int:
    """Run `scenario` cancelled at `samples` turns of the loop, spread from its first to its last.

    Every day at half as many.

    Returns the number of turns that it takes undisturbed, which differs from time to time.
    """
    before = await _settled(held)
    async with scenario() as operation:
        turns = (await _turns(operation)).count
    samples = samples if _everywhere else samples // 2
    await _restored(held, before, "undisturbed")
    for sample in range(samples):
        turn = turns * sample // samples
        async with scenario() as operation:
            await _turns(operation, turn)
        await _restored(held, before, f"turn {turn} of {turns}")
        await _undisturbed(scenario)
        await _restored(held, before, f"once more after turn {turn} of {turns}")
    await _restored(held, before, "in the end", late=True)
    return turns


async def at_its_end(
    scenario: Callable[[], AbstractAsyncContextManager[Operation]],
    held: Callable[[], Holdings],
    check: Callable[[bool], object],
    *,
    times: int,
) -> int:
    """Run `scenario` cancelled in the very turns in which it comes to its end, in each way.

    A turn later after each time that it was cancelled, a turn sooner after each that it came to its
    end first. Calls `check` each time with whether it did; returns how often that was, at least
    every tenth time. Every day it is run half as many times.
    """
    before = await _settled(held)
    kinds = [way for way in ways() if way is not Way.TIMEOUT]
    async with scenario() as operation:
        turn = (await _turns(operation)).count
        check(True)
    ended = 0
    times = times if _everywhere else times // 2
    for time in range(times):
        async with scenario() as operation:
            run = await _turns(operation, turn, kinds[time % len(kinds)])
            check(run.has_ended)
        ended += run.has_ended
        turn = max(0, turn - 1 if run.has_ended else turn + 1)
        await _restored(held, before, f"cancelled at its end, time {time}")
    await _restored(held, before, "in the end", late=True)
    assert times / 10 < ended < times * 0.9, "some came to their end first and some did not"
    return ended


# -- which operations there are


@dataclasses.dataclass(frozen=True)
class Scenario(Generic[W]):
    """An operation, and the public functions that it runs through."""

    name: str
    prepare: Callable[[W], AbstractAsyncContextManager[Operation]]
    covers: tuple[str, ...]
    stride: int


class Scenarios(Generic[W]):
    """The scenarios that play in one kind of world."""

    def __init__(self) -> None:
        self.all: dict[str, Scenario[W]] = {}

    def covers(
        self, *names: str, stride: int = 1
    ) -> Callable[[Callable[[W], AsyncIterator[Operation]]], None]:
        """Register the scenario below, which runs through the functions of these names."""

        def register(function: Callable[[W], AsyncIterator[Operation]]) -> None:
            name = function.__name__
            assert name not in self.all
            prepare = asynccontextmanager(function)
            self.all[name] = Scenario(name, prepare, names, stride)

        return register

    @property
    def covered(self) -> set[str]:
        """The names of the functions that scenarios run through."""
        return {name for scenario in self.all.values() for name in scenario.covers}


def public_async(*packages: ModuleType) -> dict[str, CodeType]:
    """Find the public async functions of packages, each with the code that it runs.

    These are the coroutine functions, async generators and async context managers among the names
    in ``__all__`` and among the public methods of the classes there, inherited ones included.
    """
    found: dict[str, CodeType] = {}
    for package in packages:
        for name in package.__all__:
            it = getattr(package, name)
            if inspect.isclass(it):
                for method, method_code in _async_methods(it):
                    found[f"{_home(it)}.{it.__qualname__}.{method}"] = method_code
            elif (code := _async_code(it)) is not None:
                found[f"{_home(it)}.{name}"] = code
    return found


def _home(it: Any) -> str:
    return str(it.__module__).partition(".")[0]


def _async_methods(cls: type) -> Iterator[tuple[str, CodeType]]:
    for name in dir(cls):
        dunder = name in ("__aenter__", "__aexit__", "__anext__", "__await__", "__call__")
        if name.startswith("_") and not dunder:
            continue
        code = _async_code(inspect.getattr_static(cls, name, None))
        if code is not None:
            yield name, code


def _async_code(it: Any) -> CodeType | None:
    function = inspect.unwrap(getattr(it, "__func__", it))
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        code: CodeType = function.__code__
        return code
    return None


@contextmanager
def entered() -> Iterator[set[CodeType]]:
    """Collect the code of every function that begins in this thread during the block."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    former = sys.getprofile()
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(former)


async def reaches(
    scenario: Callable[[], AbstractAsyncContextManager[Operation]], codes: Mapping[str, CodeType]
) -> list[str]:
    """Run `scenario` undisturbed; return the names of the code that its operation did not run."""
    async with scenario() as operation:
        with entered() as seen:
            await operation()
    return [name for name, code in codes.items() if code not in seen]


# -- what nodes hold


def process_holdings() -> dict[str, object]:
    """Return what is counted of the process: tasks of this loop and descriptors."""
    return {
        "tasks": len(anyio.get_running_tasks()),
        "descriptors": sum(1 for _ in _DESCRIPTORS.iterdir()) if _DESCRIPTORS.exists() else 0,
    }


async def _settled(held: Callable[[], Holdings]) -> dict[str, object]:
    """Return what is held once nothing more changes."""
    now, since = held(), anyio.current_time()
    while anyio.current_time() - since < 0.05:
        await anyio.sleep(0.005)
        then, now = now, held()
        if then != now:
            since = anyio.current_time()
    return dict(now)


async def _restored(
    held: Callable[[], Holdings], before: dict[str, object], when: str, *, late: bool = False
) -> None:
    deadline = anyio.current_time() + SOON
    while changed := {
        key: f"{before.get(key)} -> {value}"
        for key, value in _lowered(before, held()).items()
        if before.get(key) != value and (late or not key.startswith(LATE))
    }:
        assert anyio.current_time() < deadline, f"left behind ({when}): {changed}"
        await anyio.sleep(0.001)


def _lowered(before: dict[str, object], now: Holdings) -> Holdings:
    """Return `now`; what there is less of than before is what there was before, from now on."""
    for key, value in now.items():
        was = before.get(key)
        if key.startswith(PASSING) and isinstance(value, int) and isinstance(was, int):
            before[key] = min(was, value)
    return now


# -- cancelling


async def _undisturbed(
    scenario: Callable[[], AbstractAsyncContextManager[Operation]],
) -> None:
    with anyio.fail_after(10):
        async with scenario() as operation:
            await operation()


class _Stepped:
    """Awaits a coroutine, and calls `act` as it comes to await for the nth time."""

    def __init__(self, operation: Operation, step: int, act: Callable[[], object]) -> None:
        self._operation = operation
        self._step = step
        self._act = act
        self.reached = False

    def __await__(self) -> Generator[Any, Any, None]:
        if self._step == 0:
            self._reach()
        iterator = self._operation().__await__()
        count = 0
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                message = iterator.send(value) if error is None else iterator.throw(error)
            except StopIteration:
                return
            count += 1
            if count == self._step:
                self._reach()
            value = error = None
            try:
                value = yield message
            except BaseException as raised:
                error = raised

    def _reach(self) -> None:
        self.reached = True
        self._act()


async def _cancelled(operation: Operation, step: int, way: Way) -> bool:
    """Run `operation`, cancelled at its await number `step`; return whether it came to that.

    Cancelled at await 0, it has not begun.
    """
    match way:
        case Way.SCOPE:
            with anyio.CancelScope() as scope:
                run = _Stepped(operation, step, scope.cancel)
                await _unless_reached(run)
        case Way.TIMEOUT:
            with anyio.CancelScope() as outer:
                outer.cancel()
                with anyio.CancelScope(shield=True) as inner:
                    run = _Stepped(operation, step, lambda: _time_out(inner))
                    await _unless_reached(run)
        case Way.TASK:
            run = _Stepped(operation, step, lambda: task.cancel())
            task = asyncio.get_running_loop().create_task(_unless_reached(run))
            await asyncio.wait({task})
            if not task.cancelled():
                await task
                assert not run.reached, "the one cancellation that there is was swallowed"
    return run.reached


def _time_out(scope: anyio.CancelScope) -> None:
    scope.deadline = anyio.current_time() - 1


async def _unless_reached(run: _Stepped) -> None:
    try:
        await run
    except Exception as error:
        if run.reached:
            raise AssertionError("cancellation was turned into an error") from error
        raise


@dataclasses.dataclass
class _Run:
    """How an operation went that was watched turn by turn."""

    count: int = 0
    is_over: bool = False
    has_ended: bool = False
    was_cancelled: bool = False


async def _turns(operation: Operation, turn: int | None = None, way: Way = Way.SCOPE) -> _Run:
    """Run `operation`, cancelled at a turn of the loop."""
    run = _Run()

    async def turn_over(cancel: Callable[[], object]) -> None:
        while not run.is_over:
            if run.count == turn:
                run.was_cancelled = True
                cancel()
            run.count += 1
            await anyio.lowlevel.checkpoint()

    async def work() -> None:
        try:
            await operation()
            run.has_ended = True
        except Exception as error:
            if run.was_cancelled:
                raise AssertionError("cancellation was turned into an error") from error
            raise
        finally:
            run.is_over = True

    async with anyio.create_task_group() as tasks:
        if way is Way.TASK:
            task = asyncio.get_running_loop().create_task(work())
            tasks.start_soon(turn_over, task.cancel)
            await asyncio.wait({task})
            if not task.cancelled():
                await task
        else:
            with anyio.CancelScope() as scope:
                tasks.start_soon(turn_over, scope.cancel)
                await work()
    return run
