"""Whatever happens to one side, or is done by it: typed errors, in time, and nothing is left."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

import mesh
from mesh import blocking
from mesh.device.client.tensors import devices
from mesh.errors import MeshError
from tests.mesh.device.hostile import ATTACKS, Attacker
from tests.mesh.device.peer import CONFIG, Peer, client, peer
from tests.programs import Program

RUNS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]
"""Once each time, and 20 times in the slow form."""

LEASE = 1.0

NOTICED = CONFIG.liveness + LEASE + 2.0
"""Seconds until whoever waits for a peer that was killed is told: it might come back so long."""


@pytest.fixture(scope="module")
def there() -> Iterator[Peer]:
    with peer(devices=1, lease=LEASE, max_bytes=256 << 20) as running:
        yield running


@pytest.fixture
def node() -> Iterator[blocking.Node]:
    with client() as opened:
        yield opened
        gc.collect()
    devices.clear()


def eventually_clean(there: Peer, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    left = ("device_sessions", "executors", "connections", "tensors", "tensor_bytes", "tokens")
    while any(there.sizes()[name] for name in left):
        assert time.monotonic() < deadline, there.sizes()
        time.sleep(0.05)


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.timeout(90)
def test_a_hostile_client_harms_itself_alone(name: str, seed: int, there: Peer) -> None:
    with client() as honest, client() as bad:
        x = torch.ones(4, device=mesh.device(there.ticket, node=honest))
        assert x.sum().item() == 4
        attacker = Attacker(bad, there.ticket, seed)
        assert attacker.is_alive()
        try:
            attacker.attack(name)
        except MeshError:
            pass
        attacker.is_alive()
        began = time.monotonic()
        assert (x + 1).sum().item() == 8
        assert time.monotonic() - began < 10
        del attacker
        gc.collect()
    devices.clear()
    eventually_clean(there)


CLIENT = """
import sys, torch, mesh
from tests.mesh.device.peer import client
node = client().open()
d = mesh.device({ticket!r}, node=node)
x = torch.ones(1 << 20).to(d)
with mesh.device.capture(d) as step:
    y = x * 2
print(x.sum().item(), flush=True)
while True:
    x = x * 1
    step.replay()
    if {seed} % 3 == 0: x.cpu()
    if {seed} % 3 == 1: x = torch.ones(1 << 20).to(d) * 2
"""


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.timeout(90)
def test_a_client_that_is_killed_leaves_nothing(seed: int, there: Peer) -> None:
    code = CLIENT.format(ticket=there.ticket.encode(), seed=seed)
    with Program(["-c", code]) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == f"{float(1 << 20)}\n"
        time.sleep(0.01 * (seed % 10))
        program.kill()
    # What had begun to be put waits for half a minute to be taken up again.
    eventually_clean(there, 45.0 if seed % 3 == 1 else 10.0)


@pytest.mark.parametrize("seed", RUNS)
@pytest.mark.timeout(120)
def test_a_peer_that_is_killed_is_told_of(seed: int, there: Peer, node: blocking.Node) -> None:
    with peer(devices=1, lease=LEASE) as victim:
        one, other = (mesh.device(each.ticket, node=node) for each in (victim, there))
        x, y = torch.ones(1 << 20).to(one), torch.ones(1, device=other)
        assert x.sum().item() == 1 << 20
        assert y.item() == 1
        moved = x.to(other)  # under way, or not
        time.sleep(0.005 * (seed % 10))
        victim.program.kill()
        began = time.monotonic()
        with pytest.raises(MeshError):
            without_end(x, seed)
        assert time.monotonic() - began < NOTICED
        try:
            assert moved.sum().item() == 1 << 20
        except MeshError:
            pass
        assert time.monotonic() - began < 2 * NOTICED
        assert (y + 1).item() == 2
        with pytest.raises(MeshError):
            x.to(other).cpu()
        assert (y + 1).item() == 2


def without_end(x: torch.Tensor, seed: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        x = x + 1
        if seed % 3 == 0:
            x.cpu()
        elif seed % 3 == 1:
            x = torch.ones(1 << 20).to(x.device) + x


@pytest.mark.parametrize("seed", RUNS)
def test_an_executor_that_is_killed_amid_moves(seed: int, there: Peer, node: blocking.Node) -> None:
    eventually_clean(there)
    d = mesh.device(there.ticket, node=node)
    x = torch.ones(1 << 20).to(d)
    assert x.sum().item() == 1 << 20
    # Of the nursery's, which need not be the only child.
    (executor,) = [each for child in children(there.program.pid) for each in children(child)]
    uploads = [torch.ones(1 << 20).to(d) for _ in range(4)]
    os.kill(executor, signal.SIGKILL)
    with pytest.raises(MeshError, match="SIGKILL"):
        without_end(uploads[0], 2 - seed % 3)
    mesh.device.close(d)
    deadline = time.monotonic() + 10
    while there.sizes()["tensors"]:  # of moves that nobody waits for any more
        assert time.monotonic() < deadline
        time.sleep(0.02)
    again = torch.ones(1 << 20).to(mesh.device(there.ticket, node=node))
    assert again.sum().item() == 1 << 20


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as listed:  # noqa: PTH123
        return [int(each) for each in listed.read().split()]
