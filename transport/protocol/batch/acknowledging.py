"""Acknowledged packets taken from loss recovery in runs, where upstream takes one by one.

An acknowledgement covers dozens of packets that were full of one stream's data, one behind the
other. To the stream they are one range, to the congestion controller one packet.
"""

from __future__ import annotations

from typing import cast

from aioquic.quic.packet_builder import QuicDeliveryState
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketRecovery, QuicPacketSpace
from aioquic.quic.stream import QuicStreamSender

from transport.protocol.batch.sent import Kept, SentPackets, SentRun

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
    newly = [kept for each in acknowledged for kept in sent.within(each.start, each.stop)]
    if not newly:
        return
    newest_is_eliciting = newly[-1].packet.is_ack_eliciting
    _leave_last(newly, len(newly) - 1)
    if not newest_is_eliciting:
        eliciting_at = range(len(newly) - 1, -1, -1)
        newest = next((at for at in eliciting_at if newly[at].packet.is_ack_eliciting), None)
        if newest is not None:
            _leave_last(newly, newest)
    nbytes = eliciting = 0
    data: _StreamData | None = None
    latest: SentRun | None = None
    for packet, first, last in newly:
        sent.forget(first, last)
        if isinstance(packet, SentRun):
            latest = packet
            start, stop = packet.offset(first), packet.offset(last + 1)
            if data is None or not data.goes_on(packet.sender, start):
                if data is not None:
                    data.acknowledge()
                data = _StreamData(packet.sender, start)
            data.stop, data.fin = stop, packet.fin and last == packet.last
            nbytes += (last + 1 - first) * packet.size
            eliciting += last + 1 - first
            continue
        if packet.is_ack_eliciting:
            eliciting += 1
        if packet.in_flight:
            loss._cc.on_packet_acked(packet=packet, now=now)  # type: ignore[arg-type]
        for handler, arguments in packet.delivery_handlers:
            handler(QuicDeliveryState.ACKED, *arguments)
    if data is not None:
        data.acknowledge()
    space.ack_eliciting_in_flight -= eliciting
    if latest is not None:
        loss._cc.on_packet_acked(packet=latest.part(nbytes), now=now)  # type: ignore[arg-type]


def _leave_last(newly: list[Kept], at: int) -> None:
    """Take the last packet out of those at `at`."""
    packet, first, last = newly[at]
    if first == last:
        del newly[at]
    else:
        newly[at] = Kept(packet, first, last - 1)


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
