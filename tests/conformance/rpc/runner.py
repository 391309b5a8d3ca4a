"""Drives `server`: orders its tests, and says how each went."""

from __future__ import annotations

import contextlib
import json
import select
import tempfile
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from tests.conformance.runner import Outcome
from tests.programs import Program

__all__ = ["Server"]

START_SECONDS = 60.0
"""How long the server may take to load all suites."""

ANSWER_SECONDS = 140.0
"""How long it may take over one test."""


class Server:
    """The process that runs the tests.

    Attributes:
        names: the tests that there are, ``Suite.test_name``.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> Self:
        self._program = Program(["-m", "tests.conformance.rpc.server"], stdin=True)
        found = self._answer(START_SECONDS)
        self.names = [f"{suite}.{name}" for suite, names in found.items() for name in names]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._program.kill()
        self._program.communicate(timeout=10)

    def run(self, names: Iterable[str]) -> Iterator[Outcome]:
        """Run tests and yield how each went."""
        pipe = self._program.stdin
        assert pipe is not None
        for name in names:
            with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
                pipe.write(json.dumps([*name.split("."), directory]) + "\n")
                pipe.flush()
                answer = self._answer(ANSWER_SECONDS)
            yield Outcome(name, answer["why"], answer["error"], answer["seconds"])

    def _answer(self, seconds: float) -> Any:
        pipe = self._program.stdout
        assert pipe is not None
        ready = select.select([pipe], [], [], seconds)[0]  # one line at a time is ever under way
        line = pipe.readline() if ready else ""
        if not line:
            self._program.kill()
            raise RuntimeError(f"the server has failed:\n{self._program.communicate()[1]}")
        return json.loads(line)
