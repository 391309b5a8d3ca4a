"""Acknowledged packets taken in runs, beside upstream's way, which takes one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from aioquic import tls
from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketRecovery, QuicPacketSpace

from transport.protocol.batch import SendPart
from transport.protocol.batch.acknowledging import acknowledge_runs
from transport.protocol.batch.sent import FramePacket, SentPacket, SentRun
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
        sent: dict[int, Any] = self.space.sent_packets
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
            run = SentRun(self.now, SIZE, count)
            for _ in range(count):
                start = offsets[which]
                sent[number] = FramePacket(
                    run, number, self.parts[which], start, start + SIZE, False
                )
                offsets[which] = start + SIZE
                number += 1
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
            "streams": [(part._buffer_start, len(part._early)) for part in self.parts],
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


def test_the_epoch_is_that_of_data() -> None:
    assert FramePacket.epoch is SentPacket.epoch is tls.Epoch.ONE_RTT
