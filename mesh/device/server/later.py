"""What has to wait for something that has not arrived, and what need not. No tensors, no I/O.

A move into a storage takes its time, and operations go on meanwhile. One that touches the storage
waits, and so does everything that depends on such a one: what reads what it would write, what
writes what it would read or write, what draws random numbers after it. The rest runs at once, and
the results are those of strict order.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable

__all__ = ["Later", "Step"]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Something to do, and what it depends on.

    Attributes:
        run: does it.
        uses: handles that it reads.
        changes: handles that it writes to, makes, or ends.
        random: the devices of which it draws or sets random numbers.
        is_last: whether it has to wait for everything before it.
    """

    run: Callable[[], object]
    uses: tuple[int, ...] = ()
    changes: tuple[int, ...] = ()
    random: tuple[int, ...] = ()
    is_last: bool = False


class Later:
    """The steps that wait, in order.

    Attributes:
        is_idle: whether nothing waits, so that every step may run.
    """

    def __init__(self) -> None:
        self.is_idle = True
        self._awaited: dict[int, int] = {}
        self._steps: deque[Step] = deque()
        self._reads: set[int] = set()
        self._writes: set[int] = set()
        self._random: set[int] = set()

    def __len__(self) -> int:
        """Return how many steps wait."""
        return len(self._steps)

    def do(self, step: Step) -> None:
        """Run a step now if it may, else when it may."""
        if self.is_idle or not self._must_wait(step):
            step.run()
        else:
            self._keep(step)

    def expect(self, arrival: int, handle: int) -> None:
        """Have whatever touches `handle` wait until `arrived`. To be called by a step that runs."""
        self._awaited[arrival] = handle
        self._writes.add(handle)
        self.is_idle = False

    def is_expected(self, arrival: int) -> bool:
        """Return whether something is expected under that number."""
        return arrival in self._awaited

    def arrived(self, arrival: int) -> None:
        """Run what waited for an arrival, and no longer has to."""
        del self._awaited[arrival]
        steps, self._steps = self._steps, deque()
        self._reads.clear()
        self._random.clear()
        self._writes = set(self._awaited.values())
        while steps:
            step = steps.popleft()
            if self._must_wait(step):
                self._keep(step)
            else:
                step.run()
        self.is_idle = not (self._awaited or self._steps)

    def _must_wait(self, step: Step) -> bool:
        if step.is_last:
            return bool(self._awaited or self._steps)
        return (
            _meet(step.random, self._random)
            or _meet(step.uses, self._writes)
            or _meet(step.changes, self._writes)
            or _meet(step.changes, self._reads)
        )

    def _keep(self, step: Step) -> None:
        self._steps.append(step)
        self._reads.update(step.uses)
        self._writes.update(step.changes)
        self._random.update(step.random)


def _meet(some: Iterable[int], others: set[int]) -> bool:
    return bool(others) and not others.isdisjoint(some)
