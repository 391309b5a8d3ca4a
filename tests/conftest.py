"""What every test shares: both event loops, a watch on blocked ones, and counts of examples."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import is_hypothesis_test

from tests import cancelling, placements, profiles, turns
from transport.process import sharing, spawn

profiles.register()

# A loop that answers no timer for this long is blocked: something on it waits or computes without
# yielding. Generous, because the machine's cores are shared and a handshake alone takes 5-7 ms.
BLOCKED_LOOP_SECONDS = 1.0
_BEAT = 0.05

_EXAMPLES = "examples of a parser"
"""The property of a test's report that holds how many it ran."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        action="store_true",
        help="run the tests marked slow as well, and cancel each await in each way",
    )
    parser.addoption(
        "--placement",
        choices=("loop", "process"),
        default="loop",
        help="where the packets of nodes are moved whose test does not say it",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slow"):
        cancelling.look_everywhere()
    placements.choose(config.getoption("--placement"))
    spawn.NICE = 0  # it is the tests that wait for it, while others compute


def pytest_unconfigure() -> None:
    placements.forget()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes minutes and gigabytes, unless it is asked for."""
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(pytest.mark.skip(reason="slow: takes minutes; run with --slow"))
    if hasattr(config, "workerinput"):
        # First and in one go, so that it is once that the other processes wait.
        items.sort(key=turns.is_alone, reverse=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return turns.workers(config)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Give each test its turn; the wait for it is no part of the test's own time."""
    with turns.turn(item, nextitem):
        return (yield)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what is there now: looking at all of it takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def endpoint_process() -> Iterator[str]:
    """Where nodes share an endpoint process: half a second of a processor for each adds up."""
    path = placements.shared_at()
    with sharing.listening(path) as listener, start_blocking_portal() as portal:
        serving = portal.start_task_soon(sharing.share, listener)
        yield str(path)
        serving.cancel()


@pytest.fixture(autouse=True, scope="session")
def _placed(request: pytest.FixtureRequest) -> None:
    """Have an endpoint process where the run's nodes are to be in one."""
    if request.config.getoption("--placement") == "process":
        sharing.JOIN_SECONDS = 30.0
        request.getfixturevalue("endpoint_process")


@pytest.fixture(autouse=True)
def _loop_watch(request: pytest.FixtureRequest) -> None:
    """Let every async test fail when its event loop was blocked."""
    if "anyio_backend" in request.fixturenames:
        request.getfixturevalue("unblocked_loop")


@pytest.fixture
async def unblocked_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Beat on the loop during the test; a beat that comes far too late is a blocked loop."""
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            due = time.monotonic() + _BEAT
            cpu = time.process_time()
            await anyio.sleep(_BEAT)
            late = time.monotonic() - due
            # Busy with other processes, the machine is late too; but then we had no CPU time.
            if late > longest and time.process_time() - cpu > late / 2:
                longest = late

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat)
        yield
        tasks.cancel_scope.cancel()
    assert longest < BLOCKED_LOOP_SECONDS, f"the event loop was blocked for {longest:.2f} s"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Count the examples that a test marked ``fuzz`` runs to their end."""
    test: Any = getattr(item, "obj", None)
    if item.get_closest_marker("fuzz") is None or not is_hypothesis_test(test):
        return (yield)
    inner = test.hypothesis.inner_test
    count = 0

    @functools.wraps(inner)
    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal count
        inner(*args, **kwargs)
        count += 1

    test.hypothesis.inner_test = counted
    try:
        return (yield)
    finally:
        test.hypothesis.inner_test = inner
        item.user_properties.append((_EXAMPLES, count))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what ``make fuzz`` is there for: how many examples of what."""
    if config.getoption("--hypothesis-profile") != "thorough":
        return
    counts = {
        report.nodeid: count
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, count in report.user_properties
        if name == _EXAMPLES
    }
    terminalreporter.section("examples run")
    for test, count in sorted(counts.items(), key=lambda pair: pair[1]):
        terminalreporter.line(f"{count:7d}  {test}")
    terminalreporter.line(f"{sum(counts.values()):7d}  in all, of {len(counts)} tests")
