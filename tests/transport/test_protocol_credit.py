"""Flow control: a window moves as the application consumes, by exactly that and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from aioquic.quic.packet import QuicFrameType
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.pair import KIB, End, Link, Settings, World, connect
from transport.protocol import StreamCore

FLOW_CONTROL_ERROR = 0x03
FINAL_SIZE_ERROR = 0x06

STREAM_WINDOW = 40 * KIB
CONNECTION_WINDOW = 100 * KIB
SMALL = Settings(
    stream_window=STREAM_WINDOW, connection_window=CONNECTION_WINDOW, stranger_window=16 * KIB
)


def outstanding(end: End) -> int:
    """Bytes received on all streams that the application has not had and may still get."""
    return end.core.quic._local_max_data.used - end.core.quic._connection_consumed


def window(sender: End) -> int:
    """Bytes that the sender may still send on the connection."""
    quic = sender.core.quic
    return quic._remote_max_data - quic._remote_max_data_used


def idle_receiver(server: Settings = SMALL) -> tuple[World, End, End]:
    world = World()
    dialer, listener = connect(world, server=server)
    listener.reads = False
    return world, dialer, listener


def test_a_sender_stops_at_exactly_the_window_of_a_stream_that_nobody_reads() -> None:
    world, dialer, listener = idle_receiver()
    dialer.open(bytes(STREAM_WINDOW + 1), fin=True)
    world.run(seconds=20)
    theirs = listener.core.streams[0]
    assert theirs.buffered == STREAM_WINDOW
    assert not theirs.fin_received
    # However long the peer goes on asking, and whatever else goes on.
    dialer.open(b"other").stream_id  # noqa: B018
    world.run(seconds=20)
    assert theirs.buffered == STREAM_WINDOW

    listener.read(theirs, 1)
    listener.pump()
    world.run(seconds=1)
    assert not theirs.fin_received  # less than half a window is not worth a frame
    listener.read(theirs, STREAM_WINDOW // 2 - 1)
    listener.pump()
    assert world.run(lambda: theirs.fin_received, seconds=1)
    assert theirs.incoming.delivered == STREAM_WINDOW + 1


def test_the_credit_given_back_is_what_was_consumed() -> None:
    world, dialer, listener = idle_receiver()
    dialer.open(bytes(10 * STREAM_WINDOW), fin=False)
    world.run(seconds=5)
    theirs = listener.core.streams[0]
    consumed = 0
    for count in (STREAM_WINDOW // 2, STREAM_WINDOW // 2 + 777, STREAM_WINDOW - 5):
        listener.read(theirs, count)
        listener.pump()
        consumed += count
        world.run(seconds=3)
        assert theirs.incoming.delivered == STREAM_WINDOW + consumed
        assert theirs.buffered == STREAM_WINDOW
        assert outstanding(listener) == STREAM_WINDOW


def test_many_streams_together_stop_at_the_window_of_the_connection() -> None:
    world, dialer, listener = idle_receiver()
    for _ in range(4):
        dialer.open(bytes(3 * STREAM_WINDOW), fin=False)
    for _ in range(3):
        world.run(seconds=20)
        assert sum(s.buffered for s in listener.core.streams.values()) == CONNECTION_WINDOW
        assert outstanding(listener) == CONNECTION_WINDOW
        assert window(dialer) == 0
        for stream in listener.core.streams.values():
            listener.read(stream)
        listener.pump()


def test_a_stranger_can_make_us_hold_its_small_window_and_no_more() -> None:
    world, dialer, listener = idle_receiver(Settings(admit=False, stranger_window=16 * KIB))
    dialer.open(bytes(200 * KIB), fin=False)
    world.run(seconds=20)
    assert outstanding(listener) == 16 * KIB
    assert sum(s.buffered for s in listener.core.streams.values()) == 16 * KIB

    listener.admit()
    listener.pump()
    world.run(seconds=5)
    assert listener.core.streams[0].buffered == 200 * KIB


def test_reading_tells_when_credit_is_due_to_the_peer() -> None:
    world, dialer, listener = idle_receiver()
    dialer.open(bytes(STREAM_WINDOW), fin=False)
    world.run(seconds=3)
    theirs = listener.core.streams[0]
    core = listener.core
    assert not core.consumed(theirs, len(theirs.incoming.take(STREAM_WINDOW // 2 - 1)))
    assert core.consumed(theirs, len(theirs.incoming.take(1)))


def test_a_lost_credit_is_given_again() -> None:
    world, dialer, listener = idle_receiver()
    dialer.open(bytes(3 * STREAM_WINDOW), fin=True)
    world.run(seconds=5)
    theirs = listener.core.streams[0]
    lost: list[bytes] = []
    world.tap = lambda data, *_: lost.append(data)
    listener.read(theirs)
    listener.pump()
    assert lost
    world.tap = lambda data, *_: data
    listener.reads = True
    assert world.run(lambda: len(listener.inbox[0]) == 3 * STREAM_WINDOW)


# -- bytes that nobody reads


def full_window_is_back(world: World, dialer: End, listener: End) -> bool:
    """Whether a fresh window can be sent, to the byte."""
    assert world.run(lambda: not listener.core.streams and not dialer.core.streams)
    world.run(seconds=3)
    assert outstanding(listener) == 0
    listener.reads = False
    for _ in range(CONNECTION_WINDOW // STREAM_WINDOW + 1):
        dialer.open(bytes(STREAM_WINDOW), fin=False)
    world.run(seconds=20)
    received = sum(s.buffered for s in listener.core.streams.values())
    # Credit below half a window is kept until more of it has come together.
    return CONNECTION_WINDOW // 2 < received <= CONNECTION_WINDOW


def test_bytes_cut_off_by_a_reset_are_credited() -> None:
    """Lost and not sent again: the receiver never sees them, but they count (RFC 9000 4.5)."""
    world, dialer, listener = idle_receiver()
    world.tap = lambda data, source, _: None if source == dialer.host.address else data
    stream = dialer.open(bytes(9000), fin=False)
    world.tap = lambda data, *_: data
    lost = dialer.core.quic._streams[0].sender.highest_offset
    assert lost > 2000
    dialer.core.reset(stream, 1)
    dialer.release(stream)
    assert world.run(lambda: listener.opened)
    theirs = listener.core.streams[0]
    assert theirs.remote_reset == 1
    assert theirs.incoming.delivered == 0
    assert listener.core.quic._local_max_data.used == lost
    assert outstanding(listener) == 0
    listener.release(theirs)
    assert full_window_is_back(world, dialer, listener)


def test_bytes_that_come_after_release_are_credited() -> None:
    world, dialer, listener = idle_receiver()
    stream = dialer.open(bytes(30_000), fin=True)
    world.run(lambda: listener.opened)
    theirs = listener.core.streams[0]
    assert theirs.incoming.delivered < 30_000
    listener.release(theirs)
    world.run(lambda: stream.remote_stop is not None)
    dialer.release(stream)
    assert full_window_is_back(world, dialer, listener)


def test_a_released_stream_gets_no_new_window() -> None:
    """Who goes on sending what we threw away takes it from the connection, once."""
    world, dialer, listener = idle_receiver()
    stream = dialer.open(b"x", fin=False)
    world.run(lambda: listener.opened)
    theirs = listener.core.streams[0]
    quic = dialer.core.quic
    quic._handle_stop_sending_frame = lambda *_: None
    frames = quic._QuicConnection__frame_handlers
    _, epochs = frames[QuicFrameType.STOP_SENDING]

    def ignore(context: object, frame_type: int, buf: object) -> None:
        buf.pull_uint_var()
        buf.pull_uint_var()

    frames[QuicFrameType.STOP_SENDING] = (ignore, epochs)
    listener.release(theirs)
    dialer.write(stream, bytes(5 * STREAM_WINDOW))
    world.run(seconds=20)
    assert listener.core.quic._local_max_data.used == STREAM_WINDOW
    assert outstanding(listener) == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "write", "read", "reset", "release", "finish", "answer", "wait"]),
        st.integers(0, 3),
        st.integers(1, 30_000),
    ),
    max_size=30,
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps=STEPS, seed=st.integers(0, 1000), loss=st.sampled_from([0.0, 0.1]))
def test_no_credit_is_lost_or_made_up_whatever_the_two_sides_do(
    steps: list[tuple[str, int, int]], seed: int, loss: float
) -> None:
    world = World(seed)
    dialer, listener = connect(world, server=SMALL)
    listener.reads = False
    world.link = Link(jitter=0.01, loss=loss)
    streams: list[StreamCore] = []

    def theirs_of(number: int) -> StreamCore | None:
        return listener.core.streams.get(streams[number % len(streams)].stream_id)

    for what, number, count in steps:
        if what == "open" or not streams:
            streams.append(dialer.open(bytes(count), fin=False))
            continue
        stream = streams[number % len(streams)]
        theirs = theirs_of(number)
        match what:
            case "write" | "finish" if not stream.send_ended and not stream.released:
                dialer.write(stream, bytes(count), fin=what == "finish")
            case "reset" if not stream.released:
                dialer.outbox.pop(stream.stream_id, None)
                dialer.core.reset(stream, 1)
                dialer.pump()
            case "read" if theirs is not None and not theirs.released:
                listener.read(theirs, count)
                listener.pump()
            case "release" if theirs is not None:
                listener.release(theirs)
            case "answer" if theirs is not None and not theirs.send_ended:
                listener.write(theirs, bytes(count % 1000), fin=True)
            case _:
                world.run(seconds=count / 30_000)
        # What is out is what lies in buffers, or in upstream's reassembly.
        held = sum(
            (listener.core.quic.received_total(i) or s.incoming.delivered)
            - s.incoming.delivered
            + s.buffered
            for i, s in listener.core.streams.items()
            if s.remote_reset is None
        ) + sum(s.buffered for s in listener.core.streams.values() if s.remote_reset is not None)
        # ... also of a stream whose first bytes are still to come.
        held += sum(
            upstream.receiver.highest_offset
            for i, upstream in listener.core.quic._streams.items()
            if i >= listener.core._next_peer_stream and i not in listener.core.streams
        )
        assert outstanding(listener) == held
        assert held <= CONNECTION_WINDOW

    for stream in streams:
        dialer.release(stream)
    world.run(seconds=3)
    for theirs in list(listener.core.streams.values()):
        listener.release(theirs)
    assert world.run(lambda: not listener.core.streams and not dialer.core.streams, seconds=120)
    world.run(seconds=10)
    assert outstanding(listener) == 0
    assert CONNECTION_WINDOW // 2 < window(dialer) <= CONNECTION_WINDOW
    assert listener.core.ended is None
    assert dialer.core.ended is None


# -- senders who do not care


def ignore_stream_window(dialer: End, stream: StreamCore) -> None:
    dialer.core.quic._streams[stream.stream_id].max_stream_data_remote = 1 << 40


def ignore_connection_window(dialer: End, _: StreamCore) -> None:
    dialer.core.quic._remote_max_data = 1 << 40


@pytest.mark.attack
@pytest.mark.parametrize("ignore", [ignore_stream_window, ignore_connection_window])
@pytest.mark.parametrize("excess", [0, 1], ids=["control", "attack"])
def test_a_sender_that_ignores_a_window_is_cut_off_at_the_first_byte_too_many(
    ignore: Callable[[End, StreamCore], None], excess: int
) -> None:
    is_stream = ignore is ignore_stream_window
    server = Settings(
        stream_window=20 * KIB if is_stream else 50 * KIB,
        connection_window=50 * KIB if is_stream else 20 * KIB,
        stranger_window=16 * KIB,
    )
    world, dialer, listener = idle_receiver(server)
    stream = dialer.core.open_stream()
    ignore(dialer, stream)
    dialer.write(stream, bytes(20 * KIB + excess))
    world.run(seconds=5)
    assert listener.core.streams[0].buffered <= 20 * KIB
    if excess:
        assert listener.core.ended is not None
        assert listener.core.ended.code == FLOW_CONTROL_ERROR
        assert not listener.core.ended.is_application
        assert dialer.core.ended is not None
        assert dialer.core.ended.code == FLOW_CONTROL_ERROR
    else:
        assert listener.core.ended is None
        assert listener.core.streams[0].buffered == 20 * KIB


def test_the_window_survives_many_small_streams() -> None:
    """Half a window is consumed again and again: the credit of each byte comes back once."""
    world = World()
    dialer, listener = connect(world, server=SMALL)
    listener.echoes = True
    draw = random.Random(2)
    total = 0
    for _ in range(60):
        size = draw.randrange(1, STREAM_WINDOW)
        total += size
        stream = dialer.open(bytes(size))
        assert world.run(lambda: stream.fin_received)  # noqa: B023
        dialer.inbox.clear()
        dialer.release(stream)
    world.run(seconds=1)
    assert total > 5 * CONNECTION_WINDOW
    assert listener.core.quic._connection_consumed == total
    assert listener.core.quic._local_max_data.used == total
    assert CONNECTION_WINDOW // 2 < window(dialer) <= CONNECTION_WINDOW
