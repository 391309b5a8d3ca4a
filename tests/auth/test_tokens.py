from __future__ import annotations

import copy
import itertools
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auth import (
    AccessDenied,
    Capability,
    Claim,
    NodeId,
    TokenBook,
    TokenLimits,
    TokenRefused,
    TokenState,
)
from auth.tokens import ObjectVersion


def node(n: int) -> NodeId:
    return NodeId(bytes([n]) * 32)


ISSUER, AUDIENCE, OTHER, OWNER = (node(n) for n in range(2, 6))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> TokenBook:
    return TokenBook(clock=clock)


def mint(
    book: TokenBook,
    *,
    audience: NodeId = AUDIENCE,
    object_id: str = "object",
    version: ObjectVersion = 1,
    nbytes: int = 100,
    session: str = "session",
    owner: NodeId = OWNER,
) -> Capability:
    return book.mint(
        issuer=ISSUER,
        audience=audience,
        action="read",
        object_id=object_id,
        version=version,
        meta_digest=b"digest",
        nbytes=nbytes,
        session=session,
        owner=owner,
    )


def version_1(object_id: str) -> ObjectVersion | None:
    return 1


class Claiming:
    """Claims with everything right, unless told otherwise."""

    def __init__(self, book: TokenBook) -> None:
        self.book = book

    def __call__(
        self,
        secret: bytes,
        audience: NodeId = AUDIENCE,
        action: str = "read",
        version_of: Callable[[str], ObjectVersion | None] = version_1,
    ) -> Claim:
        return self.book.claim(secret, audience=audience, action=action, version_of=version_of)

    def refused(self, *arguments: object, **keywords: object) -> str:
        with pytest.raises(TokenRefused) as caught:
            self(*arguments, **keywords)  # type: ignore[arg-type]
        return str(caught.value)


@pytest.fixture
def claim(book: TokenBook) -> Claiming:
    return Claiming(book)


class TestLife:
    def test_a_token_is_delivered_once(self, book: TokenBook, claim: Claiming) -> None:
        capability = mint(book)
        held = claim(capability.encode())
        assert held.facts == capability.facts
        assert held.state is TokenState.CLAIMED
        held.progress(100)
        held.delivered()
        assert held.state is TokenState.DELIVERED
        claim.refused(capability.secret)
        assert book.counts().live == 0

    def test_its_facts_are_those_it_was_minted_with(self, book: TokenBook) -> None:
        facts = mint(book, version=(3, 4), nbytes=7).facts
        assert (facts.issuer, facts.audience, facts.owner) == (ISSUER, AUDIENCE, OWNER)
        assert (facts.action, facts.object_id, facts.version) == ("read", "object", (3, 4))
        assert (facts.meta_digest, facts.nbytes, facts.session) == (b"digest", 7, "session")

    def test_it_is_spent_on_delivery_only(self, book: TokenBook, claim: Claiming) -> None:
        held = claim(mint(book).secret)
        held.progress(100)
        assert book.counts().live == 1

    def test_a_second_claim_at_once_fails_and_harms_nothing(
        self, book: TokenBook, claim: Claiming
    ) -> None:
        capability = mint(book)
        held = claim(capability.secret)
        claim.refused(capability.secret)
        held.progress(1)
        held.delivered()

    def test_of_many_threads_one_claims(self, book: TokenBook, claim: Claiming) -> None:
        secret = mint(book).secret
        start = threading.Barrier(8)
        inside = threading.Event()

        def version_of(object_id: str) -> ObjectVersion:
            # Gives the other threads the time to come in, if anything lets them.
            inside.wait(0.02)
            return 1

        def attempt(_: int) -> bool:
            start.wait(5)
            try:
                claim(secret, version_of=version_of)
            except TokenRefused:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(attempt, range(8))).count(True) == 1

    def test_the_same_audience_resumes_and_no_other(self, book: TokenBook, claim: Claiming) -> None:
        capability = mint(book)
        first = claim(capability.secret)
        first.progress(50)
        first.interrupted()
        assert first.state is TokenState.INTERRUPTED
        claim.refused(capability.secret, audience=OTHER)
        second = claim(capability.secret)
        claim.refused(capability.secret)
        second.delivered()

    def test_an_old_claim_has_no_power_over_its_successor(
        self, book: TokenBook, claim: Claiming
    ) -> None:
        capability = mint(book)
        first = claim(capability.secret)
        first.interrupted()
        second = claim(capability.secret)
        first.interrupted()
        first.failed("late")
        for late in (first.delivered, lambda: first.progress(1)):
            with pytest.raises(TokenRefused):
                late()
        assert first.state is TokenState.INTERRUPTED
        assert second.state is TokenState.CLAIMED
        second.delivered()

    def test_a_failed_token_is_over(self, book: TokenBook, claim: Claiming) -> None:
        capability = mint(book)
        held = claim(capability.secret)
        held.failed("disk full")
        held.failed("again")
        assert held.state is TokenState.FAILED
        claim.refused(capability.secret)
        assert book.counts().live == 0

    def test_a_token_is_claimed_a_bounded_number_of_times(
        self, book: TokenBook, claim: Claiming
    ) -> None:
        secret = mint(book).secret
        for _ in range(64):
            held = claim(secret)
            held.progress(1)
            held.interrupted()
        claim.refused(secret)


class TestTime:
    def test_a_token_must_be_claimed_in_time(
        self, book: TokenBook, claim: Claiming, clock: Clock
    ) -> None:
        early, late = mint(book), mint(book)
        clock.now += 29.9
        claim(early.secret)
        clock.now += 0.1
        claim.refused(late.secret)
        assert book.counts().live == 1

    def test_progress_puts_the_deadline_off_and_nothing_else_does(
        self, book: TokenBook, claim: Claiming, clock: Clock
    ) -> None:
        secret = mint(book).secret
        clock.now += 20
        held = claim(secret)
        for _ in range(3):
            clock.now += 29
            held.progress(1)
        clock.now += 10
        held.progress(0)
        held.interrupted()
        clock.now += 10
        held = claim(secret)
        assert book.next_deadline() == clock.now + 10
        clock.now += 10
        with pytest.raises(TokenRefused):
            held.progress(1)
        assert held.state is TokenState.EXPIRED
        assert book.counts().live == 0

    def test_an_interrupted_token_expires(
        self, book: TokenBook, claim: Claiming, clock: Clock
    ) -> None:
        secret = mint(book).secret
        claim(secret).interrupted()
        clock.now += 30
        claim.refused(secret)

    def test_delivery_after_the_deadline_is_refused(
        self, book: TokenBook, claim: Claiming, clock: Clock
    ) -> None:
        held = claim(mint(book).secret)
        clock.now += 30
        with pytest.raises(TokenRefused):
            held.delivered()

    def test_a_driver_is_told_when_to_come(self, book: TokenBook, clock: Clock) -> None:
        assert book.next_deadline() is None
        mint(book)
        clock.now += 10
        mint(book)
        assert book.next_deadline() == 1030.0
        assert book.expire(1029.9) == 0
        assert book.expire(1030.0) == 1
        assert book.next_deadline() == 1040.0
        assert book.expire(2000.0) == 1
        assert book.next_deadline() is None

    def test_a_claim_may_bring_the_deadline_nearer(self, clock: Clock) -> None:
        book = TokenBook(TokenLimits(progress_seconds=5), clock=clock)
        mint(book)
        held = Claiming(book)(mint(book).secret)
        assert book.next_deadline() == clock.now + 5
        assert book.expire(clock.now + 5) == 1
        assert held.state is TokenState.EXPIRED

    def test_the_heap_does_not_grow_with_what_is_over(
        self, book: TokenBook, claim: Claiming
    ) -> None:
        kept = mint(book)
        for _ in range(2000):
            claim(mint(book).secret).delivered()
        assert len(book._heap) < 100
        claim(kept.secret).delivered()

    def test_many_steps_of_progress_cost_no_memory(
        self, book: TokenBook, claim: Claiming, clock: Clock
    ) -> None:
        held = claim(mint(book).secret)
        for _ in range(1000):
            clock.now += 1
            held.progress(1)
        assert len(book._heap) == 1


class TestRefusal:
    def causes(self, book: TokenBook, clock: Clock) -> Iterator[Callable[[], object]]:
        claim = Claiming(book)
        spent, claimed, expired, revoked, ended = (mint(book, object_id=f"{n}") for n in range(5))
        claim(spent.secret).delivered()
        claim(claimed.secret)
        book.revoke(object_id="3")
        held = claim(ended.secret)
        held.failed("x")
        yield lambda: claim(bytes(32))
        yield lambda: claim(b"")
        yield lambda: claim(spent.secret[:-1])
        yield lambda: claim(spent.secret)
        yield lambda: claim(claimed.secret)
        yield lambda: claim(revoked.secret)
        yield lambda: claim(ended.secret)
        yield lambda: claim(mint(book).secret, audience=OTHER)
        yield lambda: claim(mint(book).secret, action="write")
        yield lambda: claim(mint(book).secret, version_of=lambda _: 2)
        yield lambda: claim(mint(book).secret, version_of=lambda _: None)
        yield lambda: held.progress(1)
        yield held.delivered
        clock.now += 30
        yield lambda: claim(expired.secret)

    def test_every_cause_reads_the_same(self, book: TokenBook, clock: Clock) -> None:
        seen = set()
        count = 0
        for attempt in self.causes(book, clock):
            with pytest.raises(TokenRefused) as caught:
                attempt()
            error = caught.value
            seen.add((str(error), error.peer, error.stage, error.after, error.denial, error.code))
            count += 1
        assert count == 14
        assert len(seen) == 1

    def test_the_log_knows_the_cause(
        self, book: TokenBook, claim: Claiming, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        secret = mint(book).secret
        claim.refused(secret, audience=OTHER)
        assert f"it is for {AUDIENCE.short}" in caplog.text
        claim.refused(secret, action="write")
        assert "it permits 'read', not 'write'" in caplog.text
        claim.refused(secret, version_of=lambda _: None)
        assert "object object has changed or is gone" in caplog.text
        claim.refused(secret)
        assert "unknown" in caplog.text

    def test_another_peer_or_action_does_not_spoil_the_token(
        self, book: TokenBook, claim: Claiming
    ) -> None:
        secret = mint(book).secret
        claim.refused(secret, audience=OTHER)
        claim.refused(secret, action="write")
        claim(secret)

    def test_a_changed_object_ends_the_token(self, book: TokenBook, claim: Claiming) -> None:
        secret = mint(book, version=(1, 5)).secret
        asked: list[str] = []

        def changed(object_id: str) -> ObjectVersion:
            asked.append(object_id)
            return (1, 6)

        claim.refused(secret, version_of=changed)
        assert asked == ["object"]
        claim.refused(secret, version_of=lambda _: (1, 5))
        assert book.counts().live == 0
        claim(mint(book, version=(1, 5)).secret, version_of=lambda _: (1, 5))

    def test_an_object_is_not_looked_up_for_the_wrong_peer(
        self, book: TokenBook, claim: Claiming
    ) -> None:
        def never(object_id: str) -> ObjectVersion:
            raise AssertionError(object_id)

        secret = mint(book).secret
        claim.refused(secret, audience=OTHER, version_of=never)
        claim.refused(secret, action="write", version_of=never)
        claim.refused(bytes(32), version_of=never)

    def test_a_store_that_fails_leaves_the_token(self, book: TokenBook, claim: Claiming) -> None:
        def broken(object_id: str) -> ObjectVersion:
            raise OSError("disk")

        secret = mint(book).secret
        with pytest.raises(OSError, match="disk"):
            claim(secret, version_of=broken)
        claim(secret)

    def test_a_store_may_revoke_while_asked(self, book: TokenBook, claim: Claiming) -> None:
        def gone(object_id: str) -> ObjectVersion | None:
            assert book.revoke(object_id=object_id) == 1
            return None

        claim.refused(mint(book).secret, version_of=gone)
        assert book.counts().exposed_bytes == 0

    @given(st.binary(max_size=64))
    def test_no_guess_is_a_token(self, guess: bytes) -> None:
        book = TokenBook()
        capability = mint(book)
        claim = Claiming(book)
        if guess != capability.encode():
            claim.refused(guess)
        claim(capability.encode())

    @given(st.integers(0, 31), st.integers(1, 255))
    def test_no_altered_secret_is_a_token(self, at: int, flip: int) -> None:
        book = TokenBook()
        secret = bytearray(mint(book).encode())
        secret[at] ^= flip
        Claiming(book).refused(bytes(secret))
        secret[at] ^= flip
        Claiming(book)(bytes(secret))

    def test_the_whole_hash_is_compared(
        self, book: TokenBook, claim: Claiming, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Two secrets whose hashes begin alike: only one of them is a token.
        good, twin = mint(book).secret, b"twin"
        monkeypatch.setattr(
            "auth.tokens._digest", lambda s: next(iter(book._live)) + b"x" * (s == twin)
        )
        claim.refused(twin)
        monkeypatch.undo()
        claim(good)


class TestFailures:
    def test_failures_are_counted_by_peer(self, book: TokenBook, claim: Claiming) -> None:
        for _ in range(15):
            claim.refused(bytes(32))
        assert not book.too_many_failures(AUDIENCE)
        claim.refused(bytes(32))
        assert book.too_many_failures(AUDIENCE)
        assert not book.too_many_failures(OTHER)

    def test_a_success_does_not_wipe_the_count(self, book: TokenBook, claim: Claiming) -> None:
        for _ in range(16):
            claim.refused(bytes(32))
            claim(mint(book).secret).delivered()
        assert book.too_many_failures(AUDIENCE)

    def test_failures_are_forgotten_in_time(
        self, book: TokenBook, claim: Claiming, clock: Clock
    ) -> None:
        for _ in range(16):
            claim.refused(bytes(32))
        clock.now += 299
        assert book.too_many_failures(AUDIENCE)
        clock.now += 1
        assert not book.too_many_failures(AUDIENCE)
        for _ in range(15):
            claim.refused(bytes(32))
        assert not book.too_many_failures(AUDIENCE)

    def test_what_is_remembered_is_bounded(self, book: TokenBook, claim: Claiming) -> None:
        for n in range(5000):
            claim.refused(b"", audience=NodeId(n.to_bytes(32, "big")))
        assert len(book._failures) == 4096


class TestRevoking:
    def test_by_object_session_and_owner(self, book: TokenBook, claim: Claiming) -> None:
        def minted() -> dict[str, Capability]:
            return {
                "object": mint(book, object_id="a"),
                "session": mint(book, session="b"),
                "owner": mint(book, owner=OTHER),
                "audience": mint(book, audience=OWNER),
                "none": mint(book),
            }

        for name, revoke in {
            "object": lambda: book.revoke(object_id="a"),
            "session": lambda: book.revoke(session="b"),
            "owner": lambda: book.revoke(owner=OTHER),
            "audience": lambda: book.revoke(audience=OWNER),
        }.items():
            capabilities = minted()
            assert revoke() == 1
            claim.refused(capabilities.pop(name).secret)
            for capability in capabilities.values():
                claim(capability.secret, audience=capability.facts.audience).delivered()
            assert book.counts().live == 0

    def test_all_that_is_given_must_match(self, book: TokenBook) -> None:
        mint(book, object_id="a", session="b")
        assert book.revoke(object_id="a", session="c") == 0
        assert book.revoke(object_id="a", session="b", owner=OTHER) == 0
        assert book.revoke(object_id="a", session="b", owner=OWNER) == 1

    def test_it_never_matches_everything_by_accident(self, book: TokenBook) -> None:
        with pytest.raises(ValueError, match="needs"):
            book.revoke()

    def test_a_transfer_under_way_learns_of_it(self, book: TokenBook, claim: Claiming) -> None:
        held = claim(mint(book).secret)
        told: list[TokenState] = []
        held.on_end(told.append)
        book.revoke(owner=OWNER)
        assert told == [TokenState.REVOKED]
        with pytest.raises(TokenRefused):
            held.progress(1)

    def test_an_interrupted_token_can_be_revoked(self, book: TokenBook, claim: Claiming) -> None:
        secret = mint(book).secret
        held = claim(secret)
        held.interrupted()
        assert book.revoke(session="session") == 1
        assert held.state is TokenState.INTERRUPTED
        claim.refused(secret)

    @pytest.mark.parametrize("state", list(TokenState)[2:])
    def test_every_end_is_told_once(
        self, book: TokenBook, claim: Claiming, clock: Clock, state: TokenState
    ) -> None:
        held = claim(mint(book).secret)
        told: list[TokenState] = []
        held.on_end(told.append)
        {
            TokenState.INTERRUPTED: held.interrupted,
            TokenState.DELIVERED: held.delivered,
            TokenState.FAILED: lambda: held.failed("x"),
            TokenState.EXPIRED: lambda: book.expire(clock.now + 30),
            TokenState.REVOKED: lambda: book.revoke(owner=OWNER),
        }[state]()
        assert told == [held.state] == [state]
        held.interrupted()
        held.failed("x")
        assert told == [state]
        held.on_end(told.append)
        assert told == [state, state]


class TestLimits:
    def denied(self, book: TokenBook, why: str, **keywords: object) -> None:
        before = book.counts()
        with pytest.raises(AccessDenied, match=why) as caught:
            mint(book, **keywords)  # type: ignore[arg-type]
        assert not isinstance(caught.value, TokenRefused)
        assert caught.value.denial is not None
        assert caught.value.denial.code == "limit"
        assert book.counts() == before

    def test_live_tokens_of_one_peer(self, clock: Clock) -> None:
        book = TokenBook(TokenLimits(max_live_per_peer=2), clock=clock)
        mint(book)
        mint(book, audience=OTHER)
        self.denied(book, "this peer has 2 live tokens")
        mint(book, owner=OTHER)
        book.revoke(owner=OWNER)
        mint(book)

    def test_live_tokens_in_all(self, clock: Clock) -> None:
        book = TokenBook(TokenLimits(max_live=2), clock=clock)
        mint(book)
        mint(book, owner=OTHER)
        self.denied(book, "this node has 2 live tokens", owner=node(9))
        clock.now += 30
        mint(book)

    def test_exposed_bytes_of_one_peer(self, clock: Clock) -> None:
        book = TokenBook(TokenLimits(max_exposed_bytes_per_peer=100), clock=clock)
        capability = mint(book, nbytes=60)
        self.denied(book, "this peer would expose more than 100 bytes", nbytes=41)
        mint(book, nbytes=40)
        mint(book, nbytes=100, owner=OTHER)
        Claiming(book)(capability.secret).delivered()
        mint(book, nbytes=60)

    def test_exposed_bytes_in_all(self, clock: Clock) -> None:
        book = TokenBook(TokenLimits(max_exposed_bytes=100), clock=clock)
        mint(book, nbytes=60)
        self.denied(book, "this node would expose more than 100 bytes", nbytes=41, owner=OTHER)
        mint(book, nbytes=0)

    def test_counts(self, book: TokenBook) -> None:
        mint(book, nbytes=1)
        mint(book, nbytes=2, owner=OTHER)
        mint(book, nbytes=4, owner=OTHER)
        counts = book.counts()
        assert (counts.live, counts.exposed_bytes) == (3, 7)
        assert counts.live_by_peer == {OWNER: 1, OTHER: 2}
        assert counts.exposed_bytes_by_peer == {OWNER: 1, OTHER: 6}
        book.revoke(owner=OTHER)
        assert book.counts().live_by_peer == {OWNER: 1}
        assert book.counts().exposed_bytes_by_peer == {OWNER: 1}

    def test_a_negative_size_is_a_mistake(self, book: TokenBook) -> None:
        with pytest.raises(ValueError, match="nbytes"):
            mint(book, nbytes=-1)

    @pytest.mark.parametrize("name", TokenLimits.__slots__)
    def test_limits_are_above_zero(self, name: str) -> None:
        for bad in (0, -1, float("nan")):
            with pytest.raises(ValueError, match=name):
                TokenLimits(**{name: bad})  # type: ignore[arg-type]

    def test_broken_randomness_is_noticed(self) -> None:
        book = TokenBook(random=lambda size: bytes(size))
        mint(book)
        with pytest.raises(RuntimeError, match="random"):
            mint(book)
        with pytest.raises(RuntimeError, match="random"):
            mint(TokenBook(random=lambda size: b"short"))


class TestSecrecy:
    def test_a_capability_shows_its_fingerprint(self, book: TokenBook) -> None:
        capability = mint(book)
        assert len(capability.fingerprint) == 8
        assert capability.fingerprint in repr(capability)
        assert capability.fingerprint != mint(book).fingerprint

    def test_a_capability_can_not_be_copied(self, book: TokenBook) -> None:
        for copies in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="can't be pickled or copied"):
                copies(mint(book))

    def test_the_secret_has_256_bits(self, book: TokenBook) -> None:
        assert len(mint(book).secret) == 32
        assert len({mint(book).secret for _ in range(100)}) == 100

    def test_the_book_keeps_no_secret(self, book: TokenBook, claim: Claiming) -> None:
        capability = mint(book)
        claim(capability.secret)
        seen: set[int] = set()
        todo: list[object] = [book]
        while todo:
            thing = todo.pop()
            if id(thing) in seen or callable(thing):
                continue
            seen.add(id(thing))
            assert thing != capability.secret
            if isinstance(thing, dict):
                todo += itertools.chain(thing.keys(), thing.values())
            elif isinstance(thing, (list, tuple, set)):
                todo += thing
            elif not isinstance(thing, (str, bytes, int, float)):
                names = itertools.chain(
                    getattr(thing, "__dict__", ()), getattr(type(thing), "__slots__", ())
                )
                todo += [getattr(thing, name) for name in names if hasattr(thing, name)]
        assert len(seen) > 20

    def test_no_secret_is_in_any_log_repr_or_message(
        self, book: TokenBook, claim: Claiming, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        capability = mint(book)
        shown = [repr(capability), str(capability), repr(book)]
        shown.append(claim.refused(capability.secret, audience=OTHER))
        held = claim(capability.secret)
        shown += [repr(held), repr(capability.facts)]
        held.failed("x")
        shown += [claim.refused(capability.secret), repr(held), caplog.text]
        assert caplog.text.count(capability.fingerprint) == 3
        for text in shown:
            assert capability.secret.hex() not in text
            assert repr(capability.secret)[2:-1] not in text


def test_who_guesses_does_not_fill_the_log(
    book: TokenBook, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def guess() -> None:
        with pytest.raises(TokenRefused):
            book.claim(bytes(32), audience=OTHER, action="read", version_of=version_1)

    with caplog.at_level(logging.INFO):
        for _ in range(50):
            guess()
        assert len(caplog.records) == 1
        clock.now += book.limits.failure_seconds
        guess()
        assert len(caplog.records) == 2
