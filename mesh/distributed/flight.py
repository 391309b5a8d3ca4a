"""What a group did last, kept for the moment when it times out.

The records of all ranks side by side show where they parted: which has issued an operation that
another has not. One is written once in a group's life, as JSON, to a new file that only its owner
can read, in ``$MESH_FLIGHT_DIR`` or the system's directory for temporary files; the error names it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from mesh.collective import CollectiveError, Signature
from mesh.distributed.steps import Step

__all__ = ["Flight", "FlightRecorder"]

DIRECTORY = "MESH_FLIGHT_DIR"
"""Environment variable with the directory for records."""

MAX_FLIGHTS = 256
"""Operations that are remembered."""


@dataclasses.dataclass(slots=True)
class Flight:
    """One operation: what was called, and how far it got. Times are of ``time.monotonic``."""

    sequence: int
    signature: Signature
    issued: float
    started: float | None = None
    ended: float | None = None
    error: str | None = None

    def as_entry(self, now: float) -> dict[str, Any]:
        """Return the form in the record."""
        state = "done" if self.ended else "running" if self.started else "queued"
        return {
            "sequence": self.sequence,
            "operation": str(self.signature),
            "state": "failed" if self.error else state,
            "issued_seconds_ago": round(now - self.issued, 6),
            "took_seconds": round((self.ended or now) - (self.started or self.issued), 6),
            "error": self.error,
        }


class FlightRecorder:
    """The last operations of one group on this rank.

    Args:
        group, rank, size: as of the exchange.
    """

    def __init__(self, group: str, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._flights: deque[Flight] = deque(maxlen=MAX_FLIGHTS)
        self._lock = threading.Lock()
        self._path: str | None = None

    def issue(self, sequence: int, steps: Sequence[Step], now: float) -> list[Flight]:
        """Take note of operations that were called `now`, and return their entries."""
        flights = [Flight(sequence + at, one.signature, now) for at, one in enumerate(steps)]
        self._flights.extend(flights)
        return flights

    def record(self, awaited: Sequence[int] = ()) -> dict[str, Any]:
        """Return the last operations, the oldest first, and who is awaited."""
        now = time.monotonic()
        flights = list(self._flights)
        done = [flight.sequence for flight in flights if flight.ended and not flight.error]
        return {
            "group": self._group,
            "rank": self._rank,
            "size": self._size,
            "process": os.getpid(),
            "time": time.time(),
            "last_issued": max((flight.sequence for flight in flights), default=None),
            "last_completed": max(done, default=None),
            "awaited_ranks": list(awaited),
            "operations": [flight.as_entry(now) for flight in flights],
        }

    def leave(self, error: CollectiveError) -> None:
        """Write the record, unless that was done, and say in `error` where it is."""
        with self._lock:
            if self._path is None:
                self._path = self._write(error)
        if self._path:
            error.fix = f"{error.fix or ''} What this rank did last: {self._path}".strip()

    def _write(self, error: CollectiveError) -> str:
        content = self.record(error.ranks) | {"error": str(error)}
        try:
            descriptor, path = tempfile.mkstemp(
                prefix=f"quicmesh-flight-rank{self._rank}-",
                suffix=".json",
                dir=os.environ.get(DIRECTORY) or None,
            )
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file, indent=1)
        except OSError:
            return ""  # a full disk is no reason to hide what happened
        return path
