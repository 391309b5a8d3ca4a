"""Nodes in fixtures and async generators: opened by one task, closed perhaps by another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import psutil
import pytest
import torch

from mesh import MeshError, Node
from tests.mesh.nodes import eventually, machine, node
from transport import ConnectionClosed


@pytest.fixture
async def there(anyio_backend: str) -> AsyncIterator[Node]:
    async with node(tensors=True) as opened:
        yield opened


@pytest.mark.anyio
async def test_a_node_from_a_fixture(there: Node) -> None:
    async with node() as here:
        peer = await here.connect(there.ticket())
        assert torch.equal(await (await peer.put(torch.arange(9))).get(), torch.arange(9))


async def nodes(home: Path | None = None) -> AsyncIterator[Node]:
    """A node for as long as somebody iterates over this: with tensors, or with keys in a file."""
    async with node(tensors=True) if home is None else machine(home) as opened:
        yield opened


@pytest.mark.anyio
@pytest.mark.parametrize("keys", [False, True])
async def test_an_async_generator_closed_by_another_task(keys: bool, tmp_path: Path) -> None:
    before = _held()
    generator = nodes(tmp_path if keys else None)
    there = await anext(generator)
    endpoint = there.endpoint
    ticket = there.invite("here") if keys else there.ticket()

    async def close() -> None:
        with pytest.raises(MeshError, match=r"still runs.*Open and close it in one task"):
            await generator.aclose()  # type: ignore[attr-defined]

    async with node() as here:
        connection = await (await here.connect(ticket)).connection()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
        with anyio.fail_after(5):
            ended = await connection.wait_closed()
        assert (type(ended), ended.why) == (ConnectionClosed, "left")
    await eventually(lambda: _held() == before)
    await endpoint._tasks.close()  # the opener, which is this test, is in order again


@pytest.mark.parametrize("keys", [False, True])
def test_fixtures_that_run_in_a_task_each(keys: bool, tmp_path: Path) -> None:
    """As pytest-asyncio does it: set up in one task, used in another, torn down in a third."""
    with asyncio.Runner() as runner:
        generators = [nodes(tmp_path if keys else None), nodes()]
        there, here = [runner.run(_next(generator)) for generator in generators]
        assert there is not None
        assert here is not None

        async def use() -> None:
            peer = await here.connect(there.invite() if keys else there.ticket())
            assert await peer.ping() > 0

        runner.run(use())
        for generator in generators:
            assert runner.run(_next(generator)) is None
        assert runner.run(_tasks()) == 1


async def _next(generator: AsyncIterator[Node]) -> Node | None:
    return await anext(generator, None)


async def _tasks() -> int:
    return len(asyncio.all_tasks())


def _held() -> tuple[int, int]:
    return len(anyio.get_running_tasks()), len(psutil.Process().net_connections("udp"))
