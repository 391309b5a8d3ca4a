"""Ranges found by bisection, against aioquic's that are searched for."""

from __future__ import annotations

import time

from aioquic.quic.rangeset import RangeSet
from hypothesis import given
from hypothesis import strategies as st

from transport.protocol.batch.ranges import Ranges


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=60))
def test_they_hold_what_upstreams_hold(added: list[tuple[int, int]]) -> None:
    ours, theirs = Ranges(), RangeSet()
    for start, length in added:
        ours.add(start, start + length)
        theirs.add(start, start + length)
        assert len(ours) == len(theirs)
    while len(theirs):
        assert ours.first == theirs[0]
        assert ours.shift() == theirs.shift()
    assert len(ours) == 0


@given(st.integers(1, 20), st.integers(1, 30))
def test_cutting_takes_from_the_first(stop: int, length: int) -> None:
    ranges = Ranges()
    ranges.add(0, length)
    ranges.add(100, 110)
    ranges.cut(stop)
    assert ranges.first == (range(stop, length) if stop < length else range(100, 110))
    ranges.clear()
    assert len(ranges) == 0


def test_many_gaps_cost_no_search() -> None:
    ranges = Ranges()
    began = time.process_time()
    for start in range(200_000, 0, -10):
        ranges.add(start, start + 1)
    assert len(ranges) == 20_000
    assert time.process_time() - began < 2
