"""Contexts of devices in async code, on nodes of one event loop; and cancelled at any await."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest
import torch

import mesh
from auth import SecretKey, allow_any
from mesh import Node
from mesh.collective import CollectiveError, CollectiveTimeout
from mesh.device import DeviceLimits, DeviceService, device_async, read
from mesh.device.client import backend
from mesh.device.client.tensors import devices
from mesh.device.errors import DeviceError
from mesh.device.server.executor import ExecutorLimits
from tests.cancelling import Operation, at_each_await
from tests.mesh.device.peer import CONFIG

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    """What torch loads for devices takes seconds, in which it lets no other thread run."""
    backend.register()


class World:
    """A program's node, and two that offer a device each."""

    def __init__(self, services: list[DeviceService], chosen: list[torch.device]) -> None:
        self.services = services
        self.chosen = chosen

    def held(self) -> dict[str, object]:
        """Return what the peers hold."""
        return {
            f"{name} {number}": size
            for number, service in enumerate(self.services)
            for name, size in service.sizes().items()
        }

    def ones(self) -> list[torch.Tensor]:
        return [torch.ones(3, device=device) for device in self.chosen]


def make_node() -> Node:
    return Node.embedded(key=SecretKey.generate(), authorizer=allow_any(), config=CONFIG)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    limits = DeviceLimits(executor=ExecutorLimits(threads=1))
    async with (
        make_node() as mine,
        make_node() as one,
        make_node() as other,
        DeviceService(one.endpoint, ["cpu"], limits, store=one.store) as first,
        DeviceService(other.endpoint, ["cpu"], limits, store=other.store) as second,
    ):
        chosen = [await device_async(mine, each.ticket()) for each in (one, other)]
        yield World([first, second], chosen)
        gc.collect()
    devices.clear()


async def test_collectives(anyio_backend: str) -> None:
    async with world() as it:
        async with mesh.DistributedContext(it.chosen, op="sum") as context:
            found = await context.all_reduce(it.ones()).wait_async()
            assert [(await read(each)).tolist() for each in found] == [[2, 2, 2]] * 2
            later = context.all_gather(it.ones()).resolve()  # nobody waits for this one
            assert (await read(later[0].sum())).item() == 6
            with pytest.raises(DeviceError, match="would wait for itself"):
                context.all_reduce(it.ones()).wait()
            late = context.start("all_reduce")
            late.add(0, it.ones()[0])
            late.add(1, it.ones()[1])
            with pytest.raises(CollectiveTimeout):
                await late.collective().wait_async(timeout=0.0)
        with pytest.raises(DeviceError, match="the context is closed"):
            context.all_reduce(it.ones())
        with anyio.fail_after(5):
            while it.held()["device_groups 1"]:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        async with mesh.DistributedContext(it.chosen, op="sum") as context:
            bad = it.ones()
            bad[1] = bad[1].index_select(0, torch.tensor([9]).to(it.chosen[1]))[:1].expand(3)
            with pytest.raises(CollectiveError, match="index out of range") as caught:
                await context.all_reduce(bad).wait_async()
            assert caught.value.ranks == (1,)
        async with mesh.DistributedContext(["cpu"] * 2) as here:
            found = await here.all_reduce([torch.ones(2), torch.zeros(2)]).wait_async()
            assert found[1].tolist() == [0.5, 0.5]
        await anyio.to_thread.run_sync(partial(use_blocking, it))


def use_blocking(it: World) -> None:
    """Use a context in a thread beside the loop, which may wait for it."""
    with mesh.DistributedContext(it.chosen) as context:
        pending = context.all_reduce(it.ones())
        assert pending.wait()[0].tolist() == [1, 1, 1]
        with pytest.raises(DeviceError, match="another event loop"):
            anyio.run(pending.wait_async)


async def test_cancelled_anywhere_it_leaves_nothing(anyio_backend: str) -> None:
    async with world() as it:

        @asynccontextmanager
        async def scenario() -> AsyncIterator[Operation]:
            async def operation() -> None:
                async with mesh.DistributedContext(it.chosen, op="sum") as context:
                    await context.all_reduce(it.ones()).wait_async()

            yield operation

        async with mesh.DistributedContext(it.chosen):
            pass  # the first one has the peers load torch, each in a process of its own
        await at_each_await(scenario, it.held)
