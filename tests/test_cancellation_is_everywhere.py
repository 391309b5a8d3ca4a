"""No public async function is without a scenario in which it is cancelled at each of its awaits."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import auth
import mesh
import mesh.cli
import mesh.collective
import mesh.daemon
import mesh.distributed
import mesh.rpc
import tensor_bridge
import transport
import transport.protocol
from tests.auth import test_cancellation as of_auth
from tests.cancelling import Operation, Scenarios, public_async, reaches
from tests.mesh import test_cancellation as of_mesh
from tests.mesh.rpc import test_cancellation as of_rpc
from tests.tensor_bridge import test_cancellation as of_tensor_bridge
from tests.transport import test_cancellation as of_transport
from tests.transport.wires import wires

PACKAGES = (
    *(auth, transport, transport.protocol, tensor_bridge),
    *(mesh, mesh.daemon, mesh.collective, mesh.distributed, mesh.rpc, mesh.cli),
)

WITHOUT = {
    "auth.Authorizer.authorize": "a protocol without a body; what implements it is here itself",
    "transport.Carrier.call": "as above",
    "tensor_bridge.Lane.send": "as above",
    "tensor_bridge.Lane.receive": "as above",
    "mesh.DistributedContext.__aenter__": "cancelled beside devices, in mesh/device/groups",
    "mesh.DistributedContext.__aexit__": "as above",
}
"""What has no scenario, each with the reason."""

SCENARIOS: tuple[Scenarios[Any], ...] = (
    of_auth.SCENARIOS,
    of_transport.SCENARIOS,
    of_tensor_bridge.SCENARIOS,
    of_mesh.NODES,
    of_mesh.DAEMONS,
    of_rpc.SCENARIOS,
)


def public_names() -> dict[str, CodeType]:
    """Every public async function, and every public maker of an authorizer, which is one too."""
    makers = {
        f"auth.{name}": maker.__code__
        for name in auth.__all__
        if inspect.isfunction(maker := getattr(auth, name))
        and inspect.signature(maker).return_annotation == "Authorizer"
    }
    return public_async(*PACKAGES) | makers


def test_every_public_async_function_has_a_scenario() -> None:
    covered = {name for scenarios in SCENARIOS for name in scenarios.covered}
    public = set(public_names())
    assert len(public) > 50, "the search finds what there is"
    missing = public - covered - set(WITHOUT)
    assert not missing, (
        f"without a scenario of their cancellation: {sorted(missing)}; it goes into the "
        "test_cancellation.py of their package"
    )
    assert not covered - public, "scenarios of what is not there"
    assert not set(WITHOUT) - public
    assert not set(WITHOUT) & covered


@asynccontextmanager
async def desk() -> AsyncIterator[None]:
    yield None


WORLDS: dict[str, tuple[Scenarios[Any], Callable[[Path], AbstractAsyncContextManager[Any]]]] = {
    "auth": (of_auth.SCENARIOS, lambda path: desk()),
    "transport": (of_transport.SCENARIOS, lambda path: wires(**of_transport.SMALL)),
    "tensor_bridge": (of_tensor_bridge.SCENARIOS, lambda path: of_tensor_bridge.moves()),
    "nodes": (of_mesh.NODES, lambda path: of_mesh.meshed()),
    "daemons": (of_mesh.DAEMONS, of_mesh.machines),
}


@pytest.mark.anyio
@pytest.mark.parametrize("world", WORLDS)
async def test_every_scenario_runs_through_what_it_says(world: str, tmp_path: Path) -> None:
    scenarios, make = WORLDS[world]
    codes = public_names()
    async with make(tmp_path) as it:
        for scenario in scenarios.all.values():
            prepare: Callable[[], AbstractAsyncContextManager[Operation]]
            prepare = partial(scenario.prepare, it)
            missed = await reaches(prepare, {name: codes[name] for name in scenario.covers})
            assert not missed, f"{scenario.name} does not run through {missed}"
