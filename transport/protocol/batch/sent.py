"""What is kept of a sent packet until it is acknowledged or lost, and what is given to a socket."""

from __future__ import annotations

from typing import Any, NamedTuple

from aioquic import tls
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryHandler

__all__ = ["SentPacket", "Transmit"]


class Transmit(NamedTuple):
    """Datagrams for one address, one behind the other."""

    data: bytes | memoryview
    segment: int
    """The size of each, but for the last, which may be shorter."""
    address: object


class SentPacket:
    """Stands for `aioquic.quic.packet_builder.QuicSentPacket`, at a third of its cost.

    Args:
        number: the packet number, in the space of 1-RTT packets.
        time: when it was sent, in seconds.
        size: bytes of UDP payload.
        eliciting: whether it calls for an acknowledgement, and counts as in flight.
        handlers: what is called with its fate, as upstream.
    """

    __slots__ = (
        "delivered",
        "delivered_at",
        "delivery_handlers",
        "first_sent_at",
        "in_flight",
        "is_ack_eliciting",
        "is_limited",
        "packet_number",
        "sent_bytes",
        "sent_time",
    )

    epoch = tls.Epoch.ONE_RTT
    packet_type = QuicPacketType.ONE_RTT
    is_crypto_packet = False
    quic_logger_frames: tuple[dict[str, Any], ...] = ()

    def __init__(
        self,
        number: int,
        time: float,
        size: int,
        eliciting: bool,
        handlers: list[tuple[QuicDeliveryHandler, Any]],
    ) -> None:
        self.packet_number = number
        self.sent_time = time
        self.sent_bytes = size
        self.is_ack_eliciting = self.in_flight = eliciting
        self.delivery_handlers = handlers
        # Written and read by the congestion controller.
        self.delivered = 0
        self.delivered_at = self.first_sent_at = time
        self.is_limited = False
