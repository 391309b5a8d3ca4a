"""Every coroutine of remote calls, cancelled at each of its awaits, leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch

from mesh.autograd.wire import Gradients
from mesh.rpc import Agent, RefLimits
from mesh.rpc.links import ContextId
from tests.cancelling import Operation, Scenarios, at_each_await, process_holdings
from tests.mesh.nodes import eventually, node
from tests.mesh.rpc import exposures
from tests.mesh.rpc.nodes import agent_of
from tests.transport.wires import endpoint_holdings

pytestmark = pytest.mark.anyio

LARGE = torch.arange(60_000)


class Calling:
    """Three nodes that call each other."""

    def __init__(self, here: Agent, peer: Agent, third: Agent) -> None:
        self.here, self.peer, self.third = here, peer, third

    def held(self) -> dict[str, object]:
        held = process_holdings()
        for agent, name in ((self.here, "here"), (self.peer, "peer"), (self.third, "third")):
            held |= endpoint_holdings(agent._node.endpoint, name)
            held[f"values of {name}"] = len(agent.owned)
            held[f"references of {name}"] = len(agent.holdings)
            held[f"bytes of {name}"] = agent.service._room.used
            held[f"requests of {name}"] = len(agent.service._parts._expected)
            held[f"generators of {name}"] = agent.service.streams.open
            held[f"answers of {name}"] = len(agent.service._parts._offered)
        return held


@asynccontextmanager
async def calling() -> AsyncIterator[Calling]:
    limits = RefLimits(lease=0.2, confirm=0.2)
    async with node() as here, node() as peer, node() as third:
        await here.connect(peer.ticket())
        await here.connect(third.ticket())
        await third.connect(peer.ticket())
        agents = [await agent_of(each, limits) for each in (here, peer, third)]
        c = Calling(*agents)
        # What each pair shares is there from now on.
        for one, other in ((c.here, c.peer), (c.here, c.third), (c.third, c.peer)):
            await one.call(other.node_id, exposures.echo, (LARGE,))
            connection = await one.connected(other.node_id)
            await eventually(lambda held=connection: held.carrier is not None)
        for agent in agents:  # the answer may be here before its call is over there
            await eventually(lambda held=agent: not held.service._room.used)
        yield c


SCENARIOS: Scenarios[Calling] = Scenarios()


@SCENARIOS.covers("mesh.Agent.call", stride=3)
async def call(c: Calling) -> AsyncIterator[Operation]:
    async def run() -> None:
        assert await c.here.call(c.peer.node_id, exposures.echo, (1,)) == 1
        assert await c.here.call(c.here.node_id, exposures.echo, (1,)) == 1
        assert torch.equal(await c.here.call(c.peer.node_id, exposures.echo, (LARGE,)), LARGE)

    yield run


@SCENARIOS.covers(
    "mesh.Agent.remote",
    "mesh.Agent.fetch",
    "mesh.Agent.invoke",
    "mesh.RRef.fetch",
    stride=47,
)
async def make_use_and_share(c: Calling) -> AsyncIterator[Operation]:
    async def run() -> None:
        ref = await c.here.remote(c.peer.node_id, exposures.Counter, (1,))
        assert await c.here.invoke(ref, "add", (1,)) == 2
        number = await c.here.remote(c.peer.node_id, exposures.echo, (5,))
        assert await c.here.call(c.third.node_id, exposures.fetch, (number,)) == 5
        assert await number.fetch() == 5

    yield run
    await let_go(c)


@SCENARIOS.covers("mesh.Agent.tell")
async def wait_for_a_value(c: Calling) -> AsyncIterator[Operation]:
    async def run() -> None:
        exposures.let_go.set()
        ref: Any = await c.here.remote(c.here.node_id, exposures.hold)
        assert await ref.fetch() == "held"

    yield run
    await let_go(c)


@SCENARIOS.covers("mesh.Peer.call", "mesh.Peer.remote", stride=3)
async def call_a_peer(c: Calling) -> AsyncIterator[Operation]:
    peer = await c.here._node.connect(c.peer.node_id)

    async def run() -> None:
        assert await peer.call(exposures.echo, 1) == 1
        assert await (await peer.remote(exposures.echo, 2)).fetch() == 2

    yield run
    await let_go(c)


@SCENARIOS.covers(
    "mesh.RemoteIterator.__anext__",
    "mesh.RemoteIterator.aclose",
    "mesh.RemoteIterator.__aenter__",
    "mesh.RemoteIterator.__aexit__",
    stride=7,
)
async def read_items(c: Calling) -> AsyncIterator[Operation]:
    async def run() -> None:
        for function in (exposures.items, exposures.items_async):
            async with c.here.stream(c.peer.node_id, function, (LARGE, 2)) as items:
                assert [len(item) async for item in items] == [len(LARGE)] * 2
            async with c.here.stream(c.peer.node_id, function, (LARGE, 2)) as items:
                assert torch.equal(await anext(items), LARGE)

    yield run


@SCENARIOS.covers(
    "mesh.Agent.connected",
    "mesh.Agent.stream_here",
)
async def read_ones_own(c: Calling) -> AsyncIterator[Operation]:
    async def run() -> None:
        assert torch.equal(await c.here.call(c.peer.node_id, exposures.echo, (LARGE,)), LARGE)
        assert len([item async for item in c.here.stream(c.here.node_id, exposures.items, (1, 2))])

    yield run


@SCENARIOS.covers("mesh.Agent.send_gradients", "mesh.Agent.backward_at", stride=7)
async def go_backward(c: Calling) -> AsyncIterator[Operation]:
    nowhere = ContextId(c.here.node_id, 1)
    gradients = Gradients(nowhere, nowhere, 1, 1, [None])

    async def run() -> None:
        await c.here.send_gradients(c.peer.node_id, gradients.arguments())
        ref = await c.here.remote(c.peer.node_id, exposures.leaf)
        await c.here.backward_at(ref, -1, False)

    yield run
    await let_go(c)


@SCENARIOS.covers("mesh.Node.rpc", "mesh.Agent.run")
async def begin(c: Calling) -> AsyncIterator[Operation]:
    async def run() -> None:
        async with node() as other:
            agent = await other.rpc()
            assert await agent.call(other.node_id, exposures.echo, (1,)) == 1

    yield run


async def let_go(c: Calling) -> None:
    """Wait until references that were on their way have come, or have lapsed."""
    agents = (c.here, c.peer, c.third)

    def is_over() -> bool:
        return not any(len(agent.owned) or len(agent.holdings) for agent in agents)

    try:
        await eventually(is_over, 0.5)
    except TimeoutError:
        gc.collect()  # of what was cancelled there may be tracebacks in cycles; it takes 0.3 s
        await eventually(is_over)


@pytest.mark.parametrize("name", SCENARIOS.all)
async def test_calls_at_each_await(name: str) -> None:
    scenario = SCENARIOS.all[name]
    async with calling() as c:
        await at_each_await(partial(scenario.prepare, c), c.held, stride=scenario.stride)
