"""The search for the datagram size: the state machine, and a connection on paths of any size."""

from __future__ import annotations

import random

import pytest

from tests.transport.pair import KIB, MIB, End, Link, World, connect
from transport.protocol.path_mtu import BASE_SIZE, LIKELY_SIZES, MAX_PROBES, PathMtu


def search(mtu: PathMtu, carries: int, *, refuses: int = 1 << 20, now: float = 0.0) -> list[int]:
    """Answer probes as a path that carries `carries` bytes would; return the sizes probed."""
    probed = []
    while (size := mtu.next_probe(now)) is not None:
        probed.append(size)
        mtu.sent(size)
        if size > refuses:
            mtu.refused(size)
        elif size > carries:
            mtu.lost(size)
        else:
            mtu.acknowledged(size)
    return probed


@pytest.mark.parametrize("carries", [*LIKELY_SIZES, 1200, 1300, 1500, 9001, 65000])
def test_the_largest_likely_size_that_is_carried_is_found(carries: int) -> None:
    mtu = PathMtu()
    mtu.begin(0.0)
    search(mtu, carries)
    assert mtu.size == max(size for size in (*LIKELY_SIZES, BASE_SIZE) if size <= carries)


def test_nothing_is_probed_before_somebody_has_much_to_send() -> None:
    assert search(PathMtu(), 65000) == []


def test_what_the_host_refuses_is_asked_once_and_what_is_lost_a_few_times() -> None:
    mtu = PathMtu()
    mtu.begin(0.0)
    probed = search(mtu, 1452, refuses=1472)
    assert probed == [65000, 16000, 8952, *[1472] * MAX_PROBES, 1452]


def test_one_probe_is_under_way_at_a_time() -> None:
    mtu = PathMtu()
    mtu.begin(0.0)
    size = mtu.next_probe(0.0)
    assert size is not None
    mtu.sent(size)
    assert mtu.next_probe(0.0) is None


def test_the_peer_says_how_much_it_takes() -> None:
    mtu = PathMtu(1452)
    mtu.begin(0.0)
    assert search(mtu, 65000) == [1452]


def test_a_path_that_has_grown_is_found_out_later() -> None:
    mtu = PathMtu()
    mtu.begin(0.0)
    search(mtu, 1452)
    assert search(mtu, 65000, now=599.0) == []
    assert search(mtu, 65000, now=600.0) == [65000]
    assert mtu.size == 65000


def test_a_path_that_has_shrunk_is_measured_anew_and_soon_again() -> None:
    mtu = PathMtu()
    mtu.begin(0.0)
    search(mtu, 8952)
    mtu.shrunk(1.0)
    assert mtu.size == BASE_SIZE
    search(mtu, 1372, now=1.0)
    assert mtu.size == 1372
    assert search(mtu, 8952, now=5.9) == []
    search(mtu, 8952, now=6.0)
    assert mtu.size == 8952, "it was only overrun"


def test_an_answer_that_comes_after_the_size_was_given_up_changes_nothing_for_the_worse() -> None:
    mtu = PathMtu()
    mtu.begin(0.0)
    mtu.sent(65000)
    mtu.refused(65000)
    mtu.lost(65000)
    assert mtu.next_probe(0.0) == 16000


# -- in a connection


class Narrow:
    """A network that drops what is larger than it carries."""

    def __init__(self, world: World, carries: int) -> None:
        self.carries = carries
        self.largest = 0
        world.tap = self._pass

    def _pass(self, data: bytes, *_: object) -> bytes | None:
        if len(data) > self.carries:
            return None
        self.largest = max(self.largest, len(data))
        return data


def lend(end: End, data: bytes) -> int:
    stream = end.core.open_stream()
    end.core.lend(stream, memoryview(data), lambda: True, 1)
    end.pump()
    return stream.stream_id


@pytest.mark.parametrize("carries", [1200, 1372, 1472, 8952, 16000, 65000])
def test_bulk_finds_what_the_path_carries_and_arrives(carries: int) -> None:
    world = World(link=Link(delay=0.001))
    dialer, listener = connect(world)
    path = Narrow(world, carries)
    data = bytes(range(256)) * (24 * KIB)
    stream_id = lend(dialer, data)
    assert world.run(lambda: len(listener.inbox.get(stream_id, b"")) == len(data))
    assert listener.inbox[stream_id] == data
    assert path.largest == max(s for s in (*LIKELY_SIZES, BASE_SIZE) if s <= carries)
    assert dialer.core.quic.datagram_size == path.largest


def test_data_that_is_copied_finds_it_too() -> None:
    world = World(link=Link(delay=0.001))
    dialer, listener = connect(world)
    path = Narrow(world, 8952)
    data = bytes(range(256)) * (4 * KIB)
    stream_id = dialer.open(data).stream_id
    assert world.run(lambda: len(listener.inbox.get(stream_id, b"")) == len(data))
    assert path.largest == 8952


@pytest.mark.parametrize("loss", [0.02, 0.1])
def test_what_is_lost_of_the_largest_datagrams_is_sent_again_whole(loss: float) -> None:
    """aioquic's own packets can't say the length of what is in such a datagram."""
    world = World(seed=4, link=Link(delay=0.001, loss=loss))
    dialer, listener = connect(world)
    data = random.Random(5).randbytes(4 * MIB)
    stream_id = lend(dialer, data)
    assert world.run(lambda: len(listener.inbox.get(stream_id, b"")) == len(data), seconds=60)
    assert listener.inbox[stream_id] == data


def test_small_calls_probe_nothing() -> None:
    world = World()
    dialer, listener = connect(world)
    path = Narrow(world, 65000)
    dialer.open(b"small")
    assert world.run(lambda: listener.inbox.get(0) == b"small")
    world.run(seconds=5)
    assert path.largest <= BASE_SIZE


def test_a_path_that_shrinks_in_the_middle_loses_nothing_but_time() -> None:
    world = World(link=Link(delay=0.001))
    dialer, listener = connect(world)
    path = Narrow(world, 65000)
    data = bytes(range(256)) * (16 * KIB)
    stream_id = lend(dialer, data)
    assert world.run(lambda: len(listener.inbox.get(stream_id, b"")) > MIB)
    assert dialer.core.quic.datagram_size == 65000
    path.carries = 1452
    assert world.run(lambda: len(listener.inbox[stream_id]) == len(data), seconds=60)
    assert listener.inbox[stream_id] == data
    assert dialer.core.quic.datagram_size == 1452
    assert dialer.core.ended is None


def test_lost_probes_are_no_congestion() -> None:
    world = World(link=Link(delay=0.001))
    dialer, listener = connect(world)
    lost: list[object] = []
    controller = dialer.core.quic._loss._cc
    controller.on_packets_lost = lambda **facts: lost.append(facts)  # type: ignore[method-assign]
    path = Narrow(world, 1200)
    data = bytes(MIB)
    stream_id = lend(dialer, data)
    assert world.run(lambda: len(listener.inbox.get(stream_id, b"")) == len(data))
    assert path.largest == 1200
    assert not lost
