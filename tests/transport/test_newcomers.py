"""The filter before TLS: prefixes, rates, and where it stands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.nodes import at, endpoint, eventually, is_idle
from transport import AddressError, ConnectTimeout, NewcomerRules, Rate, TransportError
from transport.protocol import newcomers as module
from transport.protocol.newcomers import (
    INTERVAL,
    LEAST_SHARE,
    STEEPEST,
    STRANGERS_BURST,
    STRANGERS_TIME,
    NewcomerFilter,
    StrangerBudget,
    Verdict,
)

WELCOME, PROVE, REFUSED, TOO_MANY = Verdict


def at_host(host: str) -> tuple[str, int]:
    return (host, 4433)


def rules(**options: object) -> NewcomerFilter:
    return NewcomerFilter(NewcomerRules(**options))  # type: ignore[arg-type]


# -- addresses


@pytest.mark.parametrize(
    ("allow", "deny", "host", "refused"),
    [
        ((), (), "192.0.2.1", False),
        (("192.0.2.0/24",), (), "192.0.2.1", False),
        (("192.0.2.0/24",), (), "192.0.3.1", True),
        (("192.0.2.0/24",), (), "2001:db8::1", True),
        (("192.0.2.0/24", "2001:db8::/32"), (), "2001:db8::1", False),
        ((), ("192.0.2.0/24",), "192.0.2.1", True),
        ((), ("192.0.2.0/24",), "192.0.3.1", False),
        (("192.0.2.0/24",), ("192.0.2.7/32",), "192.0.2.7", True),
        (("192.0.2.0/24",), ("192.0.2.7",), "192.0.2.8", False),
        ((), ("fe80::/10",), "fe80::1%eth0", True),
        ((), ("192.0.2.0/24",), "::ffff:192.0.2.1", True),
        (("0.0.0.0/0",), (), "2001:db8::1", True),
    ],
)
def test_prefixes(allow: tuple[str, ...], deny: tuple[str, ...], host: str, refused: bool) -> None:
    tested = rules(allow=allow, deny=deny)
    assert tested.is_refused(at_host(host)) == refused
    for proved in (False, True):
        verdict = tested.judge(at_host(host), 0.0, proved=proved)
        assert verdict is (REFUSED if refused else WELCOME)


@pytest.mark.parametrize("text", ["", "here", "192.0.2.1/24", "192.0.2.0/33", "192.0.2.0/24 "])
def test_a_malformed_prefix_is_refused_by_name(text: str) -> None:
    with pytest.raises(AddressError, match="2001:db8::/32") as caught:
        NewcomerRules(deny=(text,))
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("rate", [(0, 1), (-1, 1), (float("inf"), 1), (float("nan"), 1), (1, 0)])
def test_a_rate_lets_somebody_in(rate: tuple[float, int]) -> None:
    with pytest.raises(TransportError, match="let somebody in"):
        Rate(*rate)


# -- rates


def test_a_host_has_its_burst_and_then_its_rate() -> None:
    tested = rules(per_host=Rate(2.0, 3))
    host, other = at_host("192.0.2.1"), at_host("192.0.2.2")
    judge = tested.judge
    assert [judge(host, 10.0, proved=False) for _ in range(4)] == [WELCOME] * 3 + [PROVE]
    assert judge(other, 10.0, proved=False) is WELCOME
    assert judge(host, 10.4, proved=False) is PROVE
    assert judge(host, 10.5, proved=False) is WELCOME
    assert judge(host, 10.5, proved=False) is PROVE
    assert [judge(host, 99.0, proved=False) for _ in range(4)] == [WELCOME] * 3 + [PROVE]


def test_forged_addresses_leave_alone_those_who_prove_theirs() -> None:
    tested = rules(per_host=Rate(1.0, 1), in_all=Rate(1.0, 2))
    for n in range(50):
        tested.judge(at_host("192.0.2.1"), 0.0, proved=False)
        tested.judge(at_host(f"192.0.2.{n}"), 0.0, proved=False)
    assert tested.judge(at_host("192.0.2.1"), 0.0, proved=True) is WELCOME
    assert tested.judge(at_host("192.0.2.1"), 0.0, proved=True) is TOO_MANY
    assert tested.judge(at_host("192.0.2.2"), 0.0, proved=True) is WELCOME
    assert tested.judge(at_host("192.0.2.3"), 0.0, proved=True) is TOO_MANY, "in all"


def test_one_site_of_ipv6_is_one_host() -> None:
    tested = rules(per_host=Rate(1.0, 1))
    assert tested.judge(at_host("2001:db8::1"), 0.0, proved=False) is WELCOME
    assert tested.judge(at_host("2001:db8::2"), 0.0, proved=False) is PROVE
    assert tested.judge(at_host("2001:db8:0:1::2"), 0.0, proved=False) is WELCOME


def test_who_is_refused_for_one_reason_does_not_pay_for_another() -> None:
    tested = rules(per_host=Rate(1.0, 1), in_all=Rate(1.0, 3))
    for _ in range(9):
        tested.judge(at_host("192.0.2.1"), 0.0, proved=False)
    for n in (2, 3):
        assert tested.judge(at_host(f"192.0.2.{n}"), 0.0, proved=False) is WELCOME


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PREFIXES", 2)
    tested = rules(per_host=Rate(1.0, 1))
    for host in ("192.0.2.1", "192.0.2.2", "192.0.2.1", "192.0.2.3"):
        tested.judge(at_host(host), 0.0, proved=False)
    assert len(tested._hosts) == 2
    assert tested.judge(at_host("192.0.2.1"), 0.0, proved=False) is PROVE, "the one heard of later"
    assert len(rules(deny=("192.0.2.0/24",))._hosts) == 0


STEPS = st.lists(st.tuples(st.sampled_from("1234"), st.floats(0, 3), st.booleans()), max_size=60)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(STEPS, st.floats(0.1, 5), st.integers(1, 4))
def test_no_host_ever_gets_more_than_its_rate(
    steps: list[tuple[str, float, bool]], per_second: float, burst: int
) -> None:
    tested = rules(per_host=Rate(per_second, burst))
    now = 100.0
    met: dict[tuple[str, bool], list[float]] = {}
    for host, pause, proved in steps:
        now += pause
        if tested.judge(at_host(f"192.0.2.{host}"), now, proved=proved) is WELCOME:
            met.setdefault((host, proved), []).append(now)
    for times in met.values():
        for first in range(len(times)):
            for last in range(first, len(times)):
                allowed = burst + (times[last] - times[first]) * per_second
                assert last - first + 1 <= allowed + 1e-6


def test_a_clock_that_goes_back_gives_nothing() -> None:
    tested = rules(per_host=Rate(1.0, 1))
    assert tested.judge(at_host("192.0.2.1"), 100.0, proved=False) is WELCOME
    assert tested.judge(at_host("192.0.2.1"), 50.0, proved=False) is PROVE
    assert tested.judge(at_host("192.0.2.1"), 100.5, proved=False) is PROVE
    assert tested.judge(at_host("192.0.2.1"), 101.0, proved=False) is WELCOME


# -- at an endpoint


@pytest.mark.anyio
async def test_a_refused_address_gets_no_answer_and_makes_no_state() -> None:
    made = 0

    async with (
        endpoint(newcomers=NewcomerRules(deny=("127.0.0.1/32",))) as node,
        endpoint() as dialer,
    ):
        make = node._engine.demux._make_listener

        def counted(*arguments: object) -> object:
            nonlocal made
            made += 1
            assert make is not None
            return make(*arguments)  # type: ignore[arg-type]

        node._engine.demux._make_listener = counted  # type: ignore[assignment]
        with pytest.raises(ConnectTimeout):
            await dialer.connect(at(node), timeout=0.5)
        assert node.drops["address not allowed"] >= 1
        assert made == 0
        assert is_idle(node)
        # A node that refuses an address may dial it, and is then answered.
        assert await (await node.connect(at(dialer))).call("echo", 1) == 1
    async with (
        endpoint(newcomers=NewcomerRules(allow=("127.0.0.0/8",))) as node,
        endpoint() as dialer,
    ):
        assert await (await dialer.connect(at(node))).call("echo", 1) == 1


@pytest.mark.anyio
async def test_beyond_the_rate_newcomers_prove_their_address_and_then_wait() -> None:
    few = NewcomerRules(per_host=Rate(0.01, 1))
    async with endpoint(newcomers=few) as node, endpoint() as one, endpoint() as two:
        first = await one.connect(at(node))
        second = await two.connect(at(node))
        assert first.core.quic._retry_source_connection_id is None
        assert second.core.quic._retry_source_connection_id is not None, "it was asked to"
        async with endpoint() as three:
            with pytest.raises(ConnectTimeout):
                await three.connect(at(node), timeout=0.5)
            assert node.drops["too many newcomers"] >= 1
        for connection in (first, second):  # whoever is in stays in
            assert await connection.call("echo", 1) == 1
        await eventually(lambda: len(node._connections) == 2)


class Flood:
    """Strangers on a virtual clock, beside those known: what a driver does, and a filter."""

    def __init__(self) -> None:
        self.budget = StrangerBudget()
        self.now = 50.0
        self.met = 0
        self.turned_away = 0
        self._adapt_at: float | None = None

    def go_on(self, seconds: float, *, rate: float, cost: float, known: float = 0.0) -> float:
        """Let `rate` strangers a second come, each worth `cost` seconds, while those known want
        the part `known` of the time; return the part that the strangers get."""
        spent, owed, step, end = 0.0, 0.0, 0.02, self.now + seconds
        while self.now < end - 1e-9:
            self.now += step
            owed += rate * step * self.budget.share
            room = step * (1 - known)
            while owed >= 1 and room > 0:
                owed -= 1
                if self.budget.has_time(self.now):
                    self.met += 1
                    spent += cost
                    room -= cost
                    self.budget.spend(cost, self.now, on_strangers=True)
                else:
                    self.turned_away += 1
                    room -= DROP_COST
            owed = min(owed, 4000)  # what the queue has room for
            self.budget.spend(step * known, self.now, on_strangers=False)
            due = self._adapt_at is not None and self.now >= self._adapt_at
            if due or (self._adapt_at is None and self.budget.is_exceeded):
                again = self.budget.adapt(self.now)
                self._adapt_at = self.now + INTERVAL if again else None
        return spent / seconds


DROP_COST = 1e-5


@pytest.mark.parametrize(("rate", "cost"), [(1e5, 1e-4), (1e5, 5e-5), (1e4, 1e-3), (300, 5e-3)])
@pytest.mark.parametrize("known", [0.0, 0.1, 0.3, 0.7])
def test_a_flood_of_strangers_gets_its_part_of_the_time(
    rate: float, cost: float, known: float
) -> None:
    flood = Flood()
    flood.go_on(3.0, rate=rate, cost=cost, known=known)
    flood.met = flood.turned_away = 0
    settled = flood.go_on(10.0, rate=rate, cost=cost, known=known)
    part = max(STRANGERS_TIME[0], STRANGERS_TIME[1] - 3 * known)
    assert part / 3 < settled < part * 1.1
    assert flood.budget.share < 1.0
    assert flood.turned_away < 2 * flood.met, "the others do not even come as far as this"


def test_a_few_strangers_are_all_met_however_busy_the_node() -> None:
    flood = Flood()
    flood.go_on(10.0, rate=20, cost=0.007, known=0.8)
    assert not flood.turned_away
    assert flood.met == pytest.approx(200, abs=5)
    assert flood.budget.share == 1.0


def test_a_cluster_that_starts_is_no_flood() -> None:
    """A node that has nothing else to do meets a hundred at once as fast as it can."""
    flood = Flood()
    flood.go_on(1.0, rate=100, cost=0.007)
    assert not flood.turned_away


def test_all_are_met_again_when_the_flood_is_over() -> None:
    flood = Flood()
    flood.go_on(5.0, rate=1e6, cost=1e-4)
    assert LEAST_SHARE <= flood.budget.share < 0.02
    flood.go_on(2.0, rate=0, cost=1e-4)
    assert flood.budget.share == 1.0
    flood.turned_away = 0
    flood.go_on(1.0, rate=20, cost=0.007)
    assert not flood.turned_away


def test_one_interval_lowers_the_share_only_so_far_and_some_are_always_met() -> None:
    budget = StrangerBudget()
    budget.has_time(100.0)
    budget.spend(1e9, 100.0, on_strangers=True)
    for second in range(20):
        before = budget.share
        for _ in range(1000):
            assert not budget.has_time(101.0 + second)
        budget.adapt(101.0 + second)
        assert budget.share >= before * STEEPEST
    assert budget.share == LEAST_SHARE


def test_strangers_who_fill_the_queue_have_the_least_even_where_nobody_else_is_busy() -> None:
    def met(*, more: bool) -> float:
        budget, now, spent = StrangerBudget(), 100.0, 0.0
        for _ in range(2000):
            now += 0.001
            budget.looked(now, more=more)
            if budget.has_time(now):
                spent += 0.001
                budget.spend(0.001, now, on_strangers=True)
        return spent / 2.0

    least, most = STRANGERS_TIME
    assert met(more=False) == pytest.approx(most, abs=0.1)
    assert met(more=True) == pytest.approx(least, abs=0.1)


def test_a_burst_is_smaller_where_the_node_is_busy() -> None:
    def burst(known: float) -> float:
        budget, now = StrangerBudget(), 100.0
        for _ in range(100):
            now += 0.02
            budget.spend(0.02 * known, now, on_strangers=False)
            assert budget.has_time(now)
        met = 0
        while budget.has_time(now):
            met += 1
            budget.spend(0.001, now, on_strangers=True)
        return met * 0.001

    assert burst(0.0) == pytest.approx(STRANGERS_BURST, abs=0.002)
    assert burst(0.8) == pytest.approx(
        STRANGERS_BURST * STRANGERS_TIME[0] / STRANGERS_TIME[1], abs=0.002
    )


def test_a_clock_that_stands_still_or_goes_back_gives_no_time() -> None:
    budget = StrangerBudget()
    assert budget.has_time(100.0)
    budget.spend(STRANGERS_BURST, 100.0, on_strangers=True)
    assert not budget.has_time(100.0)
    assert not budget.has_time(90.0)
    assert budget.has_time(100.1)
