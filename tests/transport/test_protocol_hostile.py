"""Peers that speak QUIC to do harm: floods, contradictions, fragments, malformed TLS.

What such a peer can cost is bounded before it has proved anything, and it takes down its own
connection and no other.
"""

from __future__ import annotations

import itertools
import random
import time

import pytest
from aioquic.buffer import Buffer, encode_uint_var
from aioquic.quic.packet import QuicFrameType, QuicPacketType
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.tls import Epoch
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import one_in
from tests.transport.pair import KIB, End, Host, Link, Settings, World
from transport.protocol.aioquic_adapter import MAX_CRYPTO_BYTES, AdaptedConnection
from transport.protocol.events import ConnectionEnded, HandshakeCompleted

FRAME_ENCODING_ERROR = 0x07
CRYPTO_BUFFER_EXCEEDED = 0x0D


class Rogue(AdaptedConnection):
    """A dialer that writes any frame one likes, and may take pleasure in its own handshake."""

    frames: list[bytes]
    first_flight: list[tuple[int, bytes]] | None = None
    mutate = staticmethod(lambda data: data)

    def _write_connection_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace) -> None:
        super()._write_connection_limits(builder, space)
        waiting = self.__dict__.setdefault("frames", [])
        while waiting:
            kind = Buffer(data=waiting[0]).pull_uint_var()
            buffer = builder.start_frame(kind, capacity=len(waiting[0]))
            buffer.push_bytes(waiting.pop(0)[len(encode_uint_var(kind)) :])

    def has_control(self, now: float) -> bool:
        return super().has_control(now) or bool(self.__dict__.get("frames"))

    def _write_handshake(self, builder: QuicPacketBuilder, epoch: Epoch, now: float) -> None:
        if self.first_flight is None or epoch is not Epoch.INITIAL:
            super()._write_handshake(builder, epoch, now)
            return
        builder.start_packet(QuicPacketType.INITIAL, self._cryptos[epoch])
        while self.first_flight:
            offset, data = self.first_flight[0]
            buffer = builder.start_frame(QuicFrameType.CRYPTO, capacity=len(data) + 10)
            self.first_flight.pop(0)
            buffer.push_uint_var(offset)
            buffer.push_uint_var(len(data))
            buffer.push_bytes(data)

    def _push_crypto_data(self) -> None:
        for epoch, buffer in self._crypto_buffers.items():
            if data := self.mutate(buffer.data):
                self._crypto_streams[epoch].sender.write(data)
            buffer.seek(0)


def rogue_of(end: End) -> Rogue:
    assert isinstance(end.core.quic, Rogue)
    return end.core.quic


def connected(server: Settings | None = None) -> tuple[World, End, End]:
    world = World(link=Link(delay=0.001))
    here, there = world.host(1), world.host(2, server)
    rogue = here.dial(there, kind=Rogue)
    assert world.run(lambda: rogue.handshake and there.end.handshake)
    world.run(seconds=0.1)
    return world, rogue, there.end


def stream_frame(stream_id: int, offset: int, data: bytes, fin: bool = False) -> bytes:
    head = bytes([0x0E | fin]) + encode_uint_var(stream_id) + encode_uint_var(offset)
    return head + encode_uint_var(len(data)) + data


def send(world: World, rogue: End, *frames: bytes) -> None:
    rogue_of(rogue).frames.extend(frames)
    rogue.pump()
    world.run(seconds=0.2)


def serves_others(world: World, there: Host) -> bool:
    honest = world.host(99).dial(there)
    honest.open(b"hello")
    return world.run(lambda: there.end.inbox.get(0) == b"hello", seconds=5)


# -- frames


@pytest.mark.attack
@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([stream_frame(0, 0, b"control")], None),
        ([stream_frame(0, 0, b"abc", fin=True), stream_frame(0, 2, b"xyz")], 0x06),
        ([stream_frame(0, 0, b"abc", fin=True), b"\x04\x00\x01\x02"], 0x06),
        ([stream_frame(1, 0, b"yours")], 0x05),
        ([b"\x04\x01\x00\x00"], 0x05),
        ([b"\x05\x01\x00"], 0x05),
        ([stream_frame(4 * 200, 0, b"x")], 0x04),
        ([b"\x04\x00\x00" + encode_uint_var((1 << 62) - 1)], 0x03),
        ([stream_frame(0, (1 << 62) - 3, b"xyz")], 0x07),
        ([b"\x12" + encode_uint_var((1 << 62) - 1)], 0x07),
        ([b"\x1e"], 0x0A),
        ([b"\x30hello"], 0x0A),
        ([b"\x3f"], 0x07),
        ([b"\x19\x3f"], 0x0A),
    ],
    ids=[
        "control",
        "data beyond the end",
        "another final size",
        "a stream of ours",
        "reset of a stream of ours",
        "stop of a stream of ours",
        "too many streams",
        "a final size beyond all windows",
        "an offset beyond all numbers",
        "too many streams granted",
        "HANDSHAKE_DONE from a client",
        "a DATAGRAM never offered",
        "a frame of no known type",
        "retiring an id never issued",
    ],
)
def test_a_frame_that_breaks_the_rules_ends_its_connection_and_no_other(
    frames: list[bytes], code: int | None
) -> None:
    world, rogue, listener = connected()
    send(world, rogue, *frames)
    ended = listener.core.ended
    if code is None:
        assert ended is None
        assert listener.inbox == {0: b"control"}
    else:
        assert ended is not None
        assert (ended.code, ended.is_application) == (code, False)
        assert rogue.core.ended is not None
        assert (rogue.core.ended.code, rogue.core.ended.is_application) == (code, False)
    assert serves_others(world, listener.host)
    world.run(seconds=5)
    assert (listener.core in listener.host.demux.connections) == (code is None)


@pytest.mark.attack
def test_a_cut_off_frame_type_is_not_told_as_an_error_of_the_application() -> None:
    world, rogue, listener = connected()
    send(world, rogue, b"\x01" + b"\xff")  # PING, and the first of eight bytes of a type
    assert listener.core.ended is not None
    assert listener.core.ended.code == FRAME_ENCODING_ERROR
    assert not listener.core.ended.is_application


@pytest.mark.attack
@pytest.mark.fuzz
@one_in(3)
@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=6))
def test_no_sequence_of_frames_makes_anything_raise(payloads: list[bytes]) -> None:
    world, rogue, listener = connected()
    known = [0x00, 0x01, 0x02, 0x04, 0x05, 0x06, 0x07, 0x08, 0x0F, 0x10, 0x11, 0x12, 0x18, 0x1A]
    for payload in payloads:
        kind = known[payload[0] % len(known)]
        send(world, rogue, bytes([kind]) + payload[1:])
    assert len(listener.core.streams) <= listener.host.settings.max_streams
    if listener.core.ended is None:
        rogue.core.close(0, "")
        rogue.pump()
    world.run(seconds=70)
    assert not listener.host.demux.connections


# -- fragments


@pytest.mark.attack
@pytest.mark.parametrize("count", [100, 600], ids=["control", "attack"])
def test_a_stream_in_crumbs_with_gaps_is_not_searched_for_ever(count: int) -> None:
    """Each gap makes every later frame dearer: a few hundred are what loss can make."""
    world, rogue, listener = connected(Settings(stream_window=1024 * KIB))
    batch = 50
    for start in range(0, count, batch):
        send(world, rogue, *(stream_frame(0, 2 * i + 1, b"x") for i in range(start, start + batch)))
        if listener.core.ended:
            break
    if count == 100:
        assert listener.core.ended is None
        send(world, rogue, *(stream_frame(0, 2 * i, b"y") for i in range(100)))
        assert listener.inbox == {0: b"yx" * 100}
    else:
        assert listener.core.ended is not None
        assert not listener.core.ended.is_application
        assert "gaps" in listener.core.ended.reason
        assert rogue.core.ended is not None


def knock(frames: list[tuple[int, bytes]]) -> tuple[World, Host, End]:
    """Dial with a first flight of one's own."""
    world = World(link=Link(delay=0.001))
    here, there = world.host(1), world.host(2)

    class Knocker(Rogue):
        first_flight = frames

    rogue = here.dial(there, kind=Knocker)
    began = time.perf_counter()
    for _ in range(200):
        world.run(seconds=0.01)
        if (there.ends and there.end.core.ended) or not frames:
            break
        rogue.pump()
    world.run(seconds=0.1)
    assert time.perf_counter() - began < 2
    return world, there, rogue


CLIENT_HELLO_OF_16_MIB = b"\x01\xff\xff\xff"


@pytest.mark.attack
def test_a_client_hello_that_never_ends_is_cut_off_early() -> None:
    """Upstream would collect 16 MiB of it, from anybody."""
    flood = [(0, CLIENT_HELLO_OF_16_MIB + bytes(996))]
    flood += [(1000 * i, bytes(1000)) for i in range(1, 40)]
    world, there, _ = knock(flood)
    ended = there.end.core.ended
    assert ended is not None
    assert (ended.code, ended.is_application) == (CRYPTO_BUFFER_EXCEEDED, False)
    assert len(there.end.core.quic.tls._receive_buffer) <= MAX_CRYPTO_BYTES + 1200
    world.run(seconds=5)
    assert not there.demux.connections
    assert serves_others(world, there)


@pytest.mark.attack
def test_a_client_hello_in_crumbs_is_cut_off_early() -> None:
    world, there, _ = knock([(2 * i + 1, b"x") for i in range(2000)])
    ended = there.end.core.ended
    assert ended is not None
    assert ended.code == CRYPTO_BUFFER_EXCEEDED
    assert serves_others(world, there)


def test_an_honest_client_hello_in_two_datagrams_in_the_wrong_order_is_understood() -> None:
    """The control of the above: long hellos come in pieces."""
    world = World()
    here, there = world.host(1), world.host(2)

    class Piecemeal(Rogue):
        def _push_crypto_data(self) -> None:
            hello = self._crypto_buffers[Epoch.INITIAL]
            if self.first_flight is None and hello.tell():
                data = hello.data
                cuts = [0, 50, 100, len(data)]
                pieces = [(a, data[a:b]) for a, b in itertools.pairwise(cuts)]
                self.first_flight = [pieces[2], pieces[0], pieces[1]]
                hello.seek(0)
            super()._push_crypto_data()

    rogue = here.dial(there, kind=Piecemeal)
    assert world.run(lambda: there.ends and there.end.core.quic.tls.alpn_negotiated, seconds=2)
    assert rogue.core.ended is None


# -- TLS


@pytest.mark.attack
@pytest.mark.parametrize("seed", range(40))
def test_mutilated_handshake_messages_never_raise_and_never_authenticate(seed: int) -> None:
    draw = random.Random(seed)
    world = World(link=Link(delay=0.001))
    here, there = world.host(1), world.host(2)
    flight = draw.randrange(2)
    count = 0

    def mutate(data: bytes) -> bytes:
        nonlocal count
        if not data:
            return data
        count += 1
        if count != flight + 1:
            return data
        out = bytearray(data)
        for _ in range(draw.choice([1, 1, 2, 8])):
            match draw.randrange(3):
                case 0:
                    out[draw.randrange(len(out))] = draw.randrange(256)
                case 1:
                    at = draw.randrange(len(out))
                    del out[at : at + draw.randrange(1, 9)]
                case _:
                    at = draw.randrange(len(out))
                    out[at:at] = draw.randbytes(draw.randrange(1, 9))
        return bytes(out) if bytes(out) != data else b"\0" + data

    class Mutilator(Rogue):
        pass

    Mutilator.mutate = staticmethod(mutate)
    here.dial(there, kind=Mutilator)
    world.run(seconds=4)
    assert count
    for end in there.ends.values():
        # Its Finished no longer fits what was said, so that nothing else could come of it.
        assert not any(isinstance(e, HandshakeCompleted) for e in end.events)
        assert not any(not isinstance(e, ConnectionEnded) for e in end.events)
        assert not end.core.streams
        end.core.close(0, "")
        end.pump()
    world.run(seconds=70)
    assert not there.demux.connections
    assert not there.demux.half_open
