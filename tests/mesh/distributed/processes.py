"""Starts ranks as real processes and collects what they print."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.programs import Program

DEADLINE = 50.0


class Rank:
    """One process of `tests.mesh.distributed.worker`."""

    def __init__(self, scenario: str, rank: int, size: int, store: Path, way: str = "host") -> None:
        worker = "tests.mesh.distributed.worker"
        self.process = Program(["-m", worker, scenario, str(rank), str(size), str(store), way])

    def wait_ready(self) -> None:
        """Wait for the line "ready"."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.process.communicate()[1]

    def result(self) -> Any:
        """Wait for a clean and quiet end, and return what was printed."""
        out, errors = self.process.communicate(timeout=DEADLINE)
        assert self.process.returncode == 0, errors
        assert errors == ""
        return json.loads(out.splitlines()[-1])


def start(scenario: str, size: int, tmp_path: Path, way: str = "host") -> list[Rank]:
    """Start the ranks, which share memory, or go over QUIC where `way` is "quic"."""
    store = tmp_path / f"store-{time.monotonic_ns()}"
    return [Rank(scenario, rank, size, store, way) for rank in range(size)]


def run(scenario: str, size: int, tmp_path: Path, way: str = "host") -> list[Any]:
    """Run a scenario on `size` ranks, each of which must end cleanly; return their results.

    What all have to say is shown if one has not: the first that complains is not always the first
    that failed.
    """
    ranks = start(scenario, size, tmp_path, way)
    try:
        ends = [rank.process.communicate(timeout=DEADLINE) for rank in ranks]
        errors = {number: told for number, (_, told) in enumerate(ends)}
        codes = [rank.process.returncode for rank in ranks]
        assert codes == [0] * size, errors
        assert set(errors.values()) == {""}, errors
        return [json.loads(out.splitlines()[-1]) for out, _ in ends]
    finally:
        end(ranks)


def end(ranks: list[Rank]) -> None:
    """Let nothing of them outlive the test."""
    for rank in ranks:
        rank.process.kill()
        rank.process.communicate()
