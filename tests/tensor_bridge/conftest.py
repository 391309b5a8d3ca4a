"""What the tensor tests share: moves over each lane in turn, and over both placements."""

from __future__ import annotations

import functools
import zlib

import pytest
import torch

from tensor_bridge.lanes.shared.host import unavailable
from tests.placements import placed
from tests.tensor_bridge import nodes
from transport.process import sharing

# The machine's cores are shared by everything that runs: the tests move bytes, they don't compute.
torch.set_num_threads(1)

OVER_EACH_LANE = {
    "test_cancellation",
    "test_cut_links",
    "test_failures",
    "test_moves",
    "test_paths",
    "test_revocation",
    "test_sizes",
}
"""The tests of moves that come to pass by whatever lane there is."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of moves once over each lane."""
    if metafunc.module.__name__.rpartition(".")[2] in OVER_EACH_LANE:
        metafunc.parametrize("lane", list(nodes.LANES), indirect=True)


OF_NO_LANE = {
    "test_a_copy_cancelled_exactly_at_its_end",
    "test_a_dripping_sender_loses_its_reservation",
    "test_a_put_cancelled_exactly_at_its_end",
    "test_lists_and_facts",
    "a_service",
    "create",
    "delete",
    "get_together",
    "info",
    "lane",
    "carried_call",
    "handed_over",
    "kept_in_a_block",
    "lent_for_a_call",
    "list_all",
    "shared_lane",
}
"""Tests, and scenarios of cancellation, in which no bytes to speak of take the nodes' lane."""


NOT_IN_A_PROCESS = {"test_a_put_cancelled_exactly_at_its_end"}
"""What counts the turns in which an operation ends: to wait for another process takes a hundred of
them, or thousands, as the machine's load has it."""

ONE_IN_A_PROCESS = 3

STOPS_A_PROCESS = {"test_client_vanishes", "test_source_vanishes", "test_target_vanishes"}
"""What stops a node's endpoint process, which the others must not share then."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run each test of another lane than QUIC on one event loop alone, unless all is asked for.

    Which one differs from case to case, so that there are many on either. QUIC, which is on the way
    of every move, is tested on both. Over a process, which takes the longest, it is one case in
    `ONE_IN_A_PROCESS`.
    """
    left_out = [item for item in items if _is_left_out(item, has_time=config.getoption("--slow"))]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def _is_left_out(item: pytest.Item, *, has_time: bool) -> bool:
    params = getattr(getattr(item, "callspec", None), "params", {})
    module = item.nodeid.partition("::")[0].rpartition("/")[2].removesuffix(".py")
    lane, names = params.get("lane"), {getattr(item, "originalname", None), params.get("name")}
    if module not in OVER_EACH_LANE or lane in (None, "quic"):
        return False
    if lane == nodes.PROCESS and names & NOT_IN_A_PROCESS:
        return True
    if has_time:
        return False
    if names & OF_NO_LANE:
        return True
    loop = params.get("anyio_backend")
    case = item.nodeid.replace(f"{loop}", "", 1)
    if lane == nodes.PROCESS and zlib.crc32(case.encode()) // 2 % ONE_IN_A_PROCESS:
        return True
    return loop is not None and loop != ("asyncio", "trio")[zlib.crc32(case.encode()) % 2]


@pytest.fixture(autouse=True)
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The lane that nodes of the test move everything by: QUIC, where it is not run over each."""
    name = str(getattr(request, "param", nodes.preferred))
    if name == "shared-memory" and (why := unavailable()) is not None:
        pytest.skip(why)
    if request.node.originalname in STOPS_A_PROCESS:
        monkeypatch.setattr(nodes, "placed", functools.partial(placed, alone=True))
    elif name == nodes.PROCESS:
        monkeypatch.setattr(nodes, "shared", request.getfixturevalue("endpoint_process"))
        monkeypatch.setattr(sharing, "JOIN_SECONDS", 30.0)
    monkeypatch.setattr(nodes, "preferred", name)
    return name
