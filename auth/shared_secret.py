"""An authorizer that admits whoever proves to know a secret, without the secret ever being sent.

Both ends are given the same secret. The listener's authorizer asks; the dialer answers with an HMAC
(RFC 2104) over both node ids and fresh nonces of both, see :mod:`auth.proof`; the listener answers
with its own, so that each knows that the other knows. Whoever was dialled and sees a proof can test
guesses against it: a passphrase has to be one that is not guessed, random bytes are better.
"""

from __future__ import annotations

import hashlib
import hmac
import unicodedata
from collections import OrderedDict
from collections.abc import Iterable
from typing import NoReturn

from auth.authorizer import (
    AccessRequest,
    Authorizer,
    ConnectRequest,
    FetchRequest,
    covered,
    parts,
    prompt_after_connect,
)
from auth.errors import IdentityError
from auth.grant import DEFAULT_SCOPES, Denial, Grant, Quotas
from auth.identity import NodeId
from auth.proof import Proof, Side, Transcript

__all__ = ["SharedSecret", "secret_of"]

MIN_BYTES = 16
"""Fewer random bytes could be found by trying."""

MIN_PASSPHRASE = 12
"""In characters. Even behind a slow derivation a shorter one is soon guessed."""

# 32 MiB and some tenths of a second for each guess (OWASP's advice for scrypt, RFC 7914).
_SCRYPT_COST = {"n": 1 << 15, "r": 8, "p": 3, "maxmem": 64 << 20, "dklen": 32}

_KEY_DOMAIN = b"quicmesh shared secret 1"
_SALT_DOMAIN = b"quicmesh shared secret 1 passphrase\0"

# Peers remembered as knowing the secret; the one that was not heard of for longest is forgotten.
_MAX_PROVED = 4096

# One text, whatever is wrong: a guesser must not learn how far it got.
_NOT_PROVED = Denial("shared-secret", "it has not proved that it knows this node's shared secret")
_BAD_SOURCE = Denial(
    "source", "the source of the fetch has not proved to this node that it knows the shared secret"
)


class SharedSecret:
    """A secret, as an authorizer for who is dialled and as the proof for who dials.

    At later stages, and on an application's own protocol, which has no exchange to prove anything
    in, it stands by the nodes that have proved it since this object was made. A fetch is allowed
    only from such a source.

    To change a secret, admit by both for a while: ``any_of(new, old)``.

    Args:
        secret: at least 16 random bytes, as of ``secrets.token_bytes(32)``.
        scopes: what a peer that knows it may do.
        quotas: how much of it.

    Raises:
        IdentityError: fewer than 16 bytes.
        ValueError: a scope is malformed.
    """

    __slots__ = ("_grant", "_key", "_proved")

    def __init__(
        self,
        secret: bytes,
        *,
        scopes: Iterable[str] = DEFAULT_SCOPES,
        quotas: Quotas | None = None,
    ) -> None:
        if len(secret) < MIN_BYTES:
            raise IdentityError(
                "taking a shared secret",
                why=f"it has {len(secret)} bytes, fewer than {MIN_BYTES}",
                fix="Draw one with secrets.token_bytes(32), or use SharedSecret.from_passphrase.",
            )
        self._key = hmac.digest(_KEY_DOMAIN, secret, "sha256")
        self._grant = Grant(frozenset(scopes), quotas=quotas or Quotas())
        self._proved: OrderedDict[NodeId, None] = OrderedDict()

    @classmethod
    def from_passphrase(
        cls,
        passphrase: str,
        *,
        mesh: str = "",
        scopes: Iterable[str] = DEFAULT_SCOPES,
        quotas: Quotas | None = None,
    ) -> SharedSecret:
        """Derive the secret from words, by scrypt: some tenths of a second and 32 MiB.

        Call it before the event loop starts, or in a worker thread.

        Args:
            passphrase: at least 12 characters; compared in Unicode form NFC.
            mesh: a name for who shares it, so that the same words elsewhere are another secret;
                the same on both sides.
            scopes: as in the class.
            quotas: as in the class.

        Raises:
            IdentityError: the passphrase is too short.
        """
        if len(passphrase) < MIN_PASSPHRASE:
            raise IdentityError(
                "taking a passphrase",
                why=f"it has {len(passphrase)} characters, fewer than {MIN_PASSPHRASE}",
                fix="Take several random words.",
            )
        words, name = (unicodedata.normalize("NFC", text).encode() for text in (passphrase, mesh))
        secret = hashlib.scrypt(words, salt=_SALT_DOMAIN + name, **_SCRYPT_COST)
        return cls(secret, scopes=scopes, quotas=quotas)

    @prompt_after_connect
    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        """Answer as :class:`~auth.authorizer.Authorizer` says."""
        peer = request.peer.node_id
        if isinstance(request, ConnectRequest) and request.challenge is not None:
            await request.challenge.proof()
            if not request.challenge.accept(self):
                return _NOT_PROVED
            self._remember(peer)
        elif not self._knows(peer):
            return _NOT_PROVED
        if isinstance(request, FetchRequest):
            source = request.source
            if not self._knows(source if isinstance(source, NodeId) else source.node_id):
                return _BAD_SOURCE
        return covered(self._grant, request)

    def tag(self, transcript: Transcript, side: Side) -> bytes:
        """Return the HMAC-SHA-256 with which ``side`` proves the secret."""
        return hmac.digest(self._key, transcript.message(side), "sha256")

    def verify(self, proof: Proof) -> bool:
        """Whether ``proof`` was made with this secret; takes as long either way."""
        return hmac.compare_digest(self.tag(proof.transcript, proof.side), proof.tag)

    def __repr__(self) -> str:
        return f"SharedSecret(<redacted>, scopes={sorted(self._grant.scopes)})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SharedSecret can't be pickled or copied")

    def _knows(self, node_id: NodeId) -> bool:
        if node_id not in self._proved:
            return False
        self._proved.move_to_end(node_id)
        return True

    def _remember(self, node_id: NodeId) -> None:
        self._proved[node_id] = None
        self._proved.move_to_end(node_id)
        if len(self._proved) > _MAX_PROVED:
            self._proved.popitem(last=False)


def secret_of(authorizer: Authorizer) -> SharedSecret | None:
    """Return the first shared secret that ``authorizer`` is or is combined of."""
    return next((part for part in parts(authorizer) if isinstance(part, SharedSecret)), None)
