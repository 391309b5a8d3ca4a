"""References under everything that can happen to messages about them, and to nodes that have them.

The cheap forms run every day; with ``--slow`` there are 10,000 calls, and 20 kills.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from typing import Any

import anyio
import anyio.to_thread
import pytest

from auth import MeshError
from mesh import rpc
from mesh.rpc import Agent, RefLimits
from tests.mesh import nodes
from tests.mesh.rpc import exposures
from tests.mesh.rpc.nodes import agents
from tests.programs import Program
from transport import Connection, ConnectionClosed

pytestmark = pytest.mark.anyio

rpc.expose(__name__)

SHORT = RefLimits(lease=1.0, confirm=1.0)


def pass_on(ref: Any) -> Any:
    """Give back what was given, which makes two forks of one."""
    return [ref, ref]


class Weather:
    """Delays calls about references, so that they overtake each other, and loses some.

    Of those that are lost, some are lost on their way, and of some it is the answer.
    """

    def __init__(self, seed: int, loss: float) -> None:
        self._random = random.Random(seed)
        self._loss = loss
        self.lost = 0
        self._call = Connection.call

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weather = self

        async def call(connection: Connection, service: str, *args: Any, **options: Any) -> Any:
            if not service.startswith("rpc."):
                return await weather._call(connection, service, *args, **options)
            draw = weather._random.random
            await anyio.sleep(draw() ** 4 * 0.02)
            if draw() < weather._loss:
                weather.lost += 1
                if draw() < 0.5:  # it came, and the answer did not
                    await weather._call(connection, service, *args, **options)
                raise ConnectionClosed("a call", peer=connection.peer, why="lost by the test")
            answer = await weather._call(connection, service, *args, **options)
            await anyio.sleep(draw() ** 4 * 0.02)
            return answer

        monkeypatch.setattr(Connection, "call", call)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("calls", [300, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_tables_are_empty_in_the_end_whatever_happens_to_messages(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = random.Random(7)
    async with agents(4, SHORT) as everybody:
        for one, other in itertools.permutations(everybody, 2):  # before there are losses
            await one.call(other.node_id, exposures.echo, (1,))
        weather = Weather(11, 0.05)
        weather.install(monkeypatch)
        left, failed = calls, 0
        pool: dict[Agent, list[Any]] = {each: [] for each in everybody}

        async def live(me: Agent) -> None:
            nonlocal left, failed
            mine = pool[me]
            while left > 0:
                left -= 1
                to = rules.choice(everybody).node_id
                try:
                    match rules.randrange(5):
                        case 0:
                            mine.append(await me.remote(to, exposures.echo, (left,), timeout=10))
                        case 1:
                            mine.append(me.own(left))
                        case 2 if mine:
                            given = rules.choice(mine)
                            mine += await me.call(to, pass_on, (given,), timeout=10)
                        case 3 if mine:
                            await rules.choice(mine).fetch(10)
                        case _:
                            del mine[rules.randrange(len(mine) + 1) :]
                except (MeshError, RuntimeError):
                    failed += 1  # what was lost is lost; nothing of it stays

        async with anyio.create_task_group() as tasks:
            for me in everybody:
                for _ in range(3):
                    tasks.start_soon(live, me)
        assert weather.lost > calls / 100
        assert failed < calls / 4
        pool.clear()
        monkeypatch.undo()
        await empty(*everybody)


async def empty(*everybody: Agent) -> None:
    """Wait until nobody has anything of anybody's."""
    for _ in range(3):
        gc.collect()
        await anyio.sleep(0.05)
    await nodes.eventually(
        lambda: (
            not any(len(each.owned) or len(each.holdings) for each in everybody)
            and not any(each.service._room.used for each in everybody)
            and not any(each.service._parts._offered for each in everybody)
        ),
        30.0,
    )
    for each in everybody:
        table = each.owned
        assert not any((table._owned, table._counts, table._absent, table._unconfirmed))


# -- processes that are killed


class Victim:
    """A process with a node of its own, to be killed."""

    def __init__(self) -> None:
        self._process = Program(["-m", __name__])
        assert self._process.stdout is not None
        self.ticket = self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("anyio_backend", "times"),
    [
        ("asyncio", 1),
        pytest.param("asyncio", 20, marks=pytest.mark.slow),
        pytest.param("trio", 20, marks=pytest.mark.slow),
    ],
)
async def test_a_kill_of_an_owner_or_a_holder_leaves_nothing(times: int) -> None:
    for _ in range(times):
        victim = await anyio.to_thread.run_sync(Victim)
        try:
            async with agents(2, SHORT) as (a, b):
                died = await outlive(victim, a, b)
                exposures.kept.clear()
                await nodes.eventually(lambda a=a, b=b: not len(a.owned) + len(b.owned), 10.0)  # type: ignore[misc]
                assert time.monotonic() - died < LIVENESS + SHORT.lease
        finally:
            await anyio.to_thread.run_sync(victim.kill)


async def outlive(victim: Victim, a: Agent, b: Agent) -> float:
    """Share references with a process that is killed amid calls; return when that was."""
    there = await a._node.connect(victim.ticket)
    await b._node.connect(victim.ticket)
    name = there.node_id.short
    # It owns one, which the two others hold, and holds one of each other's.
    owned_there = await a.remote(there.node_id, exposures.echo, (5,))
    await a.call(b.node_id, exposures.keep, (owned_there,))
    at_b = exposures.kept[-1]
    assert await at_b.fetch() == 5
    await a.call(there.node_id, exposures.keep, (a.own(1),))
    await b.call(there.node_id, exposures.keep, (b.own(2),))
    assert len(a.owned) == len(b.owned) == 1
    pending = await a.remote(there.node_id, exposures.nap, (60.0,), timeout=0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            fails_soon, lambda: a.call(there.node_id, exposures.nap, (60.0,), timeout=0), name
        )
        tasks.start_soon(fails_soon, lambda: pending.fetch(0), name)
        await anyio.sleep(0.1)
        died = time.monotonic()
        await anyio.to_thread.run_sync(victim.kill)
    await fails_soon(lambda: owned_there.fetch(1), name)
    await fails_soon(lambda: at_b.fetch(1), name)
    return died


LIVENESS = 5.0
"""That of nodes here is 1 s; the rest is a machine that is busy."""


async def fails_soon(use: Any, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(MeshError) as caught:
        await use()
    assert name in str(caught.value)
    assert time.monotonic() - began < LIVENESS


async def _live() -> None:
    async with nodes.node() as node:
        await node.rpc()
        print(node.ticket().encode(), flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(_live)
