"""How long a refusal takes says nothing about why.

Of a token that is unknown, spent, expired, revoked, claimed, or another peer's. Two ways to look at
it: the work is the same, whatever the cause; and over a connection the times are not told apart by
somebody who takes as many samples as there are tries. The second is coarse, so that a busy machine
does not fail it; that it notices a refusal which is slower is tested beside it.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from auth import Claim, NodeId, SecretKey, TokenBook, TokenLimits, TokenRefused, tokens
from tests.attacks.test_tokens_enumeration import token_for
from tests.tensor_bridge.nodes import Node, node, together

pytestmark = pytest.mark.attack

ROUNDS = 15
"""Tries that a peer has, and one to spare: it is thrown out after the next."""

OWNER, READER, OTHER = (SecretKey.generate().node_id for _ in range(3))


def fresh_book() -> TokenBook:
    """A book with a clock that stands still."""
    return TokenBook(clock=lambda: 0.0)


def mint(book: TokenBook, audience: NodeId = READER, object_id: str = "ab" * 16) -> bytes:
    return book.mint(
        issuer=OWNER,
        audience=audience,
        action="read",
        object_id=object_id,
        version=1,
        meta_digest=bytes(32),
        nbytes=10,
        session="s",
        owner=OWNER,
    ).secret


def claim(book: TokenBook, token: bytes) -> Claim:
    return book.claim(token, audience=READER, action="read", version_of=lambda _: 1)


def unknown(book: TokenBook) -> bytes:
    return random.randbytes(32)


def spent(book: TokenBook) -> bytes:
    token = mint(book)
    claim(book, token).delivered()
    return token


def expired(book: TokenBook) -> bytes:
    token = mint(book)
    live = book._live[tokens._digest(token)[: tokens._INDEX_BYTES]]
    book._end(live, tokens.TokenState.EXPIRED)
    return token


def revoked(book: TokenBook) -> bytes:
    token = mint(book)
    book.revoke(object_id="ab" * 16)
    return token


def claimed(book: TokenBook) -> bytes:
    token = mint(book)
    claim(book, token)
    return token


def of_another(book: TokenBook) -> bytes:
    return mint(book, audience=OTHER)


CAUSES: dict[str, Callable[[TokenBook], bytes]] = {
    "unknown": unknown,
    "spent": spent,
    "expired": expired,
    "revoked": revoked,
    "claimed": claimed,
    "of another": of_another,
}


@pytest.mark.parametrize("cause", CAUSES)
def test_every_refusal_hashes_once_and_looks_no_object_up(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = fresh_book()
    token = CAUSES[cause](book)
    done: Counter[str] = Counter()
    hash_token = tokens._digest

    def counting(secret: bytes) -> bytes:
        done["hashes"] += 1
        return hash_token(secret)

    def version_of(_: str) -> int:
        done["look-ups"] += 1
        return 1

    monkeypatch.setattr(tokens, "_digest", counting)
    with pytest.raises(TokenRefused):
        book.claim(token, audience=READER, action="read", version_of=version_of)
    assert done == {"hashes": 1}
    # The positive control: what is in order is hashed once too, and its object looked up.
    done.clear()
    good = book.mint(
        issuer=OWNER,
        audience=READER,
        action="read",
        object_id="cd" * 16,
        version=1,
        meta_digest=bytes(32),
        nbytes=1,
        session="s",
        owner=OWNER,
    ).secret
    done.clear()
    book.claim(good, audience=READER, action="read", version_of=version_of)
    assert done == {"hashes": 1, "look-ups": 1}


@pytest.mark.parametrize("matching", [0, 1, 8, 16, 31])
def test_a_token_that_is_nearly_right_is_as_unknown_as_any(matching: int) -> None:
    """It is the hash that is looked up: no first bytes can be got right one after the other."""
    book = fresh_book()
    good = mint(book)
    near = good[:matching] + bytes(each ^ 0xFF for each in good[matching:])
    index = tokens._digest(near)[: tokens._INDEX_BYTES]
    assert index not in book._live
    with pytest.raises(TokenRefused):
        claim(book, near)
    claim(book, good)


def are_told_apart(samples: dict[str, list[float]]) -> bool:
    """Whether a cause stands out: by more than the noise, and by more than this machine jitters."""
    medians = [statistics.median(values) for values in samples.values()]
    everything = sorted(itertools.chain.from_iterable(samples.values()))
    noise = everything[3 * len(everything) // 4] - everything[len(everything) // 4]
    return max(medians) - min(medians) > max(2 * noise, 0.005)


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[Node, ...]]:
    limits = TokenLimits(max_failures_per_peer=1 << 20)
    async with together(node(tokens=limits), node(), node(), node()) as up:
        yield up


async def refusal(reader: Node, source: Node, token: bytes) -> float:
    """Present a token; return how long the refusal took."""
    stream = await reader.read(source, token=token)
    began = time.perf_counter()
    async with stream:
        with pytest.raises(TokenRefused):
            await stream.reply()
        took = time.perf_counter() - began
        stream.reset()
    return took


@pytest.mark.alone
@pytest.mark.anyio
@pytest.mark.parametrize("slower", [None, "of another"])
async def test_over_a_connection_no_cause_stands_out(
    slower: str | None, nodes: tuple[Node, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, owner, reader, other = nodes
    book = source.tokens
    ref = owner.has(source, torch.arange(10))

    def minted(audience: Node = reader) -> bytes:
        return token_for(source, ref, owner, audience)

    def end(token: bytes, state: tokens.TokenState) -> bytes:
        book._end(book._live[tokens._digest(token)[: tokens._INDEX_BYTES]], state)
        return token

    if slower is not None:  # the control: a refusal that takes longer is noticed
        objection = book._objection

        def slow(token: object, *rest: object) -> object:
            if token is not None:
                time.sleep(0.03)  # it need not be fair to the loop
            return objection(token, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(book, "_objection", slow)
    samples: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        presented = {
            "unknown": random.randbytes(32),
            "spent": end(minted(), tokens.TokenState.DELIVERED),
            "expired": end(minted(), tokens.TokenState.EXPIRED),
            "revoked": end(minted(), tokens.TokenState.REVOKED),
            "of another": minted(other),
        }
        for cause in random.sample(sorted(presented), len(presented)):
            took = await refusal(reader, source, presented[cause])
            samples.setdefault(cause, []).append(took)
    assert are_told_apart(samples) is (slower is not None), {
        cause: statistics.median(values) for cause, values in samples.items()
    }
