"""Tensors made at the peer."""

from __future__ import annotations

import anyio
import pytest
import torch

from auth import SecretKey, allow_any
from tensor_bridge import (
    QuotaExceeded,
    StoreLimits,
    TensorClient,
    TensorService,
    TensorStore,
    UnsupportedTensor,
)
from tensor_bridge.serve_create import (
    FILLS,
    PIECE,
    WHOLE_BLOCK,
    CreateCall,
    _fill,
    dense_meta,
)
from transport import Endpoint, EndpointConfig, PeerAddress, PeerLost, ProtocolError, Unreachable

CONFIG = EndpointConfig(bind="127.0.0.1:0")


@pytest.fixture
async def client(anyio_backend):
    from auth import TokenBook, TokenLimits

    store = TensorStore(StoreLimits(max_bytes=1 << 20))
    async with (
        Endpoint(SecretKey.generate(), allow_any(), CONFIG) as server,
        TensorService(server, store, TokenBook(TokenLimits()), server.authorizer),
        Endpoint(SecretKey.generate(), allow_any(), CONFIG) as dialer,
    ):
        yield TensorClient(await dialer.connect(PeerAddress(server.node_id, server.addresses)))


@pytest.mark.anyio
@pytest.mark.parametrize("fill", FILLS)
async def test_content_is_that_of_the_torch_factory(client, fill):
    ref = await client.create(fill, (3, 4), seed=5)
    expected = {
        "zeros": torch.zeros(3, 4),
        "ones": torch.ones(3, 4),
        "rand": torch.rand(3, 4, generator=torch.Generator().manual_seed(5)),
        "randn": torch.randn(3, 4, generator=torch.Generator().manual_seed(5)),
        "arange": torch.arange(12.0).reshape(3, 4),
    }[fill]
    assert torch.equal(await client.get(ref), expected)


@pytest.mark.anyio
async def test_types_shapes_and_names_are_kept(client):
    ref = await client.create("ones", (), dtype=torch.bool, name="flag")
    assert (await client.get(ref)).equal(torch.tensor(True))
    assert (await client.info(ref.object_id)).name == "flag"
    empty = await client.create("randn", (0, 3), dtype=torch.bfloat16)
    assert (await client.get(empty)).shape == (0, 3)


@pytest.mark.anyio
async def test_refusals_leave_no_room_taken(client):
    with pytest.raises(UnsupportedTensor, match="randn"):
        await client.create("randn", (4,), dtype=torch.int64)
    with pytest.raises(QuotaExceeded):
        await client.create("zeros", (1 << 40,))
    with pytest.raises(UnsupportedTensor, match=r"no such fill.*zeros"):
        await client.create("from_file", (4,))
    for shape in ((2, -1), (1.5,), (True,)):
        with pytest.raises(UnsupportedTensor, match="no size"):
            await client.create("zeros", shape)
    assert await client.list() == ()
    await client.create("zeros", (1 << 20,), dtype=torch.uint8)  # all the room there is


@pytest.mark.anyio
async def test_an_error_counts_from_the_beginning_and_not_from_the_last_try(client, monkeypatch):
    monkeypatch.setattr("tensor_bridge.moves.PATIENCE", 0.3)
    errors = [PeerLost("connecting")]  # the link breaks, and after that nobody is there

    async def reconnect():
        raise errors.pop() if errors else Unreachable("connecting", after=0.0)

    lonely = TensorClient(client._connection, reconnect=reconnect)
    await client._connection.close()
    with pytest.raises(Unreachable) as caught:
        await lonely.put(torch.ones(3))
    assert caught.value.after > 0.3


def test_a_wish_for_another_fill_is_refused():
    call = CreateCall("ab" * 16, "from_file", dense_meta(torch.float64, (4,))).encode()
    with pytest.raises(ProtocolError, match="fill"):
        CreateCall.decode(call)


def test_sizes_that_overflow_are_refused():
    call = CreateCall("ab" * 16, "zeros", dense_meta(torch.float64, (1 << 40, 1 << 40))).encode()
    with pytest.raises(ProtocolError, match="bytes"):
        CreateCall.decode(call)


@pytest.mark.anyio
@pytest.mark.parametrize("count", [2 * PIECE, 2 * PIECE + 1, 2 * PIECE + WHOLE_BLOCK])
@pytest.mark.parametrize("fill", ["rand", "randn", "arange"])
async def test_pieces_give_what_the_whole_would(fill, count):
    generator = torch.Generator().manual_seed(3)
    whole = {
        "rand": lambda: torch.rand(count, generator=generator),
        "randn": lambda: torch.randn(count, generator=generator),
        "arange": lambda: torch.arange(count, dtype=torch.float32),
    }[fill]()
    tensor = torch.empty(count)
    await _fill(CreateCall("0" * 32, fill, dense_meta(torch.float32, (count,)), seed=3), tensor)
    assert torch.equal(tensor, whole)


@pytest.mark.anyio
async def test_a_large_creation_can_be_given_up_at_once(monkeypatch):
    monkeypatch.setitem(FILLS, "zeros", lambda *_: None)
    tensor = torch.empty(()).expand(1 << 40)  # hours of work, no memory
    call = CreateCall("0" * 32, "zeros", dense_meta(torch.float32, (1 << 40,)))
    with anyio.move_on_after(0.1) as scope:
        await _fill(call, tensor)
    assert scope.cancelled_caught
