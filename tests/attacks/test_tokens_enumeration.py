"""Looking for other people's tensors: by guessing tokens and object ids, or with tokens not one's.

Both are random and long (256 and 128 bits). What is tested is that nothing answers questions about
them: no order in them, no refusal that tells more than another, no end of tries, no listing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace

import anyio
import pytest
import torch

from auth import MeshError, SecretKey, TokenLimits
from tensor_bridge import NoSuchTensor, TensorRef, TensorStore
from tensor_bridge.serve_create import dense_meta
from tensor_bridge.wire import MintCall, PutAccepted, PutOpen, ReadAccepted
from tests.tensor_bridge.nodes import Node, eventually, node, together
from transport import AppCode

pytestmark = [pytest.mark.anyio, pytest.mark.attack]

FAILURES = 8


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[Node, ...]]:
    limits = TokenLimits(max_failures_per_peer=FAILURES)
    async with together(node(tokens=limits), node(), node(), node()) as up:
        yield up


def minted(source: Node, owner: Node, audience: Node) -> tuple[TensorRef, bytes]:
    """A tensor of `owner`'s at `source`, and a token with which `audience` may read it."""
    ref = owner.has(source, torch.arange(100))
    return ref, token_for(source, ref, owner, audience)


def token_for(source: Node, ref: TensorRef, owner: Node, audience: Node) -> bytes:
    capability = source.tokens.mint(
        issuer=source.endpoint.node_id,
        audience=audience.endpoint.node_id,
        action="read",
        object_id=ref.object_id,
        version=ref.version,
        meta_digest=ref.meta.digest(),
        nbytes=ref.meta.nbytes,
        session="a job",
        owner=owner.endpoint.node_id,
    )
    return capability.encode()


async def attempt(thief: Node, source: Node, **order: object) -> str:
    """Try to read; return everything that is said to it."""
    stream = await thief.read(source, **order)  # type: ignore[arg-type]
    async with stream:
        try:
            await stream.reply()
        except MeshError as error:
            stream.reset()
            return f"{type(error).__name__}|{error.what}|{error.why}|{error.fix}|{error.stage}"
        stream.reset()
    return "accepted"


# -- tokens


async def test_a_thief_who_tries_token_after_token_is_thrown_out(nodes: tuple[Node, ...]) -> None:
    source, owner, reader, thief = nodes
    _, good = minted(source, owner, reader)
    tried, told = 0, set()
    with anyio.fail_after(20):
        for number in itertools.count():
            guess = bytes([good[0] ^ 1]) + good[1:-1] + bytes([number & 0xFF])
            answer = await attempt(thief, source, token=guess)
            tried += 1
            if "too many bad tokens" in answer:
                break
            told.add(answer)
    assert tried == FAILURES
    assert len(told) == 1
    # It may come back: each try then costs it a connection.
    connection = await thief.connection(source)
    assert "too many bad tokens" in await attempt(thief, source, token=good[::-1])
    with anyio.fail_after(5):
        await connection.wait_closed()
    # The positive control: nobody else has suffered, and the token is still good.
    stream = await reader.read(source, token=good)
    assert ReadAccepted.decode(await stream.reply()).meta.nbytes == 800
    stream.reset()


async def test_claiming_others_tokens_spends_none_of_them(nodes: tuple[Node, ...]) -> None:
    source, owner, reader, thief = nodes
    tokens = [minted(source, owner, reader)[1] for _ in range(FAILURES - 1)]
    told = {await attempt(thief, source, token=token) for token in tokens}
    told.add(await attempt(thief, source, token=bytes(32)))
    (told_at_last,) = {answer for answer in told if "too many" not in answer}
    assert "TokenRefused" in told_at_last
    for token in tokens:
        assert await attempt(reader, source, token=token) == "accepted"


async def test_a_new_key_for_each_guess_gets_no_further(nodes: tuple[Node, ...]) -> None:
    """Who changes its name pays a handshake for each, and what is remembered is bounded."""
    source, owner, reader, _ = nodes
    _, good = minted(source, owner, reader)
    told = set()
    for _ in range(4):
        async with node() as stranger:
            told.add(await attempt(stranger, source, token=good))
    assert len(told) == 1
    assert "TokenRefused" in next(iter(told))
    assert len(source.tokens._failures) == 4
    assert source.tokens.counts().live == 1


@pytest.mark.parametrize("length", [1, 31, 33, 256])
async def test_tokens_of_other_lengths_are_refused_alike(
    length: int, nodes: tuple[Node, ...]
) -> None:
    source, owner, reader, thief = nodes
    _, good = minted(source, owner, reader)
    told = await attempt(thief, source, token=(good * 8)[:length])
    assert told == await attempt(thief, source, token=bytes(32))


async def test_tokens_have_no_order(nodes: tuple[Node, ...]) -> None:
    source, owner, reader, _ = nodes
    tokens = [minted(source, owner, reader)[1] for _ in range(60)]
    assert len(set(tokens)) == 60
    assert all(len(token) == 32 for token in tokens)
    for place in range(32):
        column = [token[place] for token in tokens]
        assert len(set(column)) > 35, "each byte is drawn anew"
        assert column != sorted(column)


# -- object ids


def test_object_ids_are_drawn_from_128_bits() -> None:
    store, owner = TensorStore(), SecretKey.generate().node_id
    ids = [int(store.put(torch.zeros(1), owner=owner).object_id, 16) for _ in range(2000)]
    assert len(set(ids)) == 2000
    for bit in range(128):
        ones = sum(each >> bit & 1 for each in ids)
        assert abs(ones - 1000) < 6 * math.sqrt(500), bit


async def test_ids_of_others_and_ids_of_nobody_look_the_same(nodes: tuple[Node, ...]) -> None:
    source, owner, reader, thief = nodes
    theirs, _ = minted(source, owner, reader)
    deleted = owner.has(source, torch.arange(3))
    source.store.delete(deleted.object_id)
    at_source = await thief.client(source)

    async def mint(object_id: str) -> str:
        wish = MintCall(object_id, thief.endpoint.node_id).encode()
        connection = await thief.connection(source)
        async with await connection.open_stream("tensor.mint", wish) as stream:
            answer = await told(stream.reply())
            stream.reset()
            return answer

    for ask in (
        lambda id_: attempt(thief, source, object_id=id_),
        lambda id_: attempt(thief, source, object_id=id_, offset=1 << 40),
        lambda id_: attempt(thief, source, object_id=id_, version=7),
        lambda id_: told(at_source.info(id_)),
        lambda id_: told(at_source.delete(replace(theirs, object_id=id_))),
        mint,
    ):
        answers = [
            (await ask(id_)).replace(id_[:8], "ID").replace(id_[8:], "")
            for id_ in (theirs.object_id, deleted.object_id, "ab" * 16)
        ]
        assert len(set(answers)) == 1, answers
        assert answers[0].startswith("NoSuchTensor")
    # The positive control.
    assert torch.equal(await (await owner.client(source)).get(theirs), torch.arange(100))


async def told(call: Awaitable[object]) -> str:
    with pytest.raises(NoSuchTensor) as caught:
        await call
    error = caught.value
    return f"NoSuchTensor|{error.what}|{error.why}|{error.fix}|{error.stage}"


async def test_a_listing_shows_ones_own_alone(nodes: tuple[Node, ...]) -> None:
    source, owner, _, thief = nodes
    for number in range(5):
        owner.has(source, torch.zeros(number + 1))
    mine = thief.has(source, torch.zeros(9))
    at_source = await thief.client(source)
    assert [ref.object_id for ref in await at_source.list()] == [mine.object_id]
    assert len(await (await owner.client(source)).list()) == 5


async def test_a_put_under_anothers_upload_id_takes_nothing_over(nodes: tuple[Node, ...]) -> None:
    """Who knows the id of an upload under way neither joins it nor learns how far it is."""
    source, owner, _, thief = nodes
    order = PutOpen("cd" * 16, dense_meta(torch.uint8, (1 << 20,))).encode()
    streams = []
    for peer in (owner, thief):
        stream = await (await peer.connection(source)).open_stream("tensor.put", order)
        assert PutAccepted.decode(await stream.reply(), 1 << 20).offset == 0
        await stream.send(bytes(1 << 19))
        streams.append(stream)
    assert len(source.service.arrivals) == 2
    assert source.store.used()[0] == 2 << 20
    # The positive control: the owner takes its own up again where its link broke.
    arrivals = source.service.arrivals._coming.values()
    await eventually(lambda: all(arrival.moved == 1 << 19 for arrival in arrivals))
    streams[0].connection.abort(AppCode.LEFT)
    await eventually(lambda: len(source.endpoint.connections) == 1)
    again = await (await owner.connection(source)).open_stream("tensor.put", order)
    assert PutAccepted.decode(await again.reply(), 1 << 20).offset == 1 << 19
    assert len(source.service.arrivals) == 2
    again.reset()
    streams[1].reset()
