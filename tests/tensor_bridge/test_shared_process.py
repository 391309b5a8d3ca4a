"""Programs behind one endpoint process: what one of them may is of no use to the other."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import pytest
import torch

from auth import TokenRefused
from tensor_bridge.errors import NoSuchTensor
from tests.tensor_bridge import nodes
from tests.tensor_bridge.nodes import Node, node, together
from transport.process import ProcessEngine, sharing

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has endpoint processes"),
]


@pytest.fixture
async def programs(
    endpoint_process: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Node, Node, Node]]:
    """Three that share a process."""
    monkeypatch.setattr(nodes, "preferred", nodes.PROCESS)
    monkeypatch.setattr(nodes, "shared", endpoint_process)
    monkeypatch.setattr(sharing, "JOIN_SECONDS", 30.0)
    async with together(node(liveness=10.0), node(liveness=10.0), node(liveness=10.0)) as found:
        engines = [each.endpoint._engine for each in found]
        children = [each._child for each in engines if isinstance(each, ProcessEngine)]
        assert len({child.pid for child in children if child is not None}) == 1
        yield found


async def test_a_token_of_one_is_of_no_use_to_another(
    programs: tuple[Node, Node, Node],
) -> None:
    owner, audience, thief = programs
    tensor = torch.arange(5)
    ref = audience.has(owner, tensor)
    token = await audience.token(owner, ref, audience)
    async with await thief.read(owner, token=token, offset=0) as stream:
        with pytest.raises(TokenRefused):
            await stream.reply()
    async with await audience.read(owner, token=token, offset=0) as stream:
        assert await stream.reply() is not None


async def test_an_object_of_one_is_nothing_to_another(programs: tuple[Node, Node, Node]) -> None:
    owner, mine, other = programs
    ref = mine.has(owner, torch.arange(5))
    with pytest.raises(NoSuchTensor):
        await (await other.client(owner)).get(ref)
    assert torch.equal(await (await mine.client(owner)).get(ref), torch.arange(5))
