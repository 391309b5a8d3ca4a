"""A challenge between the two ends of a connection: prove that you know a secret.

The proof is a tag over both node ids, as TLS proved them, and a fresh nonce of each side. It is of
no use on another connection, at another node, in the other direction, or a second time. The dialer
goes first, for it has chosen whom to dial: a stranger who dials learns nothing that it could test
guesses of the secret against.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from auth.identity import KEY_BYTES, NodeId

__all__ = ["NONCE_BYTES", "TAG_BYTES", "Challenge", "Proof", "Prover", "Side", "Transcript"]

NONCE_BYTES = 32
TAG_BYTES = 32

_DOMAIN = b"quicmesh proof of a shared secret 1\0"


class Side(Enum):
    """Who made a tag. A tag of one side is never one of the other."""

    DIALER = b"D"
    LISTENER = b"L"


@dataclass(frozen=True, slots=True)
class Transcript:
    """What both ends of one connection know of their exchange.

    Raises:
        ValueError: a nonce is not 32 bytes.
    """

    dialer: NodeId
    listener: NodeId
    dialer_nonce: bytes
    listener_nonce: bytes

    def __post_init__(self) -> None:
        if {len(self.dialer_nonce), len(self.listener_nonce)} != {NONCE_BYTES}:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes")

    def message(self, side: Side) -> bytes:
        """Return what ``side`` makes its tag over; every part has one length, so none can shift."""
        parts = (self.dialer.raw, self.listener.raw, self.dialer_nonce, self.listener_nonce)
        message = _DOMAIN + side.value + b"".join(parts)
        assert len(message) == len(_DOMAIN) + 1 + 2 * KEY_BYTES + 2 * NONCE_BYTES
        return message


@dataclass(frozen=True, slots=True)
class Proof:
    """The tag that ``side`` presented on a connection. Nothing is proved until it is compared."""

    transcript: Transcript
    side: Side
    tag: bytes = field(repr=False)


class Prover(Protocol):
    """Whoever can make tags, so knows the secret."""

    def tag(self, transcript: Transcript, side: Side) -> bytes:
        """Return the 32 bytes that prove, on this one connection, that ``side`` knows it."""
        ...

    def verify(self, proof: Proof) -> bool:
        """Whether ``proof`` was made with the same secret; takes as long either way."""
        ...


class Challenge:
    """An authorizer's chance to have the peer of one connection prove a secret.

    Args:
        ask: makes the one round trip that it takes; None if the peer can't or does not answer.
    """

    def __init__(self, ask: Callable[[], Awaitable[Proof | None]]) -> None:
        self._ask: Callable[[], Awaitable[Proof | None]] | None = ask
        self._proof: Proof | None = None
        self.answer: bytes | None = None
        """A listener's own tag for its peer, once that one's proof was found right."""

    async def proof(self) -> Proof | None:
        """Return what the peer presents. It is asked once, however many authorizers want it."""
        ask, self._ask = self._ask, None
        if ask is not None:
            self._proof = await ask()
        return self._proof

    def accept(self, prover: Prover) -> bool:
        """Whether the proof at hand is right by ``prover``, whose own tag then answers it."""
        proof = self._proof
        if proof is None or not prover.verify(proof):
            return False
        self.answer = prover.tag(proof.transcript, Side.LISTENER)
        return True
