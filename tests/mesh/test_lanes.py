"""Which lane tensors take to a peer, and why: as status and ping tell it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from auth import SecretKey, allow_any
from mesh import Node
from mesh.cli.output import lane_text
from tensor_bridge.lanes.shared.host import unavailable
from tests.mesh.nodes import LOOPBACK
from transport import CborValue

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the nodes not know that they are in one process."""
    monkeypatch.setattr("tensor_bridge.lanes.choice.note", lambda endpoint: None)


def node(*, shared_memory: bool = True, tensors: bool = True) -> Node:
    return Node.embedded(
        key=SecretKey.generate(),
        authorizer=allow_any(),
        config=LOOPBACK,
        tensors=tensors,
        shared_memory=shared_memory,
    )


def told(of: Node, about: Node) -> tuple[str | None, str | None]:
    (status,) = [each for each in of.peers() if each.node_id == about.node_id]
    return status.lane, status.lane_reason


async def test_status_tells_the_lane_once_it_is_known() -> None:
    async with node() as a, node() as b:
        at_b = await a.connect(b.ticket())
        lane, reason = told(a, b)
        assert lane == "quic"
        assert "so far" in str(reason)
        tensor = torch.zeros(1 << 20)
        assert torch.equal(await (await at_b.put(tensor)).get(), tensor)
        assert told(a, b) == told(b, a) == ("shared-memory", None)
        message: Any = next(status.as_message() for status in a.peers())
        assert lane_text(message) == "shared-memory"


@pytest.mark.parametrize("here", [True, False])
async def test_it_can_be_switched_off(here: bool) -> None:
    async with node(shared_memory=not here) as a, node(shared_memory=here) as b:
        at_b = await a.connect(b.ticket())
        tensor = torch.zeros(1 << 20)
        assert torch.equal(await (await at_b.put(tensor)).get(), tensor)
        assert told(a, b) == ("quic", "it is switched off")
        message: Any = next(status.as_message() for status in a.peers())
        assert lane_text(message) == "quic: it is switched off"


async def test_a_node_that_has_moved_nothing_knows_no_lane() -> None:
    async with node(tensors=False) as a, node() as b:
        at_b = await a.connect(b.ticket())
        assert told(a, b) == (None, None)
        await (await at_b.put(torch.zeros(1 << 20))).delete()
        assert told(a, b) == ("shared-memory", None)


async def test_ping_finds_it_out() -> None:
    async with node(tensors=False) as asker, node() as a, node() as b:
        connection = await (await asker.connect(a.ticket())).connection()
        order: CborValue = {"target": b.ticket().encode(), "count": 1, "timeout": 5.0}
        answer: Any = await connection.call("node.ping_peer", order)
        assert (answer["lane"], answer["lane_reason"]) == ("shared-memory", None)
        assert told(a, b) == ("shared-memory", None)
