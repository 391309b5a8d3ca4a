"""Strict reading of one CBOR map: every field by name, type and bound, and none left over."""

from __future__ import annotations

from transport import CborValue, ProtocolError

__all__ = ["MAX_BYTES", "Fields"]

MAX_BYTES = (1 << 63) - 1
"""Largest size in bytes that any field may hold: what torch counts storage sizes in."""


class Fields:
    """The fields of one map, each taken once.

    Args:
        value: what came off the wire.
        what: what the map is, for errors: ``"tensor description"``.

    Raises:
        ProtocolError: from the constructor if `value` is not a map; from each method if the field
            is missing, of another type or out of bounds; from `finish` if fields are left over.
    """

    def __init__(self, value: CborValue, what: str) -> None:
        self._what = what
        if not isinstance(value, dict):
            raise self.wrong(f"it is not a map but {type(value).__name__}")
        self._left = dict(value)

    def has(self, name: str) -> bool:
        """Return whether the optional field `name` was sent."""
        return name in self._left

    def integer(self, name: str, *, low: int = 0, high: int = MAX_BYTES) -> int:
        """Take the integer `name`, from `low` to `high`, both included."""
        return self._bounded(name, self._take(name), low, high)

    def integers(
        self, name: str, *, longest: int, low: int = 0, high: int = MAX_BYTES
    ) -> tuple[int, ...]:
        """Take the list `name` of at most `longest` integers from `low` to `high`."""
        return tuple(self._bounded(name, item, low, high) for item in self.items(name, longest))

    def items(self, name: str, longest: int) -> list[CborValue]:
        """Take the list `name` of at most `longest` values."""
        value = self._take(name)
        if not isinstance(value, list) or len(value) > longest:
            raise self.wrong(f"{name!r} must be a list of at most {longest}")
        return value

    def text(self, name: str, *, longest: int) -> str:
        """Take the text `name`: not empty, at most `longest` characters."""
        value = self._take(name)
        if not isinstance(value, str) or not 0 < len(value) <= longest:
            raise self.wrong(f"{name!r} must be a text of 1 to {longest} characters")
        return value

    def data(self, name: str, *, longest: int, shortest: int = 0) -> bytes:
        """Take the byte string `name` of `shortest` to `longest` bytes."""
        value = self._take(name)
        if not isinstance(value, bytes) or not shortest <= len(value) <= longest:
            raise self.wrong(f"{name!r} must be a byte string of {shortest} to {longest} bytes")
        return value

    def flag(self, name: str) -> bool:
        """Take the boolean `name`."""
        value = self._take(name)
        if not isinstance(value, bool):
            raise self.wrong(f"{name!r} must be a boolean")
        return value

    def value(self, name: str) -> CborValue:
        """Take the field `name` whatever it holds, for a decoder of its own."""
        return self._take(name)

    def finish(self) -> None:
        """Refuse what is left: an unknown field is a mistake, or of a version not agreed on."""
        if self._left:
            raise self.wrong(f"unknown field {min(self._left)!r:.40}")

    def wrong(self, why: str) -> ProtocolError:
        """Return the error that says what is wrong with this map."""
        return ProtocolError(f"reading of a {self._what}", why=why)

    def _take(self, name: str) -> CborValue:
        try:
            return self._left.pop(name)
        except KeyError:
            raise self.wrong(f"{name!r} is missing") from None

    def _bounded(self, name: str, value: CborValue, low: int, high: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(f"{name!r} must be an integer from {low} to {high}")
        return value
