"""Connection ids that an endpoint can tell from all others without a table.

An id is six random bytes and a tag of two, a keyed function of the six. Who lacks the key can't
link the ids of a connection, as RFC 9000 section 9.5 demands; who has it, such as a filter in the
kernel, drops what was not sent to an id of ours before it takes anybody's place in a queue. The
tag is no authentication: one in 65,536 guesses passes, and then meets the table of connections.
"""

from __future__ import annotations

import hmac
import os
import struct

from auth import SecretKey

__all__ = ["ID_LENGTH", "RANDOM_LENGTH", "ROUNDS", "ConnectionIds", "hash_words", "key_at"]

ID_LENGTH = 8
RANDOM_LENGTH = 6

KEY_LENGTH = 8

ROUNDS = (2, 4)
"""HalfSipHash-2-4: rounds after each word of the message, and at its end."""

_DOMAIN = b"quicmesh connection ids 1"

_MASK = 0xFFFFFFFF
_INITIAL = (0, 0, 0x6C796765, 0x74656462)
_FINISH = 0xFF
_LAST_WORD = RANDOM_LENGTH << 24
"""The length of the message goes into its last word."""

_TAIL = struct.Struct(">IH")


class ConnectionIds:
    """Draws the ids of one endpoint.

    Args:
        key: eight secret bytes; by default drawn at random.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key: tuple[int, int] = struct.unpack("<II", key or os.urandom(KEY_LENGTH))

    @classmethod
    def of(cls, key: SecretKey, port: int) -> ConnectionIds:
        """Return those of a node at a local port, be it the one that was there before it ended.

        What its peers still send to them reaches it, and is answered (`stateless_reset`).
        """
        return cls(key_at(key, port, _DOMAIN)[:KEY_LENGTH])

    def __repr__(self) -> str:
        return "<ConnectionIds>"

    @property
    def key(self) -> tuple[int, int]:
        """The two halves of the key. Secret."""
        return self._key

    def draw(self, length: int = ID_LENGTH) -> bytes:
        """Return a new id, which `is_ours` knows."""
        if length != ID_LENGTH:
            raise ValueError(f"connection ids have {ID_LENGTH} bytes here, not {length}")
        drawn = os.urandom(RANDOM_LENGTH)
        return drawn + self._tag(drawn)

    def is_ours(self, connection_id: bytes) -> bool:
        """Whether `connection_id` may have been drawn here: for all others with one in 65,536."""
        drawn, tag = connection_id[:RANDOM_LENGTH], connection_id[RANDOM_LENGTH:]
        return len(connection_id) == ID_LENGTH and self._tag(drawn) == tag

    def _tag(self, drawn: bytes) -> bytes:
        head, tail = _TAIL.unpack(drawn)
        digest = hash_words(self._key, (head, tail | _LAST_WORD))
        return (digest & 0xFFFF).to_bytes(2, "big")


def key_at(key: SecretKey, port: int, domain: bytes) -> bytes:
    """Return 32 secret bytes for the use that `domain` names, by whoever has `key` at `port`."""
    return hmac.digest(key.to_bytes(), domain + b"\0" + port.to_bytes(2, "big"), "sha256")


def hash_words(key: tuple[int, int], words: tuple[int, ...]) -> int:
    """Return HalfSipHash-2-4 of a message, its length within its last word, in 32 bits.

    Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012; the variant for 32-bit words is
    the one of the reference implementation and of Linux's ``hsiphash``.
    """
    low, high = key
    state = [low ^ _INITIAL[0], high ^ _INITIAL[1], low ^ _INITIAL[2], high ^ _INITIAL[3]]
    for word in words:
        state[3] ^= word
        for _ in range(ROUNDS[0]):
            _mix(state)
        state[0] ^= word
    state[2] ^= _FINISH
    for _ in range(ROUNDS[1]):
        _mix(state)
    return state[1] ^ state[3]


def _mix(state: list[int]) -> None:
    a, b, c, d = state
    a = (a + b) & _MASK
    b = (b << 5 | b >> 27) & _MASK ^ a
    a = (a << 16 | a >> 16) & _MASK
    c = (c + d) & _MASK
    d = (d << 8 | d >> 24) & _MASK ^ c
    a = (a + d) & _MASK
    d = (d << 7 | d >> 25) & _MASK ^ a
    c = (c + b) & _MASK
    b = (b << 13 | b >> 19) & _MASK ^ c
    c = (c << 16 | c >> 16) & _MASK
    state[:] = a, b, c, d
