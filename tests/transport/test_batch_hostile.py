"""Batches of datagrams from anybody: what is not authentic is left for the ordinary way."""

from __future__ import annotations

import random

import pytest
from aioquic.quic import packet
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import one_in
from tests.transport.pair import World, connect
from transport.protocol.batch.sealing import decode_packet_number


@pytest.mark.fuzz
@given(
    truncated=st.integers(0, (1 << 32) - 1),
    width=st.integers(1, 4),
    expected=st.integers(0, (1 << 62) - 1),
)
def test_packet_numbers_are_what_aioquic_takes_them_for(
    truncated: int, width: int, expected: int
) -> None:
    truncated %= 1 << 8 * width
    number = decode_packet_number(truncated, 8 * width, expected)
    assert number == packet.decode_packet_number(truncated, 8 * width, expected)
    assert number % (1 << 8 * width) == truncated


@pytest.mark.attack
@pytest.mark.fuzz
@one_in(5)
@given(seed=st.integers(0, (1 << 64) - 1))
def test_no_mutilated_batch_of_a_live_connection_breaks_it(seed: int) -> None:
    draw = random.Random(seed)
    world = World()
    dialer, listener = connect(world)
    wire: list[bytes] = []
    world.tap = lambda sent, *_: wire.append(sent) or sent
    dialer.open(b"something to mutilate" * 300)
    world.run(seconds=0.1)
    for _ in range(3):
        segment = max(map(len, wire)) if draw.getrandbits(1) else draw.randint(1, 1500)
        batch = bytearray()
        for _ in range(draw.randint(1, 8)):
            sample = bytearray(draw.choice(wire))
            for _ in range(draw.randint(0, 3)):
                sample[draw.randrange(len(sample))] = draw.getrandbits(8)
            batch += sample[: draw.randint(0, len(sample))].ljust(segment, b"\0")[:segment]
        size = len(batch) - draw.randrange(segment)
        for end, source in ((dialer, listener), (listener, dialer)):
            others = end.core.receive_batch(
                bytearray(batch), size, segment, source.host.address, world.now
            )
            for start, stop in others:
                assert 0 <= start < stop <= size
                end.host.receive(bytes(batch[start:stop]), source.host.address)
            end.pump()
    dialer.open(b"fine")
    assert world.run(lambda: listener.inbox.get(4) == b"fine")
    assert dialer.core.ended is None
    assert listener.core.ended is None
