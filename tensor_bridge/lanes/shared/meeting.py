"""How two nodes get together on a Unix socket: the call ``tensor.lane``, and one-time proofs.

The asker tells where it runs, in marks that say nothing to anybody elsewhere (see `host`). The
answerer, if it runs there too, listens at an address drawn for this one time, and answers with it,
its own marks, and a secret. The asker connects, and both show that they know the secret, each in
its own way, so that nobody learns it, or the other's proof, who has only got at the socket.
"""

from __future__ import annotations

import dataclasses
import hmac
from typing import Self

from tensor_bridge.fields import Fields
from tensor_bridge.lanes.shared.host import FACTS, MARK_BYTES, NONCE_BYTES
from transport import CborValue

__all__ = [
    "ADDRESS_BYTES",
    "LANE_CALL",
    "SECRET_BYTES",
    "LaneAsked",
    "LaneOffered",
    "LaneRefused",
    "decode_answer",
    "proof",
]

LANE_CALL = "tensor.lane"

ADDRESS_BYTES = 16
SECRET_BYTES = 32

MAX_WHY = 256
"""Longest reason, in characters."""


@dataclasses.dataclass(frozen=True, slots=True)
class LaneAsked:
    """A wish to share memory: where the asker runs."""

    nonce: bytes
    marks: tuple[bytes, ...]

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"nonce": self.nonce, "marks": list(self.marks)}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "wish to share memory")
        nonce = fields.data("nonce", shortest=NONCE_BYTES, longest=NONCE_BYTES)
        message = cls(nonce, _marks(fields))
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class LaneOffered:
    """Where to connect, what to prove, and where the answerer runs."""

    address: bytes
    secret: bytes = dataclasses.field(repr=False)
    marks: tuple[bytes, ...]

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"address": self.address, "secret": self.secret, "marks": list(self.marks)}


@dataclasses.dataclass(frozen=True, slots=True)
class LaneRefused:
    """There is no memory to share, or not `now`: the answerer is just asking the same."""

    why: str
    now: bool = False

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"why": self.why, "now": self.now}


def decode_answer(value: CborValue) -> LaneOffered | LaneRefused:
    """Return the answer to a wish that `value` holds."""
    fields = Fields(value, "answer about shared memory")
    answer: LaneOffered | LaneRefused
    if fields.has("why"):
        answer = LaneRefused(fields.text("why", longest=MAX_WHY), fields.flag("now"))
    else:
        answer = LaneOffered(
            fields.data("address", shortest=ADDRESS_BYTES, longest=ADDRESS_BYTES),
            fields.data("secret", shortest=SECRET_BYTES, longest=SECRET_BYTES),
            _marks(fields),
        )
    fields.finish()
    return answer


def proof(secret: bytes, side: bytes) -> bytes:
    """Return what shows on the Unix socket that the `side` that sends it knows the secret."""
    return hmac.digest(secret, b"quicmesh lane 1" + side, "sha256")


def _marks(fields: Fields) -> tuple[bytes, ...]:
    marks = tuple(
        item
        for item in fields.items("marks", len(FACTS))
        if isinstance(item, bytes) and len(item) == MARK_BYTES
    )
    if len(marks) != len(FACTS):
        raise fields.wrong(f"'marks' must be {len(FACTS)} byte strings of {MARK_BYTES}")
    return marks
