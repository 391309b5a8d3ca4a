"""A silent peer is told from a quiet one, in time; a slow or lossy one is not taken for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.pair import Address, Link, Settings, World, connect
from transport.protocol import Liveness
from transport.protocol.events import ConnectionEnded, EndedBy
from transport.protocol.liveness import SUSPECT_SECONDS, Verdict

BOUND = 3.0
QUIET = BOUND / 3
REPEAT = BOUND / 12


def verdicts(liveness: Liveness, until: float) -> list[tuple[float, Verdict]]:
    """What it says when asked as often as it wants to be."""
    found = []
    while (now := liveness.deadline) <= until:
        verdict = liveness.check(now)
        found.append((now, verdict))
        if verdict is Verdict.LOST:
            break
    return found


def test_it_asks_after_a_third_of_the_bound_then_often_and_then_gives_up() -> None:
    found = verdicts(Liveness(BOUND, 10.0), 100.0)
    probes = [(11.0 + i * REPEAT, Verdict.PROBE) for i in range(8)]
    assert found == [*probes, (13.0, Verdict.LOST)]


def test_whatever_is_heard_starts_it_anew() -> None:
    liveness = Liveness(BOUND, 0.0)
    assert liveness.check(2.9) is Verdict.PROBE
    liveness.heard(2.95)
    assert liveness.silence(3.95) == pytest.approx(1.0)
    assert liveness.deadline == 2.95 + QUIET
    assert liveness.check(3.0) is Verdict.WAIT
    assert verdicts(liveness, 100.0)[-1] == (5.95, Verdict.LOST)


def test_a_suspect_is_asked_at_once_and_has_little_time() -> None:
    liveness = Liveness(BOUND, 0.0)
    liveness.suspect(0.5, 0.1)
    assert liveness.check(0.5) is Verdict.PROBE
    assert liveness.check(0.5 + SUSPECT_SECONDS - 0.01) is not Verdict.LOST
    assert liveness.check(0.5 + SUSPECT_SECONDS) is Verdict.LOST


def test_a_suspect_on_a_slow_path_has_the_time_that_an_answer_takes() -> None:
    liveness = Liveness(BOUND, 0.0)
    liveness.suspect(0.5, 1.5)
    liveness.suspect(0.6, 1.5)  # repeated hints do not postpone it
    assert liveness.check(0.5) is Verdict.PROBE
    assert liveness.check(1.4) is not Verdict.LOST
    assert liveness.check(2.0) is Verdict.LOST


def test_suspicion_never_makes_for_more_time() -> None:
    liveness = Liveness(BOUND, 0.0)
    liveness.suspect(0.5, 60.0)
    assert verdicts(liveness, 100.0)[-1] == (3.0, Verdict.LOST)


def test_an_answer_clears_a_suspect() -> None:
    liveness = Liveness(BOUND, 0.0)
    liveness.suspect(0.5, 0.1)
    liveness.check(0.5)
    liveness.heard(0.6)
    assert not liveness.is_suspect
    assert liveness.check(0.9) is Verdict.WAIT
    assert verdicts(liveness, 100.0)[-1] == (3.6, Verdict.LOST)


def test_after_we_did_not_run_ourselves_the_peer_gets_one_more_interval() -> None:
    liveness = Liveness(BOUND, 0.0)
    assert liveness.check(50.0) is Verdict.PROBE
    assert verdicts(liveness, 100.0)[-1] == (50.0 + QUIET, Verdict.LOST)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.floats(0.001, 2.0)), max_size=40))
def test_it_is_lost_no_sooner_than_the_bound_and_asked_well_before(
    steps: list[tuple[bool, float]],
) -> None:
    now = heard = 0.0
    liveness = Liveness(BOUND, now)
    probed = False
    for is_heard, pause in steps:
        now += pause
        while liveness.deadline <= now:
            at = liveness.deadline
            verdict = liveness.check(at)
            probed = probed or verdict is Verdict.PROBE
            if verdict is Verdict.LOST:
                assert at == pytest.approx(heard + BOUND)
                assert probed
                return
        if is_heard:
            liveness.heard(now)
            heard, probed = now, False


# -- on connections


def test_an_idle_connection_lives_on_for_the_price_of_a_few_small_packets() -> None:
    world = World()
    dialer, listener = connect(world)
    before = sum(world.sent.values())
    world.run(seconds=600)
    assert dialer.core.ended is None
    assert listener.core.ended is None
    assert (sum(world.sent.values()) - before) / 600 < 200  # bytes a second, both directions


@pytest.mark.parametrize("direction", ["both", "ours", "theirs"])
def test_a_peer_cut_off_is_lost_at_the_bound(direction: str) -> None:
    world = World()
    dialer, listener = connect(world)
    cut = world.now

    def tap(data: bytes, source: Address, _: Address) -> bytes | None:
        ours = source == dialer.host.address
        passes = (direction == "ours" and not ours) or (direction == "theirs" and ours)
        return data if passes else None

    world.tap = tap
    assert world.run(lambda: dialer.core.ended, seconds=10)
    # From the last packet heard, which may have been under way at the cut.
    assert BOUND - QUIET <= world.now - cut <= BOUND + 0.1
    end = dialer.core.ended
    assert end is not None
    if direction != "ours":
        assert end.by is EndedBy.SILENCE
        assert "nothing heard for 3.0 s" in end.reason
    assert world.run(lambda: listener.core.ended, seconds=10)
    assert world.run(lambda: not dialer.host.demux.connections)
    assert world.run(lambda: not listener.host.demux.connections)


@pytest.mark.attack
def test_garbage_does_not_keep_a_dead_peer_alive() -> None:
    """Anybody can send to a connection id that was seen on the way; only the peer can seal."""
    world = World()
    dialer, listener = connect(world)
    replay: list[bytes] = []

    def tap(data: bytes, source: Address, _: Address) -> bytes:
        if source == listener.host.address:
            replay.append(data)
        return data

    world.tap = tap
    listener.core.ping(1)
    listener.pump()
    world.run(seconds=0.5)
    del world.hosts[listener.host.address]
    garbage = b"\x40" + dialer.core.quic.host_cid + bytes(40)
    for _ in range(40):
        for data in (garbage, *replay):
            dialer.host.receive(data, listener.host.address)
        world.run(seconds=0.1)
    assert dialer.core.ended is not None
    assert dialer.core.ended.by is EndedBy.SILENCE


def test_a_busy_sender_notices_as_soon_as_an_idle_one() -> None:
    world = World()
    dialer, listener = connect(world)
    dialer.open(bytes(4_000_000), fin=False)
    world.run(lambda: len(listener.inbox.get(0, b"")) > 200_000)
    cut = world.now
    del world.hosts[listener.host.address]
    assert world.run(lambda: dialer.core.ended, seconds=10)
    assert world.now - cut <= BOUND + 0.1
    assert dialer.core.ended is not None
    assert dialer.core.ended.by is EndedBy.SILENCE


@pytest.mark.parametrize("seed", range(4))
def test_a_lossy_but_live_peer_is_not_lost(seed: int) -> None:
    world = World(seed)
    dialer, listener = connect(world)
    world.link = Link(delay=0.05, jitter=0.02, loss=0.2)
    world.run(seconds=120)
    assert dialer.core.ended is None
    assert listener.core.ended is None


def test_a_peer_whose_host_reports_it_gone_is_lost_within_a_moment() -> None:
    world = World()
    dialer, listener = connect(world)
    world.run(seconds=5)
    del world.hosts[listener.host.address]
    now = world.now
    dialer.core.suspect(now)
    assert world.run(lambda: dialer.core.ended, seconds=10)
    assert world.now - now <= SUSPECT_SECONDS + 0.01
    assert "reports its port closed" in dialer.core.ended.reason


@pytest.mark.attack
@pytest.mark.parametrize("delay", [0.01, 0.2, 0.6])
def test_a_forged_report_harms_nobody_who_is_there(delay: float) -> None:
    """ICMP errors can be forged; on a slow path the answer takes longer than usual."""
    world = World(link=Link(delay=delay))
    dialer, listener = connect(world, Settings(liveness=6.0), Settings(liveness=6.0))
    dialer.open(b"x" * 5000)
    world.run(lambda: listener.core.streams and listener.core.streams[0].fin_received)
    for _ in range(30):
        dialer.core.suspect(world.now)
        world.run(seconds=0.1)
    world.run(seconds=10)
    assert dialer.core.ended is None


def test_a_process_that_was_stopped_for_a_while_does_not_blame_the_peer() -> None:
    world = World()
    dialer, listener = connect(world, server=Settings(liveness=60.0))
    del world.hosts[dialer.host.address]
    world.run(seconds=20)
    world.hosts[dialer.host.address] = dialer.host
    world.run(seconds=5)
    assert dialer.core.ended is None
    assert listener.core.ended is None


def test_a_process_that_was_stopped_still_notices_that_the_peer_has_gone() -> None:
    world = World()
    dialer, listener = connect(world)
    del world.hosts[dialer.host.address]
    world.run(lambda: listener.core.ended)
    del world.hosts[listener.host.address]
    world.now += 10
    world.hosts[dialer.host.address] = dialer.host
    began = world.now
    assert world.run(lambda: dialer.core.ended, seconds=10)
    assert world.now - began <= 2 * QUIET


def test_nothing_is_asked_of_a_peer_that_has_not_proved_itself() -> None:
    world = World()
    here, there = world.host(1), world.host(2)
    dialer = here.dial(there)
    del world.hosts[there.address]
    world.run(seconds=20)
    assert dialer.core.ended is None
    # QUIC's own idle timeout is the backstop.
    assert world.run(lambda: dialer.core.ended, seconds=60)
    (ended,) = dialer.events
    assert isinstance(ended, ConnectionEnded)
    assert ended.by is EndedBy.SILENCE
    assert world.run(lambda: not here.demux.connections)
