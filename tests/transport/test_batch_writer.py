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
    for missing in range(70):  # from more than fits beside the headers to less
        message = bytes(limit - missing)
        stream_id = dialer.open(message).stream_id
        world.run(seconds=0.2)
        assert listener.inbox[stream_id] == message
        assert limit - 70 < max(sizes) <= limit
        sizes.clear()
