"""Who a node is: an Ed25519 public key, the secret behind it, and the ways people write it.

A node id is the 32 bytes of a public key (RFC 8032 section 5.1.5). In full it is written as 52
lower-case base32 characters; people read and type the short form, ``k7f3-9q2m``, a unique prefix,
or a petname of their own choosing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from auth.encoding import base32_decode, base32_encode
from auth.errors import IdentityError

__all__ = ["NodeId", "SecretKey", "check_petname", "match_node"]

KEY_BYTES = 32
_TEXT_LENGTH = 52

# Shorter prefixes name some node by accident: a typing error must not pick a peer.
_SHORTEST_PREFIX = 4

_PETNAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_SHORT_FORM = re.compile(r"[a-z2-7]{4}-[a-z2-7]{4}", re.ASCII)

# The y coordinates of the eight points of small order, and the two that spell y again as y + p,
# little-endian without the sign bit (RFC 8032 section 5.1.2). Under such a "key" a signature can be
# made without any secret, so it identifies nobody.
_FIELD_PRIME = 2**255 - 19
_SMALL_ORDER_Y = frozenset(
    {
        0,
        1,
        _FIELD_PRIME - 1,
        _FIELD_PRIME,
        _FIELD_PRIME + 1,
        int.from_bytes(
            bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
            "little",
        ),
        int.from_bytes(
            bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
            "little",
        ),
    }
)
_Y_MASK = 2**255 - 1


@dataclass(frozen=True, slots=True, order=True, repr=False)
class NodeId:
    """A node: the 32 raw bytes of its Ed25519 public key.

    Hashable and ordered. ``str()`` is the full text form, which :meth:`parse` reads.

    Raises:
        IdentityError: ``raw`` is not 32 bytes.
    """

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != KEY_BYTES:
            raise IdentityError("making a node id", why=f"it takes {KEY_BYTES} bytes of public key")

    def __str__(self) -> str:
        return base32_encode(self.raw)

    def __repr__(self) -> str:
        return f"NodeId({self.short})"

    @property
    def short(self) -> str:
        """The first 8 of 52 characters, as people read them: ``k7f3-9q2m``. Not unique by force."""
        text = str(self)
        return f"{text[:4]}-{text[4:8]}"

    @property
    def is_weak(self) -> bool:
        """Whether the key is a point of small order, under which anybody can sign."""
        return int.from_bytes(self.raw, "little") & _Y_MASK in _SMALL_ORDER_Y

    @classmethod
    def parse(cls, text: str) -> NodeId:
        """Read the full text form: 52 base32 characters, in either case.

        Raises:
            IdentityError: another length, another alphabet, or no key; ``why`` says which.
        """
        if len(text) != _TEXT_LENGTH:
            raise _unreadable(text, f"it has {len(text)} characters, a node id has {_TEXT_LENGTH}")
        try:
            node_id = cls(base32_decode(text))
        except ValueError as error:
            raise _unreadable(text, str(error)) from None
        if str(node_id) != text.lower():
            raise _unreadable(text, "its last character can't end a node id: was it altered?")
        if node_id.is_weak:
            raise _unreadable(text, "it is a key that anybody can sign with")
        return node_id

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Whether this node made ``signature`` (64 bytes) over ``message``. Never raises."""
        if self.is_weak:
            return False
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True


class SecretKey:
    """The Ed25519 secret that makes a node. Shows its node id only; can't be pickled or copied."""

    __slots__ = ("node_id", "private")

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self.private = private
        self.node_id = NodeId(private.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> SecretKey:
        """Make a new key from the system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_bytes(cls, seed: bytes) -> SecretKey:
        """Make the key of a 32-byte seed (RFC 8032 section 5.1.5).

        Raises:
            IdentityError: ``seed`` is not 32 bytes.
        """
        if len(seed) != KEY_BYTES:
            raise IdentityError("making a key", why=f"it takes a seed of {KEY_BYTES} bytes")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def to_bytes(self) -> bytes:
        """Return the 32-byte seed. It is the whole secret: keep it from logs and wires."""
        return self.private.private_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """Sign ``message``; 64 bytes, the same each time (RFC 8032 section 5.1.6)."""
        return self.private.sign(message)

    def __repr__(self) -> str:
        return f"SecretKey(node {self.node_id.short})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SecretKey can't be pickled or copied; use to_bytes() if you must")


def check_petname(name: str) -> str:
    """Return ``name`` if it can be a petname.

    It has 1 to 63 of ``A-Z a-z 0-9 . _ -``, the first a letter or digit, and does not look like a
    node id, so that one node is not taken for another.

    Raises:
        IdentityError: it can't be; ``why`` says the rule it breaks.
    """
    if _PETNAME.fullmatch(name) is None:
        raise IdentityError(
            f"petname {name[:64]!r}",
            why="it has other than 1 to 63 of A-Z a-z 0-9 . _ - or starts with one of . _ -",
        )
    lower = name.lower()
    if _SHORT_FORM.fullmatch(lower) or len(lower) == _TEXT_LENGTH:
        raise IdentityError(f"petname {name!r}", why="it would be taken for a node id")
    return name


def match_node(text: str, candidates: Mapping[NodeId, str | None]) -> NodeId:
    """Find the one candidate that ``text`` names.

    ``text`` is a full id, else a petname, else the short form or a prefix of at least 4 characters
    of either form of the id.

    Args:
        text: what the user typed.
        candidates: the known nodes, each with its petname if it has one.

    Raises:
        IdentityError: it names no candidate, or several; the text lists those it could mean.
    """
    typed = text.strip()
    lower = typed.lower()
    for found in (
        [node for node in candidates if str(node) == lower],
        [node for node, petname in candidates.items() if petname == typed],
        [
            node
            for node in candidates
            if len(lower) >= _SHORTEST_PREFIX
            and (str(node).startswith(lower) or node.short.startswith(lower))
        ],
    ):
        if len(found) == 1:
            return found[0]
        if found:
            raise IdentityError(
                f"node {typed!r}",
                why=f"it could be any of {_listing(found, candidates)}",
                fix="Type more of the id.",
            )
    if not candidates:
        raise IdentityError(f"node {typed!r}", why="no node is known yet")
    raise IdentityError(
        f"node {typed!r}", why=f"it is none of the known ones: {_listing(candidates, candidates)}"
    )


def _listing(nodes: Iterable[NodeId], petnames: Mapping[NodeId, str | None]) -> str:
    ordered = sorted(nodes)
    names = [f"{petnames[n]} ({n.short})" if petnames[n] else n.short for n in ordered[:8]]
    if len(ordered) > len(names):
        names.append(f"{len(ordered) - len(names)} more")
    return ", ".join(names)


def _unreadable(text: str, why: str) -> IdentityError:
    shown = text if len(text) <= _TEXT_LENGTH else f"{text[:_TEXT_LENGTH]}..."
    return IdentityError(f"node id {shown!r}", why=why, fix="Copy the whole id again.")
