"""Pauses between tries."""

from __future__ import annotations

from transport import Backoff


def longest(low: float, high: float) -> float:
    return high


def shortest(low: float, high: float) -> float:
    return low


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 5.0, uniform=longest)
    assert [backoff.pause() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_each_is_jittered_into_its_upper_half() -> None:
    backoff = Backoff(0.5, 5.0, uniform=shortest)
    assert [backoff.pause() for _ in range(6)] == [0.25, 0.5, 1.0, 2.0, 2.5, 2.5]
    drawn = {Backoff(1.0, 9.0).pause() for _ in range(200)}
    assert len(drawn) > 100, "no two come back at one moment"
    assert min(drawn) >= 0.5
    assert max(drawn) <= 1.0
    assert max(drawn) - min(drawn) > 0.3


def test_a_success_begins_anew() -> None:
    backoff = Backoff(0.5, 60.0, uniform=longest)
    for _ in range(10):
        backoff.pause()
    backoff.reset()
    assert [backoff.pause() for _ in range(2)] == [0.5, 1.0]
