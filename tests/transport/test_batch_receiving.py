"""The receiving part of a stream: in order, out of order, into posted memory, and given back."""

from __future__ import annotations

import random

import pytest

from transport.protocol.batch import ReceivePart


def feed(part: ReceivePart, data: bytes, *, fin: bool) -> None:
    part.place(part.delivered, data, fin=fin)


def test_the_receive_buffer_gives_back_what_it_was_fed() -> None:
    part = ReceivePart(0)
    source = random.Random(4).randbytes(50_000)
    draw = random.Random(5)
    fed = taken = 0
    out = bytearray()
    while taken < len(source):
        if fed < len(source) and draw.random() < 0.6:
            count = draw.choice([1, 1, 2, 500, 512, 513, 1200])
            feed(part, source[fed : fed + count], fin=fed + count >= len(source))
            fed = min(fed + count, len(source))
        elif draw.random() < 0.5:
            out += part.take(draw.choice([0, 1, 100, 700, 5000]))
        else:
            target = bytearray(draw.choice([0, 1, 300, 2000]))
            count = part.take_into(memoryview(target))
            out += target[:count]
        taken = len(out)
        assert part.buffered == fed - taken
    assert bytes(out) == source
    assert part.is_whole
    assert not part._pieces


def test_dropping_the_receive_buffer_tells_how_much_there_was() -> None:
    part = ReceivePart(0)
    feed(part, b"a" * 1000, fin=False)
    feed(part, b"b" * 1000, fin=False)
    assert part.take(300) == b"a" * 300
    assert part.drop() == 1700
    feed(part, b"c", fin=True)
    assert part.take(5) == b"c"
    assert part.take(5) == b""


def test_whole_pieces_are_handed_on_without_a_copy() -> None:
    part = ReceivePart(0)
    piece = b"p" * 1200
    feed(part, piece, fin=False)
    assert part.take(2000) is piece


def test_a_piece_that_was_begun_is_not_handed_on_whole() -> None:
    part = ReceivePart(0)
    feed(part, b"a" * 1000, fin=False)
    part.take(300)
    feed(part, b"b" * 300, fin=False)  # as much waits as the first piece was long
    assert part.take(2000) == b"a" * 700 + b"b" * 300


@pytest.mark.attack
def test_crumbs_do_not_cost_many_times_their_size() -> None:
    part = ReceivePart(0)
    for number in range(20_000):
        feed(part, bytes([number & 255, number >> 8]), fin=False)
    assert len(part._pieces) <= 40_000 / 256
    assert len(part.take(40_000)) == 40_000
