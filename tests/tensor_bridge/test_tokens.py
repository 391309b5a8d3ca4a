"""Reads by token: one reader, one object, one version, once; beside each refusal one that works."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import anyio
import pytest
import torch

from auth import AccessDenied, TokenLimits, TokenRefused, TokenState
from tensor_bridge import CHUNK_BYTES, NoSuchTensor, TensorChanged, tensor_bytes
from tensor_bridge.serve_read import GUESSING_SECONDS
from tensor_bridge.wire import ReadAccepted, Received, Sent
from tests.tensor_bridge.nodes import Node, eventually, node, together
from tests.tensor_bridge.tensors import filled
from transport import AppCode, ProtocolError

pytestmark = [pytest.mark.anyio, pytest.mark.attack]

NBYTES = 3 * CHUNK_BYTES + 77


class Table:
    """A source with one tensor, its client, the reader a token is for, and a stranger."""

    def __init__(self, source: Node, client: Node, reader: Node, stranger: Node) -> None:
        self.source, self.client = source, client
        self.reader, self.stranger = reader, stranger
        self.tensor = filled((NBYTES,), torch.uint8)
        self.stored = source.store.put(self.tensor, owner=client.endpoint.node_id)

    @property
    def state_of_only_token(self) -> TokenState:
        (token,) = self.source.tokens._live.values()
        return token.state

    async def token(self) -> bytes:
        client = await self.client.client(self.source)
        ref = await client.info(self.stored.object_id)
        return await self.client.token(self.source, ref, self.reader)

    async def whole(self, token: bytes) -> None:
        """Read everything and acknowledge it: the positive control."""
        stream = await self.reader.read(self.source, token=token)
        async with stream:
            accepted = ReadAccepted.decode(await stream.reply())
            assert accepted.meta.nbytes == NBYTES
            assert await stream.receive_exactly(NBYTES) == bytes(tensor_bytes(self.tensor))
            assert Sent.decode(await stream.receive_message()).version == accepted.version
            await stream.send_message(Received(NBYTES).encode())
        await eventually(lambda: self.source.tokens.counts().live == 0)

    async def refused(self, token: bytes, by: Node | None = None) -> str:
        """Be refused; return everything the refused reader is told."""
        stream = await (by or self.reader).read(self.source, token=token)
        with pytest.raises(TokenRefused) as refusal:
            await stream.reply()
        stream.reset()
        error = refusal.value
        return f"{error.what}|{error.why}|{error.fix}|{error.stage}"


@pytest.fixture
async def table() -> AsyncIterator[Table]:
    limits = TokenLimits(max_failures_per_peer=3)
    async with together(node(tokens=limits), node(), node(), node()) as nodes:
        yield Table(*nodes)


async def test_a_token_is_good_for_one_delivery(table: Table) -> None:
    token = await table.token()
    await table.whole(token)
    await table.refused(token)


async def test_all_refusals_read_the_same(table: Table) -> None:
    spent = await table.token()
    await table.whole(spent)
    changed = await table.token()
    table.tensor.add_(1)
    told = {await table.refused(spent), await table.refused(changed)}
    foreign = await table.token()
    told.add(await table.refused(foreign, by=table.stranger))
    told.add(await table.refused(b"\x07" * 32, by=table.stranger))
    gone = await table.token()
    table.source.store.delete(table.stored.object_id)
    table.source.tokens._failures.clear()
    told.add(await table.refused(gone))
    assert len(told) == 1


async def test_a_token_of_another_peer_is_still_good_for_its_own(table: Table) -> None:
    token = await table.token()
    await table.refused(token, by=table.stranger)
    await table.whole(token)


async def test_a_token_dies_with_the_tensors_version(table: Table) -> None:
    token = await table.token()
    table.tensor[5] = 3
    await table.refused(token)
    await table.whole(await table.token())


async def test_a_token_dies_when_its_object_is_replaced(table: Table) -> None:
    token = await table.token()
    table.source.store.put(
        table.tensor, owner=table.client.endpoint.node_id, object_id=table.stored.object_id
    )
    await table.refused(token)
    await table.whole(await table.token())


async def test_a_token_expires_unclaimed(table: Table) -> None:
    late, now = 0.0, table.source.tokens._clock
    table.source.tokens._clock = lambda: now() + late
    token = await table.token()
    late = table.source.tokens.limits.claim_seconds
    await table.refused(token)
    await table.whole(await table.token())


async def test_two_claims_at_once_and_one_wins(table: Table) -> None:
    token = await table.token()
    first = await table.reader.read(table.source, token=token)
    await first.reply()
    await table.refused(token)
    assert await first.receive_exactly(NBYTES) == bytes(tensor_bytes(table.tensor))
    await first.receive_message()
    await first.send_message(Received(NBYTES).encode())
    await first.aclose()
    await eventually(lambda: table.source.tokens.counts().live == 0)


@pytest.mark.parametrize("cut", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 300_007, NBYTES - 1, NBYTES])
async def test_a_broken_read_goes_on_at_any_byte(table: Table, cut: int) -> None:
    token, expected = await table.token(), bytes(tensor_bytes(table.tensor))
    stream = await table.reader.read(table.source, token=token)
    version = ReadAccepted.decode(await stream.reply()).version
    assert await stream.receive_exactly(cut) == expected[:cut]
    stream.connection.abort(AppCode.LEFT)
    await eventually(lambda: table.state_of_only_token is TokenState.INTERRUPTED)
    again = await table.reader.read(table.source, token=token, offset=cut, version=version)
    async with again:
        await again.reply()
        assert await again.receive_exactly(NBYTES - cut) == expected[cut:]
        await again.receive_message()
        await again.send_message(Received(NBYTES).encode())
    await eventually(lambda: table.source.tokens.counts().live == 0)
    await table.refused(token)


async def test_a_reader_that_gives_up_has_used_its_token(table: Table) -> None:
    token = await table.token()
    stream = await table.reader.read(table.source, token=token)
    await stream.reply()
    stream.reset(AppCode.CANCELLED)
    await eventually(lambda: table.source.tokens.counts().live == 0)
    await table.refused(token)


async def test_revoking_stops_a_read_under_way(table: Table) -> None:
    token = await table.token()
    stream = await table.reader.read(table.source, token=token)
    await stream.reply()
    client = await table.client.client(table.source)
    await client.delete(await client.info(table.stored.object_id))
    with pytest.raises(TokenRefused):
        await stream.receive_exactly(2 * NBYTES)
    stream.reset()
    await eventually(lambda: table.source.is_empty)


async def test_guessing_closes_the_connection(table: Table) -> None:
    for guess in range(2):
        await table.refused(bytes([guess]) * 32)
    await table.whole(await table.token())
    connection = await table.reader.connection(table.source)
    began = anyio.current_time()
    stream = await table.reader.read(table.source, token=b"\x09" * 32)
    with pytest.raises(AccessDenied, match="too many bad tokens"):
        await stream.reply()
    assert anyio.current_time() - began >= GUESSING_SECONDS, "it is not back again at once"
    with anyio.fail_after(5):
        await connection.wait_closed()


async def test_only_the_owner_gets_a_token_or_reads_without(table: Table) -> None:
    stranger = await table.stranger.client(table.source)
    owner = await table.client.client(table.source)
    ref = await owner.info(table.stored.object_id)
    for attempt in (
        table.stranger.token(table.source, ref, table.stranger),
        stranger.get(ref),
        stranger.delete(ref),
        stranger.info(ref.object_id),
    ):
        with pytest.raises(NoSuchTensor):
            await attempt
    assert torch.equal(await owner.get(ref), table.tensor)
    await owner.delete(ref)


async def test_parts_of_two_versions_are_never_joined(table: Table) -> None:
    owner, object_id = table.client, table.stored.object_id
    stream = await owner.read(table.source, object_id=object_id)
    version = ReadAccepted.decode(await stream.reply()).version
    stream.reset()
    again = await owner.read(table.source, object_id=object_id, offset=10, version=version)
    await again.reply()
    again.reset()
    table.tensor.add_(1)
    late = await owner.read(table.source, object_id=object_id, offset=10, version=version)
    with pytest.raises(TensorChanged):
        await late.reply()
    late.reset()
    beyond = await owner.read(table.source, object_id=object_id, offset=NBYTES + 1)
    with pytest.raises(ProtocolError, match="beyond"):
        await beyond.reply()
    beyond.reset()


async def test_no_secret_in_any_log(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = await table.token()
    await table.refused(token, by=table.stranger)
    await table.whole(token)
    await table.refused(token)
    text = caplog.text
    assert "refused" in text  # the log is on
    assert token.hex() not in text
    assert repr(token) not in text
