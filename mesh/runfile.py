"""What a running daemon writes down so that the command on the same machine finds it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from auth import IdentityError, NodeId, SocketAddress
from auth.files import replace_file

__all__ = ["RunFile"]

MAX_FILE = 64 << 10
"""Largest run file that is read, in bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunFile:
    """The process, its boot and its addresses. True only while the daemon's lock is held.

    `control` are the addresses at which this very machine reaches the daemon, `addresses` those for
    others; `boot` is the random id of this start, in hex; `started` is unix time.
    """

    node_id: NodeId
    pid: int
    boot: str
    started: float
    version: str
    control: tuple[SocketAddress, ...]
    addresses: tuple[SocketAddress, ...]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        content = dataclasses.asdict(self) | {"node_id": str(self.node_id)}
        replace_file(path, (json.dumps(content, indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> RunFile | None:
        """Read the file; None when there is none, or one that is not a run file."""
        try:
            with path.open("rb") as file:
                content = json.loads(file.read(MAX_FILE))
            return cls(
                node_id=NodeId.parse(content["node_id"]),
                pid=int(content["pid"]),
                boot=str(content["boot"]),
                started=float(content["started"]),
                version=str(content["version"]),
                control=_addresses(content["control"]),
                addresses=_addresses(content["addresses"]),
            )
        except (
            OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, IdentityError,
        ):  # fmt: skip
            return None


def _addresses(values: list[list[str | int]]) -> tuple[SocketAddress, ...]:
    return tuple((str(host), int(port)) for host, port in values)
