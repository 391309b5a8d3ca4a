"""More of what users of remote calls elsewhere have complained of, by the numbers of their rows."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy
import pytest
import torch

from mesh import rpc
from mesh.rpc import RpcTimeout
from tests.mesh import nodes
from tests.mesh.nodes import LOOPBACK
from tests.mesh.rpc import exposures
from tests.mesh.rpc.nodes import SHORT, agent_of, agents
from tests.mesh.rpc.test_wishes import apart, blocking_node, known, worker

rpc.expose(__name__)


@pytest.fixture
def held() -> Iterator[None]:
    """Let calls of `exposures.hold` go in the end."""
    exposures.let_go.clear()
    while exposures.running.acquire(blocking=False):
        pass  # of calls of other tests
    yield
    exposures.let_go.set()


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.usefixtures("held")
def test_b01_a_shutdown_waits_for_what_is_under_way_as_long_as_it_is_told(
    thread: ThreadPoolExecutor, tmp_path: Path
) -> None:
    with worker(tmp_path, "alpha") as one, blocking_node() as two:
        two.run(two.node.rpc)
        peer = two.connect(one.ticket())
        waiting = thread.submit(peer.call, exposures.hold, timeout=0)
        assert exposures.running.acquire(timeout=5)
        threading.Timer(0.3, exposures.let_go.set).start()
        began = time.monotonic()
        rpc.shutdown(timeout=10)
        assert 0.2 < time.monotonic() - began < 5
        assert waiting.result(1) == "held"


@pytest.mark.usefixtures("held")
def test_b01_and_no_longer_naming_who_is_busy(thread: ThreadPoolExecutor, tmp_path: Path) -> None:
    with worker(tmp_path, "alpha"), blocking_node() as two:
        two.run(two.node.rpc)
        node_id = known(two)
        waiting = thread.submit(rpc.rpc_sync, node_id, exposures.hold, timeout=0)
        assert exposures.running.acquire(timeout=5)
        began = time.monotonic()
        with pytest.raises(RpcTimeout, match="busy"):
            rpc.shutdown(timeout=0.3)
        assert 0.2 < time.monotonic() - began < 2
        with pytest.raises(RuntimeError):
            waiting.result(1)


@pytest.mark.anyio
async def test_b03_what_a_client_that_has_left_referred_to_is_freed() -> None:
    async with nodes.node() as there:
        owner = await agent_of(there, SHORT)
        async with nodes.node() as here:
            client = await agent_of(here, SHORT)
            await here.connect(there.ticket())
            refs = [await client.remote(there.node_id, torch.ones, (1000,)) for _ in range(10)]
            assert len(owner.references()) == 10
        assert len(refs) == 10  # and nobody has let go of them
        await nodes.eventually(lambda: owner.references() == (), SHORT.lease + 1.0)
        await nodes.eventually(lambda: not owner.service._room.used)


LAYOUTS: dict[str, Any] = {
    "a transposed array": lambda: torch.from_numpy(numpy.arange(6.0).reshape(2, 3).T),
    "a chunk": lambda: torch.arange(24.0).view(6, 4).chunk(3)[1],
    "a column": lambda: torch.arange(24.0).view(6, 4)[:, 1],
    "expanded": lambda: torch.arange(4.0).view(1, 4).expand(3, 4),
    "unfolded": lambda: torch.arange(9.0).unfold(0, 4, 2),
    "flipped": lambda: torch.arange(6.0).flip(0),
    "read only": lambda: torch.from_numpy(numpy.arange(6.0)[::-1].copy())[2:],
}


@pytest.mark.anyio
@pytest.mark.parametrize("repeated", [1, 4000])
async def test_a08_arguments_of_any_layout_arrive_with_the_elements_that_they_show(
    repeated: int,
) -> None:
    """Within the call, and beside it."""
    async with agents(2) as (a, b):
        for name, make in LAYOUTS.items():
            tensor = make() if repeated == 1 else make().repeat_interleave(repeated, 0)
            if repeated > 1:
                tensor = tensor.t() if tensor.dim() == 2 else tensor[::2]
            back = await a.call(b.node_id, exposures.echo, (tensor,))
            assert torch.equal(back, tensor), name
            ref = await a.remote(b.node_id, exposures.echo, ([tensor],))
            assert torch.equal((await ref.fetch())[0], tensor), name


@pytest.mark.anyio
async def test_a32_after_an_idle_time_calls_and_references_go_on() -> None:
    config = dataclasses.replace(LOOPBACK, idle_timeout=0.5, liveness=0.3)
    async with apart(config) as (a, b):
        ref = await a.remote(b.node_id, exposures.Counter, (1,))
        connection = await a.connected(b.node_id)
        await anyio.sleep(1.2)  # it is time itself that is tested
        assert await a.call(b.node_id, exposures.echo, (1,)) == 1
        assert await a.invoke(ref, "add", (1,)) == 2
        assert await a.connected(b.node_id) is connection, "kept alive, and not dialled anew"


def hold_and_fail() -> None:
    exposures.hold()
    raise ValueError("as was expected")


@pytest.mark.anyio
@pytest.mark.usefixtures("held")
async def test_h02_what_a_sender_raises_reaches_those_that_wait_already() -> None:
    """The caller itself, a third node, and a function there; each with where it was raised."""
    async with agents(3) as (a, b, c):
        ref = await a.remote(b.node_id, hold_and_fail, timeout=60)
        assert await anyio.to_thread.run_sync(exposures.running.acquire, True, 5)
        await a.call(c.node_id, exposures.keep, (ref,))
        (theirs,) = exposures.kept
        raised: list[ValueError] = []

        async def wait(use: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(ValueError, match="as was expected") as caught:
                await use()
            raised.append(caught.value)

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait, lambda: ref.fetch(timeout=60))
                tasks.start_soon(wait, lambda: theirs.fetch(timeout=60))
                tasks.start_soon(
                    wait, lambda: a.call(c.node_id, exposures.fetch, (ref,), timeout=60)
                )
                await anyio.wait_all_tasks_blocked()
                began = time.monotonic()
                exposures.let_go.set()
            assert time.monotonic() - began < 1
        for error in raised:
            told = "".join(error.__notes__)
            assert b.node_id.short in told
            assert "in hold_and_fail" in told
        exposures.kept.clear()
