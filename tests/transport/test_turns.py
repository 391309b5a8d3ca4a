"""Who gets an endpoint's time, on a virtual clock: requests beside bulk."""

from __future__ import annotations

import pytest

from transport.protocol.turns import ADVANCE, BUSY_SECONDS, HANDLERS_SHARE, Turns

STEP = 0.001


class Loop:
    """An endpoint's loop: each step, everybody spends some time on datagrams, and some ask."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.now = 10.0
        self.served: dict[str, float] = {}

    def run(
        self, seconds: float, *, busy: tuple[str, ...], ask: dict[str, float], full: bool = True
    ) -> dict[str, float]:
        """Let `ask` have requests begun whenever they may, each of that many seconds; return the
        part of the time that each gets."""
        self.served = dict.fromkeys(ask, 0.0)
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            for owner in busy:
                self.turns.spend(owner, BUSY_SECONDS)
            self.turns.looked(self.now, more=full)
            for owner, cost in ask.items():
                if self.turns.delay(owner, self.now) == 0:
                    self.turns.serve(owner, max(cost, ADVANCE), self.now)
                    self.served[owner] += cost
        return {owner: served / seconds for owner, served in self.served.items()}


def test_requests_beside_bulk_have_their_share_and_no_more() -> None:
    shares = Loop().run(5.0, busy=("bulk",), ask={"asks": 0.005})
    assert shares["asks"] == pytest.approx(HANDLERS_SHARE, rel=0.1)


def test_those_who_ask_share_it_alike() -> None:
    shares = Loop().run(5.0, busy=("bulk",), ask={"a": 0.005, "b": 0.005, "c": 0.005})
    assert sum(shares.values()) == pytest.approx(HANDLERS_SHARE, rel=0.25)
    assert min(shares.values()) > max(shares.values()) / 2


def test_who_asks_seldom_never_waits() -> None:
    loop = Loop()
    for _ in range(100):
        loop.run(0.05, busy=("bulk",), ask={"asks": 0.005})
        assert loop.turns.delay("seldom", loop.now) == 0
        loop.turns.serve("seldom", ADVANCE, loop.now)
    assert loop.turns.delay("asks", loop.now) > 0


@pytest.mark.parametrize("busy", [(), ("asks",)])
def test_nobody_waits_where_nobody_else_is_busy(busy: tuple[str, ...]) -> None:
    assert Loop().run(1.0, busy=busy, ask={"asks": STEP})["asks"] == pytest.approx(1.0)


def test_nobody_waits_where_there_is_time_for_all() -> None:
    shares = Loop().run(1.0, busy=("bulk",), ask={"asks": STEP}, full=False)
    assert shares["asks"] == pytest.approx(1.0)


def test_a_delay_is_over_when_it_says() -> None:
    loop = Loop()
    loop.run(0.1, busy=("bulk",), ask={})
    loop.turns.serve("asks", 1.0, loop.now)
    delay = loop.turns.delay("asks", loop.now)
    loop.run(delay - 0.1, busy=("bulk",), ask={})
    assert loop.turns.delay("asks", loop.now) > 0
    loop.run(0.1, busy=("bulk",), ask={})
    assert loop.turns.delay("asks", loop.now) == 0


def test_what_was_owed_is_forgotten_when_the_others_are_idle_again() -> None:
    loop = Loop()
    loop.run(0.1, busy=("bulk",), ask={})
    loop.turns.serve("asks", 100.0, loop.now)
    loop.run(0.1, busy=(), ask={})
    assert loop.turns.delay("asks", loop.now) == 0
    loop.run(0.1, busy=("bulk",), ask={})
    assert loop.turns.delay("asks", loop.now) == 0


def test_who_is_gone_is_forgotten() -> None:
    loop = Loop()
    loop.run(0.1, busy=("bulk",), ask={})
    loop.turns.serve("asks", 100.0, loop.now)
    loop.turns.forget("asks")
    assert loop.turns.delay("asks", loop.now) == 0


def test_what_those_owe_who_ask_no_more_slows_nobody_down() -> None:
    loop = Loop()
    loop.run(0.1, busy=("bulk",), ask={})
    for number in range(100):
        loop.turns.serve(f"gone {number}", 0.03, loop.now)
    loop.run(20.0, busy=("bulk",), ask={})
    loop.turns.serve("asks", 0.02 + 0.005, loop.now)
    assert loop.turns.delay("asks", loop.now) < 0.1
    assert len(loop.turns._left) == 1, "they are forgotten"
