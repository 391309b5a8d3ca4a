"""Either side killed at any moment: the other hears of it in time, and nothing is left of it."""

from __future__ import annotations

import random
import time

import anyio
import anyio.to_thread
import pytest
import torch

from auth import MeshError, NodeId
from tensor_bridge import MoveLimits, TensorClient
from tensor_bridge.lanes.shared.host import unavailable
from tests.cancelling import process_holdings
from tests.programs import Program
from tests.tensor_bridge.nodes import LANES, Node, eventually, node
from tests.tensor_bridge.shared.program import hear, start
from transport import PeerAddress

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

FEW = 2
"""Kills of either side on either loop."""

MANY = 50

NBYTES = 24 << 20
"""Three times what is on the way at once; it takes some 10 ms."""

IN_TIME = 3.0
"""Seconds to an error: the liveness bound is half of one."""

BRIEF = MoveLimits(resume=0.2, linger=0.2)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what expires be gone soon: between kills everything has to be as it was."""
    monkeypatch.setattr("tensor_bridge.service.SWEEP_SECONDS", 0.05)
    monkeypatch.setattr("tensor_bridge.landing_memory.KEEP_SECONDS", 0.05)


kills = pytest.mark.parametrize(
    "count", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)


def holdings(own: Node) -> dict[str, object]:
    return {
        **process_holdings(),
        **own.lane_holdings("this node"),
        "connections": len(own.endpoint._connections),
        "pairs": len(own.lanes._sharing._pairs),  # type: ignore[union-attr]
        "arrivals": len(own.service.arrivals),
        "store": own.store.used(),
    }


async def run_program(backend: str, **settings: object) -> tuple[Program, PeerAddress]:
    program = start(backend, **settings)
    said = await anyio.to_thread.run_sync(hear, program)
    return program, PeerAddress(NodeId.parse(said["node"]), (("127.0.0.1", said["port"]),))


async def end(program: Program) -> None:
    program.kill()
    await anyio.to_thread.run_sync(program.communicate)


async def restored(own: Node, before: dict[str, object]) -> None:
    now: dict[str, object] = {}

    def is_as_before() -> bool:
        now.update(holdings(own))
        return now == before

    try:
        await eventually(is_as_before)
    except TimeoutError:
        left = {key: (before[key], value) for key, value in now.items() if before[key] != value}
        raise AssertionError(f"left behind: {left}") from None


async def move_on(client: TensorClient, tensor: torch.Tensor) -> None:
    """Move it to and fro until something fails."""
    while True:
        ref = await client.put(tensor)
        assert torch.equal(await client.get(ref), tensor)
        await client.delete(ref)


@kills
async def test_a_server_is_killed_under_moves(anyio_backend: str, count: int) -> None:
    tensor = torch.arange(NBYTES).to(torch.uint8)
    async with node(lanes=LANES["shared-memory"], moves=BRIEF, liveness=0.5) as own:
        program, _ = await run_program(anyio_backend)  # what is made but once is made now
        await end(program)
        before = holdings(own)
        for _ in range(count):
            program, where = await run_program(anyio_backend)
            connection = await own.endpoint.connect(where)
            client = TensorClient(connection, lanes=own.lanes)
            await client.delete(await client.put(tensor))
            assert own.lanes.status(connection).name == "shared-memory"
            killed_at = 0.0

            async def kill() -> None:
                nonlocal killed_at
                await anyio.sleep(random.uniform(0, 0.05))
                killed_at = time.monotonic()
                program.kill()  # noqa: B023

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kill)
                with pytest.raises(MeshError) as caught:
                    await move_on(client, tensor)
            assert time.monotonic() - killed_at < IN_TIME
            assert where.node_id.short in str(caught.value)
            await end(program)
            await restored(own, before)


@kills
async def test_a_client_is_killed_under_moves(anyio_backend: str, count: int) -> None:
    async with node(lanes=LANES["shared-memory"], moves=BRIEF, liveness=2.0) as own:
        peer = (str(own.endpoint.node_id), "127.0.0.1", own.endpoint.port)
        program, _ = await run_program(anyio_backend)
        await end(program)
        before = holdings(own)
        for _ in range(count):
            program, _ = await run_program(anyio_backend, peer=peer, nbytes=NBYTES)
            said = await anyio.to_thread.run_sync(hear, program)
            assert said["lane"] == "shared-memory"
            await anyio.sleep(random.uniform(0, 0.1))
            await end(program)
            await restored(own, before)
