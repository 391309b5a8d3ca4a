"""What is kept of a sent packet until it is acknowledged or lost, and what is given to a socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from aioquic import tls
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryHandler
from aioquic.quic.stream import QuicStreamSender

__all__ = [
    "AcknowledgedRun",
    "FramePacket",
    "Handlers",
    "SentPacket",
    "SentPackets",
    "SentRun",
    "Transmit",
]

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
    """Packets of one size that left together, full of one stream's data, one behind the other.

    To a congestion controller they are one packet, as large as all of them: what a controller notes
    of a packet it notes here.

    Args:
        time: when they were sent, in seconds.
        size: bytes of UDP payload of each.
        first: the first one's packet number.
        count: how many there are.
        sender: the stream's sending part.
        start: the offset at which the data of the first begins.
        room: bytes of data in each.
        fin: whether the last ends the stream.
    """

    __slots__ = (
        "delivered",
        "delivered_at",
        "fin",
        "first",
        "first_sent_at",
        "is_limited",
        "last",
        "room",
        "sender",
        "sent_bytes",
        "sent_time",
        "size",
        "start",
        "stop",
    )

    def __init__(
        self,
        time: float,
        size: int,
        first: int,
        count: int,
        sender: QuicStreamSender,
        start: int,
        room: int,
        *,
        fin: bool,
    ) -> None:
        self.sent_time = time
        self.size = size
        self.sent_bytes = size * count
        self.first = first
        self.last = first + count - 1
        self.sender = sender
        self.start = start
        self.stop = start + count * room
        self.room = room
        self.fin = fin
        self.delivered = 0
        self.delivered_at = self.first_sent_at = time
        self.is_limited = False

    def packet(self, number: int) -> FramePacket:
        """Return the packet of that number."""
        start = self.start + (number - self.first) * self.room
        return FramePacket(self, number, start, fin=self.fin and number == self.last)

    def part(self, nbytes: int) -> AcknowledgedRun:
        """Return what stands for `nbytes` bytes of it, and of runs before it."""
        return AcknowledgedRun(
            self.sent_time,
            nbytes,
            self.delivered,
            self.delivered_at,
            self.first_sent_at,
            self.is_limited,
        )


class AcknowledgedRun(NamedTuple):
    """What a congestion controller reads of a packet, of many that were acknowledged at once."""

    sent_time: float
    sent_bytes: int
    delivered: int
    delivered_at: float
    first_sent_at: float
    is_limited: bool


class FramePacket(_DataPacket):
    """A `SentPacket` of a run.

    Attributes:
        run: what it shares with others.
        packet_number: its number.
        start, stop: the offsets between which its data lies.
        fin: whether it ends the stream.
    """

    __slots__ = ("fin", "packet_number", "run", "start", "stop")

    is_ack_eliciting = in_flight = True

    def __init__(self, run: SentRun, number: int, start: int, *, fin: bool) -> None:
        self.run = run
        self.packet_number = number
        self.start = start
        self.stop = start + run.room
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
        return [(self.run.sender.on_data_delivery, (self.start, self.stop, self.fin))]

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


class SentPackets(dict[int, Any]):
    """Stands for the `sent_packets` of upstream's packet space: packets by their number, in order.

    There are a hundred thousand a second of those in runs: none is made before it is looked at.
    """

    def add_run(self, run: SentRun) -> None:
        """Keep all packets of `run`."""
        self.update(dict.fromkeys(range(run.first, run.last + 1), run))

    def kept(self, number: int) -> SentPacket | SentRun:
        """Return the packet of that number, or the run it is of."""
        found: SentPacket | SentRun = super().__getitem__(number)
        return found

    def forget(self, numbers: Iterable[int]) -> None:
        """Keep those packets no more."""
        deque(map(super().pop, numbers), maxlen=0)

    def __getitem__(self, number: int) -> Any:
        return _packet(number, super().__getitem__(number))

    def pop(self, number: int) -> Any:  # type: ignore[override]
        """Keep the packet of that number no more, and return it."""
        return _packet(number, super().pop(number))

    def items(self) -> Iterator[tuple[int, Any]]:  # type: ignore[override]
        """The packets with their numbers, one by one."""
        return ((number, _packet(number, kept)) for number, kept in super().items())

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        """The packets, one by one."""
        return (packet for _, packet in self.items())


def _packet(number: int, kept: Any) -> Any:
    return kept.packet(number) if isinstance(kept, SentRun) else kept
