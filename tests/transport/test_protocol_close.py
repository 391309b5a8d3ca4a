"""How connections end: codes and reasons arrive, a missed close is repeated, nothing is left."""

from __future__ import annotations

import pytest

from tests.transport.pair import Address, World, connect, key
from transport.codes import AppCode
from transport.protocol.events import ConnectionEnded, EndedBy


@pytest.mark.parametrize("code", [0, int(AppCode.DENIED), 0x3FFF_FFFF])
def test_code_and_reason_arrive_and_both_ends_are_forgotten(code: int) -> None:
    world = World()
    dialer, listener = connect(world)
    dialer.core.close(code, "off to bed")
    dialer.pump()
    assert dialer.core.ended == ConnectionEnded(EndedBy.LOCAL, code, "off to bed", True)
    assert dialer.events[-1] == dialer.core.ended
    assert world.run(lambda: listener.core.ended)
    assert listener.core.ended == ConnectionEnded(EndedBy.REMOTE, code, "off to bed", True)
    assert listener.events[-1] == listener.core.ended
    assert not listener.core.is_terminated
    assert world.run(lambda: not dialer.host.demux.connections, seconds=5)
    assert world.run(lambda: not listener.host.demux.connections, seconds=5)
    assert dialer.core.is_terminated
    assert listener.core.is_terminated
    assert listener.core.next_deadline() is None


def test_the_end_is_told_once_and_nothing_after_it() -> None:
    world = World()
    dialer, listener = connect(world)
    dialer.open(b"x" * 100_000)
    world.run(lambda: listener.inbox)
    listener.core.close(3, "enough")
    listener.core.close(4, "more than enough")
    listener.core.abandon("really")
    listener.pump()
    world.run(seconds=5)
    for end in (dialer, listener):
        assert [isinstance(e, ConnectionEnded) for e in end.events].count(True) == 1
        assert isinstance(end.events[-1], ConnectionEnded)
    assert dialer.core.ended == ConnectionEnded(EndedBy.REMOTE, 3, "enough", True)


def test_data_that_came_before_the_close_is_told_before_it() -> None:
    world = World()
    dialer, listener = connect(world)
    dialer.open(b"last words")
    dialer.core.close(0, "")
    dialer.pump()
    world.run(lambda: listener.core.ended)
    assert listener.inbox == {0: b"last words"}
    assert isinstance(listener.events[-1], ConnectionEnded)


def test_a_close_that_was_lost_is_repeated_to_a_peer_that_goes_on() -> None:
    world = World()
    dialer, listener = connect(world)
    swallowed: list[bytes] = []
    world.tap = lambda data, *_: swallowed.append(data)
    dialer.core.close(2, "missed")
    dialer.pump()
    assert len(swallowed) == 1
    world.tap = lambda data, *_: data
    listener.core.ping(1)
    listener.pump()
    assert world.run(lambda: listener.core.ended, seconds=0.1)
    assert listener.core.ended == ConnectionEnded(EndedBy.REMOTE, 2, "missed", True)


def test_a_close_is_repeated_ever_more_rarely() -> None:
    world = World()
    dialer, listener = connect(world)
    world.tap = lambda *_: None
    dialer.core.close(2, "")
    dialer.pump()
    poke = b"\x40" + dialer.core.quic.host_cid + bytes(40)
    answered = []
    for number in range(1, 101):
        before = world.sent[dialer.host.address, listener.host.address]
        dialer.host.receive(poke, listener.host.address)
        if world.sent[dialer.host.address, listener.host.address] > before:
            answered.append(number)
    assert answered == [1, 2, 4, 8, 16, 32, 64]


def test_a_peer_that_was_told_to_go_says_nothing_more() -> None:
    world = World()
    dialer, listener = connect(world)
    dialer.core.close(0, "")
    dialer.pump()
    world.run(lambda: listener.core.ended)
    before = world.sent[listener.host.address, dialer.host.address]
    for _ in range(10):
        listener.host.receive(b"\x40" + listener.core.quic.host_cid + bytes(40), ("192.0.2.1", 1))
    world.run(seconds=5)
    assert world.sent[listener.host.address, dialer.host.address] == before


LONG = "é" * 3000


@pytest.mark.parametrize(
    ("reason", "arrives"),
    [
        (LONG, "é" * 128),
        ("file \udcff", "file ?"),
        ("\x1b[2Jfake\nlog line", "\ufffd[2Jfake log line"),
    ],
    ids=["long", "undecodable", "control characters"],
)
def test_any_reason_can_be_given_and_only_plain_text_arrives(reason: str, arrives: str) -> None:
    world = World()
    dialer, listener = connect(world)
    dialer.core.close(1, reason)
    dialer.pump()
    assert world.run(lambda: listener.core.ended, seconds=1)
    assert listener.core.ended == ConnectionEnded(EndedBy.REMOTE, 1, arrives, True)


@pytest.mark.parametrize("when", [0.0, 0.005, 0.015, 0.025])
def test_a_long_reason_fits_at_every_stage_of_the_handshake(when: float) -> None:
    world = World()
    here, there = world.host(1), world.host(2)
    dialer = here.dial(there)
    world.run(seconds=when)
    for end in (dialer, *there.ends.values()):
        end.core.close(1, LONG)
        end.core.quic.close(0x100 + 42, 0, LONG[:128])  # a transport error tells its reason too
        end.pump()
    assert world.run(lambda: not here.demux.connections, seconds=20)
    assert world.run(lambda: not there.demux.connections, seconds=70)


def test_an_application_close_before_the_handshake_tells_the_peer_nothing_of_it() -> None:
    """RFC 9000 section 10.2.3: nobody has proved anything yet."""
    world = World()
    here, there = world.host(1), world.host(2)
    dialer = here.dial(there)
    world.run(lambda: there.ends)
    there.end.core.close(int(AppCode.DENIED), "secret reason")
    there.end.pump()
    assert world.run(lambda: dialer.core.ended, seconds=1)
    ended = dialer.core.ended
    assert ended is not None
    assert (ended.by, ended.code, ended.reason) == (EndedBy.REMOTE, 0x0C, "")
    assert not ended.is_application


def test_abandoning_tells_a_peer_that_is_still_there() -> None:
    world = World()
    dialer, listener = connect(world)
    dialer.core.abandon("internal error")
    dialer.pump()
    assert dialer.core.ended == ConnectionEnded(EndedBy.SILENCE, 0, "internal error", False)
    assert world.run(lambda: listener.core.ended, seconds=1)
    assert listener.core.ended is not None
    assert listener.core.ended.by is EndedBy.REMOTE


def test_a_listener_abandoned_before_it_read_anything_is_gone_at_once() -> None:
    world = World()
    here, there = world.host(1), world.host(2)
    wire: list[bytes] = []
    world.tap = lambda data, *_: wire.append(data)
    here.dial(there)
    there.demux.route(wire[0], here.address, world.now)
    there.end.core.abandon("internal error")
    assert there.end.core.is_terminated
    there.pump(there.end)
    assert not there.demux.connections
    assert not there.demux.half_open


def test_after_the_end_time_and_suspicion_do_nothing() -> None:
    world = World()
    dialer, _ = connect(world)
    dialer.core.close(0, "")
    dialer.pump()
    events = list(dialer.events)
    dialer.core.suspect(world.now)
    dialer.core.handle_timer(world.now + 1)
    dialer.core.handle_timer(world.now + 100)
    assert not dialer.core.events
    assert dialer.events == events
    assert dialer.core.is_terminated


@pytest.mark.attack
@pytest.mark.parametrize("proves", [True, False], ids=["control", "attack"])
def test_only_the_peer_can_close(proves: bool) -> None:
    """A close in a packet that is not authentic is garbage."""
    world = World()
    dialer, listener = connect(world)
    close: list[bytes] = []

    def tap(data: bytes, source: Address, _: Address) -> bytes | None:
        close.append(data)
        return None

    world.tap = tap
    dialer.core.close(0, "")
    dialer.pump()
    world.tap = lambda data, *_: data
    (data,) = close
    if not proves:
        data = data[:-1] + bytes([data[-1] ^ 1])
    listener.host.receive(data, dialer.host.address)
    assert (listener.core.ended is not None) == proves


def test_two_connections_of_the_same_pair_end_apart() -> None:
    world = World()
    dialer, listener = connect(world)
    other = dialer.host.dial(listener.host)
    assert world.run(lambda: other.handshake and listener.host.end.handshake)
    dialer.core.close(0, "")
    dialer.pump()
    world.run(seconds=10)
    assert other.core.ended is None
    assert other.core.peer == key(2).node_id
    other.open(b"still here")
    assert world.run(lambda: listener.host.end.inbox.get(0) == b"still here")
