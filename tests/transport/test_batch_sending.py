"""The sending part of a stream: memory that is copied or lent, fresh or lost, and let go of."""

from __future__ import annotations

import random

import pytest
from aioquic.quic.packet_builder import QuicDeliveryState

from transport.protocol.batch import SendPart

ACKED, LOST = QuicDeliveryState.ACKED, QuicDeliveryState.LOST


def always() -> bool:
    return True


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_lost_everything_arrives_once(seed: int) -> None:
    """Writes, loans, batches, losses and acknowledgements in any order."""
    draw = random.Random(seed)
    part = SendPart(0)
    source, arrived = bytearray(), {}
    flying: list[tuple[int, int, bool]] = []
    is_ended = False
    while not part.is_finished:
        what = draw.random()
        if len(source) < 200_000 and what < 0.2:
            data = draw.randbytes(draw.choice([1, 100, 5000, 40_000]))
            if part._loan is None and draw.random() < 0.3:
                part.lend(memoryview(data), always, 1)
            else:
                part.write(data)
            source += data
        elif len(source) >= 200_000 and not is_ended:
            part.write(b"", end_stream=True)
            is_ended = True
        elif what < 0.6 and part.has_fresh:
            stop = min(part.fresh + draw.choice([1, 1000, 1400]), part._buffer_stop)
            arrived[part.fresh] = bytes(part.read(part.fresh, stop))
            fin = is_ended and stop == part._buffer_fin
            flying.append((part.fresh, stop, fin))
            part.sent(stop, fin=fin)
        elif what < 0.8 and not part.buffer_is_empty:
            frame = part.get_frame(draw.choice([1, 700, 1400]))
            if frame is not None:
                stop = frame.offset + len(frame.data)
                assert frame.data == bytes(source[frame.offset : stop])
                flying.append((frame.offset, stop, frame.fin))
        elif flying:
            start, stop, fin = flying.pop(draw.randrange(len(flying)))
            part.on_data_delivery(LOST if draw.random() < 0.3 else ACKED, start, stop, fin)
    for offset, data in arrived.items():
        assert data == bytes(source[offset : offset + len(data)])
    assert part._buffer_start == len(source)
    assert not part._pieces
    assert part._loan is None


def test_what_was_lent_is_not_copied_and_let_go_of_when_acknowledged() -> None:
    part, memory = SendPart(0), bytearray(b"abcdef")
    part.lend(memoryview(memory), always, 1)
    piece = part.read(2, 5)
    assert isinstance(piece, memoryview)
    assert piece.obj is memory
    part.sent(6, fin=False)
    part.on_data_delivery(ACKED, 0, 6, False)
    piece.release()
    memory.append(0)  # nobody holds a view of it any more


def test_small_writes_are_joined() -> None:
    part = SendPart(0)
    for number in range(10_000):
        part.write(bytes([number & 255]))
    assert len(part._pieces) == 1
    assert bytes(part.read(0, 10_000)) == bytes(n & 255 for n in range(10_000))


def test_memory_that_is_gone_is_not_read_and_the_stream_is_reset() -> None:
    part, is_there = SendPart(0), True
    part.lend(memoryview(bytearray(1000)), lambda: is_there, 7)
    part.sent(500, fin=False)
    assert part.can_read()
    is_there = False
    part.on_data_delivery(LOST, 0, 500, False)
    assert part.get_frame(1000) is None
    assert part.is_spoiled
    assert part.get_reset_frame().error_code == 7
    assert not part._pieces


def test_after_a_reset_nothing_is_sent_and_late_news_is_ignored() -> None:
    part = SendPart(0)
    part.write(bytes(100))
    part.sent(50, fin=False)
    part.reset(3)
    assert not part.has_fresh
    part.on_data_delivery(LOST, 0, 50, False)
    part.on_data_delivery(ACKED, 0, 50, False)
    assert part.buffer_is_empty
    assert part.get_reset_frame().final_size == 50


def test_what_no_batch_can_send_is_handed_over_in_parts() -> None:
    part = SendPart(0)
    part.lend(memoryview(bytes(1_000_000)), always, 1)
    part.hand_over()
    handed = part.fresh
    assert 0 < handed < 1_000_000
    part.hand_over()
    assert part.fresh == handed, "not more before that has left"
    taken = 0
    while (frame := part.get_frame(100_000)) is not None:
        taken += len(frame.data)
    assert taken == handed
    part.hand_over()
    assert part.fresh > handed


def test_the_end_goes_out_with_the_last_byte_or_alone() -> None:
    part = SendPart(0)
    part.write(b"abc", end_stream=True)
    part.hand_over()
    frame = part.get_frame(1000)
    assert frame is not None
    assert (bytes(frame.data), frame.fin) == (b"abc", True)
    alone = SendPart(4)
    alone.write(b"abc")
    alone.sent(3, fin=False)
    alone.write(b"", end_stream=True)
    assert alone.has_fresh
    alone.hand_over()
    frame = alone.get_frame(1000)
    assert frame is not None
    assert (frame.offset, bytes(frame.data), frame.fin) == (3, b"", True)


def test_what_is_acknowledged_after_a_reset_is_known() -> None:
    """A reader that has taken all may say so before its last acknowledgement comes."""
    part = SendPart(0)
    part.lend(memoryview(bytes(3000)), lambda: True, 1)
    part.sent(3000, fin=False)
    part.reset(0)
    part.on_data_delivery(QuicDeliveryState.ACKED, 1000, 2000, False)
    part.on_data_delivery(QuicDeliveryState.LOST, 0, 1000, False)
    assert part.unacknowledged == 3000
    part.on_data_delivery(QuicDeliveryState.ACKED, 0, 1000, False)
    assert part.unacknowledged == 1000
    part.on_data_delivery(QuicDeliveryState.ACKED, 2000, 3000, False)
    assert part.unacknowledged == 0
    assert not part.is_finished
