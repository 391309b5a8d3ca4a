"""What holds for a device from its first use on is set once, before that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import mesh
from mesh.device.client.tensors import devices
from mesh.device.errors import DeviceError
from tensor_bridge import QuotaExceeded
from tests.mesh.device.inprocess import open_devices


@pytest.fixture
def fresh() -> Iterator[list[torch.device]]:
    before = len(devices)
    carrier, opened = open_devices(2)
    yield opened
    carrier.session.close()
    del devices[before:]


def test_floats_are_of_the_type_that_was_set(fresh: list[torch.device]) -> None:
    d, other = fresh
    mesh.device.configure(d, float_dtype=torch.bfloat16)
    for made in (
        *(torch.ones(2, device=d), torch.zeros(2, device=d), torch.empty(2, device=d)),
        *(torch.rand(2, device=d), torch.randn(2, device=d), torch.eye(2, device=d)),
        *(torch.linspace(0, 1, 2, device=d), torch.nn.Linear(2, 2, device=d).weight),
    ):
        assert made.dtype is torch.bfloat16
    assert torch.ones(2, device=d, dtype=torch.float64).dtype is torch.float64
    assert torch.arange(2, device=d).dtype is torch.int64
    assert torch.full((2,), 1, device=d).dtype is torch.int64
    assert torch.ones(2).to(d).dtype is torch.float32
    assert torch.ones(2, device=other).dtype is torch.float32
    assert torch.ones(2, device=d).sum().item() == 2


def test_its_random_numbers_start_where_they_are_told(fresh: list[torch.device]) -> None:
    d, other = fresh
    mesh.device.configure(d, seed=7)
    drawn, others = torch.rand(3, device=d).cpu(), torch.rand(3, device=other).cpu()
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))
    assert not torch.equal(drawn, others)


def test_it_makes_do_with_what_it_asks_for(fresh: list[torch.device]) -> None:
    d, _ = fresh
    mesh.device.configure(d, max_bytes=1 << 16)
    with pytest.raises(QuotaExceeded, match="of 65536 bytes are left"):
        torch.zeros(1 << 17, dtype=torch.uint8, device=d)[:4].cpu()
    assert torch.ones(4, device=d).sum().item() == 4


def test_once_and_before_its_first_use(fresh: list[torch.device]) -> None:
    d, other = fresh
    mesh.device.configure(d, seed=1)
    with pytest.raises(DeviceError, match="configured before"):
        mesh.device.configure(d, seed=1)
    torch.ones(1, device=other)
    with pytest.raises(DeviceError, match="in use already"):
        mesh.device.configure(other, seed=1)
    with pytest.raises(DeviceError, match="no type of floats"):
        mesh.device.configure(other, float_dtype=torch.int64)
