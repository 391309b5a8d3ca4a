"""Operations that a client has captured, to run them again without sending them again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mesh.device import wire
from mesh.device.server.later import Step
from mesh.device.server.program import Program
from transport import LimitExceeded, ProtocolError

__all__ = ["MAX_STEPS", "Captured", "Sequences"]

MAX_STEPS = 1 << 18
"""Operations and releases that a session may have captured in all."""

RunOne = Callable[[Program, Sequence[Any]], object]
Release = Callable[[Sequence[int]], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Captured:
    """One sequence, made ready.

    Attributes:
        steps: operations with their values, and handles to be released, in order.
        uses: handles that must be there before.
        changes: handles that it writes to, makes or releases.
        random: the devices of which it draws random numbers.
    """

    steps: tuple[tuple[Program | None, tuple[Any, ...]], ...]
    uses: tuple[int, ...]
    changes: tuple[int, ...]
    random: tuple[int, ...]

    def step(self, run: RunOne, release: Release) -> Step:
        """Return what runs it, with what it depends on.

        Args:
            run: runs one operation.
            release: releases handles, where they are there.
        """

        def replay() -> None:
            for program, values in self.steps:
                if program is None:
                    release(values)
                else:
                    start = len(program.tensors)
                    release(values[start : start + program.count])
                    run(program, values)

        return Step(replay, self.uses, self.changes, self.random)


class Sequences:
    """The sequences of one session."""

    def __init__(self) -> None:
        self._captured: dict[int, Captured] = {}
        self._steps = 0

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._captured)

    def __getitem__(self, number: int) -> Captured:
        """Return a sequence.

        Raises:
            ProtocolError: there is none of that number.
        """
        try:
            return self._captured[number]
        except KeyError:
            raise _bad(f"there is no sequence {number}") from None

    def add(
        self,
        number: int,
        steps: Iterable[wire.Run | wire.Release],
        programs: dict[int, Program],
    ) -> None:
        """Take a sequence.

        Args:
            number: what it is called.
            steps: as they came off the wire.
            programs: the templates that are defined.

        Raises:
            ProtocolError: there is one of that number, or an operation in it has to be asked.
            LimitExceeded: it would be too many operations.
        """
        if number in self._captured:
            raise _bad(f"sequence {number} is there already")
        ready: list[tuple[Program | None, tuple[Any, ...]]] = []
        uses: set[int] = set()
        changes: set[int] = set()
        random: set[int] = set()
        for step in steps:
            if isinstance(step, wire.Release):
                ready.append((None, step.handles))
                changes.update(step.handles)
                continue
            program = programs[step.template]
            if program.template.outputs is None:
                raise _bad("a sequence holds an operation whose results only it can tell")
            if program.template.name in (wire.START, wire.TAKE):
                raise _bad("a sequence holds an operation of a group, which is done once")
            ready.append((program, step.values))
            on = program.step(step.values, _nothing)
            uses.update(set(on.uses) - changes)
            changes.update(on.changes)
            random.update(on.random)
        if self._steps + len(ready) > MAX_STEPS:
            raise LimitExceeded(
                "capture of operations",
                why=f"this session may have captured {MAX_STEPS}",
                fix="Let go of what was captured and is not run any more.",
            )
        self._steps += len(ready)
        self._captured[number] = Captured(tuple(ready), tuple(uses), tuple(changes), tuple(random))

    def drop(self, number: int) -> None:
        """Forget a sequence.

        Raises:
            ProtocolError: there is none of that number.
        """
        self._steps -= len(self[number].steps)
        del self._captured[number]


def _nothing(program: Program, values: Sequence[Any]) -> None:
    """Stand in for what runs an operation, where only what it depends on is asked."""


def _bad(why: str) -> ProtocolError:
    return ProtocolError("a sequence of operations on a device", why=why)
