"""Upstream's samples of all operators give on a device what they give on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mesh
from mesh.device.client.tensors import devices
from tests.mesh.device.operators import DTYPES, names, outcome
from tests.mesh.device.peer import client, peer

LEFT_OUT = Path(__file__).with_name("operators_left_out.txt")
"""Operators with samples that a device does not pass, each with the reason."""

SHARE = 0.95
"""The part of all samples that must be right."""

ONE_IN = 16
"""Of the operators, each time."""


def left_out() -> dict[str, str]:
    lines = LEFT_OUT.read_text(encoding="utf-8").splitlines()
    pairs = (line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    return dict(pairs)


def test_what_is_left_out_has_a_reason() -> None:
    assert all(len(reason) > 10 for reason in left_out().values())


def test_some_operators(d: torch.device) -> None:
    excused = left_out()
    passed = 0
    for name in names()[::ONE_IN]:
        if name not in excused:
            found = outcome(name, torch.float32, d, most=1)
            assert found.right == found.counted, f"{name}: {found.why}"
            passed += found.right
    assert passed > 25


@pytest.fixture(scope="module")
def distant() -> Iterator[torch.device]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as at the peer: the last bit of inverse transforms depends on it
    with peer(devices=1, max_bytes=4 << 30, liveness=10.0) as there, client(10.0) as node:
        yield mesh.device(there.ticket, node=node)
    devices.clear()
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_operators(dtype: torch.dtype, distant: torch.device) -> None:
    excused = left_out()
    counted = right = 0
    wrong, unexpected = [], []
    for name in names():
        found = outcome(name, dtype, distant)
        counted += found.counted
        right += found.right
        if found.right < found.counted:
            wrong.append(name)
            if name not in excused:
                unexpected.append(f"{name}: {found.why}")
    print(f"{dtype}: {right} of {counted} samples are right; not all of {', '.join(wrong)}")
    assert not unexpected
    assert right >= SHARE * counted
    assert torch.ones(1, device=distant).item() == 1
