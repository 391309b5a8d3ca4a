"""Streams are looked at when something has happened to them: never in vain, and none is missed."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tests.transport.pair import End, Link, Settings, World, connect
from transport.protocol.batch import SendPart
from transport.protocol.batch.credit import CreditConnection

MANY = Settings(max_streams=4000)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Hold each answer against a look at every open stream; count the answers."""
    answers: Counter[str] = Counter()
    look, discard = (
        CreditConnection._streams_have_control,
        CreditConnection._discard_finished_streams,
    )

    def streams_have_control(self: CreditConnection) -> bool:
        needed = [at for at, stream in self._streams.items() if self._has_control(stream)]
        missed = set(needed) - set(self._concerned)
        assert not missed, f"nobody was told of {missed}"
        found = look(self)
        assert found == bool(needed)
        answers[f"control {found}"] += 1
        return found

    def discard_finished_streams(self: CreditConnection, now: float) -> None:
        before = len(self._streams)
        discard(self, now)
        answers["discarded"] += before - len(self._streams)
        assert not [at for at, stream in self._streams.items() if stream.is_finished]

    monkeypatch.setattr(CreditConnection, "_streams_have_control", streams_have_control)
    monkeypatch.setattr(CreditConnection, "_discard_finished_streams", discard_finished_streams)
    return answers


@pytest.mark.parametrize("seed", range(6))
def test_no_stream_is_missed_whatever_happens_to_it(seed: int, checked: Counter[str]) -> None:
    """Echoes, half-read streams, resets and stops, on a link that loses, doubles and reorders."""
    draw = random.Random(seed)
    link = Link(delay=0.005, jitter=0.01, loss=0.1, duplicate=0.05)
    world = World(seed, link)
    dialer, listener = connect(world, MANY, MANY)
    listener.echoes = True
    sides: list[End] = [dialer, listener]
    for _ in range(60):
        end = draw.choice(sides)
        kept = [each for each in end.core.streams.values() if not each.released]
        match draw.randrange(6):
            case 0 | 1:
                end.open(
                    draw.randbytes(draw.choice((0, 10, 3000, 300_000))), fin=draw.random() < 0.7
                )
            case 2 if kept:
                end.core.reset(draw.choice(kept), 7)
                end.pump()
            case 3 if kept:
                end.release(draw.choice(kept), 9)
            case 4:
                end.reads = not end.reads
            case _:
                pass
        world.run(seconds=draw.choice((0.0, 0.01, 0.1)))
    for end in sides:
        end.reads = True
        for stream in list(end.core.streams.values()):
            if not stream.released:
                end.release(stream)
    world.run(seconds=20)
    assert checked["control True"] > 20
    assert checked["control False"] > 20
    assert checked["discarded"] > 20
    for end in sides:
        assert end.core.ended is None
        assert not end.core.quic._streams, "all is over, and forgotten"
        assert not end.core.quic._concerned
        assert not end.core.quic._streams_queue


def test_credit_that_was_lost_is_given_again(checked: Counter[str]) -> None:
    """A window that nobody opens again would stop the stream for ever."""
    world = World(3, Link(delay=0.005, loss=0.1))
    dialer, listener = connect(world)
    sent = bytes(range(256)) * 2048
    stream = dialer.open(sent)
    assert world.run(lambda: len(listener.inbox.get(stream.stream_id, b"")) == len(sent), 120)
    assert bytes(listener.inbox[stream.stream_id]) == sent


def test_who_reads_late_lets_the_sender_go_on(checked: Counter[str]) -> None:
    """Credit becomes due when the application takes bytes, long after the last packet came."""
    world = World()
    dialer, listener = connect(world)
    listener.reads = False
    stream = dialer.open(bytes(1 << 20))
    world.run(seconds=2)
    there = listener.core.streams[stream.stream_id]
    assert there.buffered == listener.host.settings.stream_window
    while (taken := len(listener.inbox.get(stream.stream_id, b""))) < 1 << 20:
        listener.read(there)
        listener.pump()
        world.run(seconds=0.2)
        assert len(listener.inbox[stream.stream_id]) > taken, "it has come to a stop"


@pytest.mark.parametrize("idle", [10, 1000, 3000])
def test_idle_streams_cost_nothing(idle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    dialer, listener = connect(world, MANY, MANY)
    for count in range(idle):
        dialer.core.write(dialer.core.open_stream(), b"x")
        if count % 200 == 199:
            dialer.pump()
            world.run(seconds=0.1)
    dialer.pump()
    world.run(seconds=1)
    assert len(listener.opened) == idle
    looks: Counter[str] = Counter()
    for name in ("_has_control", "_write_stream_limits"):
        original: Any = getattr(CreditConnection, name)

        def counted(*given: Any, _name: str = name, _original: Any = original, **named: Any) -> Any:
            looks[_name] += 1
            return _original(*given, **named)

        monkeypatch.setattr(CreditConnection, name, counted)
    listener.echoes = True
    for number in range(10):
        stream = dialer.open(b"%d" % number)
        world.run(seconds=0.05)
        assert dialer.inbox[stream.stream_id] == b"%d" % number
        dialer.release(stream)
        world.run(seconds=0.05)
    assert 0 < looks["_has_control"] < 300, looks
    assert looks["_write_stream_limits"] < 300, looks
    # The control: one of them is looked at as soon as it has something to say.
    listener.core.reset(listener.core.streams[listener.opened[idle // 2]], 5)
    listener.pump()
    world.run(seconds=0.1)
    assert dialer.core.streams[listener.opened[idle // 2]].remote_reset == 5


def test_those_that_were_served_wait_for_the_others() -> None:
    """What is left to upstream's packet code goes in turns, packet by packet, as upstream."""
    world = World()
    dialer, _ = connect(world)
    quic = dialer.core.quic
    streams = [dialer.core.open_stream() for _ in range(4)]
    for stream in streams:
        dialer.core.write(stream, bytes(3000))
    quic._writer.hand_over()
    senders = [SendPart.of(quic._streams[stream.stream_id]) for stream in streams]
    controller = quic._loss._cc
    served: list[tuple[int, ...]] = []
    for _ in range(40):
        world.now += 0.01
        controller.congestion_window = controller.bytes_in_flight + quic.datagram_size
        if quic.datagrams_to_send(world.now):
            served.append(tuple(sender.highest_offset for sender in senders))
    assert served[-1] == (3000,) * 4
    for offsets in served:
        assert max(offsets) - min(offsets) <= 2 * quic.datagram_size, served
