"""What is kept of a sent packet until it is acknowledged or lost, and what is given to a socket."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from aioquic import tls
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryHandler
from aioquic.quic.stream import QuicStreamSender

__all__ = ["FramePacket", "Handlers", "SentPacket", "SentRun", "Transmit"]

Handlers: TypeAlias = list[tuple[QuicDeliveryHandler, Any]]
"""What is called with a packet's fate, each with its arguments."""


class Transmit(NamedTuple):
    """Datagrams for one address, one behind the other."""

    data: bytes | memoryview
    segment: int
    """The size of each, but for the last, which may be shorter."""
    address: object


class _DataPacket:
    """What upstream asks of every packet, and is the same for all of ours."""

    __slots__ = ()

    epoch = tls.Epoch.ONE_RTT
    packet_type = QuicPacketType.ONE_RTT
    is_crypto_packet = False
    quic_logger_frames: tuple[dict[str, Any], ...] = ()


class SentPacket(_DataPacket):
    """Stands for `aioquic.quic.packet_builder.QuicSentPacket`.

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

    def __init__(
        self, number: int, time: float, size: int, eliciting: bool, handlers: Handlers
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


class SentRun:
    """What packets of one size that left together have in common.

    To a congestion controller it is one packet, as large as all of them: what a controller notes of
    a packet it notes here.

    Args:
        time: when they were sent, in seconds.
        size: bytes of UDP payload of each.
        count: how many there are.
    """

    __slots__ = (
        "delivered",
        "delivered_at",
        "first_sent_at",
        "is_limited",
        "sent_bytes",
        "sent_time",
        "size",
    )

    def __init__(self, time: float, size: int, count: int) -> None:
        self.sent_time = time
        self.size = size
        self.sent_bytes = size * count
        self.delivered = 0
        self.delivered_at = self.first_sent_at = time
        self.is_limited = False

    def part(self, nbytes: int) -> SentRun:
        """Return what stands for `nbytes` bytes of it, and of runs before it."""
        part = SentRun(self.sent_time, nbytes, 1)
        part.delivered = self.delivered
        part.delivered_at = self.delivered_at
        part.first_sent_at = self.first_sent_at
        part.is_limited = self.is_limited
        return part


class FramePacket(_DataPacket):
    """A `SentPacket` of a run that is full of one stream's data: of these there are the most.

    Args:
        run: what it shares with others.
        number: the packet number.
        sender: the stream's sending part.
        start, stop: the offsets between which the data lies.
        fin: whether it ends the stream.
    """

    __slots__ = ("fin", "packet_number", "run", "sender", "start", "stop")

    is_ack_eliciting = in_flight = True

    def __init__(
        self, run: SentRun, number: int, sender: QuicStreamSender, start: int, stop: int, fin: bool
    ) -> None:
        self.run = run
        self.packet_number = number
        self.sender = sender
        self.start = start
        self.stop = stop
        self.fin = fin

    @property
    def sent_time(self) -> float:
        """When it was sent, in seconds."""
        return self.run.sent_time

    @property
    def sent_bytes(self) -> int:
        """Bytes of UDP payload."""
        return self.run.size

    @property
    def delivery_handlers(self) -> Handlers:
        """What is called with its fate, as upstream."""
        return [(self.sender.on_data_delivery, (self.start, self.stop, self.fin))]

    @property
    def delivered(self) -> int:
        """As the congestion controller has noted it of the run."""
        return self.run.delivered

    @property
    def delivered_at(self) -> float:
        """As the congestion controller has noted it of the run."""
        return self.run.delivered_at

    @property
    def first_sent_at(self) -> float:
        """As the congestion controller has noted it of the run."""
        return self.run.first_sent_at

    @property
    def is_limited(self) -> bool:
        """As the congestion controller has noted it of the run."""
        return self.run.is_limited
