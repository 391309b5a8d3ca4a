"""Nodes with agents for remote calls, in one process over real sockets on loopback."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import AsyncIterator

from auth import Authorizer
from mesh import Node
from mesh.rpc import Agent, RefLimits
from tests.mesh import nodes

__all__ = ["SHORT", "agent_of", "agents", "freed"]

SHORT = RefLimits(lease=0.3, confirm=0.5)
"""Leases that a test can wait for."""


@contextlib.asynccontextmanager
async def agents(
    count: int, limits: RefLimits | None = None, *, last: Authorizer | None = None
) -> AsyncIterator[list[Agent]]:
    """Nodes that all know each other; the last admits as `last` says."""
    async with contextlib.AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(nodes.node(last if number == count - 1 else None))
            for number in range(count)
        ]
        for number, one in enumerate(found):
            for other in found[:number]:
                await other.connect(one.ticket())
        yield [await agent_of(one, limits) for one in found]


async def agent_of(node: Node, limits: RefLimits | None) -> Agent:
    """The node's agent, with limits of the test's own."""
    node._rpc = Agent(node, limits=limits)
    node.endpoint.start_soon(node._rpc.run)
    return await node.rpc()


async def freed(*all_agents: Agent) -> None:
    """Wait until nobody holds anything of anybody's."""
    gc.collect()
    await nodes.eventually(lambda: not any(len(agent.owned) for agent in all_agents))
    await nodes.eventually(lambda: not any(len(agent.holdings) for agent in all_agents))
