"""Streams: contents, ends, resets, limits."""

from __future__ import annotations

import hashlib
import random

import pytest
from aioquic.tls import Epoch

from tests.transport.pair import KIB, MIB, End, Link, Settings, World, connect
from transport.protocol.events import (
    ConnectionEnded,
    PingAcknowledged,
    StreamChanged,
    StreamOpened,
    StreamsAvailable,
)

LINKS = {
    "clean": Link(),
    "reorder": Link(jitter=0.03),
    "lossy": Link(jitter=0.01, loss=0.05),
    "twice": Link(jitter=0.02, duplicate=0.3),
    "corrupt": Link(jitter=0.01, corrupt=0.03),
    "all": Link(jitter=0.02, loss=0.02, duplicate=0.05, corrupt=0.02),
}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def random_bytes(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count)


def sizes(end: End) -> dict[str, int]:
    """How much is kept about streams, ours and upstream's, all in all."""
    core, quic = end.core, end.core.quic
    return {
        "streams": len(core.streams),
        "blocked": len(core._blocked),
        "events": len(core.events),
        "awaiting": len(core._awaiting),
        "ready": len(quic._writer._ready),
        "posted": len(quic._posted),
        "upstream": len(quic._streams),
        "queue": len(quic._streams_queue),
        "upstream blocked": len(quic._streams_blocked_bidi),
    }


NOTHING = dict.fromkeys(
    (
        "streams",
        "blocked",
        "events",
        "awaiting",
        "ready",
        "posted",
        "upstream",
        "queue",
        "upstream blocked",
    ),
    0,
)


@pytest.mark.parametrize("kind", LINKS)
def test_contents_arrive_whole_both_ways_whatever_the_network_does(kind: str) -> None:
    world = World(seed=11, link=LINKS[kind])
    dialer, listener = connect(world)
    contents = [random_bytes(60 * KIB + i, i) for i in range(3)]
    streams = [dialer.open(data, fin=False) for data in contents]
    listener.echoes = True
    for stream in streams:
        dialer.write(stream, b"", fin=True)

    def is_done() -> bool:
        return all(stream.fin_received for stream in streams)

    assert world.run(is_done, seconds=120)
    for stream, data in zip(streams, contents, strict=True):
        assert digest(bytes(dialer.inbox[stream.stream_id])) == digest(data)
        dialer.release(stream)
    assert world.run(lambda: sizes(dialer) == sizes(listener) == NOTHING)


def test_streams_of_the_listener_work_the_same() -> None:
    world = World()
    dialer, listener = connect(world)
    dialer.echoes = True
    stream = listener.open(b"from the other side")
    assert stream.stream_id == 1
    assert world.run(lambda: stream.fin_received)
    assert dialer.opened == [1]
    assert listener.inbox[1] == b"from the other side"


def test_the_end_of_a_stream_may_come_alone() -> None:
    world = World()
    dialer, listener = connect(world)
    stream = dialer.open(b"", fin=True)
    assert world.run(lambda: listener.opened)
    assert listener.core.streams[stream.stream_id].fin_received
    assert listener.core.streams[stream.stream_id].is_readable


def test_keys_are_changed_in_the_middle_of_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.protocol.batch.connection.KEY_UPDATE_PACKETS", 50)
    world = World(seed=1, link=Link(jitter=0.004, loss=0.01))
    dialer, listener = connect(world)
    dialer.core.quic._key_update_at = 50
    phases = set()

    def tap(data: bytes, *_: object) -> bytes:
        phases.add(dialer.core.quic._cryptos[Epoch.ONE_RTT].key_phase)
        return data

    world.tap = lambda data, *ends: tap(data, *ends) if len(data) <= 1500 else None
    data = random_bytes(400 * KIB)
    dialer.open(data)
    assert world.run(lambda: len(listener.inbox.get(0, b"")) == len(data), seconds=60)
    assert digest(bytes(listener.inbox[0])) == digest(data)
    assert phases == {0, 1}


# -- ends before the end


def test_a_reset_reaches_the_peer_with_its_code_after_what_came_before() -> None:
    world = World()
    dialer, listener = connect(world)
    listener.reads = False
    stream = dialer.open(b"half of it", fin=False)
    world.run(lambda: listener.opened)
    dialer.core.reset(stream, 7)
    dialer.release(stream, 7)
    theirs = listener.core.streams[0]
    assert world.run(lambda: theirs.remote_reset is not None)
    assert (theirs.remote_reset, theirs.remote_stop) == (7, 7)
    assert theirs.incoming.take(100) == b"half of it"
    listener.core.consumed(theirs, 10)
    listener.release(theirs)
    assert world.run(lambda: sizes(dialer) == sizes(listener) == NOTHING)


def test_releasing_a_stream_stops_the_sender_and_throws_away_what_still_comes() -> None:
    world = World()
    dialer, listener = connect(world)
    stream = dialer.open(random_bytes(2 * MIB), fin=True)
    world.run(lambda: listener.opened)
    theirs = listener.core.streams[0]
    listener.release(theirs, 4)
    assert world.run(lambda: stream.remote_stop is not None)
    assert stream.remote_stop == 4
    assert stream.send_ended
    changed = len([e for e in listener.events if isinstance(e, StreamChanged)])
    dialer.release(stream)
    assert world.run(lambda: sizes(dialer) == sizes(listener) == NOTHING)
    # Of a stream it has dropped the application hears no more.
    assert len([e for e in listener.events if isinstance(e, StreamChanged)]) == changed


def test_a_stop_that_overtakes_the_first_data_is_not_forgotten() -> None:
    """Its answer, RESET_STREAM, is on its way already: a later write would be an error."""
    world = World()
    dialer, listener = connect(world)
    late: list[bytes] = []

    def hold_back(data: bytes, *_: object) -> bytes | None:
        late.append(data)
        return None

    world.tap = hold_back
    stream = dialer.open(b"request", fin=False)
    world.tap = lambda data, *_: data
    dialer.core.quic.stop_stream(stream.stream_id, 5)
    dialer.pump()
    assert world.run(lambda: listener.opened)
    theirs = listener.core.streams[0]
    assert theirs.remote_stop == 5
    assert theirs.send_ended
    world.send(late[0], dialer.host.address, listener.host.address)
    assert world.run(lambda: listener.inbox.get(0) == b"request")
    assert listener.opened == [0]


def test_what_comes_late_for_a_stream_that_is_over_opens_it_no_second_time() -> None:
    world = World()
    dialer, listener = connect(world)
    stream = dialer.open(b"all there is", fin=True)
    world.run(lambda: listener.opened and listener.core.streams[0].fin_received)
    # The listener is done with it, but what it wrote has not been acknowledged.
    answer = listener.core.streams[0]
    world.tap = lambda data, source, _: None if source == listener.host.address else data
    listener.write(answer, b"answer", fin=True)
    listener.release(answer)
    assert not listener.core.streams
    dialer.release(stream)  # crosses the answer: STOP_SENDING
    world.run(seconds=0.1)
    world.tap = lambda data, *_: data

    assert world.run(lambda: sizes(dialer) == sizes(listener) == NOTHING)
    assert listener.opened == [0]
    assert not [e for e in dialer.events if isinstance(e, StreamOpened)]


def test_opening_a_stream_opens_those_before_it_in_order() -> None:
    world = World()
    dialer, listener = connect(world)
    lost: list[bytes] = []
    world.tap = lambda data, *_: lost.append(data)
    for number in range(3):
        dialer.open(b"%d" % number)
    world.tap = lambda data, *_: data
    dialer.open(b"3")
    assert world.run(lambda: listener.opened, seconds=0.015)
    assert listener.opened == [0, 4, 8, 12]
    assert listener.inbox == {12: b"3"}
    assert world.run(lambda: len(listener.inbox) == 4)
    assert listener.opened == [0, 4, 8, 12]


def test_a_second_reset_or_release_changes_nothing() -> None:
    world = World()
    dialer, listener = connect(world)
    stream = dialer.open(b"x", fin=False)
    dialer.core.reset(stream, 3)
    dialer.core.reset(stream, 4)
    dialer.release(stream, 5)
    dialer.release(stream, 6)
    world.run(lambda: listener.opened and listener.core.streams[0].remote_reset is not None)
    assert listener.core.streams[0].remote_reset == 3
    assert stream.local_reset == 3


def test_resetting_after_everything_was_acknowledged_is_harmless() -> None:
    world = World()
    dialer, listener = connect(world)
    listener.echoes = True
    stream = dialer.open(b"ping")
    world.run(lambda: stream.fin_received)
    world.run(seconds=1)
    dialer.core.reset(stream, 1)
    dialer.release(stream)
    world.run(seconds=1)
    assert sizes(dialer) == sizes(listener) == NOTHING
    assert dialer.core.ended is None


# -- bounds


def test_the_send_buffer_is_bounded_and_room_is_announced() -> None:
    world = World()
    dialer, _ = connect(world, Settings(send_buffer=10_000))
    core = dialer.core
    stream = core.open_stream()
    assert core.room(stream) == 10_000
    core.write(stream, b"a" * 4_000)
    assert core.room(stream) == 6_000
    core.write(stream, b"a" * 6_000)
    assert core.room(stream) == 0
    assert core.quic.unacknowledged(stream.stream_id) == 10_000
    assert not [e for e in dialer.events if isinstance(e, StreamChanged)]

    dialer.pump()
    assert world.run(lambda: StreamChanged(stream.stream_id) in dialer.events)
    assert 0 < core.room(stream) <= 10_000
    world.run(seconds=1)
    # Told once: nobody has asked for room in vain since.
    assert dialer.events.count(StreamChanged(stream.stream_id)) == 1
    assert core.room(stream) == 10_000


def test_a_stranger_has_one_stream_and_an_admitted_peer_as_many_as_it_was_given() -> None:
    world = World()
    dialer, listener = connect(world, server=Settings(admit=False, max_streams=5))
    core = dialer.core
    assert core.quic.streams_left == 1
    assert not listener.core.can_open_stream or listener.core.quic.streams_left == 128
    dialer.open(b"hello", fin=False)
    assert not core.can_open_stream
    before = dialer.events.count(StreamsAvailable())

    listener.admit()
    listener.pump()
    assert world.run(lambda: dialer.events.count(StreamsAvailable()) > before)
    assert core.quic.streams_left == 4


def test_streams_closed_before_admission_do_not_narrow_it() -> None:
    world = World()
    dialer, listener = connect(world, server=Settings(admit=False, max_streams=5))
    listener.echoes = True
    stream = dialer.open(b"hello")
    world.run(lambda: stream.fin_received)
    dialer.release(stream)
    world.run(seconds=1)
    listener.admit()
    listener.pump()
    world.run(seconds=1)
    assert dialer.core.quic.streams_left == 5
    # Admitting again does not add up.
    listener.admit()
    listener.pump()
    world.run(seconds=1)
    assert dialer.core.quic.streams_left == 5


@pytest.mark.attack
@pytest.mark.parametrize("count", [5, 6], ids=["control", "attack"])
def test_a_peer_that_opens_one_stream_too_many_is_cut_off(count: int) -> None:
    world = World()
    dialer, listener = connect(world, server=Settings(max_streams=5))
    dialer.core.quic._remote_max_streams_bidi = 100
    for _ in range(count):
        dialer.open(b"x", fin=False)
    world.run(seconds=1)
    if count == 5:
        assert listener.core.ended is None
        assert len(listener.opened) == 5
    else:
        assert listener.core.ended is not None
        assert listener.core.ended.code == 0x04  # STREAM_LIMIT_ERROR
        assert not listener.core.ended.is_application


@pytest.mark.attack
def test_unidirectional_streams_are_not_for_anybody() -> None:
    world = World()
    dialer, listener = connect(world)
    dialer.core.quic._remote_max_streams_uni = 10
    dialer.core.quic.send_stream_data(2, b"x")
    dialer.pump()
    world.run(seconds=1)
    assert listener.core.ended is not None
    assert listener.core.ended.code == 0x04
    assert not listener.opened


def test_a_stream_slot_that_comes_with_another_being_used_is_announced() -> None:
    """Whoever waits for one must hear of it, even if as many are left as when last counted."""
    world = World()
    dialer, listener = connect(world, server=Settings(max_streams=1))
    listener.echoes = True
    first = dialer.open(b"1")
    world.run(lambda: first.fin_received)
    before = dialer.events.count(StreamsAvailable())
    dialer.release(first)
    assert not dialer.core.can_open_stream
    assert world.run(lambda: dialer.core.can_open_stream)
    assert dialer.events.count(StreamsAvailable()) == before + 1
    dialer.core._collect()
    dialer.open(b"2", fin=False)  # taken before anything else arrives
    dialer.core.quic._remote_max_streams_bidi += 1
    dialer.core._collect()
    assert dialer.core.events.popleft() == StreamsAvailable()


def test_any_number_of_streams_in_turn_leaves_nothing_behind() -> None:
    """As many calls as one likes on one connection: the tables stay as they are."""
    world = World(link=Link(delay=0.001))
    dialer, listener = connect(world)
    listener.echoes = True
    total, batch = 3_000, 100
    for _ in range(total // batch):
        assert world.run(lambda: dialer.core.quic.streams_left >= batch)
        streams = [dialer.open(b"call") for _ in range(batch)]
        assert world.run(lambda: all(s.fin_received for s in streams))  # noqa: B023
        assert {bytes(dialer.inbox.pop(s.stream_id)) for s in streams} == {b"call"}
        for stream in streams:
            dialer.core.release(stream, 0)
        dialer.pump()
        dialer.events.clear()
        listener.events.clear()
        world.run(seconds=0.05)
        assert sizes(dialer) == sizes(listener) == NOTHING
    assert len(listener.opened) == total
    assert not listener.core.quic._spaces[Epoch.ONE_RTT].sent_packets


def test_new_stream_slots_are_announced_in_batches() -> None:
    """A frame for each call would be a third of what a small call costs."""
    world = World(link=Link(delay=0.001))
    dialer, listener = connect(world, server=Settings(max_streams=16))
    listener.echoes = True
    announced = set()
    for _ in range(64):
        stream = dialer.open(b"call")
        assert world.run(lambda: stream.fin_received)  # noqa: B023
        dialer.release(stream)
        world.run(seconds=0.05)
        announced.add(dialer.core.quic.stream_limit)
        assert dialer.core.quic.streams_left >= 8
    assert 2 <= len(announced) <= 1 + 64 / 8


# -- when everything has arrived


def test_flushed_means_that_data_ends_and_resets_have_arrived() -> None:
    world = World()
    dialer, _ = connect(world)
    core = dialer.core
    assert core.is_flushed()

    stream = dialer.open(b"x", fin=False)
    assert not core.is_flushed()
    assert world.run(core.is_flushed, seconds=1)

    dropped: list[bytes] = []
    world.tap = lambda data, *_: dropped.append(data)
    dialer.write(stream, b"", fin=True)  # the end alone, and it gets lost
    assert not core.is_flushed()
    world.tap = lambda data, *_: data
    assert world.run(core.is_flushed, seconds=2)
    assert dropped

    other = dialer.open(b"y", fin=False)
    world.run(core.is_flushed, seconds=1)
    dialer.core.reset(other, 1)
    dialer.pump()
    assert not core.is_flushed()
    assert world.run(core.is_flushed, seconds=1)


def test_pings_are_answered_by_number_and_those_for_liveness_are_kept_quiet() -> None:
    world = World()
    dialer, _ = connect(world)
    dialer.core.ping(17)
    dialer.pump()
    assert world.run(lambda: PingAcknowledged(17) in dialer.events)
    world.run(seconds=5)
    assert [e for e in dialer.events if isinstance(e, PingAcknowledged)] == [PingAcknowledged(17)]
    assert not [e for e in dialer.events if isinstance(e, ConnectionEnded)]
