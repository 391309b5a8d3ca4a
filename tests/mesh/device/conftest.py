"""Devices for tests: in this process for what torch sees, at a peer's for what the mesh adds."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from mesh.device.client.tensors import devices
from tests.mesh.device.inprocess import Loopback, open_devices


@pytest.fixture(scope="module")
def loopback() -> Iterator[tuple[Loopback, list[torch.device]]]:
    """Two devices of one session, in this process."""
    carrier, opened = open_devices(2)
    yield carrier, opened
    carrier.session.close()
    gc.collect()
    devices.clear()


@pytest.fixture
def d(loopback: tuple[Loopback, list[torch.device]]) -> torch.device:
    return loopback[1][0]


@pytest.fixture
def other(loopback: tuple[Loopback, list[torch.device]]) -> torch.device:
    return loopback[1][1]
