"""What is no timeout is refused at the door, by the project's own error, which says the rule."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import numpy
import pytest
import torch

from auth import MeshError, SecretKey
from mesh import Node
from mesh.blocking import Node as BlockingNode
from tests.mesh.nodes import node
from transport import Connection
from transport.deadlines import seconds_of
from transport.errors import TransportError

pytestmark = pytest.mark.anyio

WRONG: list[Any] = [math.nan, -1.0, -math.inf, "5", Decimal(5), [1]]

DOORS: dict[str, Callable[[Node, Node, Connection, Any], Awaitable[object]]] = {
    "connect": lambda here, there, _, t: here.connect(SecretKey.generate().node_id, timeout=t),
    "connect, with a ticket": lambda here, there, _, t: here.connect(there.ticket(), timeout=t),
    "ping": lambda here, there, _, t: _peer(here, there).ping(timeout=t),
    "info": lambda here, there, _, t: _peer(here, there).info(timeout=t),
    "put": lambda here, there, _, t: _peer(here, there).put(torch.ones(3), timeout=t),
    "create": lambda here, there, _, t: _peer(here, there).create("zeros", (3,), timeout=t),
    "a remote call": lambda here, there, _, t: _peer(here, there).call("add", timeout=t),
    "a call": lambda here, there, link, t: link.call("node.info", timeout=t),
    "a ping of the connection": lambda here, there, link, t: link.ping(t),
    "a stream": lambda here, there, link, t: link.open_stream("x", timeout=t),
    "a raw stream": lambda here, there, link, t: link.open_raw_stream(timeout=t),
    "a raw stream of the peer's": lambda here, there, link, t: link.accept_raw_stream(timeout=t),
}


def _peer(here: Node, there: Node) -> Any:
    from mesh.peer import Peer

    return Peer(here, there.node_id)


@pytest.mark.parametrize("door", DOORS)
async def test_what_is_no_timeout_is_refused(door: str) -> None:
    async with node() as here, node(tensors=True) as there:
        if door == "connect":
            here.directory.told(there.node_id, (("127.0.0.1", 9),))
        link = None
        if not door.startswith("connect"):
            link = await (await here.connect(there.ticket())).connection()
        for wrong in WRONG:
            if door == "a remote call" and isinstance(wrong, str | Decimal | list):
                continue  # of another type: upstream's own TypeError
            with pytest.raises(MeshError, match="not a number of seconds from 0") as caught:
                await DOORS[door](here, there, link, wrong)  # type: ignore[arg-type]
            assert repr(wrong) in str(caught.value)
        assert not any(connection.info.streams for connection in here.endpoint.connections)


async def test_a_tensor_is_fetched_moved_and_deleted_in_a_time_that_is_one() -> None:
    async with node() as here, node(tensors=True) as there, node(tensors=True) as third:
        ref = await (await here.connect(there.ticket())).put(torch.ones(3))
        target = await here.connect(third.ticket())
        for act in (ref.get, lambda timeout: ref.copy_to(target, timeout=timeout), ref.delete):
            for wrong in (math.nan, -1.0):
                with pytest.raises(TransportError, match="not a number of seconds from 0 on"):
                    await act(timeout=wrong)
        assert (await ref.get()).tolist() == [1.0, 1.0, 1.0]


async def test_an_open_connection_is_no_excuse() -> None:
    async with node() as here, node() as there:
        await here.connect(there.ticket())
        for wrong in WRONG:
            with pytest.raises(TransportError, match="not a number of seconds"):
                await here.endpoint.connect(there.node_id, timeout=wrong)
        await here.endpoint.connect(there.node_id, timeout=1)


def test_a_blocking_node_is_closed_in_a_time_that_is_one() -> None:
    with BlockingNode(node()) as it:
        for wrong in (math.nan, -1.0):
            with pytest.raises(TransportError, match="not a number of seconds"):
                it.close(wrong)
        assert it.node_id


@pytest.mark.parametrize("right", [0, 0.0, 1, 2.5, math.inf, numpy.float32(0.5), numpy.int64(3)])
def test_what_is_one(right: float) -> None:
    assert seconds_of(right) == right
