"""How a node that has lost its state tells its peers: stateless resets (RFC 9000 section 10.3).

With each connection id, a node gives its peer a token. The token is a keyed function of the id, and
the key one of the node's own key and port: a node that starts anew on its port knows the token of
whatever id it is sent, and the peer, which finds it in the answer, need not wait until silence says
the same. A listener's peers have a token from the handshake on. A dialer's have none for the id
that they use; a dialer that starts anew dials.
"""

from __future__ import annotations

import hmac
import os

from auth import SecretKey
from transport.protocol.connection_ids import key_at
from transport.protocol.newcomers import Bucket, Rate

__all__ = ["FIXED_BIT", "LEAST", "MOST", "TOKEN_SIZE", "StatelessResets"]

TOKEN_SIZE = 16

_DOMAIN = b"quicmesh stateless reset 1"

LEAST_UNPREDICTABLE = 5
"""Bytes before the token (RFC 9000 section 10.3)."""

LEAST = LEAST_UNPREDICTABLE + TOKEN_SIZE
MOST = 42
"""Size of a reset in bytes: that of a packet with little to say."""

SENT, LOOKED_AT = Rate(100.0, burst=100), Rate(200.0, burst=200)
"""Resets sent, and datagrams that might be one, in a second. All others are met with silence."""

FIXED_BIT = 0x40


class StatelessResets:
    """Makes the tokens and the resets of one endpoint.

    A reset ends a connection for whoever can have one sent (RFC 9000 section 21.11). Only the very
    port for which a token was given answers with it, so that no second endpoint of the key, alive
    elsewhere, can be asked for it; and there the table of connections has every id that is in use.

    Args:
        key: the node's key, from which the key of the tokens is derived.
        port: the local UDP port.
    """

    def __init__(self, key: SecretKey, port: int) -> None:
        self._key = key_at(key, port, _DOMAIN)
        self._sent, self._looked_at = Bucket(SENT), Bucket(LOOKED_AT)

    def __repr__(self) -> str:
        return "<StatelessResets>"

    def token(self, connection_id: bytes) -> bytes:
        """Return the token of one of our ids. Secret until the connection is to end."""
        return hmac.digest(self._key, connection_id, "sha256")[:TOKEN_SIZE]

    def may_look(self, size: int, now: float) -> bool:
        """Whether to look if a datagram of `size` bytes, of no connection, is a peer's reset."""
        return size >= LEAST and _take(self._looked_at, now)

    def answer(self, connection_id: bytes, size: int, now: float) -> bytes | None:
        """Return the reset that answers a datagram of `size` bytes to an id that nobody has.

        It is smaller than what it answers, so that two nodes which both know nothing come to an end
        (RFC 9000 section 10.3.3), and nothing is amplified. None where there is to be no answer.
        """
        if size <= LEAST or not _take(self._sent, now):
            return None
        noise = bytearray(os.urandom(min(size - 1, MOST) - TOKEN_SIZE))
        noise[0] = noise[0] & (FIXED_BIT - 1) | FIXED_BIT
        return bytes(noise) + self.token(connection_id)


def _take(bucket: Bucket, now: float) -> bool:
    if not bucket.has_one(now):
        return False
    bucket.take()
    return True
