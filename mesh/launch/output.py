"""What ranks print, line by line, each with its rank before it."""

from __future__ import annotations

from typing import BinaryIO

import anyio
import anyio.abc
import anyio.to_thread

__all__ = ["Lines", "pump"]

MAX_LINE = 64 << 10
"""Bytes of a line that are kept back for its end; more is shown as it comes."""


class Lines:
    """Cuts bytes into whole lines.

    Args:
        prefix: goes before each.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be shown now that `data` has come."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) >= MAX_LINE:
            lines.append(self._rest)
            self._rest = b""
        return b"".join(self._prefix + line + b"\n" for line in lines)

    def end(self) -> bytes:
        """Return what is left at the end."""
        rest, self._rest = self._rest, b""
        return self._prefix + rest + b"\n" if rest else b""


async def pump(source: anyio.abc.ByteReceiveStream, prefix: bytes, target: BinaryIO) -> None:
    """Copy what comes from `source` to `target`, with `prefix` before each line, until it ends."""
    lines = Lines(prefix)
    try:
        async for data in source:
            await _write(lines.feed(data), target)
    finally:
        with anyio.CancelScope(shield=True):
            await _write(lines.end(), target)


async def _write(data: bytes, target: BinaryIO) -> None:
    if data:  # in a thread: whoever reads may be slow
        await anyio.to_thread.run_sync(_write_all, data, target)


def _write_all(data: bytes, target: BinaryIO) -> None:
    try:
        target.write(data)
        target.flush()
    except (OSError, ValueError):
        pass  # whoever reads has gone; the ranks go on
