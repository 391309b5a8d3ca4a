"""When the other process is given up, by a clock that the test winds."""

from __future__ import annotations

import os

import pytest

from transport.process.pulse import Pulse, processor_time

BOUND = 3.0
STEP = 0.5


def lost_after(words: dict[float, bool], work: dict[float, float]) -> float | None:
    """Return when a pulse that is looked at each `STEP` is lost, None if not within a minute."""
    pulse, worked = Pulse(BOUND, 0.0), 1.0
    for step in range(1, 121):
        now = step * STEP
        worked += work.get(now, 0.0)
        if words.get(now):
            pulse.heard(now)
        if pulse.is_lost(now, worked):
            return now
    return None


def test_silence_without_work_is_the_end() -> None:
    # The first look finds how much it has worked before, and counts as work.
    assert lost_after({}, {}) == STEP + BOUND


def test_a_word_or_work_puts_it_off() -> None:
    assert lost_after({2.0: True}, {}) == 2.0 + BOUND
    assert lost_after({}, {2.5: 1e-6}) == 2.5 + BOUND
    steps = [step * STEP for step in range(121)]
    assert lost_after(dict.fromkeys(steps, True), {}) is None
    assert lost_after({}, dict.fromkeys(steps, 0.01)) is None


def test_without_the_clock_words_alone_count() -> None:
    pulse = Pulse(BOUND, 0.0)
    assert not any(pulse.is_lost(step * STEP, None) for step in range(1, 6))
    assert pulse.is_lost(BOUND, None)


def test_who_did_not_look_gives_time_to_be_heard() -> None:
    pulse = Pulse(BOUND, 0.0)
    assert not pulse.is_lost(100.0, None)
    assert not pulse.is_lost(100.5, None)
    assert pulse.is_lost(101.0, None)
    pulse = Pulse(BOUND, 0.0)
    assert not pulse.is_lost(100.0, None)
    pulse.heard(100.1)
    assert not pulse.is_lost(101.0, None)


@pytest.mark.skipif(not os.path.exists("/proc"), reason="Linux alone has the clock")  # noqa: PTH110
def test_the_processor_time_of_another() -> None:
    before = processor_time(os.getpid())
    assert before is not None
    sum(range(100_000))
    after = processor_time(os.getpid())
    assert after is not None
    assert after > before
    assert processor_time(1 << 23) is None
