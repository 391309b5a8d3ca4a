"""What the tensor tests share: moves over each lane in turn."""

from __future__ import annotations

import pytest
import torch

from tensor_bridge.lanes.shared.host import unavailable
from tests.tensor_bridge import nodes

# The machine's cores are shared by everything that runs: the tests move bytes, they don't compute.
torch.set_num_threads(1)

OVER_EACH_LANE = {
    "test_cancellation",
    "test_cut_links",
    "test_failures",
    "test_lost_answers",
    "test_moves",
    "test_paths",
    "test_revocation",
    "test_sizes",
    "test_tokens",
}
"""The tests of moves, which are none of their lane's business."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of moves once over each lane."""
    if metafunc.module.__name__.rpartition(".")[2] in OVER_EACH_LANE:
        metafunc.parametrize("lane", list(nodes.LANES), indirect=True)


@pytest.fixture(autouse=True)
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The lane that nodes of the test move everything by: QUIC, where it is not run over each."""
    name = str(getattr(request, "param", nodes.preferred))
    if name == "shared-memory" and (why := unavailable()) is not None:
        pytest.skip(why)
    monkeypatch.setattr(nodes, "preferred", name)
    return name
