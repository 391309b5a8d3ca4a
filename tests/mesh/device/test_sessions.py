"""Sessions over the mesh: who gets one, and what is left when either side dies or misbehaves."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest
import torch

import mesh
from auth import AccessDenied, Grant, SecretKey, allow_any
from mesh import Node, blocking
from mesh.device import (
    DeviceLimits,
    DeviceService,
    api,
    device_async,
    read,
    synchronize_async,
    wire,
)
from mesh.device.client import carrier
from mesh.device.client import session as session_module
from mesh.device.client.tensors import device_of, devices
from mesh.device.errors import DeviceBusy, DeviceError, SessionLost
from mesh.device.server.executor import ExecutorLimits
from mesh.errors import LimitExceeded, MeshError, ServiceUnknown
from tensor_bridge import QuotaExceeded
from tests.mesh.device.peer import CONFIG, Peer, client, peer


@pytest.fixture(scope="module")
def there() -> Iterator[Peer]:
    with peer(lease=1.0, max_bytes=64 << 20) as running:
        yield running


@pytest.fixture
def node() -> Iterator[blocking.Node]:
    with client() as opened:
        yield opened
        gc.collect()
    devices.clear()


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_clean(there: Peer) -> bool:
    sizes = there.sizes()
    return sizes["device_sessions"] == 0 and sizes["executors"] == 0 and sizes["connections"] == 0


def test_opening_describing_and_closing(
    there: Peer, node: blocking.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = mesh.device(there.ticket, 1, node=node)
    assert d == torch.device("mesh", 0)
    assert mesh.device(there.ticket.encode(), 1, node=node) == d
    other = mesh.device(there.ticket, 0, node=node)
    assert other == torch.device("mesh", 1)
    info = mesh.describe(other)
    assert (info.index, info.type, info.device) == (0, "cpu", other)
    assert info.node_id == there.ticket.node_id
    assert info.memory > 1 << 30
    assert info.lane in ("quic", "shared-memory")
    listed = mesh.devices(there.ticket, type="cpu", node=node)
    assert [each.index for each in listed] == [0, 1]
    assert mesh.devices(there.ticket, type="cuda", node=node) == ()
    with pytest.raises(DeviceError, match="it offers 2"):
        mesh.device(there.ticket, 2, node=node)
    monkeypatch.setattr(api, "MAX_DEVICES", 2)
    with client() as third, pytest.raises(DeviceError, match="numbers devices up to 1"):
        mesh.device(there.ticket, 0, node=third)
    monkeypatch.undo()
    x = torch.ones(2, device=d)
    assert x.to(other).tolist() == [1.0, 1.0]
    eventually(lambda: there.sizes()["executors"] == 1)  # that of the third is over
    mesh.device.close(d)
    with pytest.raises(SessionLost, match="it was closed"):
        x.cpu()
    eventually(lambda: there.sizes()["device_sessions"] == 0)
    again = mesh.device(there.ticket, 0, node=node)
    assert again == torch.device("mesh", 2)
    assert torch.ones(2, device=again).sum().item() == 2


def test_large_tensors_and_back_pressure(there: Peer, node: blocking.Node) -> None:
    d = mesh.device(there.ticket, node=node)
    x = torch.arange(1 << 20, dtype=torch.int32)
    y = x.to(d)
    x.zero_()  # what was sent is what it was then
    assert torch.equal(y.cpu(), torch.arange(1 << 20, dtype=torch.int32))
    slow = torch.ones(100, 100, device=d)
    for _ in range(2000):
        torch.mm(slow, slow)
    outbox = device_of(d).session.carrier._outbox  # type: ignore[union-attr]
    assert len(outbox) <= 64
    assert slow.sum().item() == 10000


def test_the_grants_quota_holds(there: Peer, node: blocking.Node) -> None:
    d = mesh.device(there.ticket, node=node)
    with pytest.raises(QuotaExceeded, match="of 67108864 bytes"):
        torch.zeros(65 << 20, dtype=torch.uint8, device=d)[:4].cpu()
    assert torch.zeros(4, device=d).sum().item() == 0


def test_operations_that_take_more_memory_than_there_is_fail_alone(
    there: Peer, node: blocking.Node
) -> None:
    d = mesh.device(there.ticket, node=node)
    x = torch.ones(1, device=d)
    with pytest.raises(DeviceError, match="memory"):  # 4 GiB, which only the operation can tell
        torch.bincount(torch.tensor([1 << 29]).to(d))
    assert (x + 1).item() == 2


def test_a_session_that_takes_too_long_is_ended(there: Peer, node: blocking.Node) -> None:
    x = torch.ones(1, device=mesh.device(there.ticket, node=node))
    assert x.item() == 1
    os.kill(_executor_of(there), signal.SIGALRM)  # as the kernel does then
    with pytest.raises(SessionLost, match="took longer than 5 s"):
        x.cpu()


def _executor_of(there: Peer) -> int:
    """Return the process that runs the one session there is."""

    def children(pid: int) -> list[int]:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(each) for each in listed.split()]

    def executors() -> list[int]:  # children of the nursery's, which need not be the only child
        return [each for child in children(there.program.pid) for each in children(child)]

    eventually(lambda: len(executors()) == 1)
    return executors()[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_an_executor_that_dies_takes_nobody_with_it(
    number: signal.Signals, there: Peer, node: blocking.Node
) -> None:
    d = mesh.device(there.ticket, node=node)
    x = torch.ones(1, device=d)
    assert x.item() == 1
    victim = _executor_of(there)
    with client() as other_node:
        other = torch.ones(1, device=mesh.device(there.ticket, node=other_node))
        assert other.item() == 1
        os.kill(victim, number)
        with pytest.raises(SessionLost, match=number.name):
            x.cpu()
        with pytest.raises(SessionLost, match=r"Open the device again"):
            _ = x + 1
        torch.manual_seed(0)  # is for all devices, the lost ones too
        assert (other + 1).item() == 2
    again = mesh.device(there.ticket, node=node)
    assert torch.ones(1, device=again).item() == 1


def test_a_link_that_breaks_loses_and_repeats_nothing(there: Peer, node: blocking.Node) -> None:
    d = mesh.device(there.ticket, node=node)
    x = torch.zeros(1, device=d)

    async def cut() -> None:
        connection = node.endpoint.connection(there.ticket.node_id)
        assert connection is not None
        connection.abort(0, "cut")

    for step in range(1, 6):
        for _ in range(700):
            x += 1
        node.run(cut)
        for _ in range(300):
            x += 1
        assert x.item() == 1000 * step
    eventually(lambda: there.sizes()["executors"] == 1)


def test_hostile_sessions_end_and_others_do_not(there: Peer, node: blocking.Node) -> None:
    d = mesh.device(there.ticket, node=node)
    x = torch.ones(1, device=d)
    for message in (
        b"\xff" * 100,
        b"\x01" + bytes(12),
        wire.release(range(1 << 60, (1 << 60) + 10)) + wire.write(1 << 61, 0, b"x"),
        bytes(1 << 20),
    ):
        with client() as attacker:
            bad = mesh.device(there.ticket, node=attacker)
            y = torch.ones(1, device=bad)
            assert y.item() == 1
            session = device_of(bad).session
            session.emit(message)
            session.flush()
            with pytest.raises(SessionLost, match=r"batch for a device|operation on a device"):
                y.cpu()
    assert (x + 1).item() == 2
    eventually(lambda: there.sizes()["executors"] == 1)


def test_sessions_of_one_machine_are_few(there: Peer, node: blocking.Node) -> None:
    opened = []
    for _ in range(8):
        opened.append(mesh.device(there.ticket, node=node))
        api._peerings.clear()
    with pytest.raises(LimitExceeded, match="8 of 8 sessions of programs of this machine"):
        mesh.device(there.ticket, node=node)
    mesh.device.close(opened[0])
    eventually(lambda: there.sizes()["device_sessions"] == 7)
    assert torch.ones(1, device=mesh.device(there.ticket, node=node)).item() == 1


def test_a_program_that_ends_frees_its_sessions_at_once(
    there: Peer, node: blocking.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventually(lambda: is_clean(there))
    x = torch.ones(1, device=mesh.device(there.ticket, node=node))
    peering = api._by_session[id(device_of(x.device).session)]
    monkeypatch.setattr(api, "_by_session", {0: peering})
    began = time.monotonic()
    api._leave_all()
    assert time.monotonic() - began < api.EXIT_SECONDS
    assert peering.carrier.has_ended
    eventually(lambda: there.sizes()["device_sessions"] == 0)
    api._leave_all()  # what has ended is not waited for
    with pytest.raises(SessionLost, match="it was closed"):
        x.cpu()


def test_a_fork_does_not_use_its_parents_devices(there: Peer, node: blocking.Node) -> None:
    d = mesh.device(there.ticket, node=node)
    x = torch.ones(1, device=d)
    assert x.item() == 1
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _ = x + 1
        except MeshError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as told:
        assert "'spawn'" in told.read()
    assert (x + 1).item() == 2


@pytest.mark.anyio
async def test_async_code_reads_without_blocking(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier, "MAX_QUEUED", 4)
    monkeypatch.setattr(session_module, "MAX_UNSENT", 512)
    monkeypatch.setattr(session_module, "BATCH_BYTES", 1 << 12)
    mine = Node.embedded(
        key=SecretKey.generate(), authorizer=allow_any(), config=CONFIG, tensors=False
    )
    theirs = Node.embedded(
        key=SecretKey.generate(), authorizer=allow_any(), config=CONFIG, tensors=False
    )
    limits = DeviceLimits(executor=ExecutorLimits(threads=1))
    async with mine, theirs, DeviceService(theirs.endpoint, ["cpu"], limits) as service:
        d = await device_async(mine, theirs.ticket())
        x = torch.arange(5.0, device=d)
        assert (await read(x * 2)).tolist() == [0, 2, 4, 6, 8]
        await synchronize_async(d)
        with pytest.raises(DeviceError, match=r"await mesh\.device\.read"):
            x.cpu()
        with pytest.raises(DeviceBusy, match="messages are queued"):
            _without_end(x)
        await synchronize_async(d)
        assert (await read(x))[0] > 1000
        with pytest.raises(MeshError, match="index out of range"):
            await read(x.index_select(0, torch.tensor([9]).to(d)))
        assert service.sizes() == {"device_sessions": 1, "executors": 1, "device_groups": 0}
        session = device_of(d).session
        del x
        gc.collect()
        with anyio.fail_after(5):
            while (await _wait(d))["handles"]:
                gc.collect()
                await anyio.sleep(0.02)
        mesh.device.close(d)
        with anyio.fail_after(5):
            while service.sizes()["executors"]:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        assert session.waiting == 0
    devices.clear()


def _without_end(x: torch.Tensor) -> None:
    while True:
        x += 1


async def _wait(d: torch.device) -> dict[str, int]:
    from mesh.device.client import backend
    from mesh.device.client.moving import answered

    answer = await answered(backend.ask_wait(device_of(d)).future)
    assert isinstance(answer, dict)
    return answer  # type: ignore[return-value]


@pytest.mark.anyio
async def test_devices_are_for_those_who_are_granted_the_scope(anyio_backend: str) -> None:
    class Tensors:
        async def authorize(self, request: object) -> Grant:
            return Grant(frozenset({"tensor", "collective", "node"}))

    mine = Node.embedded(key=SecretKey.generate(), authorizer=allow_any(), config=CONFIG)
    strict = Node.embedded(key=SecretKey.generate(), authorizer=Tensors(), config=CONFIG)
    plain = Node.embedded(key=SecretKey.generate(), authorizer=allow_any(), config=CONFIG)
    async with mine, strict, plain, DeviceService(strict.endpoint, ["cpu"]) as service:
        with pytest.raises(AccessDenied, match="device"):
            await device_async(mine, strict.ticket())
        with pytest.raises(ServiceUnknown):
            await device_async(mine, plain.ticket())
        assert service.sizes() == {"device_sessions": 0, "executors": 0, "device_groups": 0}
        with pytest.raises(DeviceError, match="'cuda:99'"):
            await DeviceService(plain.endpoint, ["cuda:99"]).__aenter__()
