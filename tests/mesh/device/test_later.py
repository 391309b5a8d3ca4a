"""What waits for an arrival, and what does not: the results are those of strict order."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.device.server.later import Later, Step

_handles = st.integers(0, 5)
_steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("run"),
            st.lists(_handles, max_size=3).map(tuple),
            st.lists(_handles, max_size=2).map(tuple),
            st.sampled_from([(), (), (0,), (1,), (0, 1)]),
            st.booleans(),
        ),
        st.tuples(st.just("move"), _handles),
        st.tuples(st.just("come"), st.integers(0, 5)),
    ),
    max_size=24,
)


class Memory:
    """What every step leaves: each handle has the history of what made it."""

    def __init__(self) -> None:
        self.content: dict[int, tuple[object, ...]] = {}
        self.random = [0, 0]
        self.told: dict[int, object] = {}

    def run(
        self, name: int, reads: tuple[int, ...], writes: tuple[int, ...], random: tuple[int, ...]
    ) -> None:
        made: tuple[object, ...] = (name, *(self.content.get(each) for each in (*reads, *writes)))
        for device in random:
            self.random[device] += 1
            made += (self.random[device],)
        self.told[name] = made
        for each in writes:
            self.content[each] = made


@given(_steps)
def test_the_results_are_those_of_strict_order(steps: list[tuple[object, ...]]) -> None:
    strict, free, later = Memory(), Memory(), Later()
    moves: list[int] = []
    come: set[int] = set()

    def arrive(arrival: int, handle: int) -> None:
        free.content[handle] = ("moved", arrival)
        later.arrived(arrival)

    def expect(arrival: int, handle: int) -> None:
        if arrival in come:
            free.content[handle] = ("moved", arrival)
        else:
            later.expect(arrival, handle)

    def bring(arrival: int) -> None:
        if arrival not in come:
            come.add(arrival)
            if later.is_expected(arrival):
                arrive(arrival, moves[arrival])

    for name, (kind, *rest) in enumerate(steps):
        if kind == "run":
            reads, writes, random, is_last = rest
            strict.run(name, reads, writes, random)  # type: ignore[arg-type]
            run = partial(free.run, name, reads, writes, random)
            later.do(Step(run, reads, writes, random, is_last))  # type: ignore[arg-type]
        elif kind == "move":
            (handle,) = rest
            arrival = len(moves)
            moves.append(handle)  # type: ignore[arg-type]
            strict.content[handle] = ("moved", arrival)  # type: ignore[index]
            later.do(Step(partial(expect, arrival, handle), (), (handle,)))  # type: ignore[arg-type]
        elif moves:
            bring(rest[0] % len(moves))  # type: ignore[operator]
    for arrival in reversed(range(len(moves))):
        bring(arrival)
    assert later.is_idle
    assert not len(later)
    assert free.told == strict.told
    assert free.content == strict.content


@pytest.mark.parametrize(
    ("step", "waits"),
    [
        (Step(lambda: None, (1,)), True),
        (Step(lambda: None, (), (1,)), True),
        (Step(lambda: None, (2,), (3,)), False),
        (Step(lambda: None, random=(0,)), False),
        (Step(lambda: None, is_last=True), True),
    ],
)
def test_only_what_needs_it_waits(step: Step, waits: bool) -> None:
    later = Later()
    later.expect(7, 1)
    later.do(step)
    assert len(later) == waits
    later.arrived(7)
    assert later.is_idle
