"""Batches of datagrams from anybody: what is not authentic is left for the ordinary way."""

from __future__ import annotations

import random
from typing import Any

import pytest
from aioquic import tls
from aioquic.quic import packet
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import one_in
from tests.transport.pair import World, connect
from transport.protocol.batch import reader
from transport.protocol.batch.connection import IDLE_STEP
from transport.protocol.batch.frames import FULL_FRAME, FULL_FRAME_TYPE, VARINT_4, VARINT_8
from transport.protocol.batch.landing import land_packets
from transport.protocol.batch.reader import _Packets
from transport.protocol.batch.sealing import Sealer, decode_packet_number
from transport.protocol.batch.window import ReceivedWindow
from transport.protocol.batch.writer import keys_of


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


@pytest.mark.attack
@pytest.mark.parametrize("size", [1000, 2500])
def test_full_frames_repeated_from_before_the_posted_memory_are_not_written_to_it(
    size: int,
) -> None:
    world = World()
    dialer, listener = connect(world)
    stream_id = dialer.open(bytes(4000), fin=False).stream_id
    assert world.run(lambda: len(listener.inbox.get(stream_id, b"")) == 4000)
    quic, stream = listener.core.quic, listener.core.streams[stream_id]
    memory = bytearray(b"." * 300_000)
    listener.core.post(stream, memoryview(memory))
    number = quic._spaces[tls.Epoch.ONE_RTT].expected_packet_number + 10
    plain, opened = bytearray(), []
    for at in (0, size, 4000):
        start = len(plain)
        plain += FULL_FRAME.pack(FULL_FRAME_TYPE, stream_id | VARINT_4, at | VARINT_8)
        plain += (b"new" if at == 4000 else b"old").ljust(size, b"!")
        opened.append((number + len(opened), start, len(plain)))
    packets = _Packets(quic, world.now)
    packets.take_all(opened, plain)
    packets.finish()
    overlap = max(0, 2 * size - 4000)  # has come with the second, and is not written again
    assert memory[:size] == b"!" * overlap + b"new".ljust(size, b"!")[overlap:]
    assert memory[size:] == b"." * (300_000 - size)
    assert packets.eliciting == 3


@pytest.mark.attack
@pytest.mark.parametrize(
    ("landed", "after"), [(8, 4000), (8, 5000), (8, 11_000), (2, 6000)], ids=str
)
def test_nothing_is_opened_over_what_has_landed(landed: int, after: int) -> None:
    """Once more what has come already, or what came too late: what follows belongs elsewhere."""
    world = World()
    dialer, listener = connect(world)
    stream_id = dialer.open(bytes(4000), fin=False).stream_id
    assert world.run(lambda: len(listener.inbox.get(stream_id, b"")) == 4000)
    memory = bytearray(300_000)
    listener.core.post(listener.core.streams[stream_id], memoryview(memory))
    data = random.Random(1).randbytes(20_000)
    peer = dialer.core.quic

    def send(offsets: list[int]) -> None:
        sealer = Sealer(
            keys_of(peer.data_crypto.send), peer._peer_cid.cid, spin=False, room=bytearray(1 << 16)
        )
        frames = [
            FULL_FRAME.pack(FULL_FRAME_TYPE, stream_id | VARINT_4, at | VARINT_8)
            + data[at - 4000 : at - 3000]
            for at in offsets
        ]
        for frame in frames:
            segment = sealer.add(peer._packet_number, frame)
            peer._packet_number += 1
        batch = bytearray(sealer.finish())
        others = listener.core.receive_batch(
            batch, len(batch), segment, dialer.host.address, world.now
        )
        assert others == []

    send([4000 + 1000 * at for at in range(8) if at < landed or at > 2])
    send([after, *(12_000 + 1000 * at for at in range(4))])
    assert memory == data[:12_000] + bytes(288_000)


@pytest.mark.attack
def test_what_was_delivered_to_posted_memory_is_not_written_again() -> None:
    world = World()
    dialer, listener = connect(world)
    stream_id = dialer.open(bytes(4000), fin=False).stream_id
    assert world.run(lambda: len(listener.inbox.get(stream_id, b"")) == 4000)
    memory = bytearray(10_000)
    listener.core.post(listener.core.streams[stream_id], memoryview(memory))
    quic = listener.core.quic
    for offset, data in ((4000, b"a" * 2000), (4000, b"b" * 1000), (5500, b"c" * 1000)):
        number = quic._spaces[tls.Epoch.ONE_RTT].expected_packet_number + 10
        plain = FULL_FRAME.pack(FULL_FRAME_TYPE, stream_id | VARINT_4, offset | VARINT_8) + data
        packets = _Packets(quic, world.now)
        packets.take_all([(number, 0, len(plain))], plain)
        packets.finish()
    assert memory == b"a" * 2000 + b"c" * 500 + bytes(7500)


@pytest.mark.attack
def test_a_packet_number_far_ahead_costs_nothing() -> None:
    """Packets that landed are noted behind another of their batch, whose number the peer chose."""
    received = ReceivedWindow()
    received.add(1 << 61)
    received.add_run(3, 9)  # as many bits would take all memory
    assert (1 << 61) in received
    assert (1 << 61) - 1 not in received


@pytest.mark.parametrize("odd", [2, 9, 10, 11, 20, 28])
def test_what_lies_behind_another_packet_lands_still(
    odd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has something in front of its data shifts all data behind it."""
    world = World()
    dialer, listener = connect(world)
    stream_id = dialer.open(bytes(4000), fin=False).stream_id
    assert world.run(lambda: len(listener.inbox.get(stream_id, b"")) == 4000)
    count, room, front = 30, 1000, 12
    size = count * room - front
    memory, data = bytearray(size), random.Random(1).randbytes(size)
    listener.core.post(listener.core.streams[stream_id], memoryview(memory))
    landed = 0

    def land(*arguments: Any) -> range:
        nonlocal landed
        found = land_packets(*arguments)
        landed += len(found)
        return found

    monkeypatch.setattr(reader, "land_packets", land)
    peer, now = dialer.core.quic, world.now
    sealer = Sealer(
        keys_of(peer.data_crypto.send), peer._peer_cid.cid, spin=False, room=bytearray(1 << 16)
    )
    at = 0
    for number in range(count):
        before = bytes([0x01]) * front if number == odd else b""
        part = data[at : at + room - len(before)]
        head = FULL_FRAME.pack(FULL_FRAME_TYPE, stream_id | VARINT_4, 4000 + at | VARINT_8)
        segment = sealer.add(peer._packet_number, before + head + part)
        peer._packet_number += 1
        at += len(part)
    batch = bytearray(sealer.finish())
    half = count // 2 * segment
    for part_of in (batch[:half], batch[half:]) if odd == 28 else (batch,):
        assert not listener.core.quic.is_acknowledgement_due(now)
        others = listener.core.receive_batch(
            bytearray(part_of), len(part_of), segment, dialer.host.address, now
        )
        assert others == []
    assert memory == data
    assert listener.core.quic.is_acknowledgement_due(now), "the sender waits to hear of the last"
    assert landed >= count - 12


def test_the_idle_timeout_counts_from_what_came_last() -> None:
    world = World()
    dialer, listener = connect(world)
    peer, own = dialer.core.quic, listener.core.quic
    for seconds in (0.0, 20.0, 40.0):
        now = world.now + seconds
        sealer = Sealer(
            keys_of(peer.data_crypto.send), peer._peer_cid.cid, spin=False, room=bytearray(1 << 10)
        )
        sealer.add(peer._packet_number, bytes([0x01]) + bytes(60))
        peer._packet_number += 1
        batch = bytearray(sealer.finish())
        assert not listener.core.receive_batch(
            batch, len(batch), len(batch), dialer.host.address, now
        )
        assert own._close_at == pytest.approx(now + own._idle_timeout(), abs=2 * IDLE_STEP)


def test_what_is_something_else_is_left_where_it_lies() -> None:
    world = World()
    dialer, listener = connect(world)
    peer = dialer.core.quic
    sealer = Sealer(
        keys_of(peer.data_crypto.send), peer._peer_cid.cid, spin=False, room=bytearray(1 << 16)
    )
    sizes = [sealer.add(peer._packet_number + n, bytes([0x01]) + bytes(60)) for n in range(4)]
    batch = bytearray(sealer.finish())
    segment = sizes[0]
    for at in (1, 3):
        batch[at * segment + 1] ^= 1  # another connection id
    others = listener.core.receive_batch(batch, len(batch), segment, dialer.host.address, world.now)
    assert sorted(others) == [(segment, 2 * segment), (3 * segment, 4 * segment)]
