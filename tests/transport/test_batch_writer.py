"""What is small leaves in one packet by itself, which counts and is bounded like any other."""

from __future__ import annotations

from tests.transport.pair import Address, World, connect


def test_a_small_message_counts_as_in_flight_until_it_is_acknowledged() -> None:
    world = World()
    dialer, listener = connect(world)
    quic = dialer.core.quic
    world.run(seconds=1.0)
    assert quic._loss._cc.bytes_in_flight == 0
    before = dialer.core.bytes_sent
    stream_id = dialer.open(b"small", fin=False).stream_id
    assert dialer.core.bytes_sent > before
    assert quic._loss._cc.bytes_in_flight == dialer.core.bytes_sent - before
    assert quic.data_space.ack_eliciting_in_flight == 1
    assert world.run(lambda: quic._loss._cc.bytes_in_flight == 0, seconds=1.0)
    assert listener.inbox[stream_id] == b"small"
    assert quic.data_space.ack_eliciting_in_flight == 0


def test_no_packet_is_larger_than_the_path_carries() -> None:
    world = World()
    dialer, listener = connect(world)
    sizes: list[int] = []

    def tap(data: bytes, *_: Address) -> bytes:
        sizes.append(len(data))
        return data

    world.tap = tap
    limit = dialer.core.quic.datagram_size
    streams = [dialer.core.open_stream() for _ in range(100)]
    for size in range(1, 11):  # the head of each one's frame is as long
        for stream in streams:
            dialer.core.write(stream, bytes(size))
        dialer.pump()
        world.run(seconds=0.2)
    assert all(listener.inbox[stream.stream_id] == bytes(55) for stream in streams)
    assert limit - 40 < max(sizes) <= limit
