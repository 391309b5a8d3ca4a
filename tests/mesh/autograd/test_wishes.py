"""What users of distributed autograd elsewhere have complained of, by the numbers of their rows.

Those that other files have: B17 in `test_stages`, B18 and B19 in `test_failures`, B21 and B23 in
`test_backward` as well.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from auth import SecretKey, allow_any
from mesh import Node
from mesh.device.client.tensors import devices
from tests.mesh import nodes
from tests.mesh.autograd.nodes import Worker, in_thread, quiet, workers
from tests.mesh.device.inprocess import open_devices
from tests.mesh.nodes import LOOPBACK, eventually
from transport import Connection

pytestmark = pytest.mark.anyio


def scale(worker: Worker, x: torch.Tensor) -> torch.Tensor:
    return x * worker.weight


def through(worker: Worker, x: torch.Tensor, name: str) -> torch.Tensor:
    return worker.call(worker.others[0], name, x) * worker.weight


async def test_b20_contexts_of_an_initiator_that_vanished_lapse() -> None:
    """Without a word of it: as if its process were killed, or its host unplugged."""
    async with workers(3, scale, through) as (a, b, c):
        b.others = [c]
        with a.context():
            x = torch.ones(3, requires_grad=True)
            await a.agent.call(b.node_id, "through", (x, "scale"))
            assert len(b.agent.autograd.contexts) == len(c.agent.autograd.contexts) == 1
            a.agent._node.endpoint._engine.driver._send = lambda transmit: None  # type: ignore[attr-defined]
            gone = [each.agent._node.endpoint.connection(a.node_id) for each in (b, c)]
            await eventually(lambda: not any(each and each.is_open for each in gone))
            await eventually(
                lambda: len(b.agent.autograd.contexts) + len(c.agent.autograd.contexts) == 0, 2.0
            )
        await quiet(a, b, c)


def both(worker: Worker, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A result that is short, and one of a megabyte."""
    return x.sum() * worker.weight, x * worker.weight[0]


@pytest.mark.parametrize("used", [0, 1])
async def test_b21_of_a_result_that_the_loss_does_not_need_no_byte_goes_back(
    used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apart() -> Node:
        """A node whose every byte goes over its connections."""
        return Node.embedded(
            key=SecretKey.generate(),
            authorizer=allow_any(),
            config=LOOPBACK,
            tensors=False,
            shared_memory=False,
        )

    monkeypatch.setattr(nodes, "node", apart)
    gradient = 1 << 20
    carried: list[int] = []

    def program(a: Worker, b: Worker, connection: Connection) -> None:
        x = torch.ones(gradient // 4, requires_grad=True)
        with a.context() as context_id:
            results = a.call(b, both, x)
            before = connection.info.bytes_sent
            a.backward(context_id, results[used].sum())
            carried.append(connection.info.bytes_sent - before)
            expected = (b.weight.sum() if used == 0 else b.weight[0]).detach()
            assert torch.equal(a.gradients(context_id)[x], expected.expand(x.shape))

    async with workers(2, both) as (a, b):
        connection = a.agent._node.endpoint.connection(b.node_id)
        assert connection is not None
        await in_thread(program, a, b, connection)
        await quiet(a, b)
    if used:  # the control: there it does
        assert carried[0] > gradient
    else:
        assert carried[0] < gradient / 8


@contextmanager
def opened() -> Iterator[torch.device]:
    carrier, (device,) = open_devices()
    yield device
    carrier.session.close()
    gc.collect()
    devices.clear()


@pytest.fixture(scope="module")
def once() -> None:
    """The first device takes torch seconds, with the GIL that the event loops of tests need."""
    with opened() as device:
        leaf = torch.ones(3, requires_grad=True)
        (leaf.to(device) * leaf.to(device)).sin().cpu().sum().backward()


@pytest.fixture
def there(once: None) -> Iterator[torch.device]:
    """A device of a peer, for the length of a test."""
    with opened() as device:
        yield device


def offer_on(device: torch.device, worker: Worker) -> None:
    """Have a worker compute on a device; what comes and goes is on the CPU."""

    def on_device(worker: Worker, x: torch.Tensor) -> torch.Tensor:
        return (x.to(device) * worker.weight.to(device)).sin().cpu()

    worker.offer(on_device)


def chain_over(device: torch.device, a: Worker, b: Worker, c: Worker) -> None:
    """Go from the CPU of one to a device of another and on, and back: as if all were here."""
    weights = [each.weight.detach().clone().requires_grad_() for each in (b, c)]
    x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    parameter = torch.tensor([2.0, 3.0, 4.0], device=device, requires_grad=True)
    other = parameter.detach().cpu().requires_grad_()
    with a.context() as context_id:
        for _ in range(2):
            y = a.call(b, through, x, "on_device").to(device) * parameter
            a.backward(context_id, a.call(c, scale, y.cos().cpu()).sum())
            local = (twin * weights[1]).sin() * weights[0] * other
            (local.cos() * weights[1]).sum().backward()
        for worker, leaf, expected in (
            (a, x, twin),
            (a, parameter, other),
            (b, b.weight, weights[0]),
            (c, c.weight, weights[1]),
        ):
            found = worker.gradients(context_id)[leaf]
            assert found.device == leaf.device
            torch.testing.assert_close(found.cpu(), expected.grad)


async def test_b22_a_chain_over_a_peers_device(there: torch.device) -> None:
    async with workers(3, scale, through) as (a, b, c):
        b.others = [c]
        offer_on(there, c)
        await in_thread(chain_over, there, a, b, c)
        await quiet(a, b, c)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
async def test_b22_a_chain_over_a_gpu() -> None:
    device = torch.device("cuda", 0)
    async with workers(3, scale, through) as (a, b, c):
        b.others = [c]
        offer_on(device, c)
        await in_thread(chain_over, device, a, b, c)
        await quiet(a, b, c)
