"""A peer that has got as far as the Unix socket, and then breaks every rule there is.

Each case ends the lane, is logged, and leaves nothing; the move under way ends as if the connection
had, which is what lets it be taken up again over QUIC.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable

import anyio
import pytest

from auth import PeerIdentity, SecretKey
from tensor_bridge.lanes.shared.host import unavailable
from tensor_bridge.lanes.shared.link import MAX_UNSENT, Link
from tensor_bridge.lanes.shared.pool import Pool, make_pool
from tensor_bridge.lanes.shared.protocol import FilledMessage, GivenMessage, PoolMessage
from tests.cancelling import process_holdings
from tests.tensor_bridge.nodes import eventually
from tests.tensor_bridge.shared.test_pool import SEALED, memory
from transport import ConnectionClosed

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.attack,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

SLOT = 1 << 16
SLOTS = 8
MOVE = 8


def descriptors_open() -> int:
    count = process_holdings()["descriptors"]
    assert isinstance(count, int)
    return count


class Attacker:
    """The other end of a link, by hand."""

    def __init__(self, sock: socket.socket, link: Link) -> None:
        self.sock = sock
        self.link = link
        self.pool: Pool | None = None
        self.lent = 0
        """The slot that it has."""

    def send(self, packet: bytes, *descriptors: int) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        self.sock.sendmsg([packet], ancillary if descriptors else [])

    def send_pool(self) -> None:
        """Send a pool as there should be."""
        self.pool, descriptor = make_pool(SLOTS, SLOT)
        self.send(PoolMessage(SLOT).encode(), descriptor)
        os.close(descriptor)

    def fill(self, slot: int, data: bytes, move: int = MOVE) -> None:
        assert self.pool is not None
        self.pool.fill(slot, memoryview(data))
        self.send(FilledMessage(slot, len(data), move).encode())


@contextlib.asynccontextmanager
async def attacked() -> AsyncIterator[Attacker]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    link = Link(ours, PeerIdentity(SecretKey.generate().node_id), os.getpid())
    attacker = Attacker(theirs, link)
    descriptors = descriptors_open()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(link.run)
        yield attacker
        link.end("the test is over")
    if attacker.pool is not None:
        attacker.pool.close()
    theirs.close()
    assert descriptors_open() <= descriptors - 2, "a descriptor was left open"


async def test_who_keeps_to_the_rules_is_heard() -> None:
    """The positive control of everything below."""
    async with attacked() as a:
        with a.link.landing(MOVE) as landing:
            a.send_pool()
            a.fill(3, b"x" * SLOT)
            a.fill(0, b"yz")
            got, parts = bytearray(SLOT + 2), list[int]()
            with anyio.fail_after(2):
                await landing.fill(memoryview(got), parts.append)
            assert got == b"x" * SLOT + b"yz"
            assert parts == [SLOT, 2]
            assert [a.sock.recv(64) for _ in "12"] == [
                GivenMessage(slot).encode() for slot in (3, 0)
            ]
        a.fill(3, b"late")  # of a move that is over
        await eventually(lambda: a.link._incoming is not None and a.link._incoming.here == 0)
        assert a.link.why_ended is None


def a_pool_twice(a: Attacker) -> None:
    a.send_pool()
    a.send_pool()


def an_unsealed_pool(a: Attacker) -> None:
    descriptor = memory(SLOT, 0)
    a.send(PoolMessage(SLOT).encode(), descriptor)
    os.close(descriptor)


def a_resized_pool(a: Attacker) -> None:
    descriptor = memory(8 * SLOT, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    os.ftruncate(descriptor, SLOT)
    a.send(PoolMessage(SLOT).encode(), descriptor)
    os.close(descriptor)


def a_file_for_a_pool(a: Attacker) -> None:
    descriptor = os.open("/dev/zero", os.O_RDWR)
    a.send(PoolMessage(SLOT).encode(), descriptor)
    os.close(descriptor)


def a_pool_without_memory(a: Attacker) -> None:
    a.send(PoolMessage(SLOT).encode())


def two_descriptors(a: Attacker) -> None:
    one, other = memory(SLOT, SEALED), memory(SLOT, SEALED)
    a.send(PoolMessage(SLOT).encode(), one, other)
    os.close(one)
    os.close(other)


def a_descriptor_with_another_message(a: Attacker) -> None:
    descriptor = memory(SLOT, SEALED)
    a.send(GivenMessage(a.lent).encode(), descriptor)
    os.close(descriptor)


def a_slot_of_no_pool(a: Attacker) -> None:
    a.send(FilledMessage(0, 1, MOVE).encode())


def a_slot_beyond_the_pool(a: Attacker) -> None:
    a.send_pool()
    a.send(FilledMessage(SLOTS, 1, MOVE).encode())


def more_than_a_slot_holds(a: Attacker) -> None:
    a.send_pool()
    a.send(FilledMessage(SLOTS - 1, SLOT + 1, MOVE).encode())


def a_slot_lent_twice(a: Attacker) -> None:
    a.send_pool()
    a.fill(1, b"x")
    a.fill(1, b"y")


def a_slot_that_it_does_not_have(a: Attacker) -> None:
    a.send(GivenMessage(a.lent + 1).encode())


def a_slot_given_twice(a: Attacker) -> None:
    a.send(GivenMessage(a.lent).encode())
    a.send(GivenMessage(a.lent).encode())


def more_than_the_move(a: Attacker) -> None:
    a.send_pool()
    a.fill(1, b"x" * 11)


def too_short(a: Attacker) -> None:
    a.send(b"\2")


def too_long(a: Attacker) -> None:
    a.send(GivenMessage(0).encode() * 100)


def garbage(a: Attacker) -> None:
    a.send(b"\xff" * 16)


def gone(a: Attacker) -> None:
    a.sock.shutdown(socket.SHUT_RDWR)


ATTACKS: list[Callable[[Attacker], None]] = [
    a_pool_twice,
    an_unsealed_pool,
    a_resized_pool,
    a_file_for_a_pool,
    a_pool_without_memory,
    two_descriptors,
    a_descriptor_with_another_message,
    a_slot_of_no_pool,
    a_slot_beyond_the_pool,
    more_than_a_slot_holds,
    a_slot_lent_twice,
    a_slot_that_it_does_not_have,
    a_slot_given_twice,
    more_than_the_move,
    too_short,
    too_long,
    garbage,
    gone,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: str(attack.__name__))
async def test_a_break_of_the_protocol_ends_the_lane(
    attack: Callable[[Attacker], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "quicmesh.tensors")
    async with attacked() as a:
        told = anyio.Event()
        with a.link.watched(told.set), a.link.landing(MOVE) as landing:
            landing.arrivals.open(10)
            await a.link.send(MOVE, iter([memoryview(b"x")]), 1, lambda _: None)
            (a.lent,) = a.link._outgoing._lent
            attack(a)
            with anyio.fail_after(2):
                await told.wait()
            with pytest.raises(ConnectionClosed):
                a.link.check()
            with pytest.raises(ConnectionClosed):
                await a.link.send(MOVE, iter([memoryview(b"x")]), 1, lambda _: None)
        assert len(caplog.records) == (attack is not gone)
    assert a.sock.fileno() == -1


async def test_what_is_rewritten_after_it_was_announced_is_copied_once() -> None:
    """The bytes may be any of the attacker's, but what has been copied out does not change."""
    async with attacked() as a:
        with a.link.landing(MOVE) as landing:
            a.send_pool()
            a.fill(1, b"before")
            await eventually(lambda: landing.arrivals._waiting)
            message = landing.arrivals.next()
            assert message is not None
            assert a.pool is not None
            a.pool.fill(1, memoryview(b"amid!!"))
            room = bytearray(6)
            a.link.copy_out(message, memoryview(room))
            a.pool.fill(1, memoryview(b"after!"))
            assert room == b"amid!!"


async def test_who_reads_nothing_makes_us_hold_little() -> None:
    async with attacked() as a:
        a.send_pool()
        sent = 0
        with contextlib.suppress(OSError):
            while a.link.why_ended is None:
                try:
                    a.fill(sent % SLOTS, b"x", move=1)  # of no move: given back at once
                    sent += 1
                except BlockingIOError:
                    await anyio.sleep(0.001)
                assert sent < 10_000
        assert a.link.why_ended is not None
        assert len(a.link._unsent) <= MAX_UNSENT + 1


async def test_what_had_to_wait_is_sent_when_there_is_room() -> None:
    async with attacked() as a:
        a.link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        a.send_pool()
        for slot in range(SLOTS):
            a.fill(slot, b"x", move=1)
        given = []
        await eventually(lambda: a.link._unsent)
        with anyio.fail_after(2):
            while len(given) < SLOTS:
                try:
                    given.append(a.sock.recv(64))
                except BlockingIOError:
                    await anyio.sleep(0.001)
        assert given == [GivenMessage(slot).encode() for slot in range(SLOTS)]
        assert a.link.why_ended is None
