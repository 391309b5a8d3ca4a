"""Contenders take turns; what counts are the ratios of their medians within one run."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.benchmarks.harness import (
    LOOPBACK,
    QUIET_SHARE,
    Contender,
    Session,
    Site,
    Turn,
    median,
    other_load,
    session,
)

__all__ = ["Options", "Row", "Shown", "compare", "ratio", "ready", "take_turns"]

STARTS_AT_ONCE = 4
"""Most of a start is imports, and half of it is waiting."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What was asked for on the command line."""

    rounds: int = 5
    calls: int = 300
    sizes: tuple[int, ...] = (64 << 20, 256 << 20)
    scale: float = 1.0
    """Which part of its bytes a part moves."""
    losses: tuple[float, ...] = (0.0, 0.01)
    only: tuple[str, ...] = ("*",)
    """Names of contenders, with wildcards."""
    failed: list[str] = dataclasses.field(default_factory=list)
    """Which contenders broke, for the exit code."""

    def wants(self, name: str) -> bool:
        """Whether a contender is to take part. Ours is, always: it is what ratios are made with."""
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.only)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One contender's figure, the median of its rounds, with their range."""

    part: str
    figure: str
    contender: str
    unit: str
    median: float
    least: float
    most: float
    rounds: int
    nbytes: int = 0
    p99: float | None = None
    send_cpu: float | None = None
    receive_cpu: float | None = None
    """CPU seconds for 10^9 bytes at either end."""
    others: float | None = None
    """The share of the machine that others had meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """A ratio of two contenders, and what it should be at least (or at most)."""

    part: str
    what: str
    ratio: float | None
    goal: float | None = None
    at_most: bool = False

    @property
    def holds(self) -> bool | None:
        """Whether the goal is reached; None where there is none, or no figure."""
        if self.ratio is None or self.goal is None:
            return None
        return self.ratio <= self.goal if self.at_most else self.ratio >= self.goal


@contextlib.contextmanager
def ready(
    contenders: Mapping[str, Contender],
    options: Options,
    sites: Callable[[str], tuple[Site, Site]] = lambda name: (LOOPBACK, LOOPBACK),
) -> Iterator[dict[str, Session]]:
    """Start those contenders that are wanted and can take part; say why others can't.

    `sites` are where a contender's sender and receiver run.
    """
    if (load := other_load()) > QUIET_SHARE:
        print(f"warning: others use {load:.0%} of this machine", file=sys.stderr)
    wanted = {}
    for name, contender in contenders.items():
        if options.wants(name):
            if (why := contender.missing()) is None:
                wanted[name] = contender
            else:
                _left_out(name, why)
    with contextlib.ExitStack() as stack:
        sessions: dict[str, Session] = {}

        def start(name: str) -> None:
            opening = session(wanted[name], *sites(name))
            try:
                sessions[name] = opening.__enter__()
            except (OSError, RuntimeError) as error:
                _left_out(name, str(error))
                options.failed.append(name)
            else:
                stack.push(opening)

        with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
            for started in [pool.submit(start, name) for name in wanted]:
                started.result()
        yield {name: sessions[name] for name in wanted if name in sessions}


def take_turns(
    sessions: dict[str, Session], options: Options, turn: Callable[[Session], Turn]
) -> dict[str, list[Turn]]:
    """Return the turns of each contender; one before them, that is not measured, warms it up.

    One that breaks is taken out of `sessions`, and the others go on.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in sessions}
    rounds = options.rounds
    for number in range(rounds + 1):
        for name, each in list(sessions.items()):
            try:
                taken = turn(each)
            except (EOFError, OSError) as error:  # a broken pipe and a time-out are of the latter
                print(f"failed: {name}: {str(error) or type(error).__name__}", file=sys.stderr)
                options.failed.append(name)
                del sessions[name], turns[name]
                continue
            if number:
                turns[name].append(taken)
            _progress(f"{name:40.40} {number}/{rounds}")
    _progress("")
    return turns


def rate_row(part: str, figure: str, name: str, turns: list[Turn]) -> Row:
    """Return how fast bytes moved, in megabytes (10^6) a second."""
    rates = [turn.nbytes / turn.seconds / 1e6 for turn in turns]
    gigabytes = sum(turn.nbytes for turn in turns) / 1e9
    return Row(
        part,
        figure,
        name,
        "MB/s",
        median(rates),
        min(rates),
        max(rates),
        len(turns),
        nbytes=turns[0].nbytes,
        send_cpu=sum(turn.send_cpu for turn in turns) / gigabytes,
        receive_cpu=sum(turn.receive_cpu for turn in turns) / gigabytes,
        others=_others(turns),
    )


def trip_row(part: str, figure: str, name: str, turns: list[Turn]) -> Row:
    """Return how long a round trip took, in microseconds: the median of the rounds' medians."""
    medians = [median(list(turn.trips)) * 1e6 for turn in turns]
    slowest = [sorted(turn.trips)[int(len(turn.trips) * 0.99)] * 1e6 for turn in turns]
    return Row(
        part,
        figure,
        name,
        "us",
        median(medians),
        min(medians),
        max(medians),
        len(turns),
        p99=median(slowest),
        others=_others(turns),
    )


def compare(
    part: str,
    figure: str,
    sessions: dict[str, Session],
    options: Options,
    turn: Callable[[Session], Turn],
) -> list[Row]:
    """Let contenders take turns; return a row for each."""
    turns = take_turns(sessions, options, turn)
    return [
        (trip_row if taken[0].trips else rate_row)(part, figure, name, taken)
        for name, taken in turns.items()
    ]


def ratio(rows: list[Row], one: str, other: str, figure: str | None = None) -> float | None:
    """Return the median of `one` over that of `other`; None if one of them took no part."""
    found: dict[str, Any] = {
        row.contender: row.median for row in rows if figure is None or row.figure == figure
    }
    return found[one] / found[other] if one in found and other in found else None


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:48}\r", end="", file=sys.stderr, flush=True)


def _left_out(name: str, why: str) -> None:
    print(f"left out: {name}: {why}", file=sys.stderr)


def _others(turns: list[Turn]) -> float:
    machine = sum(turn.machine for turn in turns)
    return sum(turn.others for turn in turns) / machine if machine else 0.0
