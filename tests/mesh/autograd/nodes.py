"""Nodes that go backward together, in one process over real sockets on loopback."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import anyio.to_thread
import torch

from mesh import autograd
from mesh.rpc import Agent, Exposures, RefLimits, RRef
from tests.mesh import nodes

__all__ = ["Worker", "in_thread", "quiet", "workers"]


class Worker:
    """A node with functions of its own, which know where they run."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.others: list[Worker] = []
        self.weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)

    @property
    def node_id(self) -> Any:
        return self.agent.node_id

    def offer(self, function: Callable[..., Any], name: str | None = None) -> None:
        """Let others call ``function(worker, ...)``."""
        self.agent.exposures.add(partial(function, self), name or function.__name__)

    def call(self, to: Worker, function: Callable[..., Any] | str, *args: Any, **kw: Any) -> Any:
        """Call a function at a worker; for threads."""
        name: Any = function if isinstance(function, str) else function.__name__
        if not isinstance(function, str) and function.__module__.startswith("torch"):
            name = function
        return self.agent.bridge.block_on(lambda: self.agent.call(to.node_id, name, args, **kw))

    def remote(self, to: Worker, name: str, *args: Any) -> RRef[Any]:
        return self.agent.bridge.block_on(lambda: self.agent.remote(to.node_id, name, args))

    @contextlib.contextmanager
    def context(self) -> Any:
        with autograd.context(self.agent) as context_id:
            yield context_id

    def backward(self, context_id: int, *losses: torch.Tensor, **options: Any) -> None:
        autograd.backward(context_id, list(losses), agent=self.agent, **options)

    def gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        return autograd.get_gradients(context_id, agent=self.agent)


@contextlib.asynccontextmanager
async def workers(
    count: int, *functions: Callable[..., Any], lease: float = 0.3, timeout: float = 20.0
) -> AsyncIterator[list[Worker]]:
    """Workers that all know each other and offer the same functions."""
    async with contextlib.AsyncExitStack() as stack:
        every = [await stack.enter_async_context(nodes.node()) for _ in range(count)]
        for number, one in enumerate(every):
            for other in every[:number]:
                await other.connect(one.ticket())
        found = []
        for one in every:
            limits = RefLimits(lease=lease, confirm=lease)
            one._rpc = Agent(one, exposures=Exposures(), limits=limits, timeout=timeout)
            one.endpoint.start_soon(one._rpc.run)
            worker = Worker(await one.rpc())
            for function in functions:
                worker.offer(function)
            found.append(worker)
        yield found


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run what a program does, which blocks."""
    return await anyio.to_thread.run_sync(partial(function, *args), abandon_on_cancel=True)


async def quiet(*all_workers: Worker) -> None:
    """Wait until nothing is left of any context, run or reference."""
    gc.collect()
    await nodes.eventually(
        lambda: (
            not any(
                len(each.agent.autograd.contexts) + each.agent.autograd.running
                for each in all_workers
            )
        )
    )
    await nodes.eventually(lambda: not any(len(each.agent.holdings) for each in all_workers))
