"""A program that is one worker of a chain of stages: it does what its first argument says.

python -m tests.mesh.autograd.stage SCENARIO RANK SIZE FILE [NUMBER]
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from auth import SecretKey, allow_any
from mesh import autograd, blocking, optim, rpc
from mesh.autograd.commits import Commits
from mesh.rpc import Agent, MeshRpcBackendOptions, RefLimits, RRef, api
from tests.placements import placed
from transport import EndpointConfig

CONFIG = EndpointConfig(bind="127.0.0.1:0", liveness=3.0, **placed())
LEASE = 1.0

weight = torch.ones(8, 8, requires_grad=True)


@rpc.exposed
def forward(x: torch.Tensor, rank: int, last: int, dying: int) -> torch.Tensor:
    """Go through this stage and those behind it."""
    y = torch.tanh(x @ weight)
    if rank == dying:
        y.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    return y if rank == last else rpc.rpc_sync(rank + 1, forward, (y, rank + 1, last, dying))


@rpc.exposed
def left_over() -> tuple[int, int, int, int]:
    """Return how many contexts, runs, values of others' and references there are here."""
    agent = api.current_agent()
    autograd_here = agent.autograd
    return (
        len(autograd_here.contexts),
        autograd_here.running,
        len(agent.owned),
        len(agent.holdings),
    )


@rpc.exposed
def memory() -> int:
    """Return the bytes that this process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@rpc.exposed
def parameter() -> torch.Tensor:
    return weight


def kill(rank: int, size: int, number: int, *, settling: bool = False) -> None:
    """Stage `number` dies amid a backward; who is left says its name, and frees everything."""
    if rank == 0:
        x = torch.ones(2, 8, requires_grad=True)
        with autograd.context() as context_id:
            loss = forward(x, 0, size - 1, -1).sum()  # all are connected, and well
            autograd.backward(context_id, [loss])
        with autograd.context() as context_id:
            loss = forward(x, 0, size - 1, -1 if settling else number).sum()
            who = rpc.get_worker_info(f"stage{number}").node_id.short
            began = time.monotonic()
            try:
                autograd.backward(context_id, [loss], atomic=settling)
            except autograd.BackwardError as error:
                assert who in str(error), str(error)  # noqa: PT017
                assert not settling or not autograd.get_gradients(context_id)
            else:
                raise AssertionError("nothing was raised")
            assert time.monotonic() - began < 2 * CONFIG.liveness
    end = time.monotonic() + 20 + LEASE
    while left_over()[:2] != (0, 0) or (rank and api.current_agent().autograd.contexts.begun < 2):
        assert time.monotonic() < end, left_over()
        time.sleep(0.05)
    print("freed:", rank, flush=True)


def settle(rank: int, size: int, number: int) -> None:
    """The same, when all runs are over, and their gradients are to count."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == number:
        # Of the root what begins it, of the others what answers it.
        Commits.commit = Commits._taken = die  # type: ignore[method-assign, assignment]
    kill(rank, size, number, settling=True)


def repeat(rank: int, size: int, number: int) -> None:
    """So many iterations leave nothing, and no more memory than the first hundred."""
    if rank:
        return
    others = range(1, size)
    optimizer = optim.DistributedOptimizer(
        torch.optim.SGD, [rpc.remote(each, parameter) for each in range(size)], lr=1e-3
    )
    x, before = torch.ones(2, 8), [0] * size
    for iteration in range(number):
        with autograd.context() as context_id:
            loss = forward(x, 0, size - 1, -1).sum()
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        if iteration == min(100, number // 2):
            before = [memory(), *(rpc.rpc_sync(each, memory) for each in others)]
    after = [memory(), *(rpc.rpc_sync(each, memory) for each in others)]
    grown = [(new - old) >> 20 for new, old in zip(after, before, strict=True)]
    assert max(grown) < 20, grown
    left = [left_over(), *(rpc.rpc_sync(each, left_over) for each in others)]
    assert all(each[:2] == (0, 0) for each in left), left
    print("grown:", grown, "MiB", flush=True)


def optimize(rank: int, size: int, number: int) -> None:
    """One optimizer for the parameters of all stages does what one does that has them all."""
    if rank:
        return
    refs: list[RRef[Any]] = [rpc.remote(each, parameter) for each in range(size)]
    weights = [torch.ones(8, 8).requires_grad_() for _ in range(size)]
    for kind, options in ((torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {})):
        ours = optim.DistributedOptimizer(kind, refs, **options)
        theirs = kind(weights, **options)
        for _ in range(3):
            x = torch.randn(2, 8)
            weight.grad = torch.full((8, 8), 7.0)  # another's
            with autograd.context() as context_id:
                autograd.backward(context_id, [forward(x, 0, size - 1, -1).sum()])
                ours.step(context_id)
            assert torch.equal(weight.grad, torch.full((8, 8), 7.0))
            theirs.zero_grad()
            y = x
            for each in weights:
                y = torch.tanh(y @ each)
            y.sum().backward()
            theirs.step()
            for ref, each in zip(refs, weights, strict=True):
                torch.testing.assert_close(ref.to_here(), each)
    for wrong, error in (
        ((torch.optim.Optimizer, refs), rpc.RpcError),
        ((torch.optim.SGD, refs, -1.0), ValueError),
    ):
        try:
            optim.DistributedOptimizer(*wrong)  # type: ignore[arg-type]
        except error:
            continue
        raise AssertionError("nothing was raised")
    try:
        ours.step(12345)
    except autograd.ContextGone:
        print("optimized", flush=True)


SCENARIOS: dict[str, Callable[[int, int, int], None]] = {
    "kill": kill,
    "optimize": optimize,
    "repeat": repeat,
    "settle": settle,
}


def main() -> None:
    name, rank, size, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    number = int(sys.argv[5])
    torch.set_num_threads(1)
    node = blocking.Node.embedded(key=SecretKey.generate(), authorizer=allow_any(), config=CONFIG)
    with node:
        node.node._rpc = Agent(node.node, limits=RefLimits(lease=LEASE, confirm=LEASE))
        node.run(_begin(node))
        rpc.init_rpc(
            f"stage{rank}",
            rank=rank,
            world_size=size,
            rpc_backend_options=MeshRpcBackendOptions(init_method=f"file://{file}", node=node),
        )
        SCENARIOS[name](rank, size, number)
        rpc.shutdown(graceful=name not in ("kill", "settle"))


def _begin(node: blocking.Node) -> Any:
    async def begin() -> None:
        agent = node.node._rpc
        assert agent is not None
        node.node.endpoint.start_soon(agent.run)

    return begin


if __name__ == "__main__":
    main()
