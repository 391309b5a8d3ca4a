"""Large arguments that lie in shared memory: copied once, given back, and nothing else believed."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
import torch

from auth import MeshError, NodeId
from mesh import rpc
from mesh.rpc import Agent
from mesh.rpc.tensors.carriage import MOST_LENT
from mesh.rpc.wire import PART_SERVICE, Request
from tensor_bridge.lanes import LaneConfig
from tensor_bridge.lanes.shared import sharing
from tensor_bridge.lanes.shared.blocks import KEEP_SECONDS, LEAST_BYTES, OwnBlocks
from tensor_bridge.lanes.shared.host import unavailable
from tests.mesh.nodes import eventually
from tests.mesh.rpc.nodes import agents
from transport import Connection

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

LENGTH = LEAST_BYTES // 4
"""Of a tensor that is just long enough."""

kept: list[torch.Tensor] = []


@rpc.exposed
def keep(x: torch.Tensor) -> float:
    kept.append(x)
    return float(x[0])


@rpc.exposed
def refuse(x: torch.Tensor) -> None:
    raise ValueError("not this one")


@rpc.exposed
async def wait(x: torch.Tensor) -> None:
    await anyio.sleep_forever()


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Agent, Agent]]:
    """Two nodes of this process that take each other for another process's."""
    kept.clear()
    async with agents(2) as (a, b):
        for agent in a, b:
            agent.lanes.config = LaneConfig(in_process=False)
        for value in range(2):  # shared memory is there, and the length has been seen
            await a.call(b.node_id, keep, (torch.full((LENGTH,), float(value)),))
        kept.clear()
        yield a, b


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many streams were opened, by service."""
    count: Counter[str] = Counter()
    open_stream = Connection.open_stream

    async def counted(self: Connection, service: str, *args: Any, **kwargs: Any) -> Any:
        count[service] += 1
        return await open_stream(self, service, *args, **kwargs)

    monkeypatch.setattr(Connection, "open_stream", counted)
    return count


def connection(a: Agent, b: NodeId) -> Connection:
    found = a._node.endpoint.connection(b)
    assert found is not None
    return found


def blocks(a: Agent, b: Agent) -> OwnBlocks:
    link = a.lanes._link(connection(a, b.node_id))
    assert link is not None
    return link.blocks


def lent(a: Agent, b: Agent) -> int:
    """How many are in the hands of the other."""
    return sum(each.lend is not None for each in blocks(a, b)._blocks.values())


@pytest.mark.parametrize("is_dense", [True, False])
async def test_arguments_that_are_sent_again_take_no_stream_and_are_copies(
    pair: tuple[Agent, Agent], opened: Counter[str], is_dense: bool
) -> None:
    a, b = pair
    for value in range(3):
        x = torch.full((LENGTH,) if is_dense else (1,), float(value)).expand(LENGTH)
        assert await a.call(b.node_id, keep, (x,)) == value
    assert not opened[PART_SERVICE]
    # Each is its receiver's own, though they have lain at the same place.
    assert [(each[0].item(), each[-1].item()) for each in kept] == [(n, n) for n in range(3)]
    await eventually(lambda: not lent(a, b))
    assert len(blocks(a, b)) == 1


async def test_what_is_too_long_or_too_short_takes_streams(
    pair: tuple[Agent, Agent], opened: Counter[str]
) -> None:
    a, b = pair
    for length in (LENGTH - 1, MOST_LENT // 4 + 1):
        for _ in range(2):
            await a.call(b.node_id, keep, (torch.ones(length),))
    assert opened[PART_SERVICE] == 4


async def test_calls_at_the_same_time_have_blocks_of_their_own(pair: tuple[Agent, Agent]) -> None:
    a, b = pair

    async def one(value: float) -> None:
        assert await a.call(b.node_id, keep, (torch.full((LENGTH,), value),)) == value

    for _ in range(3):
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(one, float(number))
    assert all(torch.equal(each, each[0].expand(LENGTH)) for each in kept)
    await eventually(lambda: not lent(a, b))


async def test_calls_that_fail_leave_nothing_lent(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    x = torch.ones(LENGTH)
    with pytest.raises(ValueError, match="not this one"):
        await a.call(b.node_id, refuse, (x,))
    with anyio.move_on_after(0.2):
        await a.call(b.node_id, wait, (x,))
    await eventually(lambda: not lent(a, b))
    with pytest.raises(rpc.NotExposed):  # said before it is looked at
        await a.call(b.node_id, "nobody.has_this", (x,))
    await eventually(lambda: not lent(a, b))
    assert await a.call(b.node_id, keep, (x,)) == 1


async def test_what_does_not_lie_where_it_says_is_refused(
    pair: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    x = torch.ones(LENGTH)
    encode = Request.encode

    def lying(self: Request) -> Any:
        wrong = {number: (block + 9, lend) for number, (block, lend) in self.lent.items()}
        return encode(dataclasses.replace(self, lent=wrong))

    with monkeypatch.context() as patch:
        patch.setattr(Request, "encode", lying)
        with pytest.raises(rpc.RefLost):
            await a.call(b.node_id, keep, (x,))
    assert await a.call(b.node_id, keep, (x,)) == 1  # positive control
    await eventually(lambda: not lent(a, b))


async def test_who_names_a_block_twice_loses_the_shared_memory(
    pair: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    encode, borrowed, held = Request.encode, b.lanes.borrowed, list[Any]()

    def again(self: Request) -> Any:
        return encode(dataclasses.replace(self, lent=dict.fromkeys(self.lent, self.lent[0])))

    async def hold(*args: Any) -> Any:
        held.append(await borrowed(*args))
        return held[-1]

    x = torch.ones(LENGTH)
    await a.call(b.node_id, both, (x, x + 1))  # positive control
    monkeypatch.setattr(b.lanes, "borrowed", hold)
    monkeypatch.setattr(Request, "encode", again)
    with pytest.raises(MeshError, match="the memory shared with it is given up"):
        await a.call(b.node_id, both, (x, x + 1))
    monkeypatch.undo()
    assert b.lanes._link(connection(b, a.node_id)) is None
    await eventually(lambda: connection(a, b.node_id).carrier is None)
    held.clear()
    assert await a.call(b.node_id, keep, (x,)) == 1


@rpc.exposed
def both(x: torch.Tensor, y: torch.Tensor) -> None:
    """Takes two."""


async def test_nothing_is_borrowed_of_who_shares_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with agents(2) as (a, b):  # they are in one process, and take that way
        x = torch.ones(LENGTH)
        encode = Request.encode

        def lying(self: Request) -> Any:
            return encode(dataclasses.replace(self, lent={0: (0, 1)}))

        assert await a.call(b.node_id, keep, (x,)) == 1
        monkeypatch.setattr(Request, "encode", lying)
        with pytest.raises(rpc.RefLost), anyio.fail_after(3):
            await a.call(b.node_id, keep, (x,))


async def test_a_callee_that_gives_nothing_back_does_not_keep_it(
    pair: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    borrowed, held = b.lanes.borrowed, list[Any]()

    async def hold(*args: Any) -> Any:
        held.append(await borrowed(*args))
        return held[-1]

    await eventually(lambda: not lent(a, b))
    monkeypatch.setattr(b.lanes, "borrowed", hold)
    assert await a.call(b.node_id, keep, (torch.full((LENGTH,), 7.0),)) == 7
    assert lent(a, b) == 1
    blocks(a, b).expire(time.monotonic())
    assert lent(a, b) == 1
    blocks(a, b).expire(time.monotonic() + KEEP_SECONDS)
    assert not blocks(a, b)._blocks
    held.clear()  # late, and of no block that anybody knows
    assert await a.call(b.node_id, keep, (torch.full((LENGTH,), 8.0),)) == 8


@pytest.mark.parametrize("late", ["admit", "introduce"])
async def test_what_is_lent_by_who_has_the_link_already_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, opened: Counter[str], late: str
) -> None:
    """Either end may be the first to have the link, and lends at once."""
    getting = getattr(sharing, late)

    async def get(*args: Any) -> Any:
        found = await getting(*args)
        await anyio.sleep(0.3)  # as a loop that is busy
        return found

    monkeypatch.setattr(sharing, late, get)
    async with agents(2) as (a, b):
        for agent in a, b:
            agent.lanes.config = LaneConfig(in_process=False)
        caller, callee = (a, b) if late == "admit" else (b, a)
        x = torch.ones(LENGTH)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a.lanes.meet, connection(a, b.node_id))
            await eventually(lambda: has_link(caller, callee))
            assert not has_link(callee, caller)
            assert await caller.call(callee.node_id, keep, (x,)) == 1
        assert not opened[PART_SERVICE]


def has_link(a: Agent, b: Agent) -> bool:
    return a.lanes._link(connection(a, b.node_id)) is not None
