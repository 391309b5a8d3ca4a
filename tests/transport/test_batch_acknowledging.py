"""Acknowledged packets taken in runs, beside upstream's way, which takes one by one."""

from __future__ import annotations

import random

import pytest
from aioquic import tls
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketRecovery, QuicPacketSpace

from transport.protocol.batch import SendPart
from transport.protocol.batch.acknowledging import acknowledge_runs
from transport.protocol.batch.sent import FramePacket, SentPacket, SentPackets, SentRun
from transport.protocol.congestion import register

SIZE = 1000


class Sender:
    """Loss recovery with packets of all kinds in flight, and what became of them."""

    def __init__(self, controller: str, seed: int) -> None:
        register()
        draw = random.Random(seed)
        self.space = QuicPacketSpace()
        self.loss = QuicPacketRecovery(
            congestion_control_algorithm=controller,
            initial_rtt=0.1,
            max_datagram_size=SIZE,
            peer_completed_address_validation=True,
            send_probe=lambda: None,
        )
        self.loss.spaces = [self.space]
        self.fates: list[tuple[QuicDeliveryState, int]] = []
        self.parts = [SendPart(4 * number) for number in range(2)]
        for part in self.parts:
            part.lend(memoryview(bytes(100 * SIZE)), lambda: True, 1)
        sent = SentPackets()
        self.space.sent_packets = sent
        offsets, number, self.now = [0, 0], 0, 1.0
        while number < 60:
            self.now += 0.001
            if draw.random() < 0.4:
                packet = SentPacket(
                    number, self.now, 40, draw.random() < 0.5, [(self._note, (number,))]
                )
                sent[number] = packet
                if packet.is_ack_eliciting:
                    self.space.ack_eliciting_in_flight += 1
                    self.loss._cc.on_packet_sent(packet=packet)  # type: ignore[arg-type]
                number += 1
                continue
            which, count = draw.randrange(2), draw.randint(1, 6)
            part, start, fin = self.parts[which], offsets[which], draw.random() < 0.1
            run = SentRun(self.now, SIZE, number, count, part, start, SIZE, fin=fin)
            sent.add_run(run)
            offsets[which] += count * SIZE
            number += count
            self.space.ack_eliciting_in_flight += count
            self.loss._cc.on_packet_sent(packet=run)  # type: ignore[arg-type]
        self.last = number

    def _note(self, delivery: QuicDeliveryState, number: int) -> None:
        self.fates.append((delivery, number))

    def acknowledge(self, ranges: RangeSet, *, in_runs: bool) -> None:
        self.now += 0.01
        if in_runs:
            acknowledge_runs(self.loss, self.space, ranges, self.now)
        self.loss.on_ack_received(
            ack_rangeset=ranges, ack_delay=0.0, now=self.now, space=self.space
        )

    def state(self) -> dict[str, object]:
        cc = self.loss._cc
        return {
            "left": list(self.space.sent_packets),
            "eliciting": self.space.ack_eliciting_in_flight,
            "in flight": cc.bytes_in_flight,
            "round trip": (self.loss._rtt_latest, self.loss._rtt_smoothed),
            "fates": sorted(self.fates, key=lambda fate: fate[1]),
            "streams": [
                (part._buffer_start, len(part._early), part._acked_fin) for part in self.parts
            ],
            "lost": [len(part._lost) for part in self.parts],
        }


@pytest.mark.parametrize("controller", ["rate", "reno", "cubic"])
def test_what_is_taken_in_runs_ends_as_what_is_taken_one_by_one(controller: str) -> None:
    for seed in range(150):
        one, other = Sender(controller, seed), Sender(controller, seed)
        draw = random.Random(seed)
        for _ in range(4):
            ranges = RangeSet()
            for _ in range(draw.randint(1, 4)):
                start = draw.randrange(one.last)
                ranges.add(start, min(one.last, start + draw.randint(1, 20)))
            one.acknowledge(ranges, in_runs=False)
            other.acknowledge(ranges, in_runs=True)
            assert one.state() == other.state(), f"seed {seed}"


def test_the_packets_of_a_run() -> None:
    part = SendPart(4)
    run = SentRun(1.0, SIZE, 7, 3, part, 1000, 50, fin=True)
    sent = SentPackets()
    sent.add_run(run)
    packets = dict(sent.items())
    assert (
        list(sent)
        == list(packets)
        == [packet.packet_number for packet in packets.values()]
        == [7, 8, 9]
    )
    assert [(packet.start, packet.stop, packet.fin) for packet in packets.values()] == [
        (1000, 1050, False),
        (1050, 1100, False),
        (1100, 1150, True),
    ]
    for packet in packets.values():
        assert packet.run is run
        assert (packet.sent_time, packet.sent_bytes) == (1.0, SIZE)
        assert packet.delivery_handlers == [
            (part.on_data_delivery, (packet.start, packet.stop, packet.fin))
        ]
    assert run.sent_bytes == 3 * SIZE
    assert [packet.start for packet in sent.values()] == [1000, 1050, 1100]
    assert sent[8].start == sent.pop(8).start == 1050
    assert sent.within(0, 9) == [(run, 7, 7)]
    assert sent.within(8, 20) == [(run, 9, 9)]
    with pytest.raises(KeyError):
        sent[8]
    sent.forget(7, 7)
    sent.forget(9, 9)
    assert not sent


def test_what_is_kept_is_what_a_dictionary_keeps() -> None:
    part = SendPart(4)
    for seed in range(100):
        draw = random.Random(seed)
        sent, model = SentPackets(), dict[int, object]()
        number = 0
        for _ in range(200):
            if draw.random() < 0.5:
                number += draw.choice((0, 0, 5))
                if draw.random() < 0.3:
                    packet = SentPacket(number, 1.0, 40, True, [])
                    sent[number] = packet
                    model[number] = packet
                    number += 1
                else:
                    run = SentRun(1.0, SIZE, number, draw.randint(1, 9), part, 0, 50, fin=False)
                    sent.add_run(run)
                    model.update(dict.fromkeys(range(number, run.last + 1), run))
                    number = run.last + 1
            elif model and draw.random() < 0.7:
                gone = draw.choice(list(model))
                del sent[gone], model[gone]
            else:
                start = draw.randint(0, number)
                for kept, first, last in sent.within(start, start + draw.randint(0, 20)):
                    assert all(model[each] is kept for each in range(first, last + 1))
                    sent.forget(first, last)
                    for each in range(first, last + 1):
                        del model[each]
            assert list(sent) == list(model)
            assert len(sent) == len(model)
            assert (number in sent) == (number in model)
        assert [getattr(packet, "run", packet) for packet in sent.values()] == list(model.values())
        sent.clear()
        assert not sent
        assert not list(sent.items())


def test_the_epoch_is_that_of_data() -> None:
    assert FramePacket.epoch is SentPacket.epoch is tls.Epoch.ONE_RTT
