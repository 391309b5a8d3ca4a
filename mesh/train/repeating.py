"""A training step that is what it was before, done again without this program's part in it.

A step is a way from one call of a strategy to the next: from the beginning to the gradients of a
batch, maybe to those of another one, and to the optimizers' step. Each is known by its kind: the
shapes of the batch, the function, the mode of torch. What was done twice in the same way is kept at
the peers, and from then on told to them by a few bytes, as long as whatever it depends on is as it
was. All else is done as ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from auth import MeshError
from mesh.device.client.tensors import BACKEND
from mesh.device.groups.context import DistributedContext
from mesh.device.groups.issuing import SessionPart
from mesh.device.groups.repeating import Course, Names, Repetition, recorded
from mesh.train.batches import moved, tensors_of
from mesh.train.watching import NotUnderstood, Watch, random_states

__all__ = ["Repeater"]

MAX_KINDS = 16
"""Kinds of a call, after the same calls, that are told apart."""

MAX_KEPT = 2
"""Kinds of a step's first call that are kept: each has gradients of its own at the peers."""

LONG_AGO = 64
"""Steps after which a kind that did not come makes room for another."""

MOST_PATIENCE = 10
"""After n vain attempts to keep a call it is done 2 to the power of n times without one, up to this
n."""

Work = Callable[[list[Any]], Any]


@dataclasses.dataclass(slots=True, eq=False)
class _Call:
    """A kind of call, after the calls that lead to it.

    Attributes:
        seen: how often it was done in full.
        last: the step in which it was done last.
        watch, course: what it depended on, and what was done, when it was recorded last.
        inputs: the batch's places on the devices.
        repetition: how it is done again.
        names: of handles after it.
        result: what it returns.
        vain: attempts to keep it.
        pause: how often it is not recorded.
        following: kinds of calls after it.
    """

    seen: int = 0
    last: int = 0
    watch: Watch | None = None
    course: Course | None = None
    inputs: list[Any] | None = None
    repetition: Repetition | None = None
    names: Names = ()
    result: Any = None
    vain: int = 0
    pause: int = 0
    following: dict[Hashable, _Call] = dataclasses.field(default_factory=dict)

    def forget(self) -> None:
        """Have the peers forget it, and what follows."""
        if self.repetition is not None:
            self.repetition.close()
        self.repetition, self.result, self.inputs = None, None, None
        self.watch, self.course = None, None
        for each in self.following.values():
            each.forget()

    def give_up(self) -> None:
        """Do without for some time."""
        self.forget()
        self.vain = min(self.vain + 1, MOST_PATIENCE)
        self.pause = 1 << self.vain


class Repeater:
    """The calls of a strategy on the devices of a context, repeated where that is possible.

    Args:
        context: of the strategy; nothing is repeated on devices of this process.
        is_on: whether anything is.

    Attributes:
        is_on: whether anything may be repeated.
    """

    def __init__(self, context: DistributedContext, *, is_on: bool) -> None:
        self._context = context
        self.is_on = is_on and context.devices[0].type == BACKEND
        self._begin = _Call()
        self._at: _Call | None = None
        self._is_kept = False
        """Whether handles are those that what follows is kept for."""
        self._names: Names = ()
        self._steps = 0

    def rewind(self) -> None:
        """Begin a step."""
        self._at, self._is_kept = self._begin, True
        self._names = tuple({} for _ in self._context._parts)
        self._steps += 1

    def lose_track(self) -> None:
        """Do what is left of the step as ever."""
        self._at = None

    def close(self) -> None:
        """Have the peers forget everything."""
        self._begin.forget()
        self._begin.following.clear()
        self._at = None

    def run(
        self,
        kind: Hashable | None,
        roots: Callable[[], Iterable[object]],
        parts: Sequence[Any],
        work: Work,
        guard: Callable[[SessionPart], AbstractContextManager[None]],
    ) -> Any:
        """Do some work, in full or again.

        Args:
            kind: what tells it from other work after the same calls; None if nothing does.
            roots: returns what it depends on.
            parts: of a batch, one for each device.
            work: does it, with those parts on their devices, and returns what it makes.
            guard: entered for each session when it is done again.

        Returns:
            what `work` returns; where it is done again, the same objects as before.
        """
        call = self._call(kind)
        if call is None:
            self._at = None
            return work(self._moved(parts))
        repetition = call.repetition
        if repetition is not None and self._is_kept:
            if repetition.is_known and self._is_watched(call, roots):
                call.last = self._steps
                _fill(call.inputs or [], parts)
                repetition.replay(guard)
                self._at, self._names = call, tuple(map(dict, call.names))
                return call.result
            call.forget()
        call.seen += 1
        if call.pause or (self._at is self._begin and call.seen == 1):
            call.pause = max(0, call.pause - 1)
            self._at = None
            return work(self._moved(parts))
        return self._recorded(call, roots, parts, work)

    def _call(self, kind: Hashable | None) -> _Call | None:
        if not self.is_on or self._at is None or kind is None:
            return None
        known = self._at.following
        call = known.get(kind)
        if call is None:
            if len(known) >= MAX_KINDS:
                oldest = min(known, key=lambda each: known[each].last)
                known.pop(oldest).forget()
            call = known[kind] = _Call()
        return call

    def _recorded(
        self,
        call: _Call,
        roots: Callable[[], Iterable[object]],
        parts: Sequence[Any],
        work: Work,
    ) -> Any:
        if not self._is_watched(call, roots):
            call.give_up()
            self._at = None
            return work(self._moved(parts))
        if call.inputs is None:
            call.inputs = self._moved(parts, copy=True)
        else:
            _fill(call.inputs, parts)
        with ExitStack() as stack:
            try:
                tape = stack.enter_context(recorded(self._context))
            except MeshError:  # the work itself says what is wrong, if anything is
                self._at = None
                return work(call.inputs)
            drawn = random_states()
            self._at, before = None, self._at
            result = work(call.inputs)
            is_pure = self._is_watched(call, roots) and random_states() == drawn
            course = tape.course(self._names) if is_pure else None
            if course is None and is_pure and not self._is_kept:
                return result  # it may have used up what will be kept when that is
            if course is None or (call.course not in (None, course) and self._is_kept):
                call.give_up()
                return result
            if course == call.course and self._is_kept and self._has_room(call, before):
                call.repetition = tape.keep()
                call.names = tuple(map(dict, self._names))
                call.result, call.vain = result, 0
            self._at, self._is_kept = call, call.repetition is not None
            call.course = course
            call.last = self._steps
        return result

    def _is_watched(self, call: _Call, roots: Callable[[], Iterable[object]]) -> bool:
        """Return whether what it depends on is known, and is as it was if it was known before."""
        if call.watch is not None:
            return call.watch.holds(roots())
        try:
            call.watch = Watch(roots())
        except NotUnderstood:
            return False
        return True

    def _has_room(self, call: _Call, before: _Call | None) -> bool:
        """Return whether one more may be kept; let go of one that did not come for long."""
        if before is not self._begin:
            return True
        kept = [each for each in before.following.values() if each.repetition is not None]
        if len(kept) < MAX_KEPT:
            return True
        oldest = min(kept, key=lambda each: each.last)
        if self._steps - oldest.last < LONG_AGO:
            call.pause = LONG_AGO
            return False
        oldest.forget()
        return True

    def _moved(self, parts: Sequence[Any], *, copy: bool = False) -> list[Any]:
        devices = self._context.devices
        return [
            moved(part, device, copy=copy) for part, device in zip(parts, devices, strict=False)
        ]


def _fill(places: Sequence[Any], parts: Sequence[Any]) -> None:
    with torch.no_grad():
        for place, part in zip(places, parts, strict=True):
            for target, source in zip(tensors_of(place), tensors_of(part), strict=True):
                target.copy_(source)
