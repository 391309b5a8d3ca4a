"""Capability tokens: one permits one named action on one object by one peer, once.

The owner's node keeps a :class:`TokenBook`, a state machine without I/O::

    MINTED ──claim──> CLAIMED ──delivered──> DELIVERED
                      │  ▲  └───failed─────> FAILED
           interrupted│  │claim (same audience)
                      ▼  │
                   INTERRUPTED         every live state: ──> EXPIRED, ──> REVOKED

A token is spent when the receiver acknowledged what it got. Until then, and until its deadline, the
same audience may take a broken transfer up again. Only the minter's monotonic clock judges time: a
token must be claimed within ``claim_seconds``, and from then on make progress every
``progress_seconds``.

The book keeps a hash of each secret, not the secret. What is wrong with a presented token is logged
here and never told: to the peer all causes read the same. A book lives in memory, so that tokens
end with the process that minted them.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn, TypeAlias

from auth.errors import AccessDenied, TokenRefused
from auth.grant import Denial
from auth.identity import NodeId

__all__ = [
    "Capability",
    "Claim",
    "ObjectVersion",
    "TokenBook",
    "TokenCounts",
    "TokenFacts",
    "TokenLimits",
    "TokenState",
]

SECRET_BYTES = 32

ObjectVersion: TypeAlias = int | tuple[int, ...]
"""Whatever the object's store calls its version; equal exactly when the content is the same."""

# Tokens are found by a part of their hash; the rest is compared in constant time.
_INDEX_BYTES = 8
_HASH_DOMAIN = b"quicmesh token 1\0"

# One token serves this many connections at most: enough for a bad link, an end for a trickster.
_MAX_CLAIMS = 64

# How many peers' failures are remembered; those who failed last.
_MAX_FAILING_PEERS = 4096

# Entries that are no longer valid stay in the heap until it has this many beyond twice the live.
_HEAP_SLACK = 64

_log = logging.getLogger("quicmesh.auth")


class TokenState(StrEnum):
    """Where a token is in its life. The last four are ends: the book has forgotten it."""

    MINTED = "minted"
    CLAIMED = "claimed"
    INTERRUPTED = "interrupted"
    DELIVERED = "delivered"
    FAILED = "failed"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Bounds of a :class:`TokenBook`; times in seconds, sizes in bytes.

    Args:
        claim_seconds: from minting to the first claim.
        progress_seconds: from one byte of progress to the next, also across an interruption.
        max_live: tokens that may be live at once.
        max_live_per_peer: of these, for one owner.
        max_exposed_bytes: sum over live tokens of what each exposes.
        max_exposed_bytes_per_peer: of these, for one owner.
        max_failures_per_peer: refused claims before :meth:`TokenBook.too_many_failures` says so.
        failure_seconds: a peer's count starts anew when its first failure is this old.

    Raises:
        ValueError: one is not above zero.
    """

    claim_seconds: float = 30.0
    progress_seconds: float = 30.0
    max_live: int = 4096
    max_live_per_peer: int = 256
    max_exposed_bytes: int = 1 << 40
    max_exposed_bytes_per_peer: int = 1 << 38
    max_failures_per_peer: int = 16
    failure_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above zero, and is {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """What a token permits, fixed when it is minted.

    Args:
        issuer: the node that minted it and has the object.
        audience: the only node that may claim it.
        action: what it may do, such as ``"read"``.
        object_id: with which object.
        version: which content of the object.
        meta_digest: digest of dtype, shape and layout.
        nbytes: bytes of payload that it exposes.
        session: the job or connection it was minted for; revoked with it.
        owner: the peer who answers for it: its limits count, and it is revoked with it.
    """

    issuer: NodeId
    audience: NodeId
    action: str
    object_id: str
    version: ObjectVersion
    meta_digest: bytes
    nbytes: int
    session: str
    owner: NodeId


@dataclass(frozen=True, slots=True, eq=False)
class Capability:
    """A minted token with its secret, to be sent to its audience and then forgotten.

    ``repr`` shows a fingerprint; it can't be pickled or copied.
    """

    secret: bytes = field(repr=False)
    facts: TokenFacts

    @property
    def fingerprint(self) -> str:
        """8 hexadecimal digits that name the token in logs and don't help to guess it."""
        return _fingerprint(_digest(self.secret))

    def encode(self) -> bytes:
        """Return the form for the wire, which :meth:`TokenBook.claim` takes: the 32-byte secret."""
        return self.secret

    def __repr__(self) -> str:
        facts = self.facts
        return f"Capability({self.fingerprint}, {facts.action} by {facts.audience.short})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Capability can't be pickled or copied; encode() is its form for the wire"
        )


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What a :class:`TokenBook` holds now.

    Args:
        live: live tokens.
        exposed_bytes: what they expose, summed.
        live_by_peer: live tokens of each owner that has any.
        exposed_bytes_by_peer: what those expose.
    """

    live: int
    exposed_bytes: int
    live_by_peer: dict[NodeId, int]
    exposed_bytes_by_peer: dict[NodeId, int]


class TokenBook:
    """The live tokens of one node. Safe to use from several threads; each call is atomic.

    Time passes only by ``clock``: every call first expires what is due. A driver that wants tokens
    to end on time when nobody calls waits for :meth:`next_deadline` and calls :meth:`expire`.

    Args:
        limits: its bounds.
        clock: monotonic time in seconds.
        random: source of secrets.
    """

    def __init__(
        self,
        limits: TokenLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.limits = TokenLimits() if limits is None else limits
        self._clock = clock
        self._random = random
        self._lock = threading.RLock()
        self._live: dict[bytes, _Token] = {}
        self._heap: list[tuple[float, int, _Token]] = []
        self._pushes = 0
        self._count_by_owner: Counter[NodeId] = Counter()
        self._bytes_by_owner: Counter[NodeId] = Counter()
        self._exposed_bytes = 0
        self._failures: OrderedDict[NodeId, tuple[int, float]] = OrderedDict()

    def mint(
        self,
        *,
        issuer: NodeId,
        audience: NodeId,
        action: str,
        object_id: str,
        version: ObjectVersion,
        meta_digest: bytes,
        nbytes: int,
        session: str,
        owner: NodeId,
    ) -> Capability:
        """Make a token; for the arguments see :class:`TokenFacts`.

        Raises:
            AccessDenied: it would exceed a limit, in all or of ``owner``; ``denial`` says which.
            ValueError: ``nbytes`` is negative.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, and is {nbytes}")
        facts = TokenFacts(
            issuer=issuer,
            audience=audience,
            action=action,
            object_id=object_id,
            version=version,
            meta_digest=meta_digest,
            nbytes=nbytes,
            session=session,
            owner=owner,
        )
        with self._lock:
            now = self._clock()
            self.expire(now)
            self._check_limits(facts)
            secret = self._random(SECRET_BYTES)
            digest = _digest(secret)
            if len(secret) != SECRET_BYTES or digest[:_INDEX_BYTES] in self._live:
                raise RuntimeError("the source of randomness is broken: it repeats itself")
            token = _Token(facts, digest, now + self.limits.claim_seconds)
            self._live[digest[:_INDEX_BYTES]] = token
            self._count_by_owner[owner] += 1
            self._bytes_by_owner[owner] += nbytes
            self._exposed_bytes += nbytes
            self._push(token)
            return Capability(secret, facts)

    def claim(
        self,
        secret: bytes,
        *,
        audience: NodeId,
        action: str,
        version_of: Callable[[str], ObjectVersion | None],
    ) -> Claim:
        """Take up a token, for the first time or after an interruption. Atomic: one of many wins.

        Args:
            secret: what the peer presented.
            audience: the node that presented it, as TLS proved.
            action: what it is about to do.
            version_of: gives an object's version now, None if it is gone. Called under the book's
                lock, with the object the token is for, only if all else is right.

        Raises:
            TokenRefused: unknown, spent, expired, revoked, claimed by another connection, for
                another peer, action or version. All read the same, and all count as a failure of
                ``audience``. A token whose object has changed is over.
        """
        with self._lock:
            now = self._clock()
            self.expire(now)
            digest = _digest(secret)
            token = self._live.get(digest[:_INDEX_BYTES])
            cause = self._objection(token, digest, audience, action, version_of)
            if token is None or cause is not None:
                # Who guesses is not to fill the log: one line in the time that failures count.
                is_first = self._count_failure(audience, now) == 1
                _log.log(
                    logging.WARNING if is_first else logging.DEBUG,
                    "token %s refused to %s: %s",
                    _fingerprint(digest),
                    audience.short,
                    cause,
                )
                raise _refusal()
            if token.state is TokenState.MINTED:
                token.deadline = now + self.limits.progress_seconds
                # The new deadline may be the sooner one, which the heap would find too late.
                self._push(token)
            token.state = TokenState.CLAIMED
            token.claims += 1
            token.claim = Claim(self, token)
            return token.claim

    def revoke(
        self,
        *,
        object_id: str | None = None,
        session: str | None = None,
        owner: NodeId | None = None,
        audience: NodeId | None = None,
        facts: TokenFacts | None = None,
    ) -> int:
        """End every live token that matches all of what is given; return how many did.

        ``facts`` are those of one capability, the very object: two tokens may permit the same.

        Raises:
            ValueError: nothing is given, which would match every token.
        """
        if all(given is None for given in (object_id, session, owner, audience, facts)):
            raise ValueError("revoke needs an object_id, a session, an owner, an audience or facts")
        with self._lock:
            matching = [
                token
                for token in self._live.values()
                if object_id in (None, token.facts.object_id)
                and session in (None, token.facts.session)
                and owner in (None, token.facts.owner)
                and audience in (None, token.facts.audience)
                and (facts is None or facts is token.facts)
            ]
            for token in matching:
                self._end(token, TokenState.REVOKED)
            return len(matching)

    def expire(self, now: float) -> int:
        """End every token whose deadline is at or before ``now``; return how many did."""
        with self._lock:
            ended = 0
            while (deadline := self.next_deadline()) is not None and deadline <= now:
                self._end(self._heap[0][2], TokenState.EXPIRED)
                ended += 1
            return ended

    def next_deadline(self) -> float | None:
        """Return the time at which the first live token expires, None if there is none."""
        with self._lock:
            # An entry is as old as its push: since then its token may have ended, been pushed
            # again, or had its deadline put off.
            while self._heap:
                deadline, entry, token = self._heap[0]
                if entry != token.entry:
                    heapq.heappop(self._heap)
                elif deadline != token.deadline:
                    heapq.heappop(self._heap)
                    self._push(token)
                else:
                    return deadline
            return None

    def counts(self) -> TokenCounts:
        """Return what the book holds now."""
        with self._lock:
            return TokenCounts(
                live=len(self._live),
                exposed_bytes=self._exposed_bytes,
                live_by_peer=dict(self._count_by_owner),
                exposed_bytes_by_peer=dict(self._bytes_by_owner),
            )

    def too_many_failures(self, peer: NodeId) -> bool:
        """Whether ``peer`` presented so many bad tokens that its connection should be closed."""
        with self._lock:
            count, since = self._failures.get(peer, (0, 0.0))
            recent = self._clock() - since < self.limits.failure_seconds
            return recent and count >= self.limits.max_failures_per_peer

    def __repr__(self) -> str:
        return f"TokenBook({len(self._live)} live)"

    def _check_limits(self, facts: TokenFacts) -> None:
        limits, owner = self.limits, facts.owner
        exposed = facts.nbytes + self._exposed_bytes
        exposed_by_owner = facts.nbytes + self._bytes_by_owner.get(owner, 0)
        if self._count_by_owner.get(owner, 0) >= limits.max_live_per_peer:
            raise _over(f"this peer has {limits.max_live_per_peer} live tokens, the limit", owner)
        if len(self._live) >= limits.max_live:
            raise _over(f"this node has {limits.max_live} live tokens, the limit", owner)
        if exposed_by_owner > limits.max_exposed_bytes_per_peer:
            limit = limits.max_exposed_bytes_per_peer
            raise _over(f"the live tokens of this peer would expose more than {limit} bytes", owner)
        if exposed > limits.max_exposed_bytes:
            limit = limits.max_exposed_bytes
            raise _over(f"the live tokens of this node would expose more than {limit} bytes", owner)

    def _objection(
        self,
        token: _Token | None,
        digest: bytes,
        audience: NodeId,
        action: str,
        version_of: Callable[[str], ObjectVersion | None],
    ) -> str | None:
        if token is None or not hmac.compare_digest(token.digest, digest):
            return "it is unknown, spent, expired or revoked"
        facts = token.facts
        if not hmac.compare_digest(facts.audience.raw, audience.raw):
            return f"it is for {facts.audience.short}"
        if facts.action != action:
            return f"it permits {facts.action!r}, not {action!r}"
        if token.state is TokenState.CLAIMED:
            return "it is claimed already"
        if token.claims >= _MAX_CLAIMS:
            return f"it was claimed {_MAX_CLAIMS} times"
        if version_of(facts.object_id) != facts.version:
            self._end(token, TokenState.FAILED)
            return f"object {facts.object_id} has changed or is gone"
        return None

    def _count_failure(self, peer: NodeId, now: float) -> int:
        count, since = self._failures.pop(peer, (0, now))
        if now - since >= self.limits.failure_seconds:
            count, since = 0, now
        self._failures[peer] = (count + 1, since)
        if len(self._failures) > _MAX_FAILING_PEERS:
            self._failures.popitem(last=False)
        return count + 1

    def _push(self, token: _Token) -> None:
        if len(self._heap) > 2 * len(self._live) + _HEAP_SLACK:
            self._heap = [item for item in self._heap if item[1] == item[2].entry]
            heapq.heapify(self._heap)
        # The number tells a token's one valid entry, and keeps tokens from being compared.
        self._pushes += 1
        token.entry = self._pushes
        heapq.heappush(self._heap, (token.deadline, self._pushes, token))

    def _end(self, token: _Token, state: TokenState) -> None:
        if token.over:
            return
        owner, nbytes = token.facts.owner, token.facts.nbytes
        del self._live[token.digest[:_INDEX_BYTES]]
        self._exposed_bytes -= nbytes
        self._count_by_owner[owner] -= 1
        self._bytes_by_owner[owner] -= nbytes
        if not self._count_by_owner[owner]:
            # Without this the counters would keep an entry for every peer that was ever here.
            del self._count_by_owner[owner], self._bytes_by_owner[owner]
        token.state = state
        token.entry = 0
        claim, token.claim = token.claim, None
        if claim is not None:
            claim._ended(state)


class Claim:
    """A claimed token, in the hands of the connection that serves it.

    It holds until it is delivered, failed or interrupted here, or until the book ends the token.
    From then on :meth:`progress` and :meth:`delivered` raise and the rest does nothing.
    """

    __slots__ = ("_book", "_on_end", "_state", "_token", "facts")

    def __init__(self, book: TokenBook, token: _Token) -> None:
        self._book = book
        self._token = token
        self._state = TokenState.CLAIMED
        self._on_end: Callable[[TokenState], object] | None = None
        self.facts = token.facts

    @property
    def state(self) -> TokenState:
        """CLAIMED while it holds; afterwards, how it ended."""
        return self._state

    def on_end(self, callback: Callable[[TokenState], object]) -> None:
        """Call ``callback`` once when the claim ends, however it does; at once if it has.

        So that a transfer that waits for credit learns that its token was revoked or expired. It
        runs in the thread that ended the claim, under the book's lock: it must not wait.
        """
        with self._book._lock:
            if self._state is TokenState.CLAIMED:
                self._on_end = callback
                return
        callback(self._state)

    def progress(self, nbytes: int) -> None:
        """Say that ``nbytes`` more bytes have moved, which puts the deadline off.

        Raises:
            TokenRefused: the claim no longer holds.
        """
        with self._book._lock:
            self._require()
            if nbytes > 0:
                self._token.deadline = self._book._clock() + self._book.limits.progress_seconds

    def delivered(self) -> None:
        """Spend the token: the receiver has acknowledged everything.

        Raises:
            TokenRefused: the claim no longer holds.
        """
        with self._book._lock:
            self._require()
            self._book._end(self._token, TokenState.DELIVERED)

    def interrupted(self) -> None:
        """Let the same audience claim the token again, until the deadline, which stays as it is."""
        with self._book._lock:
            if self._holds():
                self._token.state = TokenState.INTERRUPTED
                self._token.claim = None
                self._ended(TokenState.INTERRUPTED)

    def failed(self, reason: str) -> None:
        """End the token without delivery; ``reason`` goes to the log."""
        with self._book._lock:
            if self._holds():
                fingerprint = _fingerprint(self._token.digest)
                _log.info("token %s failed: %s", fingerprint, reason)
                self._book._end(self._token, TokenState.FAILED)

    def __repr__(self) -> str:
        return f"Claim({_fingerprint(self._token.digest)}, {self._state})"

    def _holds(self) -> bool:
        self._book.expire(self._book._clock())
        return self._token.claim is self

    def _require(self) -> None:
        if not self._holds():
            raise _refusal()

    def _ended(self, state: TokenState) -> None:
        self._state = state
        callback, self._on_end = self._on_end, None
        if callback is not None:
            callback(state)


class _Token:
    """What the book knows of one token."""

    __slots__ = ("claim", "claims", "deadline", "digest", "entry", "facts", "state")

    def __init__(self, facts: TokenFacts, digest: bytes, deadline: float) -> None:
        self.facts = facts
        self.digest = digest
        self.deadline = deadline
        self.entry = 0
        self.state = TokenState.MINTED
        self.claims = 0
        self.claim: Claim | None = None

    @property
    def over(self) -> bool:
        return self.state not in (TokenState.MINTED, TokenState.CLAIMED, TokenState.INTERRUPTED)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(_HASH_DOMAIN + secret).digest()


def _fingerprint(digest: bytes) -> str:
    return digest.hex()[:8]


def _refusal() -> TokenRefused:
    return TokenRefused(
        "use of a capability token",
        why="the token does not permit this, here, now",
        fix="Ask the owner of the object for a new one.",
    )


def _over(why: str, peer: NodeId) -> AccessDenied:
    error = AccessDenied(
        "minting a capability token",
        peer=peer.short,
        why=why,
        fix="Let transfers under way end first.",
    )
    error.denial = Denial("limit", why)
    return error
