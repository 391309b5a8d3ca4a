"""Drives the ranks of torch's own suite through its tests, one test at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import select
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.programs import Program

__all__ = ["Outcome", "Suite"]

START_SECONDS = 60.0
"""How long the ranks may take to load the suite."""

TEST_SECONDS = 120.0
"""How long one test may take."""


LOG_TAIL = 4000
"""Characters of a rank's output that a failure shows."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one test went: passed, failed with `error`, or left out because `why`."""

    name: str
    why: str
    error: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether it ran on all ranks and held."""
        return not (self.why or self.error)


class Suite:
    """The ranks, as processes that go from test to test. A failure makes new ones.

    Args:
        backend: ``mesh``; or ``gloo``, with groups of the mesh in the place of gloo's.
        size: how many ranks.
    """

    def __init__(self, backend: str, size: int) -> None:
        self._backend = backend
        self._size = size
        self._ranks: list[Program] = []
        self._logs = tempfile.TemporaryDirectory(prefix="conformance-logs-")
        self.names: list[str] = []

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()
        self._logs.cleanup()

    def run(self, names: Sequence[str]) -> Iterator[Outcome]:
        """Run tests and yield how each went."""
        for name in names:
            outcome = self._run(name)
            if outcome.error:
                self._stop()
                self._start()
            yield outcome

    def _run(self, name: str) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
            for part in ("barrier", "test_dir", "init_dir"):
                (Path(directory) / part).mkdir()
            for rank in self._ranks:
                assert rank.stdin is not None
                rank.stdin.write(json.dumps([name, directory]) + "\n")
                rank.stdin.flush()
            try:
                answers = [self._answer(rank, TEST_SECONDS) for rank in range(self._size)]
            except RuntimeError as error:
                return Outcome(name, "", str(error), TEST_SECONDS)
        # A test may be meant for some ranks alone: the first that ran it speaks.
        errors = [a["error"] for a in answers if a["error"]]
        reasons = [a["why"] for a in answers]
        why = reasons[0] if all(reasons) else ""
        return Outcome(name, why, "\n".join(errors), max(a["seconds"] for a in answers))

    def _start(self) -> None:
        worker = ["-m", "tests.conformance.worker", self._backend]
        self._ranks = [
            Program([*worker, str(rank), str(self._size), str(self._log(rank))], stdin=True)
            for rank in range(self._size)
        ]
        for rank in range(self._size):
            self.names = self._answer(rank, START_SECONDS)

    def _answer(self, rank: int, seconds: float) -> Any:
        pipe = self._ranks[rank].stdout
        assert pipe is not None
        ready = select.select([pipe], [], [], seconds)[0]  # one line at a time is ever under way
        line = pipe.readline() if ready else ""
        if not line:
            how = "ended" if ready else "does not answer"
            raise RuntimeError(f"rank {rank} {how}:\n{self._log(rank).read_text()[-LOG_TAIL:]}")
        return json.loads(line)

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank-{rank}.log"

    def _stop(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.kill()
        for rank in self._ranks:
            with contextlib.suppress(OSError, ValueError):
                rank.communicate(timeout=10)
        self._ranks = []
