"""Whether two processes run on one kernel, under one user, and see the same of it.

Neither tells the other where it is: a stranger would learn of containers and users, and could
repeat what it was told. Each fact goes through HMAC-SHA-256 with the kernel's boot id as the key,
which only who is there can read, over both node ids and a nonce of the asker's:

    HMAC(boot id, "quicmesh host 1" || side || asker || answerer || nonce || name || 0x00 || value)

So equal marks mean equal facts, and are good for no other pair, no other time and no other side.
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
from pathlib import Path
from typing import NamedTuple

from auth import NodeId

__all__ = ["FACTS", "MARK_BYTES", "NONCE_BYTES", "Facts", "apart", "here", "unavailable"]

MARK_BYTES = 32
NONCE_BYTES = 16

ASKER, ANSWERER = b"A", b"B"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = Path("/proc/self/ns")

FACTS = {
    "kernel": "another host",
    "user namespace": "another user namespace",
    "network namespace": "another network namespace",
    "mount namespace": "another mount namespace",
    "process namespace": "another process namespace",
    "user": "another user",
}
"""What has to be equal, and what the other end runs on or under where it is not."""


class Facts(NamedTuple):
    """Where a process runs: the kernel's boot id, and the value of each of `FACTS`."""

    boot: bytes
    values: tuple[bytes, ...]

    def marks(
        self, side: bytes, asker: NodeId, answerer: NodeId, nonce: bytes
    ) -> tuple[bytes, ...]:
        """Return the marks that this process makes for a peer, one for each of `FACTS`.

        Args:
            side: `ASKER` or `ANSWERER`, which of the two this process is.
            asker, answerer: the ids as TLS has proved them.
            nonce: the asker's.
        """
        start = b"quicmesh host 1" + side + asker.raw + answerer.raw + nonce
        return tuple(
            hmac.digest(self.boot, start + name.encode() + b"\0" + value, "sha256")
            for name, value in zip(FACTS, self.values, strict=True)
        )


def apart(ours: tuple[bytes, ...], theirs: tuple[bytes, ...]) -> str | None:
    """Return what keeps two processes apart, by the marks that both make of one side."""
    for why, one, other in zip(FACTS.values(), ours, theirs, strict=True):
        if not hmac.compare_digest(one, other):
            return why
    return None


def unavailable() -> str | None:
    """Return why this process can't share memory with any other, None if it can."""
    has_parts = hasattr(os, "memfd_create") and hasattr(socket, "SO_PEERCRED")
    if sys.platform != "linux" or not has_parts:
        return "shared memory needs Linux"
    try:
        here()
    except OSError as error:
        return f"this system hides where a process runs: {error.strerror}"
    return None


def here() -> Facts:
    """Return where this process runs.

    Raises:
        OSError: it can't be found out.
    """
    boot = _BOOT_ID.read_bytes().strip()
    spaces = [bytes((_NAMESPACES / name).readlink()) for name in ("user", "net", "mnt", "pid")]
    return Facts(boot, (boot, *spaces, str(os.geteuid()).encode()))
