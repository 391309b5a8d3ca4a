"""A way to a peer that is cut for a while: nothing is lost, nothing is done twice, all go on."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mesh
from auth import Delegation, SecretKey, allow_any
from mesh import Node
from mesh.device import DeviceLimits, DeviceService, device_async
from mesh.device.client.tensors import device_of, devices
from mesh.device.errors import SessionLost
from mesh.errors import LimitExceeded, MeshError
from tests.mesh.device.outage import Line
from tests.mesh.device.peer import CONFIG, Peer, client, peer

BACKENDS = ("asyncio", "trio")

LENGTHS = [
    pytest.param(0.1, 0, "asyncio", id="short"),
    pytest.param(CONFIG.liveness + 0.5, 1, "trio", id="noticed"),
    *(
        pytest.param(length, seed, BACKENDS[seed % 2], marks=pytest.mark.slow)
        for length in (0.1, 0.3, 1.0, 3.0, 10.0)
        for seed in range(4)
    ),
]
"""Seconds of outages, what decides where in the program they come, and the client's loop."""

SIZE = 1 << 19
"""Elements of what moves beside the operations: 2 MiB."""

LEASE, WITHIN = 25.0, 10.0


@pytest.fixture(scope="module")
def there() -> Iterator[Peer]:
    with peer(devices=1, lease=LEASE, shares_memory=False) as running:
        yield running


@pytest.fixture
def line(there: Peer) -> Iterator[Line]:
    with Line(there.ticket) as opened:
        yield opened
    gc.collect()
    devices.clear()


def cut_for(line: Line, seconds: float, after: float) -> None:
    def cut() -> None:
        line.is_cut = True
        time.sleep(seconds)
        line.is_cut = False

    threading.Timer(after, cut).start()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("length", "seed", "backend"), LENGTHS)
def test_a_program_goes_on_after_an_outage(
    length: float, seed: int, backend: str, there: Peer, line: Line
) -> None:
    after = random.Random(seed).random() * 0.2
    with client(shared_memory=False, backend=backend) as node:
        d = mesh.device(line.ticket, node=node)
        count = torch.zeros(1, device=d)
        big = torch.zeros(SIZE).to(d)
        with mesh.device.capture(d) as step:
            count += 1
        assert count.item() == 1
        done = 1
        cut_for(line, length, after)
        end = time.monotonic() + after + length + 0.3
        while time.monotonic() < end:
            for _ in range(20):
                count += 1
            step.replay()
            big += torch.full((SIZE,), 1.0).to(d)  # moves up
            done += 21
            if done % 4 == seed % 4:
                assert count.item() == done
            if done % 8 == seed % 8:
                assert torch.all(big.cpu() == (done - 1) / 21)
        assert count.item() == done
        assert torch.all(big.cpu() == (done - 1) / 21)


def test_after_the_lease_all_is_lost(there: Peer, line: Line) -> None:
    with client(shared_memory=False) as node:
        d = mesh.device(line.ticket, node=node)
        x = torch.ones(1, device=d)
        assert x.item() == 1
        carrier: Any = device_of(d).session.carrier
        assert carrier._lease == LEASE
        carrier._lease = 0.3
        line.is_cut = True
        began = time.monotonic()
        with pytest.raises(SessionLost, match="nothing heard"):
            x.cpu()
        assert time.monotonic() - began < WITHIN
        line.is_cut = False
        again = torch.ones(1, device=mesh.device(line.ticket, node=node))
        assert again.item() == 1
    eventually_free(there)


def eventually_free(there: Peer, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while there.sizes()["device_sessions"]:
        assert time.monotonic() < deadline, there.sizes()
        time.sleep(0.02)


def test_a_node_that_is_closed_frees_its_sessions_at_once(there: Peer) -> None:
    with client() as node:
        x = torch.ones(1 << 20).to(mesh.device(there.ticket, node=node))
        assert x.sum().item() == 1 << 20
        assert there.sizes()["device_sessions"] == 1
    eventually_free(there)  # within far less than the lease
    with pytest.raises(MeshError):
        x.cpu()
    devices.clear()


def test_a_peer_that_is_killed_is_told_of_long_before_the_lease_is_over() -> None:
    with peer(devices=1, lease=600.0) as killed, client() as node:
        x = torch.ones(1, device=mesh.device(killed.ticket, node=node))
        assert x.item() == 1
        killed.program.kill()
        began = time.monotonic()
        with pytest.raises(SessionLost, match=str(killed.ticket.node_id.short)):
            x.cpu()
        assert time.monotonic() - began < WITHIN


def test_a_peer_that_is_closed_is_told_of_at_once() -> None:
    with peer(devices=1, lease=600.0) as leaving, client() as node:
        x = torch.ones(1, device=mesh.device(leaving.ticket, node=node))
        assert x.item() == 1
        assert leaving.program.stdin is not None
        leaving.program.stdin.close()
        with pytest.raises(SessionLost, match=r"left|Open the device again"):
            without_end(x)
    devices.clear()


def without_end(x: torch.Tensor) -> None:
    deadline = time.monotonic() + WITHIN
    while time.monotonic() < deadline:
        (x + 1).item()


@pytest.mark.anyio
async def test_programs_of_one_machine_share_its_sessions(anyio_backend: str) -> None:
    machine = SecretKey.generate()

    def program() -> Node:
        key = SecretKey.generate()
        lent = Delegation.issue(machine, key.node_id, ("device",), 60.0, time.time())
        return Node(key=key, authorizer=allow_any(), config=CONFIG, delegation=lent)

    server = Node.embedded(
        key=SecretKey.generate(), authorizer=allow_any(), config=CONFIG, tensors=False
    )
    limits = DeviceLimits(max_sessions_per_machine=2)
    one, two, three = program(), program(), program()
    async with server, one, two, three, DeviceService(server.endpoint, ["cpu"], limits) as service:
        await device_async(one, server.ticket())
        await device_async(two, server.ticket())
        with pytest.raises(LimitExceeded, match="2 of 2 sessions of programs of this machine"):
            await device_async(three, server.ticket())
        assert service.sizes()["device_sessions"] == 2
    devices.clear()
