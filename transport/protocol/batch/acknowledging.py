"""Acknowledged packets taken from loss recovery in runs, where upstream takes one by one.

An acknowledgement covers dozens of packets that were full of one stream's data, one behind the
other. To the stream they are one range, to the congestion controller one packet.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import cast

from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketRecovery, QuicPacketSpace
from aioquic.quic.stream import QuicStreamSender

from transport.protocol.batch.sent import SentPackets, SentRun

__all__ = ["acknowledge_runs"]


def acknowledge_runs(
    loss: QuicPacketRecovery, space: QuicPacketSpace, acknowledged: RangeSet, now: float
) -> None:
    """Take what `acknowledged` covers out of `space`, but for the newest packet.

    That is left for `on_ack_received`, which measures the round trip by it and looks for losses. If
    it called for no acknowledgement, the newest that did is left too: only with one of those is the
    round trip measured (RFC 9002 section 5.1).
    """
    sent = cast(SentPackets, space.sent_packets)
    numbers = list(sent)
    newly: list[int] = []
    for each in acknowledged:
        newly += numbers[bisect_left(numbers, each.start) : bisect_left(numbers, each.stop)]
    if len(newly) < 2:
        return
    if not sent[newly.pop()].is_ack_eliciting:
        eliciting_at = range(len(newly) - 1, -1, -1)
        newest = next((at for at in eliciting_at if sent[newly[at]].is_ack_eliciting), None)
        if newest is not None:
            del newly[newest]
    nbytes = eliciting = at = 0
    data: _StreamData | None = None
    run: SentRun | None = None
    while at < len(newly):
        packet = sent.kept(newly[at])
        if isinstance(packet, SentRun):
            run = packet
            # What is left of the run, as far as it was acknowledged without a gap.
            count = _consecutive(newly, at, run.last)
            first, last = run.packet(newly[at]), run.packet(newly[at + count - 1])
            if data is None or not data.goes_on(run.sender, first.start):
                if data is not None:
                    data.acknowledge()
                data = _StreamData(run.sender, first.start)
            data.stop, data.fin = last.stop, last.fin
            nbytes += count * run.size
            eliciting += count
            sent.forget(newly[at : at + count])
            at += count
            continue
        del sent[newly[at]]
        at += 1
        if packet.is_ack_eliciting:
            eliciting += 1
        if packet.in_flight:
            loss._cc.on_packet_acked(packet=packet, now=now)  # type: ignore[arg-type]
        for handler, arguments in packet.delivery_handlers:
            handler(QuicDeliveryState.ACKED, *arguments)
    if data is not None:
        data.acknowledge()
    space.ack_eliciting_in_flight -= eliciting
    if run is not None:
        loss._cc.on_packet_acked(packet=run.part(nbytes), now=now)  # type: ignore[arg-type]


class _StreamData:
    """Data of one stream from one offset to another, of which all was acknowledged."""

    __slots__ = ("fin", "sender", "start", "stop")

    def __init__(self, sender: QuicStreamSender, start: int) -> None:
        self.sender = sender
        self.start = self.stop = start
        self.fin = False

    def goes_on(self, sender: QuicStreamSender, start: int) -> bool:
        """Whether what `sender` sent from `start` on comes right behind it."""
        return start == self.stop and sender is self.sender and not self.fin

    def acknowledge(self) -> None:
        """Tell the stream."""
        self.sender.on_data_delivery(QuicDeliveryState.ACKED, self.start, self.stop, self.fin)


def _consecutive(numbers: list[int], at: int, last: int) -> int:
    """Return how many of the sorted `numbers` from `at` on follow each other, up to `last`."""
    first = numbers[at]
    count = bisect_left(numbers, last + 1, at) - at
    if numbers[at + count - 1] - first == count - 1:
        return count
    # The distance of a number from its place grows at each gap, and never shrinks.
    return bisect_left(range(count), 1, key=lambda n: numbers[at + n] - first - n)
