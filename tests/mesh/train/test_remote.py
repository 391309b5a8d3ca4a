"""Training over devices of peers, which exchange over QUIC, and which may be killed."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mesh
from mesh import blocking
from mesh.collective import RankLost
from mesh.device.client.tensors import devices
from mesh.train import Strategy, ddp, fit, sharded_optimizer, single
from tests.mesh.device.peer import Peer, client, peer
from tests.mesh.device.test_moving import moved_bytes
from tests.mesh.train.models import OPTIMIZERS, batches, compute, mlp, plain

LIVENESS = 3.0

STRATEGIES: dict[str, Callable[[list[torch.device]], Strategy]] = {
    "ddp": ddp,
    "sharded": sharded_optimizer,
}


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[Peer, Peer]]:
    with (
        peer(liveness=LIVENESS, shares_memory=False) as one,
        peer(liveness=LIVENESS, shares_memory=False) as other,
    ):
        yield one, other


@pytest.fixture(scope="module")
def node() -> Iterator[blocking.Node]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with client(LIVENESS) as opened:
        yield opened
        gc.collect()
    devices.clear()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def four(peers: tuple[Peer, Peer], node: blocking.Node) -> list[torch.device]:
    one, other = ([mesh.device(each.ticket, k, node=node) for k in (0, 1)] for each in peers)
    return [one[0], other[0], one[1], other[1]]


CHOICES = {"1 on 1": [0], "2 on 1": [0, 2], "2 on 2": [0, 1], "4 on 2": [0, 1, 2, 3]}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_is_that_of_one_device(
    name: str, optimizer: str, choice: str, four: list[torch.device]
) -> None:
    model, data, make = mlp().double(), batches(20, 6), OPTIMIZERS[optimizer]
    chosen = [four[index] for index in CHOICES[choice]]
    with STRATEGIES[name](chosen) as strategy:
        strategy.prepare(copy.deepcopy(model), make)
        assert strategy.main_device == chosen[0]
        losses = []
        for batch in data:
            losses.append(strategy.backward(batch, compute))
            strategy.step()
        weights = strategy.state()["model"]
    wanted, reference = plain(model, make, data)
    assert torch.stack(losses).tolist() == pytest.approx(wanted, abs=1e-6)
    torch.testing.assert_close(weights, reference, atol=1e-6, rtol=0)


def wide(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_moves_is_between_the_peers_and_what_has_to(
    name: str, four: list[torch.device], peers: tuple[Peer, Peer], node: blocking.Node
) -> None:
    (batch,) = batches(1, 6)
    batch = (batch[0].float(), batch[1])
    other = str(peers[1].ticket.node_id)
    of_client = {}
    for width in (10, 100_000):  # a million parameters
        model = wide(width)
        nbytes = 4 * sum(each.numel() for each in model.parameters())
        with STRATEGIES[name](four[:2]) as strategy:
            strategy.prepare(model, OPTIMIZERS["sgd"])

            def step(strategy: Strategy = strategy) -> None:
                strategy.backward(batch, compute)
                strategy.confirm()
                strategy.step()
                strategy.model[0].bias[:1].item()  # type: ignore[index]

            for number in range(6):  # in full, kept at the peers, and done again
                before = moved_bytes(node), peers[0].moved()[other]
                step()
                of_client[width, number] = moved_bytes(node) - before[0]
                between = peers[0].moved()[other] - before[1]
                if width > 10 and number:  # each of two has to have what the other has
                    assert between == pytest.approx(2 * nbytes, rel=0.05)
    for number in range(1, 6):
        assert of_client[100_000, number] < of_client[10, number] + 4096
        assert of_client[100_000, number] < 32 << 10


def test_a_checkpoint_goes_on_over_devices_of_peers(
    four: list[torch.device], tmp_path: Path
) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 3)).double()

    def go(epochs: int, directory: Path | None) -> list[float]:
        torch.manual_seed(3)
        with ddp(four[:2]) as strategy:
            return fit(
                strategy,
                net(),
                optimizer=OPTIMIZERS["adam"],
                loss=compute,
                train=batches(4, 6),
                epochs=epochs,
                directory=directory,
            ).losses

    wanted = go(2, None)
    go(1, tmp_path)
    torch.manual_seed(77)
    assert go(2, tmp_path) == pytest.approx(wanted, rel=1e-9)


def test_one_device_of_a_peer(four: list[torch.device]) -> None:
    with single(four[3]) as strategy:
        history = fit(
            strategy,
            mlp().double(),
            optimizer=OPTIMIZERS["sgd"],
            loss=compute,
            train=batches(4, 6),
            validate=batches(1, 6),
        )
    wanted, _ = plain(mlp().double(), OPTIMIZERS["sgd"], batches(4, 6))
    assert history.losses == pytest.approx(wanted)


EPOCHS = 10


class Killing:
    """Batches that don't end before a peer is killed, some steps after the first."""

    def __init__(self, victim: Peer, after: float) -> None:
        self.killed_at = 0.0
        self._victim = victim
        self._timer = threading.Timer(after, self._kill)
        self._data = batches(12, 6)

    def __iter__(self) -> Iterator[Any]:
        if not self._timer.is_alive() and not self.killed_at:
            self._timer.start()
        yield from self._data

    def _kill(self) -> None:
        self.killed_at = time.monotonic()
        self._victim.program.kill()


def killed(
    victim: Peer, four: list[torch.device], node: blocking.Node, after: float, on_lost: Any
) -> tuple[Killing, torch.device, Any, float]:
    """Train over a device of a peer that is killed, and two of others."""
    lost = mesh.device(victim.ticket, 0, node=node)
    data = Killing(victim, after)
    with ddp([lost, *four[:2]]) as strategy:
        try:
            found: Any = fit(
                strategy,
                mlp().double(),
                optimizer=OPTIMIZERS["sgd"],
                loss=compute,
                train=data,
                epochs=1000 if on_lost == "raise" else EPOCHS,
                on_lost=on_lost,
            )
        except mesh.MeshError as error:
            found = error
    return data, lost, found, time.monotonic()


def check_named(data: Killing, lost: torch.device, found: Any, ended: float) -> None:
    assert isinstance(found, RankLost), found
    assert found.ranks == (0,)
    assert str(lost) in str(found)
    assert ended - data.killed_at < LIVENESS


def check_survived(data: Killing, lost: torch.device, found: Any) -> None:
    assert isinstance(found, mesh.train.History), found
    assert data.killed_at
    wanted, _ = plain(mlp().double(), OPTIMIZERS["sgd"], batches(12, 6) * EPOCHS)
    assert found.losses == pytest.approx(wanted, abs=1e-6)
    assert found.lost == [lost]


def test_a_peer_that_is_killed_is_named_or_done_without(
    four: list[torch.device], node: blocking.Node
) -> None:
    """The device that is lost is the main one, which has the losses."""
    with peer(devices=1, liveness=LIVENESS, shares_memory=False) as victim:
        data, lost, found, _ = killed(victim, four, node, 0.2, "continue")
        check_survived(data, lost, found)


class Cutting:
    """Batches during which the way between two peers breaks."""

    def __init__(self, peers: tuple[Peer, Peer]) -> None:
        self._peers = peers
        self._data = batches(12, 6)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._data):
            if number == 7:
                one, other = self._peers
                one.cut_off(other)
                other.cut_off(one)
            yield batch


def test_two_peers_that_lose_each_other_and_not_the_client(node: blocking.Node) -> None:
    """One goes on: nothing is silent for the liveness bound, and then for the time to connect."""
    with (
        peer(devices=1, liveness=1.0, shares_memory=False) as one,
        peer(devices=1, liveness=1.0, shares_memory=False) as other,
    ):
        chosen = [mesh.device(each.ticket, 0, node=node) for each in (one, other)]
        with ddp(chosen) as strategy:
            found = fit(
                strategy,
                mlp().double(),
                optimizer=OPTIMIZERS["sgd"],
                loss=compute,
                train=Cutting((one, other)),
                on_lost="continue",
            )
            assert strategy.devices == (chosen[0],)
        wanted, _ = plain(mlp().double(), OPTIMIZERS["sgd"], batches(12, 6))
        assert found.losses == pytest.approx(wanted, abs=1e-6)
        assert found.lost == [chosen[1]]
        assert (torch.ones(1).to(chosen[1]) + 1).item() == 2  # it is there, and of use to others


@pytest.mark.slow
@pytest.mark.parametrize("run", range(20))
@pytest.mark.parametrize("on_lost", ["raise", "continue"])
def test_a_peer_that_is_killed_at_any_time(
    on_lost: str, run: int, four: list[torch.device], node: blocking.Node
) -> None:
    with peer(devices=1, liveness=LIVENESS, shares_memory=run % 2 == 0) as victim:
        data, lost, found, ended = killed(victim, four, node, 0.05 + 0.02 * run, on_lost)
        if on_lost == "raise":
            check_named(data, lost, found, ended)
        else:
            check_survived(data, lost, found)
