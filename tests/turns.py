"""Who may run now, of the processes that share a run of the suite.

Most tests wait more than they compute, and many run beside each other. Those marked ``alone``
measure what a neighbour would change: rates, shares of the processors, waits of milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

if sys.platform != "win32":
    import fcntl

__all__ = ["is_alone", "turn", "workers"]

MOST_WORKERS = 4
"""More gain little, and a container tells of its host's cores rather than of its own share."""


def workers(config: pytest.Config) -> int:
    """Return how many processes share this run; 0 is this one alone.

    That is so unless the whole suite is run: what is named runs where one can watch it, and what is
    slow measures whole machines.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if not whole or config.getoption("--slow") or sys.platform == "win32":
        return 0
    cores = os.cpu_count() or 1
    return min(cores + 1, MOST_WORKERS)


_room: IO[str] | None = None
"""What this process keeps locked from one test that is alone to the next."""


@contextlib.contextmanager
def turn(item: pytest.Item, following: pytest.Item | None) -> Iterator[None]:
    """Wait until a test may begin: beside those of other processes, or with none of them running.

    Whoever waits to be alone keeps others from beginning. A process that dies gives up its turn.
    """
    global _room
    if not hasattr(item.config, "workerinput"):
        yield
        return
    room, _room = _room, None
    if room is None:
        room = _enter(Path(item.config.option.basetemp).parent, alone=is_alone(item))
    try:
        yield
    finally:
        if is_alone(item) and following is not None and is_alone(following):
            _room = room
        else:
            # Closing it does not do where a process that the test has forked has it open as well.
            fcntl.flock(room, fcntl.LOCK_UN)
            room.close()


def is_alone(item: pytest.Item) -> bool:
    """Whether no other test may run beside this one."""
    return item.get_closest_marker("alone") is not None


def _enter(shared: Path, *, alone: bool) -> IO[str]:
    room = (shared / "room").open("w")
    with (shared / "door").open("w") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    return room
