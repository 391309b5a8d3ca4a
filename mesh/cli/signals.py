"""Ctrl+C and SIGTERM while the daemon runs in this process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

import anyio

__all__ = ["INTERRUPTED", "force_on_interrupt", "wait_for_signal"]

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of an interrupted command, as shells have it."""


async def wait_for_signal(received: Callable[[int], None]) -> None:
    """Call `received` with the number of the first SIGINT, SIGTERM or SIGHUP that arrives.

    On Windows, where loops receive no signals, it returns at once: Ctrl+C interrupts the loop.
    """
    if sys.platform == "win32":
        return
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async for number in signals:
            received(number)
            break
    force_on_interrupt()


def force_on_interrupt() -> None:
    """From now on a SIGINT ends the process at once, whatever its loop is doing."""
    signal.signal(signal.SIGINT, _force)


def _force(number: int, frame: FrameType | None) -> None:
    print("mesh: forced", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)
