"""What a program does with the devices of a context, kept to be done again by a few bytes.

As `mesh.device.capture` it has the peers keep operations; those of the group are told anew each
time, because each has a number of its own. Whether the same is to be done again is for the caller
to know.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias

from auth import MeshError
from mesh.device import wire
from mesh.device.client.capturing import Kept, Steps, keep
from mesh.device.client.session import Recording, Session
from mesh.device.groups.context import DistributedContext
from mesh.device.groups.issuing import SessionPart

__all__ = ["Course", "Names", "Repetition", "Tape", "recorded"]

MAX_RUNS = 1 << 15
"""Operations on one peer that are kept together; it keeps eight times as many for a session."""

Names: TypeAlias = tuple[dict[int, int], ...]
"""For each session numbers of handles that are the same whenever the same is done."""

Course: TypeAlias = tuple[tuple[Any, ...], ...]
"""What is done, for each session: that of equal courses is the same."""


@contextlib.contextmanager
def recorded(context: DistributedContext) -> Iterator[Tape]:
    """Record what goes to the devices of a context during the block, operations of its group too.

    Unlike `mesh.device.capture` it lets through what can't be done again.

    Raises:
        DeviceError: operations on a device are captured already, or this is the node's own loop.
        MeshError: a session is lost.
    """
    parts = [part for part in context._parts if isinstance(part, SessionPart)]
    with ExitStack() as stack:
        recordings = [
            stack.enter_context(part.session.recording(is_tentative=True)) for part in parts
        ]
        yield Tape(context, list(zip(parts, recordings, strict=True)))


class Tape:
    """What goes to the devices of a context. Made by `recorded`."""

    def __init__(
        self, context: DistributedContext, recordings: list[tuple[SessionPart, Recording]]
    ) -> None:
        self._context = context
        self._recordings = recordings
        self._first = context._next
        self._steps: list[Steps] = []

    def course(self, names: Names) -> Course | None:
        """Return what was done up to here; None if it can't be done again.

        Args:
            names: of handles that were made before; those made meanwhile are added.
        """

        def look(steps: Steps) -> bool:
            self._steps.append(steps)
            return False

        self._steps = []
        found = []
        for (part, recording), known in zip(self._recordings, names, strict=True):
            try:
                keep(part.session, recording, look)
            except MeshError:
                return None  # it can't be done again, or a session is lost, which others will tell
            runs = self._steps[-1].runs
            if recording.is_spoiled or len(runs) > MAX_RUNS or not self._is_own(part, runs):
                return None
            found.append(self._canonical(part, runs, known))
        return tuple(found)

    def keep(self) -> Repetition | None:
        """Have the peers keep what `course` has returned."""
        kept: list[tuple[SessionPart, Kept]] = []
        for (part, recording), steps in zip(self._recordings, self._steps, strict=True):
            one = keep(part.session, recording, lambda now, then=steps: now.runs == then.runs)  # type: ignore[misc]
            if one is None:  # another thread has done something
                for _, each in kept:
                    each.close()
                return None
            kept.append((part, one))
        return Repetition(self._context, kept, self._context._next - self._first)

    def _is_own(self, part: SessionPart, runs: list[wire.Run | wire.Release]) -> bool:
        """Return whether operations of groups are of this one."""
        calls = (run for run in runs if _call_layout(part.session, run) is not None)
        return all(run.values[-2] == part.number for run in calls if isinstance(run, wire.Run))

    def _canonical(
        self, part: SessionPart, runs: list[wire.Run | wire.Release], names: dict[int, int]
    ) -> tuple[Any, ...]:
        """Return operations with names in the place of handles, and without numbers that count."""
        found: list[Any] = []
        for run in runs:
            if isinstance(run, wire.Release):
                continue  # threads may differ in when they let go of something
            layout = part.session.layouts[run.template]
            count = len(layout.tensors)
            taken, made = run.values[:count], run.values[count : count + layout.made]
            rest = run.values[count + layout.made :]
            if _call_layout(part.session, run) is not None:
                rest = (rest[-1] - self._first,)
            used = [names.get(int(each), each) for each in taken]
            for each in made:
                names[int(each)] = -1 - len(names)
            found.append((run.template, *used, *rest))
        return tuple(found)


class Repetition:
    """What can be done again by a few bytes. Made by `Tape.keep`."""

    def __init__(
        self, context: DistributedContext, parts: list[tuple[SessionPart, Kept]], count: int
    ) -> None:
        self._context = context
        self._count = count
        """Operations of the group that it begins."""
        first = context._next - count
        self._kept = [kept for _, kept in parts]
        self._parts = [
            (part, [_message(kept, item, first) for item in kept.items]) for part, kept in parts
        ]

    @property
    def is_known(self) -> bool:
        """Whether the peers still know all that it takes."""
        return all(
            message.number in part.session.layouts
            for part, messages in self._parts
            for message in messages
            if isinstance(message, _Call)
        )

    def replay(self, guard: Callable[[SessionPart], AbstractContextManager[None]]) -> None:
        """Do it again. Nobody waits for it.

        Args:
            guard: entered for each session, for what fails there.

        Raises:
            CollectiveError: it has operations of the group, which is broken.
            MeshError: a session is lost.
        """
        context = self._context
        if self._count:
            context._check_usable("repeating of operations")
        first = context._next
        context._next += self._count
        context._turns = [context._next for _ in context._turns]
        for part, messages in self._parts:
            part.next = context._next
            with guard(part):
                part.session.emit(b"".join(message.encode(first) for message in messages))

    def close(self) -> None:
        """Have the peers forget it."""
        for kept in self._kept:
            kept.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequence:
    number: int

    def encode(self, first: int) -> bytes:
        return wire.replay(self.number)


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """An operation of the group.

    Attributes:
        number, layout: of its template.
        values: handles, and the group.
        after: how many operations of the group begin before it.
    """

    number: int
    layout: wire.Layout
    values: tuple[float, ...]
    after: int

    def encode(self, first: int) -> bytes:
        pack = self.layout.packer().pack
        message = pack(wire.RUN_KIND, self.number, *self.values, first + self.after)
        made = [int(each) for each in self.values[len(self.layout.tensors) : -1]]
        return wire.release(made) + message if made else message


def _message(kept: Kept, item: int | wire.Run, first: int) -> _Sequence | _Call:
    if isinstance(item, int):
        return _Sequence(item)
    *values, sequence = item.values
    layout = kept.session.layouts[item.template]
    return _Call(item.template, layout, tuple(values), int(sequence) - first)


def _call_layout(session: Session, run: wire.Run | wire.Release) -> wire.Layout | None:
    """Return the layout of an operation of a group; None of anything else."""
    if isinstance(run, wire.Release):
        return None
    layout = session.layouts[run.template]
    return layout if layout.name in (wire.START, wire.TAKE) else None
