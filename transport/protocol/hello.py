"""The first exchange on a ``mesh/1`` connection: versions, features, limits, identity.

The dialer's hello is the request on its first stream; the listener replies with a welcome, or with
the error for which it refuses, and the stream ends. Unknown fields and features are ignored, so
that a newer node can say more; a version range without overlap is refused with both ranges.

Where the listener's authorizer wants the dialer to prove a secret, and the dialer has named the
feature `PROOF`, a challenge comes before the reply: a frame with the listener's nonce, to which the
dialer answers with its own nonce and its tag. The listener's tag is then in the welcome.
"""

from __future__ import annotations

import dataclasses

from auth.proof import NONCE_BYTES, TAG_BYTES
from transport.cbor import CborValue
from transport.errors import ProtocolError
from transport.frames import MAX_FRAME, MIN_FRAME

__all__ = [
    "BOOT_ID_LENGTH",
    "HELLO_MAX",
    "HELLO_SERVICE",
    "PROOF",
    "PROOF_MAX",
    "Hello",
    "Welcome",
    "challenge_value",
    "negotiate",
    "parse_challenge",
    "parse_proof",
    "proof_value",
]

HELLO_SERVICE = "mesh.hello"

MAX_CREDENTIAL = 4096
MAX_DELEGATION = 4096
MAX_ADDRESS_TEXT = 128

HELLO_MAX = 12288
"""Largest hello in bytes: credential, delegation, and the rest with room to spare. All that a
stranger can make us hold."""

BOOT_ID_LENGTH = 16
"""A node draws a boot id when it starts: the same key with another boot id has restarted, or is
alive twice."""

VERSIONS = (1, 1)
"""Oldest and newest protocol version spoken here."""

FEATURES: frozenset[str] = frozenset()
"""Optional abilities spoken here; both sides must name one for it to be used."""

MAX_FEATURES = 64

PROOF = "proof"
"""The feature of a dialer that has a shared secret to prove."""

PROOF_MAX = 256
"""Largest answer to a challenge in bytes; it takes about 80."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """What the dialer says first. `credential` is opaque, and secret to everyone else."""

    boot: bytes
    delegation: bytes | None = None
    credential: bytes = dataclasses.field(default=b"", repr=False)
    versions: tuple[int, int] = VERSIONS
    features: frozenset[str] = FEATURES
    max_frame: int = MAX_FRAME
    """Longest value that the sender accepts in a frame, in bytes; `MIN_FRAME` at least."""

    def to_value(self) -> CborValue:
        """Return the CBOR value, which travels in the stream's request frame."""
        value: dict[str, CborValue] = {
            "versions": list(self.versions),
            "features": [*sorted(self.features)],
            "max_frame": self.max_frame,
            "boot": self.boot,
            "credential": self.credential,
        }
        if self.delegation is not None:
            value["delegation"] = self.delegation
        return value

    @classmethod
    def from_value(cls, value: CborValue) -> Hello:
        """Check what arrived; `ProtocolError` says what is wrong with it."""
        fields = _Fields(value, "hello")
        return cls(
            boot=fields.boot(),
            delegation=fields.delegation(),
            credential=fields.binary("credential", MAX_CREDENTIAL),
            versions=fields.versions(),
            features=fields.features(),
            max_frame=fields.max_frame(),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Welcome:
    """What an accepting listener answers: the version chosen and who it is beyond its key."""

    version: int
    boot: bytes
    delegation: bytes | None = None
    features: frozenset[str] = FEATURES
    max_frame: int = MAX_FRAME
    observed: str = ""
    """The dialer's address as the listener sees it."""
    proof: bytes | None = dataclasses.field(default=None, repr=False)
    """The listener's tag, where it has asked for the dialer's."""

    def to_value(self) -> CborValue:
        """Return the CBOR value, which travels inside the stream's reply frame."""
        value: dict[str, CborValue] = {
            "version": self.version,
            "features": [*sorted(self.features)],
            "max_frame": self.max_frame,
            "boot": self.boot,
            "observed": self.observed,
        }
        if self.delegation is not None:
            value["delegation"] = self.delegation
        if self.proof is not None:
            value["proof"] = self.proof
        return value

    @classmethod
    def from_value(cls, value: CborValue) -> Welcome:
        """Check what arrived; `ProtocolError` says what is wrong with it."""
        fields = _Fields(value, "welcome")
        return cls(
            version=fields.positive("version"),
            boot=fields.boot(),
            delegation=fields.delegation(),
            features=fields.features(),
            max_frame=fields.max_frame(),
            observed=fields.text("observed", MAX_ADDRESS_TEXT),
            proof=fields.exactly("proof", TAG_BYTES) if "proof" in fields else None,
        )


def challenge_value(nonce: bytes) -> CborValue:
    """Return the challenge, which travels in a frame of its own before the reply."""
    return {"challenge": nonce}


def parse_challenge(value: CborValue) -> bytes | None:
    """Return the listener's nonce; None if `value` is no challenge, so the reply itself."""
    if not isinstance(value, dict) or "challenge" not in value:
        return None
    return _Fields(value, "challenge").exactly("challenge", NONCE_BYTES)


def proof_value(nonce: bytes, tag: bytes) -> CborValue:
    """Return the answer to a challenge, the second and last frame of the dialer's."""
    return {"nonce": nonce, "proof": tag}


def parse_proof(value: CborValue) -> tuple[bytes, bytes]:
    """Return the dialer's nonce and its tag; `ProtocolError` says what is wrong with them."""
    fields = _Fields(value, "answer to a challenge")
    return fields.exactly("nonce", NONCE_BYTES), fields.exactly("proof", TAG_BYTES)


def negotiate(theirs: tuple[int, int], ours: tuple[int, int] = VERSIONS) -> int:
    """Return the newest version both speak, or raise `ProtocolError` naming both ranges."""
    newest = min(theirs[1], ours[1])
    if newest < max(theirs[0], ours[0]):
        raise ProtocolError(
            "choice of a protocol version",
            why=f"they speak {theirs[0]} to {theirs[1]}, we speak {ours[0]} to {ours[1]}",
            fix="Upgrade the older of the two.",
        )
    return newest


class _Fields:
    """Reads typed fields out of a map from the wire."""

    def __init__(self, value: CborValue, what: str) -> None:
        if not isinstance(value, dict):
            raise ProtocolError(what, why="not a map")
        self._value = value
        self._what = what

    def __contains__(self, name: str) -> bool:
        return name in self._value

    def _wrong(self, name: str) -> ProtocolError:
        return ProtocolError(self._what, why=f"field {name!r} is missing or malformed")

    def binary(self, name: str, limit: int) -> bytes:
        value = self._value.get(name)
        if not isinstance(value, bytes) or len(value) > limit:
            raise self._wrong(name)
        return value

    def delegation(self) -> bytes | None:
        name = "delegation"
        return self.binary(name, MAX_DELEGATION) if name in self._value else None

    def exactly(self, name: str, length: int) -> bytes:
        value = self.binary(name, length)
        if len(value) != length:
            raise self._wrong(name)
        return value

    def boot(self) -> bytes:
        return self.exactly("boot", BOOT_ID_LENGTH)

    def text(self, name: str, limit: int) -> str:
        value = self._value.get(name)
        if not isinstance(value, str) or len(value) > limit or not value.isprintable():
            raise self._wrong(name)
        return value

    def positive(self, name: str) -> int:
        value = self._value.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(name)
        return value

    def max_frame(self) -> int:
        size = self.positive("max_frame")
        if size < MIN_FRAME:
            raise ProtocolError(
                self._what, why=f"it accepts frames of {size} bytes, and {MIN_FRAME} is the least"
            )
        return size

    def versions(self) -> tuple[int, int]:
        value = self._value.get("versions")
        if not isinstance(value, list) or len(value) != 2:
            raise self._wrong("versions")
        low, high = value
        if type(low) is not int or type(high) is not int or not 0 < low <= high:
            raise self._wrong("versions")
        return low, high

    def features(self) -> frozenset[str]:
        value = self._value.get("features")
        if not isinstance(value, list) or len(value) > MAX_FEATURES:
            raise self._wrong("features")
        names = {name for name in value if isinstance(name, str)}
        if len(names) != len(value):
            raise self._wrong("features")
        return frozenset(names)
