"""Sizes around every limit on the way, and beyond what 31 and 32 bits can count."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio.to_thread
import pytest
import torch

from tensor_bridge import CHUNK_BYTES
from tensor_bridge.wire import ReadAccepted
from tests.tensor_bridge.nodes import Node, node, together
from tests.tensor_bridge.tensors import filled, same
from transport import Incoming, ProtocolError, RemoteError
from transport.cbor import CborValue
from transport.frames import MAX_FRAME, ok_reply, request_frame

pytestmark = pytest.mark.anyio

GIB = 1 << 30


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[Node, Node, Node]]:
    async with together(node(), node(), node()) as (a, b, client):
        yield a, b, client


@pytest.mark.parametrize("limit", [CHUNK_BYTES, MAX_FRAME])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
async def test_moves_of_a_byte_less_and_a_byte_more_than_a_limit(
    nodes: tuple[Node, Node, Node], limit: int, beyond: int
) -> None:
    a, b, client = nodes
    at_a, at_b = await client.client(a), await client.client(b)
    tensor = filled((limit + beyond,), torch.uint8)
    ref = await at_a.put(tensor)
    copy = await at_a.copy_to(ref, at_b)
    assert same(await at_b.get(copy), tensor)


async def test_a_call_of_a_byte_more_than_a_frame_is_refused_where_it_is_made(
    nodes: tuple[Node, Node, Node],
) -> None:
    a, _, client = nodes

    async def measure(incoming: Incoming) -> CborValue:
        assert isinstance(incoming.value, bytes)
        return len(incoming.value)

    async def fill(incoming: Incoming) -> CborValue:
        assert isinstance(incoming.value, int)
        return bytes(incoming.value)

    a.endpoint.register_call("measure", measure, scope="x")
    a.endpoint.register_call("fill", fill, scope="x")
    connection = await client.connection(a)
    largest = MAX_FRAME - (
        len(request_frame("measure", bytes(MAX_FRAME // 2))) - 4 - MAX_FRAME // 2
    )
    assert await connection.call("measure", bytes(largest)) == largest
    with pytest.raises(ProtocolError, match="at most"):
        await connection.call("measure", bytes(largest + 1))
    largest = MAX_FRAME - (len(ok_reply(bytes(MAX_FRAME // 2))) - 4 - MAX_FRAME // 2)
    assert await connection.call("fill", largest) == bytes(largest)
    with pytest.raises(RemoteError, match="its log says how"):
        await connection.call("fill", largest + 1)
    assert await connection.call("fill", 1) == b"\x00", "the connection is none the worse for it"


@pytest.mark.parametrize("bits", [31, 32, 40])
async def test_offsets_and_sizes_of_more_than_so_many_bits(
    nodes: tuple[Node, Node, Node], bits: int
) -> None:
    """The last bytes of a tensor that is that large, though it lies in a handful of bytes."""
    a, _, client = nodes
    size = (1 << bits) + 5
    tensor = torch.arange(7, dtype=torch.uint8)[6:].expand(size)
    ref = client.has(a, tensor)
    assert await (await client.client(a)).info(ref.object_id) == ref
    stream = await client.read(a, object_id=ref.object_id, offset=size - 9)
    async with stream:
        assert ReadAccepted.decode(await stream.reply()).meta.nbytes == size
        assert await stream.receive_exactly(9) == b"\x06" * 9
        stream.reset()
    stream = await client.read(a, object_id=ref.object_id, offset=size + 1)
    with pytest.raises(ProtocolError, match="beyond its end"):
        await stream.reply()


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_more_than_two_gibibytes_there_and_back(nodes: tuple[Node, Node, Node]) -> None:
    a, _, client = nodes
    at_a = await client.client(a)
    # In threads: to look at that much takes seconds, which the event loop must not lose.
    tensor = await anyio.to_thread.run_sync(_large)
    ref = await at_a.put(tensor, timeout=900)
    arrived = a.store.get(ref.object_id).tensor
    assert await anyio.to_thread.run_sync(torch.equal, arrived, tensor)
    back = await at_a.get(ref, timeout=900)
    assert await anyio.to_thread.run_sync(torch.equal, back, tensor)


def _large() -> torch.Tensor:
    """2.1 GiB, in which no two pages are alike."""
    count = 2 * GIB + GIB // 10
    return torch.arange(count // 8 + 1).view(torch.uint8)[:count]
