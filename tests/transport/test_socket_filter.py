"""What the kernel lets through, and that it says the same as Python."""

from __future__ import annotations

import logging
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Iterator

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auth import SecretKey
from tests.transport.nodes import eventually
from tests.transport.pair import World, connect
from transport import socket_filter
from transport.protocol.connection_ids import ID_LENGTH, ConnectionIds, hash_words
from transport.protocol.newcomers import STRANGERS_BURST, StrangerBudget
from transport.protocol.stateless_reset import LEAST, MOST, StatelessResets
from transport.socket_filter import MAX_LISTED, FloodGuard, assemble, attach

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux's")

V1, V2 = 1, 0x6B3343CF
IDS = ConnectionIds()


class Filtered:
    """A pair of UDP sockets; what arrives at the second passes a program."""

    def __init__(self) -> None:
        self.receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.receiver.bind(("127.0.0.1", 0))
        self.receiver.setblocking(False)
        self.sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sender.connect(self.receiver.getsockname())

    def attach(self, ids: ConnectionIds = IDS, newcomers: float = 1.0, **more: object) -> None:
        assert attach(self.receiver, assemble(ids, newcomers=newcomers, **more))  # type: ignore[arg-type]

    def passes(self, data: bytes) -> bool:
        self.sender.send(data)  # on loopback it is there, or is not, when this returns
        try:
            received = self.receiver.recv(65536)
        except BlockingIOError:
            return False
        assert received == data, "whole"
        return True

    def passed(self, data: bytes, times: int) -> int:
        return sum(self.passes(data) for _ in range(times))

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


@pytest.fixture
def sockets() -> Iterator[Filtered]:
    pair = Filtered()
    pair.attach()
    yield pair
    pair.close()


def short(destination: bytes, rest: int = 30) -> bytes:
    return b"\x40" + destination + os.urandom(rest)


def long(
    destination: bytes,
    *,
    first: int = 0xC0,
    version: int = V1,
    source: bytes = b"12345678",
    size: int = 1200,
) -> bytes:
    header = struct.pack(">BIB", first, version, len(destination)) + destination
    return (header + bytes([len(source)]) + source).ljust(size, b"\0")[:size]


def foreign() -> bytes:
    """An id that is none of ours, not even by accident."""
    while IDS.is_ours(drawn := os.urandom(ID_LENGTH)):
        pass
    return drawn


@needs_linux
def test_a_short_header_needs_an_id_of_ours(sockets: Filtered) -> None:
    assert all(sockets.passes(short(IDS.draw())) for _ in range(100))
    assert not any(sockets.passes(short(foreign(), 40)) for _ in range(100))
    assert sockets.passes(short(IDS.draw(), 0)), "the demultiplexer judges what there is of it"
    assert not sockets.passes(short(IDS.draw(), 0)[:-1])


@needs_linux
def test_a_long_header_to_an_id_of_ours_passes_whatever_it_is(sockets: Filtered) -> None:
    for first in (0xC0, 0xD0, 0xE0, 0xF0, 0x80):
        for version in (V1, V2, 0, 0x0A0A0A0A):
            for size in (40, 1200):
                assert sockets.passes(long(IDS.draw(), first=first, version=version, size=size))


@needs_linux
@pytest.mark.parametrize(
    ("what", "data", "passes"),
    [
        ("an Initial", long(foreign()), True),
        ("an Initial with bits of its own", long(foreign(), first=0xCF), True),
        ("an Initial of version 2", long(foreign(), version=V2, first=0xD0), True),
        ("a version to negotiate", long(foreign(), version=0x0A0A0A0A, first=0x80), True),
        ("the longest ids", long(os.urandom(20), source=os.urandom(20)), True),
        ("no source id", long(foreign(), source=b""), True),
        ("more than it takes", long(foreign(), size=1472), True),
        ("too small", long(foreign(), size=1199), False),
        ("too small to negotiate", long(foreign(), version=0x0A0A0A0A, size=1199), False),
        ("0-RTT", long(foreign(), first=0xD0), False),
        ("a handshake", long(foreign(), first=0xE0), False),
        ("a Retry", long(foreign(), first=0xF0), False),
        ("without the fixed bit", long(foreign(), first=0x80), False),
        ("0-RTT of version 2", long(foreign(), version=V2, first=0xE0), False),
        ("a Retry of version 2", long(foreign(), version=V2, first=0xC0), False),
        ("version negotiation", long(foreign(), version=0), False),
        ("a short id", long(os.urandom(7)), False),
        ("no id", long(b""), False),
        ("a long id", long(os.urandom(21)), False),
        ("a long source id", long(foreign(), source=os.urandom(21)), False),
        ("nothing", b"", False),
        ("a byte", b"\xc0", False),
        ("half a header", long(foreign())[:20], False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_may_begin_a_connection(
    sockets: Filtered, what: str, data: bytes, passes: bool
) -> None:
    assert sockets.passes(data) is passes, what
    sockets.attach(newcomers=0.0)
    assert not sockets.passes(data), "who does not listen hears of nobody"
    assert sockets.passes(short(IDS.draw())), "but of its own"


@needs_linux
def test_ten_thousand_datagrams_of_junk(sockets: Filtered) -> None:
    draw = random.Random(4)
    junk = [draw.randbytes(draw.randrange(1, 1200)) for _ in range(10_000)]
    passed = [each for each in junk if sockets.passes(each)]
    resets = [each for each in junk if LEAST <= len(each) <= MOST and each[0] & 0xC0 == 0x40]
    assert len(set(passed) - set(resets)) <= 3, "one in 65,536 is to be expected"
    assert set(resets) <= set(passed)
    # Full-sized junk may look like a version to negotiate: a long header, both ids of few bytes.
    expected = 0.5 * (13 / 256) * (21 / 256)
    passed = sum(sockets.passes(draw.randbytes(1400)) for _ in range(10_000))
    assert passed / 10_000 < 2 * expected
    assert sockets.passes(short(IDS.draw()))


@needs_linux
def test_a_filter_that_lets_everything_through_would_be_noticed() -> None:
    """The control of the tests above."""
    pair = Filtered()
    try:
        assert pair.passes(short(foreign()))
        assert pair.passes(b"")
    finally:
        pair.close()


@needs_linux
@settings(max_examples=400, deadline=None)
@given(key=st.binary(min_size=8, max_size=8), drawn=st.binary(min_size=6, max_size=6))
def test_the_kernel_and_python_agree_on_every_tag(key: bytes, drawn: bytes) -> None:
    ids = ConnectionIds(key)
    pair = Filtered()
    try:
        pair.attach(ids)
        tag = ids._tag(drawn)
        assert ids.is_ours(drawn + tag)
        assert pair.passes(b"\x40" + drawn + tag)
        assert pair.passes(long(drawn + tag, first=0xE0, size=40))
        for bit in range(16):
            other = (int.from_bytes(tag) ^ 1 << bit).to_bytes(2)
            assert not ids.is_ours(drawn + other)
            assert not pair.passes(b"\x40" + drawn + other)
    finally:
        pair.close()


@needs_linux
def test_a_share_of_the_newcomers(sockets: Filtered) -> None:
    initial = long(foreign())
    sockets.attach(newcomers=0.25)
    assert 150 < sockets.passed(initial, 1000) < 350
    assert sockets.passed(short(IDS.draw()), 100) == 100, "the known ones are not concerned"
    sockets.attach(newcomers=2.0**-12)
    assert sockets.passed(initial, 1000) < 10
    sockets.attach(newcomers=1.0)
    assert sockets.passed(initial, 100) == 100


@needs_linux
def test_what_may_be_a_stateless_reset_passes_and_under_a_flood_a_share_of_it(
    sockets: Filtered,
) -> None:
    reset = StatelessResets(SecretKey.generate(), 4433).answer(foreign(), 100, 0.0)
    assert reset is not None
    assert sockets.passes(reset)
    assert all(sockets.passes(short(foreign(), size - 9)) for size in range(LEAST, MOST + 1))
    assert not any(sockets.passes(short(foreign(), size - 9)) for size in (9, LEAST - 1, MOST + 1))
    assert not sockets.passes(b"\0" + reset[1:])
    sockets.attach(others=0.25)
    assert 150 < sockets.passed(reset, 1000) < 350
    sockets.attach(newcomers=0.0, others=0.0)
    assert not sockets.passes(reset)


def test_a_node_that_starts_anew_on_its_port_knows_its_ids() -> None:
    key = SecretKey.generate()
    ids, other = ConnectionIds.of(key, 4433), ConnectionIds.of(key, 4434)
    drawn = [ids.draw() for _ in range(100)]
    assert all(map(ConnectionIds.of(key, 4433).is_ours, drawn))
    assert sum(map(other.is_ours, drawn)) < 3
    assert len(set(drawn)) == 100


@needs_linux
def test_under_a_flood_the_ids_in_use_come_first(sockets: Filtered) -> None:
    listed = [IDS.draw() for _ in range(MAX_LISTED)]
    retired = IDS.draw()
    sockets.attach(newcomers=0.5, listed=listed, others=0.0)
    assert all(sockets.passes(short(each)) for each in listed)
    assert all(sockets.passes(long(each, first=0xE0, size=60)) for each in listed[:10])
    assert sockets.passed(short(retired), 100) == 0
    assert sockets.passed(short(foreign()), 100) == 0
    sockets.attach(newcomers=0.5, listed=listed, others=0.5)
    assert 20 < sockets.passed(short(retired), 100) < 80
    # More than a program can name: those that carry the tag.
    sockets.attach(newcomers=0.5, listed=[*listed, retired], others=0.0)
    assert sockets.passed(short(IDS.draw()), 100) == 100
    assert sockets.passed(short(foreign()), 100) == 0


@pytest.mark.anyio
async def test_the_guard_narrows_the_filter_under_a_flood_and_opens_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs: list[bytes] = []
    monkeypatch.setattr(socket_filter, "INTERVAL", 0.01)
    monkeypatch.setattr(socket_filter, "attach", lambda _, program: programs.append(program))
    listener = connect(World())[1]
    host, budget = listener.host, StrangerBudget()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        guard = FloodGuard(sock, host.ids, host.demux, budget)
        assert programs == [assemble(host.ids, newcomers=1.0)], "from the start"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(guard.run)
            guard.budget.spend(1.0, 100.0, on_strangers=False)
            await anyio.sleep(0.03)
            assert len(programs) == 1, "what those known take is no flood"
            now = time.monotonic()
            assert budget.has_time(now)
            guard.spend(1.0, now)
            assert not budget.has_time(now)
            guard.spend(0.0, now)
            await eventually(lambda: len(programs) > 1)
            narrow = assemble(
                host.ids,
                newcomers=0.5,
                listed=[listener.core.quic.host_cid],
                others=0.5,
            )
            assert narrow in programs, "one was met, and one turned away"
            budget._left = STRANGERS_BURST
            await eventually(lambda: programs[-1] == programs[0])
            # And the same again, by the next flood.
            budget.spend(1.0, time.monotonic(), on_strangers=True)
            budget.has_time(time.monotonic())
            guard.spend(0.0, time.monotonic())
            await eventually(lambda: programs[-1] != programs[0])
            host.demux.stop_listening()
            budget._left = STRANGERS_BURST
            await eventually(lambda: programs[-1] == assemble(host.ids, newcomers=0.0))
            tasks.cancel_scope.cancel()


def test_the_hash_is_the_one_of_the_paper() -> None:
    # The reference implementation's vectors, for messages 00, 00 01, ... and key 00 01 ... 07.
    key = (0x03020100, 0x07060504)
    assert hash_words(key, (0,)) == int.from_bytes(bytes.fromhex("a9359f5b"), "little")
    six = (0x03020100, 0x0504 | 6 << 24)
    assert hash_words(key, six) == int.from_bytes(bytes.fromhex("5863fc23"), "little")


def test_ids_of_two_endpoints_are_strange_to_each_other() -> None:
    one, other = ConnectionIds(), ConnectionIds()
    drawn = [one.draw() for _ in range(2000)]
    assert len(set(drawn)) == 2000
    assert all(len(each) == ID_LENGTH and one.is_ours(each) for each in drawn)
    assert sum(other.is_ours(each) for each in drawn) <= 2
    assert not one.is_ours(b"")
    assert not one.is_ours(drawn[0] + b"x")
    with pytest.raises(ValueError, match="8 bytes"):
        one.draw(9)
    assert str(one.key[0]) not in repr(one)


def test_tags_are_spread_evenly() -> None:
    """Who sees ids can't tell them from others by their last bytes."""
    ones = [0] * 16
    for _ in range(4000):
        tag = int.from_bytes(IDS.draw()[6:])
        for bit in range(16):
            ones[bit] += tag >> bit & 1
    assert all(1700 < count < 2300 for count in ones)


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_without_a_filter_one_line_says_so(
    platform: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        def setsockopt(self, *_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

    caplog.set_level(logging.DEBUG, "quicmesh.transport")
    monkeypatch.setattr(sys, "platform", platform)
    socket_filter._say_once.cache_clear()
    for _ in range(3):
        assert not attach(Refusing(), assemble(IDS, newcomers=1.0))  # type: ignore[arg-type]
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.DEBUG
