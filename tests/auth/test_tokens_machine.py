"""The token book against a model of it, over random histories."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)

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

PEERS = [NodeId(bytes([n]) * 32) for n in range(2, 5)]
OBJECTS = ["a", "b"]
SESSIONS = ["s", "t"]
LIMITS = TokenLimits(
    claim_seconds=10.0,
    progress_seconds=7.0,
    max_live=6,
    max_live_per_peer=4,
    max_exposed_bytes=100,
    max_exposed_bytes_per_peer=70,
    max_failures_per_peer=5,
    failure_seconds=50.0,
)

LIVE = (TokenState.MINTED, TokenState.CLAIMED, TokenState.INTERRUPTED)

peers = st.sampled_from(PEERS)
objects = st.sampled_from(OBJECTS)
sessions = st.sampled_from(SESSIONS)


@dataclass(eq=False)
class Model:
    """What one token should be."""

    capability: Capability
    deadline: float
    state: TokenState = TokenState.MINTED
    holder: Claim | None = None


class Machine(RuleBasedStateMachine):
    tokens: Bundle[Model] = Bundle("tokens")
    claims: Bundle[tuple[Model, Claim]] = Bundle("claims")

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.book = TokenBook(LIMITS, clock=lambda: self.now)
        self.versions = dict.fromkeys(OBJECTS, 0)
        self.models: list[Model] = []
        self.failures: dict[NodeId, tuple[int, float]] = {}

    def live(self) -> list[Model]:
        for model in self.models:
            if model.state in LIVE and model.deadline <= self.now:
                model.state, model.holder = TokenState.EXPIRED, None
        self.models = [model for model in self.models if model.state in LIVE]
        return self.models

    @rule(
        target=tokens,
        audience=peers,
        object_id=objects,
        owner=peers,
        session=sessions,
        nbytes=st.integers(0, 40),
    )
    def mint(self, audience: NodeId, object_id: str, owner: NodeId, session: str, nbytes: int):  # type: ignore[no-untyped-def]
        live = [model.capability.facts for model in self.live()]
        own = [facts for facts in live if facts.owner == owner]
        fits = (
            len(live) < LIMITS.max_live
            and len(own) < LIMITS.max_live_per_peer
            and sum(facts.nbytes for facts in live) + nbytes <= LIMITS.max_exposed_bytes
            and sum(facts.nbytes for facts in own) + nbytes <= LIMITS.max_exposed_bytes_per_peer
        )
        try:
            capability = self.book.mint(
                issuer=PEERS[0],
                audience=audience,
                action="read",
                object_id=object_id,
                version=self.versions[object_id],
                meta_digest=b"",
                nbytes=nbytes,
                session=session,
                owner=owner,
            )
        except AccessDenied:
            assert not fits
            return multiple()
        assert fits
        model = Model(capability, self.now + LIMITS.claim_seconds)
        self.models.append(model)
        return model

    @rule(target=claims, model=tokens, stranger=st.none() | peers)
    def claim(self, model: Model, stranger: NodeId | None):  # type: ignore[no-untyped-def]
        self.live()
        facts = model.capability.facts
        audience = facts.audience if stranger is None else stranger
        mine = audience == facts.audience
        free = model.state in (TokenState.MINTED, TokenState.INTERRUPTED)
        same = self.versions[facts.object_id] == facts.version
        try:
            claim = self.book.claim(
                model.capability.encode(),
                audience=audience,
                action="read",
                version_of=self.versions.get,
            )
        except TokenRefused:
            assert not (mine and free and same)
            if mine and free:
                model.state = TokenState.FAILED
            count, since = self.failures.get(audience, (0, self.now))
            if self.now - since >= LIMITS.failure_seconds:
                count, since = 0, self.now
            self.failures[audience] = (count + 1, since)
            return multiple()
        assert mine
        assert free
        assert same
        if model.state is TokenState.MINTED:
            model.deadline = self.now + LIMITS.progress_seconds
        model.state, model.holder = TokenState.CLAIMED, claim
        return model, claim

    @rule(pair=claims, nbytes=st.integers(0, 2))
    def progress(self, pair: tuple[Model, Claim], nbytes: int) -> None:
        model, claim = pair
        self.live()
        try:
            claim.progress(nbytes)
        except TokenRefused:
            assert model.holder is not claim
        else:
            assert model.holder is claim
            if nbytes:
                model.deadline = self.now + LIMITS.progress_seconds

    @rule(pair=claims)
    def deliver(self, pair: tuple[Model, Claim]) -> None:
        model, claim = pair
        self.live()
        try:
            claim.delivered()
        except TokenRefused:
            assert model.holder is not claim
        else:
            assert model.holder is claim
            model.state, model.holder = TokenState.DELIVERED, None

    @rule(pair=claims, fail=st.booleans())
    def break_off(self, pair: tuple[Model, Claim], fail: bool) -> None:
        model, claim = pair
        self.live()
        if fail:
            claim.failed("test")
        else:
            claim.interrupted()
        if model.holder is claim:
            model.state = TokenState.FAILED if fail else TokenState.INTERRUPTED
            model.holder = None
            assert claim.state is model.state

    @rule(
        object_id=st.none() | objects,
        session=st.none() | sessions,
        owner=st.none() | peers,
    )
    def revoke(self, object_id: str | None, session: str | None, owner: NodeId | None) -> None:
        if object_id is None and session is None and owner is None:
            return
        self.book.expire(self.now)
        matching = [
            model
            for model in self.live()
            if (object_id is None or model.capability.facts.object_id == object_id)
            and (session is None or model.capability.facts.session == session)
            and (owner is None or model.capability.facts.owner == owner)
        ]
        assert self.book.revoke(object_id=object_id, session=session, owner=owner) == len(matching)
        for model in matching:
            model.state, model.holder = TokenState.REVOKED, None

    @rule(object_id=objects)
    def change(self, object_id: str) -> None:
        self.versions[object_id] += 1

    @rule(seconds=st.sampled_from([0.5, 3.0, 7.0, 10.0, 50.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tick(self) -> None:
        self.book.expire(self.now)
        live = self.live()
        assert self.book.next_deadline() == min((model.deadline for model in live), default=None)

    @invariant()
    def the_counts_agree(self) -> None:
        self.book.expire(self.now)
        facts = [model.capability.facts for model in self.live()]
        counts = self.book.counts()
        assert counts.live == len(facts)
        assert counts.exposed_bytes == sum(each.nbytes for each in facts)
        owners = {each.owner for each in facts}
        assert counts.live_by_peer == {
            owner: sum(each.owner == owner for each in facts) for owner in owners
        }
        assert counts.exposed_bytes_by_peer == {
            owner: sum(each.nbytes for each in facts if each.owner == owner) for owner in owners
        }

    @invariant()
    def the_failures_agree(self) -> None:
        for peer in PEERS:
            count, since = self.failures.get(peer, (0, 0.0))
            recent = self.now - since < LIMITS.failure_seconds
            expected = recent and count >= LIMITS.max_failures_per_peer
            assert self.book.too_many_failures(peer) is expected


class TestMachine(Machine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
