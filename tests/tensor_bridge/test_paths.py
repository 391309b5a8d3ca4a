"""Moves over a path that changes under them: the source port that a NAT gives is another now."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
import torch

from tensor_bridge import Progress, TensorClient, TensorRef
from tests.tensor_bridge.nodes import Node, node, together
from tests.tensor_bridge.tensors import filled, same
from tests.transport.test_endpoint_paths import Relay, relay
from transport import PeerAddress

pytestmark = pytest.mark.anyio

SIZE = 6 << 20


class Switching:
    """Has the relay change its port at a quarter and at a half of a move."""

    def __init__(self, between: Relay) -> None:
        self.between = between
        self.at = [SIZE // 4, SIZE // 2]

    def __call__(self, progress: Progress) -> None:
        self.moved(progress.moved)

    def moved(self, nbytes: int) -> None:
        if self.at and nbytes >= self.at[0]:
            del self.at[0]
            self.between.switch()

    async def watch(self, node: Node) -> None:
        """Look at what has landed: progress of a copy is told too seldom for this."""
        while self.at:
            self.moved(sum(each.moved for each in node.service.arrivals._coming.values()))
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("way", ["put", "get", "copy"])
async def test_a_move_survives_a_change_of_the_source_port(way: str) -> None:
    async with together(node(), node(), node()) as (a, b, client):
        tensor = filled((SIZE,), torch.uint8)
        # From where a NAT stands: before the client, or before the node that fetches.
        behind = b if way == "copy" else client
        async with relay(("127.0.0.1", a.endpoint.port)) as between:
            where = PeerAddress(a.endpoint.node_id, (between.address,))
            connection = await behind.endpoint.connect(where)
            switching = Switching(between)
            if way == "put":
                ref = await TensorClient(connection).put(tensor, progress=switching)
                arrived = a.store.get(ref.object_id).tensor
            elif way == "get":
                ref = client.has(a, tensor)
                arrived = await TensorClient(connection).get(ref, progress=switching)
            else:
                copy = await copied(client, a, b, tensor, switching)
                arrived = b.store.get(copy.object_id).tensor
            assert len(between.sources) == 3, "it has switched twice under the move"
            assert same(arrived, tensor)
            assert connection.is_open, "and it is one connection all the time"


async def copied(
    client: Node, a: Node, b: Node, tensor: torch.Tensor, switching: Switching
) -> TensorRef:
    at_a, at_b = await client.client(a), await client.client(b)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(switching.watch, b)
        copy = await at_a.copy_to(client.has(a, tensor), at_b)
        tasks.cancel_scope.cancel()
    return copy
