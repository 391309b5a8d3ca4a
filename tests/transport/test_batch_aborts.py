"""A peer that opens streams and gives them up is kept to a rate; one that is answered is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.transport.pair import End, Link, World, connect
from transport.protocol import StreamCore
from transport.protocol.batch.aborts import ABORT_BURST, ABORTS_PER_SECOND, GRANT, AbortedStreams

FAST = Link(delay=0.0005)
SECONDS = 1.0

Abort = Callable[[End, StreamCore], object]


def reset(end: End, stream: StreamCore) -> None:
    """Give up sending and receiving before the request is whole."""
    end.write(stream, b"request")
    end.release(stream, 1)


def stop(end: End, stream: StreamCore) -> None:
    """Give the answer up, as who cancels a call does."""
    end.write(stream, b"request", fin=True)
    end.release(stream, 1)


def answered(end: End, stream: StreamCore) -> None:
    end.write(stream, b"request", fin=True)


def opened(world: World, dialer: End, act: Abort, seconds: float) -> int:
    """Open streams for so long as fast as there is credit; return how many."""
    count, end = 0, world.now + seconds
    while world.now < end:
        while dialer.core.can_open_stream:
            act(dialer, dialer.core.open_stream())
            count += 1
        world.run(lambda: dialer.core.can_open_stream, end - world.now)
    return count


@pytest.mark.parametrize("abort", [reset, stop])
def test_streams_that_are_given_up_are_replaced_at_a_rate(abort: Abort) -> None:
    world = World(link=FAST)
    dialer, listener = connect(world)
    count = opened(world, dialer, abort, SECONDS)
    limit = listener.host.settings.max_streams
    most = limit + ABORT_BURST + SECONDS * ABORTS_PER_SECOND
    assert 0.9 * most < count <= most
    assert dialer.core.ended is listener.core.ended is None
    world.run(seconds=1)  # nothing waits for ever: in the end all may be opened again
    assert listener.core.quic._aborted.due is None
    at_once = 0
    while dialer.core.can_open_stream:
        dialer.core.open_stream()
        at_once += 1
    assert limit // 2 <= at_once <= limit, "it is told when half is used up"


def test_as_many_as_may_be_open_are_given_up_twice_without_a_wait() -> None:
    world = World(link=FAST)
    dialer, listener = connect(world)
    for _ in range(2):
        assert opened(world, dialer, reset, 0.0005) == listener.host.settings.max_streams
        world.run(lambda: listener.core.quic._streams == {}, 0.02)
        assert world.run(lambda: dialer.core.can_open_stream, 0.02)


def test_streams_that_are_answered_wait_for_nothing() -> None:
    world = World(link=FAST)
    dialer, listener = connect(world)
    listener.echoes = dialer.echoes = True
    assert opened(world, dialer, answered, 0.1) > 5 * ABORTS_PER_SECOND / 10
    assert listener.core.quic._aborted._bucket == ABORT_BURST


def test_who_leaves_a_stream_with_the_answer_in_hand_has_not_given_it_up() -> None:
    world = World(link=FAST)
    dialer, listener = connect(world)
    for _ in range(20):
        stream = dialer.open(b"request", fin=False)
        number = stream.stream_id
        assert world.run(lambda number=number: number in listener.core.streams)  # type: ignore[misc]
        listener.write(listener.core.streams[number], b"answer")
        assert world.run(lambda number=number: number in dialer.inbox)  # type: ignore[misc]
        dialer.release(stream)
        world.run(seconds=0.01)
        listener.release(listener.core.streams[number])
    world.run(seconds=0.1)
    assert listener.core.quic._streams == {}
    assert listener.core.quic._aborted._bucket == ABORT_BURST


def test_credit_comes_by_so_many_at_a_time_and_when_it_says() -> None:
    aborted, now = AbortedStreams(), 50.0
    assert aborted.due is None
    assert aborted.replaced(now) == 0
    for _ in range(ABORT_BURST + GRANT + 1):
        aborted.add()
    assert aborted.replaced(now) == ABORT_BURST
    assert aborted.due == pytest.approx(now + GRANT / ABORTS_PER_SECOND)
    assert aborted.replaced(aborted.due - 1e-6) == 0
    assert aborted.replaced(aborted.due + 1e-6) == GRANT
    assert aborted.due == pytest.approx(now + (GRANT + 1) / ABORTS_PER_SECOND, abs=1e-5)
    assert aborted.replaced(aborted.due + 1e-6) == 1
    assert aborted.due is None
    aborted.add()
    assert aborted.replaced(now + 1e6) == 1
    assert aborted._bucket == ABORT_BURST - 1, "an idle hour saves up no more than a burst"
