"""Tensors move between devices of two peers, and no element passes through the client."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import anyio
import anyio.to_thread
import pytest
import torch

import mesh
from mesh import blocking
from mesh.device.client import moving
from mesh.device.client.tensors import device_of, devices
from mesh.errors import MeshError
from tests.mesh.device.peer import Peer, client, peer


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[Peer, Peer]]:
    with peer(devices=2) as one, peer(devices=1, max_bytes=160 << 20) as other:
        yield one, other


@pytest.fixture
def node() -> Iterator[blocking.Node]:
    with client() as opened:
        yield opened
        gc.collect()
    devices.clear()


@pytest.fixture
def pair(peers: tuple[Peer, Peer], node: blocking.Node) -> tuple[torch.device, torch.device]:
    one, other = (mesh.device(each.ticket, node=node) for each in peers)
    return one, other


def moved_bytes(node: blocking.Node) -> int:
    """Bytes of UDP payload that this program has sent and received."""

    async def count() -> int:
        infos = [connection.info for connection in node.endpoint.connections]
        return sum(info.bytes_sent + info.bytes_received for info in infos)

    return node.run(count)


def test_no_element_passes_through_the_client(
    pair: tuple[torch.device, torch.device], node: blocking.Node
) -> None:
    one, other = pair
    n = 64 << 18  # 64 MiB
    x = torch.arange(n, dtype=torch.float32, device=one)
    assert x[5].item() == 5
    assert torch.ones(1, device=other).item() == 1
    before = moved_bytes(node)
    y = x.to(other)
    x.zero_()  # after the move, whenever that is
    total = 2 * y.sum(dtype=torch.float64).item()
    assert moved_bytes(node) - before < 64 << 10
    assert total == n * (n - 1)
    assert y.device == other


def test_between_devices_of_one_peer_nothing_moves_but_the_order(
    peers: tuple[Peer, Peer], node: blocking.Node
) -> None:
    one, other = (mesh.device(peers[0].ticket, index, node=node) for index in (0, 1))
    x = torch.full((16 << 18,), 3.0, device=one)
    y = torch.ones(2, device=other)
    assert x[:2].to(other).sum().item() + y.sum().item() == 8
    before = moved_bytes(node)
    y = x.to(other)
    assert (y.device, y[-1].item()) == (other, 3.0)
    assert moved_bytes(node) - before < 4096


def test_moves_keep_the_order_of_both_sides(
    pair: tuple[torch.device, torch.device], peers: tuple[Peer, Peer]
) -> None:
    one, other = pair
    a = torch.ones(3, device=one)
    b = torch.ones(3, device=other)
    for step in range(5):
        c = a.to(other)
        a.add_(1)
        b.add_(c)
        d = b.to(one)
        b.mul_(2)
        a.add_(d)
        b.sub_(step)
    a1, b1 = torch.ones(3), torch.ones(3)
    for step in range(5):
        c1 = a1.clone()
        a1.add_(1)
        b1.add_(c1)
        d1 = b1.clone()
        b1.mul_(2)
        a1.add_(d1)
        b1.sub_(step)
    assert torch.equal(a.cpu(), a1)
    assert torch.equal(b.cpu(), b1)
    assert torch.empty(0, 3, device=one).to(other).shape == (0, 3)
    view = torch.arange(6.0, device=one).view(2, 3).t()
    assert torch.equal(view.to(other).cpu(), torch.arange(6.0).view(2, 3).t())
    deadline = time.monotonic() + 5
    while any(each.sizes()["tensors"] for each in peers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_model_over_two_peers(pair: tuple[torch.device, torch.device]) -> None:
    one, other = pair
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
    x = torch.randn(3, 4)
    expected = second(first(x).relu())
    expected.sum().backward()
    gradient = first.weight.grad.clone()
    first.zero_grad()
    first.to(one)
    second.to(other)
    y = second(first(x.to(one)).relu().to(other))
    y.sum().backward()
    assert torch.equal(y.detach().cpu(), expected.detach())
    assert torch.equal(first.weight.grad.cpu(), gradient)


def test_errors_of_either_side_are_told_to_who_reads(
    pair: tuple[torch.device, torch.device],
) -> None:
    one, other = pair
    bad = torch.ones(3, device=one).index_select(0, torch.tensor([9]).to(one))
    y = bad.to(other) + 1
    big = torch.zeros(161 << 20, dtype=torch.uint8, device=one)
    z = big.to(other)
    with pytest.raises(MeshError, match="index out of range"):
        y.cpu()
    with pytest.raises(MeshError, match="bytes are left"):
        z.cpu()
    assert torch.ones(1, device=one).to(other).item() == 1


@pytest.mark.parametrize("shared_memory", [True, False])
def test_large_tensors_go_up_and_down(shared_memory: bool, peers: tuple[Peer, Peer]) -> None:
    before = sum(each.sizes()["tensors"] for each in peers)
    with client(shared_memory=shared_memory) as node:
        d = mesh.device(peers[0].ticket, node=node)
        x = torch.arange(1 << 19, dtype=torch.int32)
        y = x.to(d)
        x.zero_()  # what was sent is what it was then
        expected = torch.arange(1 << 19, dtype=torch.int32)
        z = y * 2
        y[1 << 18 :] = expected[: 1 << 18]  # into the middle of a storage
        y[0] = 7
        assert torch.equal(z.cpu(), 2 * expected)
        after = torch.cat((expected[: 1 << 18], expected[: 1 << 18]))
        after[0] = 7
        assert torch.equal(y.cpu(), after)
        view = y.view(512, 1024).t()
        assert torch.equal(view.cpu(), after.view(512, 1024).t())
        complex_ = torch.full((1 << 17,), 1 + 2j, device=d).conj()
        assert torch.equal(complex_.cpu(), torch.full((1 << 17,), 1 - 2j))
        poisoned = torch.zeros(1 << 20, device=d).index_select(0, torch.tensor([1 << 21]).to(d))
        with pytest.raises(MeshError, match="index out of range"):
            torch.cat((poisoned.expand(1 << 20), y.float())).cpu()
        gc.collect()
        devices.clear()
    deadline = time.monotonic() + 5
    while sum(each.sizes()["tensors"] for each in peers) > before:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_slow_move_delays_only_what_needs_it(
    peers: tuple[Peer, Peer], node: blocking.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = mesh.device(peers[0].ticket, node=node)
    allowed = threading.Event()
    send_up = moving.Mover._send_up

    async def wait_first(self: moving.Mover, snapshot: torch.Tensor) -> str:
        await anyio.to_thread.run_sync(allowed.wait)
        return await send_up(self, snapshot)

    monkeypatch.setattr(moving.Mover, "_send_up", wait_first)
    big, here = torch.ones(1 << 18), torch.ones(3, device=d)
    x = big.to(d)
    total = x.sum() + here[0]  # waits
    here += 1  # and so does this, which writes what that reads
    other = torch.full((3,), 5.0, device=d)
    assert (other * 2).tolist() == [10, 10, 10]
    allowed.set()
    assert total.item() == (1 << 18) + 1
    assert here.tolist() == [2, 2, 2]


def test_many_moves_are_bounded_and_keep_their_order(
    peers: tuple[Peer, Peer], node: blocking.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "MAX_UNDERWAY", 3)
    d = mesh.device(peers[1].ticket, node=node)
    x = torch.zeros(1 << 18, device=d)
    most = 0
    for step in range(12):
        x.copy_(torch.full((1 << 18,), float(step)))
        mover = device_of(d).session.carrier.mover  # type: ignore[union-attr]
        most = max(most, mover._count)  # type: ignore[union-attr]
        x.add_(1)
    assert x[-1].item() == 12
    assert 1 < most <= 3


def test_a_move_that_fails_is_told_to_who_reads(
    peers: tuple[Peer, Peer], node: blocking.Node
) -> None:
    d = mesh.device(peers[1].ticket, node=node)  # with room for 160 MiB
    x = torch.empty(161 << 20, dtype=torch.uint8, device=d)
    y = torch.zeros(161 << 20, dtype=torch.uint8).to(d)
    with pytest.raises(MeshError, match="bytes"):
        y[:4].cpu()
    with pytest.raises(MeshError, match="are left for this session"):
        x[:4].cpu()
    assert torch.ones(1, device=d).item() == 1


def test_a_move_whose_order_was_interrupted_holds_nothing_up(
    peers: tuple[Peer, Peer], node: blocking.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = mesh.device(peers[0].ticket, node=node)
    x = torch.ones(1 << 18, device=d)
    session = device_of(d).session
    flush = session.flush

    def interrupted(*, wait: bool = True) -> bool:
        if wait:
            monkeypatch.undo()
            raise InterruptedError
        return flush(wait=wait)

    assert x[0].item() == 1
    monkeypatch.setattr(session, "flush", interrupted)
    with pytest.raises(InterruptedError):
        x.copy_(torch.zeros(1 << 18))
    with pytest.raises(MeshError, match="was interrupted"):
        x.cpu()
    assert torch.ones(1, device=d).item() == 1
