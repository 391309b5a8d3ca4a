"""What an endpoint can be told, with the reason for each default."""

from __future__ import annotations

import dataclasses
import math

from transport.errors import AddressError, TransportError
from transport.protocol.newcomers import NewcomerRules

__all__ = ["EndpointConfig"]

MIB = 1 << 20

TIMES = (
    "liveness",
    "connect_timeout",
    "handshake_timeout",
    "authorizer_timeout",
    "idle_timeout",
    "linger",
)
"""The settings that are times: each finite and positive, but for a linger of nothing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """Settings of an `Endpoint`. Times are in seconds, sizes in bytes.

    Raises:
        TransportError: values that contradict each other, with the rule they break.
    """

    bind: str = "[::]:0"
    """Where to listen: a UDP address, or a choice of interfaces (``"eth0:4433"``, ``"^lo,wg*"``)
    as `transport.binding.parse_bind` reads it. The default takes a free port on every interface, v4
    and v6.
    """

    advertise: tuple[str, ...] = ()
    """Addresses to tell others instead of those found on the interfaces, each with its port."""

    listen: bool = True
    """Whether strangers may dial. A client that only dials turns it off."""

    liveness: float = 3.0
    """A peer silent for this long is lost. A killed process is noticed far sooner."""

    connect_timeout: float = 10.0
    """Default deadline of a dial, over all addresses."""

    handshake_timeout: float = 5.0
    """How long an inbound connection may take to prove itself and to say hello."""

    authorizer_timeout: float = 5.0
    """How long the authorizer may think; after that the answer is no."""

    idle_timeout: float = 60.0
    """Default for one wait on a stream: how long a peer may keep a reader or writer waiting."""

    linger: float = 5.0
    """How long a close waits for what was accepted to be acknowledged."""

    stream_window: int = 1 * MIB
    """Receive window of one stream: what a peer may send before the application reads it."""

    connection_window: int = 8 * MIB
    """Receive window of a connection, over all its streams."""

    send_buffer: int = 1 * MIB
    """What one stream keeps of written data until the peer acknowledges it."""

    max_streams: int = 128
    """Streams that one peer may have open to us at a time."""

    max_connections: int = 1024
    """Connections in all, those still in their handshake included."""

    max_half_open: int = 128
    """Inbound connections not admitted yet; beyond that newcomers are dropped."""

    max_half_open_per_host: int = 32
    """The same for one source address (IPv6: one /64); beyond that they prove it first."""

    retry_threshold: int = 32
    """Half-open connections above which newcomers prove their address (RFC 9000 section 8.1.2)."""

    newcomers: NewcomerRules | None = None
    """Who may begin a handshake, by address and rate; None for everybody, within the bounds above.
    """

    congestion_control: str = "rate"
    """Congestion controller: ``"rate"``, which learns the path's rate and shortest round trip and
    bears random loss, ``"cubic"`` or ``"reno"``."""

    placement: str | None = None
    """Where packets are moved: ``"loop"``, in the event loop that the endpoint lives in, or
    ``"process"``, in a process of the endpoint's own, which leaves the program its GIL (Linux).
    None leaves it to who makes the endpoint, and there is the loop where nobody minds."""

    share: str | None = None
    """Unix socket of a process that moves the packets of several programs of a user, as a machine's
    daemon has one. Where it takes this endpoint in, none is started; with ``"process"`` alone."""

    key_log: str | None = None
    """File to which the TLS secrets of every connection are appended, for Wireshark and its like.
    Whoever reads it can read all traffic, so it is made for its owner alone, and refused where
    others can read it. None leaves it to ``SSLKEYLOGFILE``; with ``""`` there is none."""

    qlog: str | None = None
    """Directory for a trace of each connection (qlog): packets, frames, losses; no content. None
    leaves it to ``QLOGDIR``; with ``""`` there is none."""

    def __post_init__(self) -> None:
        if self.placement not in (None, "loop", "process"):
            raise TransportError(
                "endpoint configuration",
                why=f"placement is {self.placement!r}",
                fix='Choose "loop" or "process".',
            )
        for name in TIMES:
            seconds = getattr(self, name)
            if not 0 < seconds < math.inf and not (name == "linger" and seconds == 0):
                raise TransportError(
                    "endpoint configuration",
                    why=f"{name} is {seconds}, not a positive and finite number of seconds",
                )
        if self.stream_window > self.connection_window:
            raise TransportError(
                "endpoint configuration",
                why=f"stream_window ({self.stream_window}) exceeds connection_window "
                f"({self.connection_window})",
                fix="One stream can't be given more than its connection has.",
            )
        if not 0 < self.retry_threshold <= self.max_half_open <= self.max_connections:
            raise TransportError(
                "endpoint configuration",
                why="0 < retry_threshold <= max_half_open <= max_connections does not hold",
            )
        for address in self.advertise:
            if address.rpartition(":")[2] == "0":
                raise AddressError(
                    f"address to advertise {address!r}",
                    why="port 0 means 'any', and nobody can dial that",
                    fix="Give the port that others can reach, as in 192.0.2.1:4433.",
                )
