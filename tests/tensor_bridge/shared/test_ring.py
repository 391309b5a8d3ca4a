"""The ring of messages: what goes in comes out, and what should not be there is refused."""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Iterator

import pytest

from tensor_bridge.lanes.shared.doorbell import LINE_WORDS
from tensor_bridge.lanes.shared.host import unavailable
from tensor_bridge.lanes.shared.ring import (
    FIRST,
    MAX_BODY,
    MEMORY_BYTES,
    RING_BYTES,
    SECOND,
    START,
    Inbox,
    Message,
    Outbox,
    flag_of,
)
from transport import ProtocolError

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

HEAD = 20


class Ends:
    """Both ends of a ring, and the memory between them as an attacker has it."""

    def __init__(self, side: int, descriptor: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, MEMORY_BYTES))
        self.words = self.memory[:START].cast("Q")
        self.out = Outbox(self.memory, side, descriptor)
        self.inbox = Inbox(self.memory, 1 - side)
        self.written = side * LINE_WORDS
        self.taken = (3 - side) * LINE_WORDS
        self.bytes = self.memory[START + side * RING_BYTES :][:RING_BYTES]
        self.other_flag = flag_of(1 - side)


@pytest.fixture(params=[FIRST, SECOND])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    ends = Ends(request.param, descriptor)
    yield ends
    os.close(descriptor)


def test_what_is_written_is_taken_in_order_round_and_round(ends: Ends) -> None:
    draw = random.Random(5)
    waiting: list[Message] = []
    count, full = 0, 0
    while count < 400:
        body = draw.randbytes(draw.choice([0, 1, 64, 5000, MAX_BODY]))
        message = Message(draw.randrange(9), draw.randrange(1 << 64), body)
        if ends.out.put(message):
            waiting.append(message)
            count += 1
        else:
            full += 1
        if (full and draw.random() < 0.7) or draw.random() < 0.2:
            assert ends.inbox.take() == (waiting.pop(0) if waiting else None)
    while waiting:
        assert ends.inbox.take() == waiting.pop(0)
    assert ends.inbox.is_empty
    assert ends.inbox.take() is None
    assert full > 20


def test_it_wakes_who_sleeps() -> None:
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    ends = Ends(FIRST, descriptor)
    ends.out.put(Message(1, 1))
    with pytest.raises(BlockingIOError):
        os.eventfd_read(descriptor)
    ends.words[ends.other_flag] = 1
    ends.out.put(Message(1, 2))
    assert os.eventfd_read(descriptor) == 1
    os.close(descriptor)


@pytest.mark.attack
@pytest.mark.parametrize("claimed", [1, HEAD - 1, RING_BYTES + 1, 1 << 63, (1 << 64) - 1])
def test_counters_that_can_not_be_are_refused(ends: Ends, claimed: int) -> None:
    ends.words[ends.written] = claimed
    with pytest.raises(ProtocolError):
        ends.inbox.take()
    ends.words[ends.taken] = claimed
    with pytest.raises(ProtocolError):
        ends.out.put(Message(1, 1))


def test_a_counter_that_goes_back_is_refused(ends: Ends) -> None:
    ends.out.put(Message(1, 1, b"x"))
    ends.inbox.take()
    ends.words[ends.written] = 0
    with pytest.raises(ProtocolError):
        ends.inbox.take()


@pytest.mark.attack
@pytest.mark.parametrize(
    ("length", "number"),
    [(MAX_BODY + 1, 0), (6, 0), ((1 << 32) - 1, 0), (5, 1), (5, (1 << 32) - 1)],
    ids=["too long", "longer than what is there", "endless", "out of order", "out of order too"],
)
def test_heads_that_can_not_be_are_refused(ends: Ends, length: int, number: int) -> None:
    ends.out.put(Message(1, 1, b"hello"))
    struct.pack_into("<II", ends.bytes, 0, length, number)
    with pytest.raises(ProtocolError):
        ends.inbox.take()


@pytest.mark.attack
def test_what_was_taken_does_not_change(ends: Ends) -> None:
    ends.out.put(Message(1, 1, b"before"))
    message = ends.inbox.take()
    ends.bytes[:] = b"\xff" * RING_BYTES
    assert message == Message(1, 1, b"before")
