"""The receiving part of a stream: in order, out of order, into posted memory, and given back."""

from __future__ import annotations

import random
from itertools import pairwise

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


def test_more_is_asked_for_than_there_is() -> None:
    part = ReceivePart(0)
    feed(part, b"abcdef", fin=False)
    assert part.take(2) == b"ab"
    assert part.take(1000) == b"cdef"
    assert part.buffered == 0
    assert part.take(1000) == b""


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


# -- posted memory


@pytest.mark.parametrize("seed", range(6))
def test_frames_in_any_order_land_in_their_place(seed: int) -> None:
    draw = random.Random(seed)
    source, size = draw.randbytes(60_000), 50_000
    part, memory = ReceivePart(0), bytearray(size)
    cuts = sorted({0, len(source), *(draw.randrange(len(source)) for _ in range(80))})
    frames = [(start, stop) for start, stop in pairwise(cuts)]
    draw.shuffle(frames)
    early = draw.randrange(len(frames))
    for start, stop in frames[:early]:
        part.place(start, source[start:stop], fin=stop == len(source))
    taken = part.post(memoryview(memory))
    for start, stop in frames[early:] + frames[:3]:
        part.place(start, source[start:stop], fin=stop == len(source))
    assert bytes(memory) == source[:size]
    assert part.posted == 0
    assert part.landed + taken == size
    part.withdraw()
    assert part.take(1 << 20) == source[size:]
    assert part.is_whole


def test_memory_taken_back_is_not_written_to_and_the_stream_still_comes_to_its_end() -> None:
    part, memory = ReceivePart(0), bytearray(100)
    part.post(memoryview(memory))
    part.place(50, b"x" * 10, fin=False)
    part.withdraw()
    seen = bytes(memory)
    part.place(0, b"y" * 50, fin=False)
    part.place(60, b"z" * 40, fin=True)
    assert bytes(memory) == seen
    assert part.is_whole
    assert part.consumed == 100
    assert part.landed == 100


def test_a_reset_lets_go_of_the_memory() -> None:
    part, memory = ReceivePart(0), bytearray(100)
    part.post(memoryview(memory))
    part.handle_reset(final_size=100, error_code=1)
    part.place(0, b"y" * 50, fin=False)
    assert bytes(memory) == bytes(100)
    assert not part.is_whole
    memory.append(0)  # nobody holds a view of it any more
