"""A program that is one worker of a job: it does what its first argument says.

python -m tests.mesh.rpc.workers SCENARIO RANK SIZE FILE HOME
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mesh import blocking, rpc
from mesh.rpc import MeshRpcBackendOptions
from tests.mesh.rpc import exposures
from tests.mesh.rpc.remote_modules import use_modules
from tests.placements import placed
from transport import EndpointConfig

NAMES = ("alpha", "beta", "gamma")

LOOPBACK = EndpointConfig(bind="127.0.0.1:0", linger=1.0, **placed())


def use(rank: int) -> None:
    """What a program of ``torch.distributed.rpc`` does."""
    if rank:
        return
    assert rpc.get_worker_info().name == "alpha"
    assert rpc.get_worker_info("beta").id == 1
    assert torch.equal(rpc.rpc_sync("beta", torch.add, (torch.ones(2), 3)), torch.full((2,), 4.0))
    assert rpc.rpc_sync(1, exposures.echo, (1,), {"x": 2}) == ((1,), {"x": 2})
    assert rpc.rpc_sync("alpha", exposures.echo, ("self",)) == "self"

    futures = [rpc.rpc_async("beta", exposures.echo, (n,)) for n in range(20)]
    assert torch.futures.wait_all(futures) == list(range(20))  # type: ignore[arg-type]
    seen: list[Any] = []
    chained = rpc.rpc_async("beta", exposures.echo, (5,)).then(
        lambda done: seen.append(rpc.rpc_sync("beta", exposures.echo, (done.wait() + 1,)))
    )
    chained.wait()
    assert seen == [6]
    failed = rpc.rpc_async("beta", exposures.fail, ("value",))
    try:
        failed.wait()
    except ValueError as error:
        assert str(error) == "as was expected"  # noqa: PT017
    else:
        raise AssertionError("nothing was raised")

    counter = rpc.remote("beta", exposures.Counter, (3,))
    assert counter.owner_name() == "beta"
    assert counter.owner() == rpc.get_worker_info("beta")
    assert counter.rpc_sync().add(4) == 7
    assert counter.rpc_async().add(1).wait() == 8
    assert counter.remote().add(1).to_here() == 9
    mine = rpc.RRef(torch.ones(3))
    assert mine.is_owner()
    assert mine.owner_name() == "alpha"
    assert torch.equal(rpc.rpc_sync("gamma", exposures.fetch, (mine,)), torch.ones(3))
    number = rpc.remote("beta", exposures.echo, (11,))
    assert rpc.rpc_sync("gamma", exposures.fetch, (number,)) == 11
    large = torch.randn(1 << 20)
    assert torch.equal(rpc.rpc_sync("gamma", exposures.echo, (large,)), large)
    assert rpc.rpc_sync("beta", batch, (1,)) == 3

    def two_ones(given: torch.Tensor) -> torch.Tensor:
        """Tensors that are made here, where a transform makes them, have no memory."""
        ones: torch.Tensor = rpc.rpc_sync("beta", torch.ones, (2,))
        assert ones.tolist() == [1.0, 1.0]
        return given.sum()

    torch.func.grad(two_ones)(torch.ones(1))

    # A thread that waits holds up nobody else's.
    count = 0
    stop = threading.Event()

    def advance() -> None:
        nonlocal count
        while not stop.is_set():
            count += 1

    thread = threading.Thread(target=advance)
    thread.start()
    rpc.rpc_sync("beta", exposures.nap, (0.2,))
    stop.set()
    thread.join()
    assert count > 1000


def everything(rank: int) -> None:
    """Whatever a program does, and all of it is over when the workers end together."""
    use(rank)
    rpc.shutdown()


@rpc.functions.async_execution
def batch(first: int) -> torch.futures.Future[int]:
    done: torch.futures.Future[int] = torch.futures.Future()
    threading.Thread(target=lambda: done.set_result(first + 2)).start()
    return done


rpc.exposed(batch)


def left(rank: int) -> None:
    """Who leaves in no good order waits for nothing any more."""
    if rank == 1:
        with contextlib.suppress(rpc.RpcError):  # the other's loss, of which it may hear
            rpc.shutdown()
        return
    held = rpc.remote("beta", exposures.echo, (7,))
    assert held.to_here() == 7
    future = rpc.rpc_async("beta", exposures.nap, (0.5,))
    rpc.shutdown(graceful=False)
    for late in (future.wait, lambda: rpc.rpc_sync("beta", exposures.echo, (1,))):
        try:
            late()
        except RuntimeError as error:
            assert "shut down" in str(error) or "not been initialized" in str(error), error  # noqa: PT017
        else:
            raise AssertionError("something was waited for after the end")


def chain(rank: int) -> None:
    """Calls that nobody waits for go on from worker to worker, while all of them end."""
    rpc.rpc_async((rank + 1) % 3, pass_on, ((rank + 2) % 3, 12))
    rpc.shutdown()
    assert passed == 12, passed  # 36 in all, a third of them here


passed = 0


def pass_on(to: int, left: int) -> None:
    global passed
    passed += 1
    if left > 1:
        rpc.rpc_async(to, pass_on, ((to + 1) % 3, left - 1))


rpc.exposed(pass_on)


def busy(rank: int) -> None:
    """One worker is busy for longer than another waits for it to end."""
    if rank == 1:
        time.sleep(2.5)
        try:
            rpc.shutdown()
        except rpc.RpcError as error:
            assert "alpha" in str(error)  # noqa: PT017 - which has not waited for it
        return
    try:
        rpc.shutdown(timeout=1)
    except rpc.RpcTimeout as error:
        assert "beta" in str(error)  # noqa: PT017
    else:
        raise AssertionError("nobody was waited for")


def killed(rank: int) -> None:
    """One worker dies amid a call and in no good order."""
    if rank == 1:
        time.sleep(30)
    try:
        rpc.rpc_sync("beta", die, timeout=0)
    except Exception as error:
        told = str(error)
        assert "beta" in told or rpc.get_worker_info("beta").node_id.short in told
    try:
        rpc.shutdown()
    except rpc.RpcError as error:
        assert "beta" in str(error)  # noqa: PT017
    else:
        raise AssertionError("the loss of a worker ended nothing")


def die() -> None:
    os._exit(9)


rpc.exposed(die)

SCENARIOS: tuple[tuple[Callable[[int], None], int], ...] = (
    (everything, 3),
    (use_modules, 3),
    (chain, 3),
    (left, 2),
    (busy, 2),
    (killed, 2),
)
"""What the workers do one after another, and how many of them."""


def main() -> None:
    rank, file, home = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    for scenario, size in SCENARIOS:
        if rank >= size:
            break
        with blocking.Node.worker(home=home, config=LOOPBACK) as node:
            rpc.init_rpc(
                NAMES[rank],
                rank=rank,
                world_size=size,
                rpc_backend_options=MeshRpcBackendOptions(
                    init_method=f"file://{file}-{scenario.__name__}", node=node
                ),
            )
            try:
                scenario(rank)
            finally:
                with contextlib.suppress(rpc.RpcError):
                    rpc.shutdown(graceful=False)
        print("done:", scenario.__name__, flush=True)


if __name__ == "__main__":
    main()
