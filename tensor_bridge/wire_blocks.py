"""The messages about tensors that lie in memory which their owners have made (see `lanes.shared`).

keep    KeepCall ->, <- Stored, or nothing: then the tensor is to be put in another way
give    GiveCall ->, <- Stored, or nothing: the same, of memory that was handed over for good
undo    UndoCall ->
find    ObjectCall ->, <- Found, or nothing: it does not lie in a block of the caller's
"""

from __future__ import annotations

import dataclasses
from typing import Self

from tensor_bridge.codec import TensorMeta, decode_meta, encode_meta
from tensor_bridge.fields import Fields
from tensor_bridge.wire import MAX_VERSION, name_of, take_id
from transport import CborValue

__all__ = ["FIRST_GIFT", "MAX_BLOCK", "Found", "GiveCall", "KeepCall", "UndoCall"]

MAX_BLOCK = (1 << 16) - 1

FIRST_GIFT = 1 << 63
"""Smallest number of memory that is handed over before anybody asks for it: beyond moves."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeepCall:
    """A tensor that lies in block `block`, lent as `lend`, for the peer to keep.

    `upload` names this put, as that of ``PutOpen``.
    """

    upload: str
    meta: TensorMeta
    block: int
    lend: int
    name: str | None = None

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        value: dict[str, CborValue] = {"lend": self.lend, "meta": encode_meta(self.meta)}
        if self.name is not None:
            value["name"] = self.name
        return value | {"block": self.block, "upload": self.upload}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "keep")
        message = cls(
            take_id(fields, "upload"),
            decode_meta(fields.value("meta")),
            fields.integer("block", high=MAX_BLOCK),
            fields.integer("lend", high=MAX_VERSION),
            name_of(fields),
        )
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class GiveCall:
    """A tensor that is all of some sealed memory, handed over as `gift`, for the peer to keep.

    `upload` names this put, as that of ``PutOpen``.
    """

    upload: str
    meta: TensorMeta
    gift: int
    name: str | None = None

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        value: dict[str, CborValue] = {
            "upload": self.upload,
            "meta": encode_meta(self.meta),
            "gift": self.gift,
        }
        return value if self.name is None else value | {"name": self.name}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "gift")
        message = cls(
            take_id(fields, "upload"),
            decode_meta(fields.value("meta")),
            fields.integer("gift", high=MAX_VERSION),
            name_of(fields),
        )
        fields.finish()
        if message.gift < FIRST_GIFT:
            raise fields.wrong(f"'gift' must be at least {FIRST_GIFT}")
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class UndoCall:
    """A put of the caller's that it has given up, whatever has become of it."""

    upload: str

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"upload": self.upload}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "undo")
        message = cls(take_id(fields, "upload"))
        fields.finish()
        return message


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """An object that lies in the block that was lent as `lend`."""

    meta: TensorMeta
    lend: int

    def encode(self) -> dict[str, CborValue]:
        """Return the message as it travels."""
        return {"lend": self.lend, "meta": encode_meta(self.meta)}

    @classmethod
    def decode(cls, value: CborValue) -> Self:
        """Return the message in `value`."""
        fields = Fields(value, "found tensor")
        message = cls(decode_meta(fields.value("meta")), fields.integer("lend", high=MAX_VERSION))
        fields.finish()
        return message
