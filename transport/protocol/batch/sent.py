"""What is kept of a sent packet until it is acknowledged or lost, and what is given to a socket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, MutableMapping
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from aioquic import tls
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicDeliveryHandler
from aioquic.quic.stream import QuicStreamSender

__all__ = [
    "AcknowledgedRun",
    "FramePacket",
    "Handlers",
    "Kept",
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

    is_ack_eliciting = True

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

    def offset(self, number: int) -> int:
        """Return where in the stream the data of the packet of that number begins."""
        return self.start + (number - self.first) * self.room

    def packet(self, number: int) -> FramePacket:
        """Return the packet of that number."""
        fin = self.fin and number == self.last
        return FramePacket(self, number, self.offset(number), fin=fin)

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


class Kept(NamedTuple):
    """Packets kept for one reason: one, or those of a run whose numbers follow each other."""

    packet: SentPacket | SentRun
    """The one, or the run that they are of."""
    first: int
    last: int


class SentPackets(MutableMapping[int, Any]):
    """Stands for the `sent_packets` of upstream's packet space: packets by their number, in order.

    There are a hundred thousand a second of those in runs. Numbers that follow each other are kept
    as their first and their last, and no packet of a run is made before it is looked at.
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self._packets: list[SentPacket | SentRun] = []

    def add_run(self, run: SentRun) -> None:
        """Keep all packets of `run`, which come after all that are kept."""
        self._append(run.first, run.last, run)

    def within(self, start: int, stop: int) -> list[Kept]:
        """Return what is kept of the numbers in ``[start, stop)``, in order."""
        firsts, lasts, packets = self._firsts, self._lasts, self._packets
        return [
            Kept(packets[at], max(firsts[at], start), min(lasts[at], stop - 1))
            for at in range(bisect_left(lasts, start), bisect_left(firsts, stop))
        ]

    def forget(self, first: int, last: int) -> None:
        """Keep the packets from `first` to `last` no more, all of which lie in one of `within`."""
        at = bisect_left(self._lasts, first)
        begin, end = self._firsts[at], self._lasts[at]
        if first == begin and last == end:
            del self._firsts[at], self._lasts[at], self._packets[at]
        elif first == begin:
            self._firsts[at] = last + 1
        else:
            self._lasts[at] = first - 1
            if last < end:
                self._firsts.insert(at + 1, last + 1)
                self._lasts.insert(at + 1, end)
                self._packets.insert(at + 1, self._packets[at])

    def clear(self) -> None:
        """Keep none."""
        self._firsts.clear()
        self._lasts.clear()
        self._packets.clear()

    def _append(self, first: int, last: int, packet: SentPacket | SentRun) -> None:
        assert not self._lasts or self._lasts[-1] < first, "packet numbers only grow"
        self._firsts.append(first)
        self._lasts.append(last)
        self._packets.append(packet)

    # -- as upstream uses it

    def __iter__(self) -> Iterator[int]:
        ranges = map(range, self._firsts, [last + 1 for last in self._lasts])
        return chain.from_iterable(ranges)

    def __len__(self) -> int:
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def __getitem__(self, number: int) -> Any:
        at = bisect_left(self._lasts, number)
        if at == len(self._lasts) or number < self._firsts[at]:
            raise KeyError(number)
        packet = self._packets[at]
        return packet.packet(number) if isinstance(packet, SentRun) else packet

    def __setitem__(self, number: int, packet: SentPacket) -> None:
        self._append(number, number, packet)

    def __delitem__(self, number: int) -> None:
        if number not in self:
            raise KeyError(number)
        self.forget(number, number)
