"""What the contenders share: a serving child process, and figures about the machine."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil

QUIET_SECONDS = 0.5
QUIET_SHARE = 0.05
"""A quiet machine: less than this share of it is used by anybody else."""

START_SECONDS = 60.0


@contextlib.contextmanager
def child(serve: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """Run `serve(pipe, *arguments)` in a process of its own; yield its first word and the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_SECONDS):
            raise SystemExit(f"{serve.__module__}: the serving process did not start")
        yield ours.recv(), ours
    finally:
        process.terminate()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()


def other_load() -> float:
    """Return the share of the machine's CPU time used by others while we do nothing."""
    return psutil.cpu_percent(QUIET_SECONDS) / 100


def resident_bytes() -> int:
    """Return this process's resident memory."""
    return int(psutil.Process().memory_info().rss)
