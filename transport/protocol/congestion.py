"""Rate-based congestion control, after BBR (draft-cardwell-iccrg-bbr-congestion-control).

A sender that learns the path's rate and its shortest round trip keeps about their product in
flight, however many packets the path loses by chance: where one packet in a hundred is lost, a
window that halves with each loss carries a thirtieth. Loss counts only where it is so much that
the path must be full.

Registered with aioquic by its public hook, as ``rate``; ``reno`` and ``cubic`` are upstream's.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable
from typing import Any

from aioquic.quic.congestion.base import QuicCongestionControl, register_congestion_control

from transport.protocol.pacing import UNPACED_ROUND_TRIP

__all__ = ["RateController", "register"]

INITIAL_PACKETS = 32
MINIMUM_PACKETS = 4
"""Full packets in the window at first, and at least."""

STARTUP_GAIN = 2.885
"""2/ln 2: doubles the rate with each round trip (draft section 4.1.1)."""

WINDOW_GAIN = 2.0
NEAR_WINDOW_GAIN = 1.25
"""What may be in flight, over what the path delivers in a round trip: enough for acknowledgements
that come in bunches. Within a host or a rack that is `HOLDING_SECONDS` of data already, and more
of it would only wait in the receiver's queue, and whatever is small behind it."""

PROBING_GAINS = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)

PIPE_FULL_GROWTH = 1.25
PIPE_FULL_ROUNDS = 3
"""Startup is over when the rate has not grown by a quarter in this many round trips."""

RATE_ROUNDS = 10
"""The rate is the greatest of this many round trips."""

SHORTEST_SECONDS = 10.0
PROBE_RTT_SECONDS = 0.2
"""How long the shortest round trip is believed, and how long little is in flight to measure it."""

HOLDING_SECONDS = 0.003
"""What an acknowledgement held back, two event loops, and busy hosts may add to any round trip. The
window leaves room for it: a host that was late must not look like a path that has become slow."""

HEAVY_LOSS = 0.1
LOSS_BACKOFF = 0.7
"""A round that lost more than this share cuts what may be in flight to this share."""


class _State(enum.Enum):
    STARTUP = enum.auto()
    DRAIN = enum.auto()
    PROBE_RATE = enum.auto()
    PROBE_RTT = enum.auto()


class RateController(QuicCongestionControl):
    """One path's model: `rate` in bytes per second, `shortest` round trip in seconds."""

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self._max_datagram_size = max_datagram_size
        self.congestion_window = INITIAL_PACKETS * max_datagram_size
        self.bytes_in_flight = 0
        self.shortest = math.inf
        self.pacing_gain = STARTUP_GAIN
        self._state = _State.STARTUP
        self._shortest_at = 0.0
        self._delivered = 0
        self._delivered_at = 0.0
        self._first_sent_at = 0.0
        self._lost = 0
        self._newest: Any = None
        self._rates: deque[tuple[int, float]] = deque()
        self._round = 0
        self._round_ends_at = 0
        self._round_delivered = 0
        self._round_lost = 0
        self._full_rate = 0.0
        self._full_rounds = 0
        self._phase = 0
        self._phase_at = 0.0
        self._probe_rtt_until = 0.0
        self._ceiling = math.inf
        self._limited_until = 0

    @property
    def rate(self) -> float:
        """The rate at which the path delivers, in bytes per second; 0 while unknown."""
        return self._rates[0][1] if self._rates else 0.0

    @property
    def pacing_rate(self) -> float:
        """Bytes per second at which to send; infinite while nothing is known."""
        if self._state is _State.STARTUP and self.shortest < math.inf:
            # Nothing is known yet that should slow the window down.
            return self.pacing_gain * max(self.rate, self.congestion_window / self.shortest)
        if not self.rate:
            return math.inf
        least = MINIMUM_PACKETS * self._max_datagram_size / self.shortest
        return max(self.pacing_gain * self.rate, least)

    def ran_dry(self) -> None:
        """The application has nothing more to send: what is measured now is its rate."""
        self._limited_until = self._delivered + self.bytes_in_flight

    # -- aioquic's hook

    def on_packet_sent(self, *, packet: Any) -> None:
        """Remember what had been delivered when it left."""
        if not self.bytes_in_flight:
            self._first_sent_at = self._delivered_at = packet.sent_time
            self._limited_until = max(self._limited_until, self._delivered)
        self.bytes_in_flight += packet.sent_bytes
        packet.delivered = self._delivered
        packet.delivered_at = self._delivered_at
        packet.first_sent_at = self._first_sent_at
        packet.is_limited = self._delivered <= self._limited_until

    def on_packet_acked(self, *, now: float, packet: Any) -> None:
        """Count it; the model moves once for each acknowledgement, not for each packet."""
        self.bytes_in_flight -= packet.sent_bytes
        self._delivered += packet.sent_bytes
        self._delivered_at = now
        self._newest = packet

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:
        """All packets of an acknowledgement have been counted: move the model."""
        packet = self._newest
        if packet is None:
            return
        self._newest = None
        self._first_sent_at = packet.sent_time
        if rtt <= self.shortest or now - self._shortest_at > SHORTEST_SECONDS:
            if rtt > self.shortest and self._state is not _State.PROBE_RTT:
                self._begin_probe_rtt(now)
            self.shortest = rtt
            self._shortest_at = now
        is_new_round = packet.delivered >= self._round_ends_at
        if is_new_round:
            self._round += 1
            self._round_ends_at = self._delivered
            self._judge_loss()
        self._sample(packet, now)
        self._advance(now, is_new_round, packet.is_limited)
        self._set_window()

    def on_packets_expired(self, *, packets: Iterable[Any]) -> None:
        """They count as neither delivered nor lost."""
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes

    def on_packets_lost(self, *, now: float, packets: Iterable[Any]) -> None:
        """Count them; a round decides whether that was much."""
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            self._lost += packet.sent_bytes

    def on_persistent_congestion(self) -> None:
        """The path has changed beyond recognition: learn it anew."""
        self._rates.clear()
        self._state = _State.STARTUP
        self.pacing_gain = STARTUP_GAIN
        self._full_rate = 0.0
        self._full_rounds = 0
        self.congestion_window = MINIMUM_PACKETS * self._max_datagram_size

    # -- the model

    def _sample(self, packet: Any, now: float) -> None:
        # The slower of sending and acknowledging: acknowledgements that come in a bunch would
        # otherwise show a rate that the path does not have (draft-cheng-iccrg-delivery-rate).
        elapsed = max(now - packet.delivered_at, packet.sent_time - packet.first_sent_at)
        if elapsed <= 0:
            return
        rate = (self._delivered - packet.delivered) / elapsed
        if packet.is_limited and rate < self.rate:
            return
        rates = self._rates
        while rates and rates[-1][1] <= rate:
            rates.pop()
        rates.append((self._round, rate))
        while rates[0][0] <= self._round - RATE_ROUNDS:
            rates.popleft()

    def _judge_loss(self) -> None:
        delivered = self._delivered - self._round_delivered
        lost = self._lost - self._round_lost
        self._round_delivered, self._round_lost = self._delivered, self._lost
        if lost > HEAVY_LOSS * (lost + delivered):
            self._ceiling = LOSS_BACKOFF * min(self._ceiling, self.congestion_window)
        elif self._ceiling < math.inf:
            self._ceiling *= PIPE_FULL_GROWTH
            if self._ceiling > 4 * self.congestion_window:
                self._ceiling = math.inf

    def _advance(self, now: float, is_new_round: bool, is_limited: bool) -> None:
        if self._state is _State.STARTUP:
            if is_new_round and not is_limited and self._is_pipe_full():
                self._state = _State.DRAIN
                self.pacing_gain = 1 / STARTUP_GAIN
        elif self._state is _State.DRAIN:
            if self.bytes_in_flight <= self._product(1.0):
                self._begin_probe_rate(now)
        elif self._state is _State.PROBE_RATE:
            if now - self._phase_at > self.shortest + HOLDING_SECONDS:
                self._phase = (self._phase + 1) % len(PROBING_GAINS)
                self._phase_at = now
                self.pacing_gain = PROBING_GAINS[self._phase]
        elif now > self._probe_rtt_until:
            self._begin_probe_rate(now)

    def _is_pipe_full(self) -> bool:
        if self.rate >= PIPE_FULL_GROWTH * self._full_rate:
            self._full_rate = self.rate
            self._full_rounds = 0
        else:
            self._full_rounds += 1
        return self._full_rounds >= PIPE_FULL_ROUNDS

    def _begin_probe_rate(self, now: float) -> None:
        self._state = _State.PROBE_RATE
        # Anywhere but in the phase that sends less: flows that begin together must not stay so.
        self._phase = 2 + int(now * 1e6) % (len(PROBING_GAINS) - 2)
        self._phase_at = now
        self.pacing_gain = PROBING_GAINS[self._phase]

    def _begin_probe_rtt(self, now: float) -> None:
        if self._state is not _State.STARTUP:
            self._state = _State.PROBE_RTT
            self.pacing_gain = 1.0
            self._probe_rtt_until = now + PROBE_RTT_SECONDS

    def _product(self, gain: float) -> int:
        return int(gain * self.rate * (self.shortest + HOLDING_SECONDS))

    def _set_window(self) -> None:
        is_near = self.shortest < UNPACED_ROUND_TRIP
        gain = NEAR_WINDOW_GAIN if is_near else WINDOW_GAIN
        if self._state is _State.STARTUP:
            gain = STARTUP_GAIN
        least = MINIMUM_PACKETS * self._max_datagram_size
        window = self._product(gain)
        if self._state is _State.PROBE_RTT:
            window = self._product(0.5)
        elif self._state is _State.STARTUP:
            window = max(window, self.congestion_window)
        window = int(min(window, self._ceiling))
        self.congestion_window = max(window, least)


def register() -> None:
    """Make the controller known to aioquic, as ``rate``."""
    register_congestion_control("rate", RateController)
