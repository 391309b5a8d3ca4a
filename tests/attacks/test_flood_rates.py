"""A legitimate transfer keeps at least half of its rate beside each flood, and memory is bounded.

Each flood comes from a process of its own, beside a transfer between two others, against the same
transfer without the flood in the same run. The attacker is niced down, because what is asked for is
what the flood does to its victim, and not who gets which of this machine's processors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.attacks.floods.attackers import FLOODS
from tests.attacks.floods.measure import (
    KEPT,
    MEMORY_BOUND,
    OUTCOME,
    ROUNDS,
    Arena,
    ProcessEnded,
    arena,
)

pytestmark = [
    pytest.mark.alone,
    pytest.mark.attack,
    pytest.mark.skipif(sys.platform != "linux", reason="without socket filters there is no bound"),
]

LEAST_ATTACKS = 5
"""Attacks a second below which a flood was none: those that do a handshake each come to 30."""


@pytest.mark.parametrize("flood", FLOODS)
def test_a_transfer_keeps_half_its_rate(
    flood: str, floor: Arena, record_property: Callable[[str, object], None]
) -> None:
    for rounds in ROUNDS:
        outcome = floor.measure(flood, rounds)
        was_flood = outcome.attacks > LEAST_ATTACKS
        if was_flood and outcome.kept >= KEPT and outcome.grown <= MEMORY_BOUND:
            break
    record_property(OUTCOME, str(outcome))
    assert outcome.is_open, "the honest connection was lost"
    assert outcome.kept >= KEPT
    assert outcome.grown <= MEMORY_BOUND
    assert was_flood, "it was no flood"
    if flood.startswith("junk") and flood != "junk: other versions":  # those are answered
        assert sum(outcome.drops.values()) > 250 * rounds


def test_without_its_defences_a_node_goes_down() -> None:
    """The positive control: it is not the flood that is weak."""
    for rounds in ROUNDS:
        with arena("disarmed victim") as floor:
            try:
                outcome = floor.measure("junk: Initials", rounds)
            except ProcessEnded:
                return  # the transfer's connection was lost
            if outcome.kept < KEPT / 10:
                return
    pytest.fail(f"it kept {outcome.kept:.0%}")
