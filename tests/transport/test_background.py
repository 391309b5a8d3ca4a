"""Background tasks, and endpoints, that another task closes than the one that opened them."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import psutil
import pytest

from auth import SecretKey, allow_any
from tests.transport.nodes import at, config, eventually
from transport import ConnectionClosed, Endpoint, TransportError
from transport.background import Background

READABLE = r"closing .*: this is task '.+', while task '.+' has opened it and still runs"


def endpoint() -> Endpoint:
    return Endpoint(SecretKey.generate(), allow_any(), config(linger=1.0))


async def endpoints() -> AsyncIterator[Endpoint]:
    """An endpoint for as long as somebody iterates over this."""
    async with endpoint() as opened:
        yield opened


def open_sockets() -> int:
    return len(psutil.Process().net_connections("udp"))


# -- background tasks


@pytest.mark.anyio
async def test_closing_ends_the_tasks_and_waits_for_them() -> None:
    running, ended = anyio.Event(), False

    async def serve(seconds: float) -> None:
        nonlocal ended
        try:
            running.set()
            await anyio.sleep(seconds)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.02)
            ended = True

    before = len(anyio.get_running_tasks())
    background = Background("a thing")
    await background.open()
    background.start_soon(serve, 60)
    await running.wait()
    await background.close()
    assert ended
    assert len(anyio.get_running_tasks()) == before
    await background.close()


@pytest.mark.anyio
async def test_a_failing_task_cancels_the_opener() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    before = len(anyio.get_running_tasks())
    background = Background("a thing")

    async def block() -> None:
        await background.open()
        try:
            background.start_soon(fail)
            await anyio.sleep_forever()
        finally:
            await background.close()

    with anyio.fail_after(5), pytest.raises(ExceptionGroup) as failed:
        await block()
    assert failed.group_contains(ZeroDivisionError)
    assert len(anyio.get_running_tasks()) == before


@pytest.mark.anyio
async def test_cancelled_while_it_opens() -> None:
    before = len(anyio.get_running_tasks())
    with anyio.CancelScope() as scope:
        scope.cancel()
        await Background("a thing").open()
    assert scope.cancelled_caught
    assert len(anyio.get_running_tasks()) == before
    await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
async def test_a_cancelled_block_does_not_spin_while_it_is_held_up() -> None:
    # A loop that delivers a cancellation again and again, to a task that can't take it, is busy.
    async with endpoint() as listener:
        with anyio.CancelScope() as scope:
            async with endpoint() as dialer:
                connection = await dialer.connect(at(listener))
                scope.cancel()
                with anyio.CancelScope(shield=True):
                    before = time.process_time()
                    await anyio.sleep(1)
                    used = time.process_time() - before
                    assert await connection.ping() > 0  # the endpoint serves until it is left
    assert used < 0.05


# -- closed by another task


@pytest.mark.anyio
async def test_closed_by_another_task_while_the_opener_runs() -> None:
    before = len(anyio.get_running_tasks())
    background = Background("a thing")
    await background.open()
    background.start_soon(anyio.sleep_forever)

    async def close() -> None:
        with pytest.raises(TransportError, match=f"^{READABLE}.*aclosing"):
            await background.close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
    assert len(anyio.get_running_tasks()) == before
    await background.close()  # the opener, with whom all is in order again
    with anyio.move_on_after(0) as scope:
        await anyio.sleep_forever()
    assert scope.cancelled_caught


@pytest.mark.anyio
async def test_an_async_generator_closed_by_another_task() -> None:
    before = len(anyio.get_running_tasks()), open_sockets()
    generator = endpoints()
    listener = await anext(generator)

    async def close() -> None:
        with pytest.raises(TransportError, match=READABLE):
            await generator.aclose()  # type: ignore[attr-defined]

    async with endpoint() as dialer:
        connection = await dialer.connect(at(listener))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
        # All that was open is closed, and the peer was told.
        with anyio.fail_after(5):
            ended = await connection.wait_closed()
        assert (type(ended), ended.why) == (ConnectionClosed, "left")
    await eventually(lambda: (len(anyio.get_running_tasks()), open_sockets()) == before)
    await listener._tasks.close()


@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_async_generator_that_is_dropped(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        before = len(anyio.get_running_tasks())
        generator = endpoints()
        opened = await anext(generator)
        del generator
        gc.collect()
        await eventually(lambda: len(anyio.get_running_tasks()) == before)
        await opened._tasks.close()

    sockets = open_sockets()
    anyio.run(main, backend=backend)
    assert open_sockets() == sockets
    gc.collect()  # asyncio tells of a task's error when the task is gone
    told = "\n".join(str(record.exc_info[1]) for record in caplog.records if record.exc_info)
    assert re.search(READABLE, told)


@pytest.mark.parametrize("debug", [False, True])
def test_fixtures_that_run_in_a_task_each(debug: bool) -> None:
    """As pytest-asyncio does it: set up in one task, used in another, torn down in a third."""
    before = threading.active_count(), open_sockets()
    with asyncio.Runner(debug=debug) as runner:
        generators = [endpoints(), endpoints()]
        listener, dialer = [runner.run(_next(generator)) for generator in generators]

        async def use() -> None:
            connection = await dialer.connect(at(listener))
            with anyio.fail_after(5):
                assert await connection.ping() > 0

        runner.run(use())
        for generator in generators:
            assert runner.run(_next(generator)) is None
        assert runner.run(_count_tasks()) == 1
    assert (threading.active_count(), open_sockets()) == before


async def _next(generator: AsyncIterator[Endpoint]) -> Endpoint | None:
    return await anext(generator, None)


async def _count_tasks() -> int:
    return len(asyncio.all_tasks())
