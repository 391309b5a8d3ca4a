"""Acknowledged packets taken from loss recovery in runs, where upstream takes one by one.

An acknowledgement covers dozens of packets that were full of one stream's data, one behind the
other. To the stream they are one range, to the congestion controller one packet.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketRecovery, QuicPacketSpace
from aioquic.quic.stream import QuicStreamSender

from transport.protocol.batch.sent import FramePacket, SentRun

__all__ = ["acknowledge_runs"]


def acknowledge_runs(
    loss: QuicPacketRecovery, space: QuicPacketSpace, acknowledged: RangeSet, now: float
) -> None:
    """Take what `acknowledged` covers out of `space`, but for the newest packet.

    That is left for `on_ack_received`, which measures the round trip by it and looks for losses. If
    it called for no acknowledgement, the newest that did is left too: only with one of those is the
    round trip measured (RFC 9002 section 5.1).
    """
    sent: dict[int, Any] = space.sent_packets
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
    sender: QuicStreamSender | None = None
    start = stop = nbytes = eliciting = 0
    run: SentRun | None = None
    for number in newly:
        packet = sent.pop(number)
        if isinstance(packet, FramePacket):
            eliciting += 1
            run = packet.run
            nbytes += run.size
            if packet.start == stop and packet.sender is sender and not packet.fin:
                stop = packet.stop
                continue
            if stop > start and sender is not None:
                sender.on_data_delivery(QuicDeliveryState.ACKED, start, stop, False)
            sender, start, stop = packet.sender, packet.start, packet.stop
            if packet.fin:
                sender.on_data_delivery(QuicDeliveryState.ACKED, start, stop, True)
                start = stop
            continue
        if packet.is_ack_eliciting:
            eliciting += 1
        if packet.in_flight:
            loss._cc.on_packet_acked(packet=packet, now=now)
        for handler, arguments in packet.delivery_handlers:
            handler(QuicDeliveryState.ACKED, *arguments)
    if stop > start and sender is not None:
        sender.on_data_delivery(QuicDeliveryState.ACKED, start, stop, False)
    space.ack_eliciting_in_flight -= eliciting
    if run is not None:
        loss._cc.on_packet_acked(packet=run.part(nbytes), now=now)  # type: ignore[arg-type]
