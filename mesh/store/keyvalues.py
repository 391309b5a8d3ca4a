"""Keys, values and queues of one job, as torch's stores have them; bounded, and no I/O."""

from __future__ import annotations

import dataclasses
from collections import deque

from transport import LimitExceeded, ProtocolError

__all__ = ["KeyValues", "StoreLimits"]

ENTRY_COST = 128
"""What an entry counts for beside its bytes, so that empty ones are bounded too."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much one job may keep.

    Attributes:
        max_bytes: keys, values and queues together.
        max_value: longest value; one that `append` grows, too. Values travel in one frame of 1 MiB.
    """

    max_bytes: int = 64 << 20
    max_value: int = 1000 << 10


class KeyValues:
    """What one job keeps.

    Raises, all methods that write:
        LimitExceeded: the job would keep too much.
    """

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self._limits = limits or StoreLimits()
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._used = 0

    def __len__(self) -> int:
        return len(self._values)

    @property
    def used(self) -> int:
        """Bytes that are kept, as the limits count them."""
        return self._used

    def keys(self) -> list[str]:
        """Return all keys, sorted."""
        return sorted(self._values)

    def has(self, *keys: str) -> bool:
        """Return whether all of `keys` have values."""
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes | None:
        """Return a value, or None if there is none."""
        return self._values.get(key)

    def set(self, key: str, value: bytes) -> None:
        """Set a value."""
        former = self._values.get(key)
        gone = 0 if former is None else _cost(key, former)
        self._charge(value, _cost(key, value) - gone)
        self._values[key] = value

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins as 0 and is kept as decimal digits; return the sum.

        Raises:
            ProtocolError: the value is no number.
        """
        text = self._values.get(key, b"0")
        try:
            total = int(text[:32]) + amount
        except ValueError:
            raise ProtocolError(f"adding to {key!r}", why="its value is no number") from None
        if not -(1 << 63) <= total < 1 << 63:
            raise ProtocolError(f"adding to {key!r}", why="the sum has more than 64 bits")
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a value if the present one is `expected`; return what is there afterwards.

        Where there is none, it is set if nothing is expected; else `expected` is returned.
        """
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self.set(key, desired)
            return desired
        return expected if present is None else present

    def append(self, key: str, value: bytes) -> None:
        """Add to the end of a value, which begins empty."""
        self.set(key, self._values.get(key, b"") + value)

    def delete(self, key: str) -> bool:
        """Delete a value; return whether there was one."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._used -= _cost(key, value)
        return True

    def push(self, queue: str, value: bytes) -> None:
        """Add a value to the end of a queue."""
        self._charge(value, _cost(queue, value))
        self._queues.setdefault(queue, deque()).append(value)

    def pop(self, queue: str) -> bytes | None:
        """Take the first value of a queue; None if there is none."""
        values = self._queues.get(queue)
        if not values:
            return None
        value = values.popleft()
        if not values:
            del self._queues[queue]
        self._used -= _cost(queue, value)
        return value

    def length(self, queue: str) -> int:
        """Return how many values a queue has."""
        return len(self._queues.get(queue, ()))

    def _charge(self, value: bytes, cost: int) -> None:
        if len(value) > self._limits.max_value:
            raise LimitExceeded(
                "writing to a job's store",
                why=f"a value of {len(value)} bytes; the most is {self._limits.max_value}",
                fix="Stores are for addresses and states: send tensors as such.",
            )
        if cost > 0 and self._used + cost > self._limits.max_bytes:
            raise LimitExceeded(
                "writing to a job's store",
                why=f"the job keeps {self._used} bytes already, of {self._limits.max_bytes}",
                fix="Delete what is not needed any more.",
            )
        self._used += cost


def _cost(key: str, value: bytes) -> int:
    return len(key) + len(value) + ENTRY_COST
