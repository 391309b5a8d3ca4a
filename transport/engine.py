"""What an endpoint, its connections and its streams need of whatever moves their packets.

An engine has the socket, the cryptography and the state of each QUIC connection; admission,
services and everything that calls the program's code stay above it. `transport.loop_engine` is the
engine in the endpoint's own event loop, `transport.process` one in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from auth import IdentityError, MeshError, NodeId, SocketAddress
from transport.deadlines import Deadlines
from transport.protocol import StreamCore
from transport.protocol.events import ConnectionEnded, Event
from transport.udp import Refusal

__all__ = ["Engine", "EventHandler", "InboundHandler", "Lent", "Link", "LinkHandler"]


class Lent(Protocol):
    """What became of memory that was lent to a stream."""

    @property
    def unacknowledged(self) -> int:
        """Bytes written to the stream that the peer has not acknowledged; also after a reset."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be acknowledged."""


class Link(Protocol):
    """One QUIC connection. The methods are those of `transport.protocol.ConnectionCore`."""

    streams: dict[int, StreamCore]
    peer: NodeId | None
    ended: ConnectionEnded | None
    bytes_sent: int
    bytes_received: int

    def __hash__(self) -> int:
        """Of the object itself: tables have it as their key."""

    @property
    def rtt(self) -> float | None:
        """Smoothed round-trip time in seconds, once measured."""

    @property
    def datagram_size(self) -> int:
        """UDP payload of a full packet, in bytes."""

    @property
    def remote_address(self) -> SocketAddress | None:
        """Where datagrams go now; None before the first."""

    @property
    def peer_error(self) -> IdentityError | None:
        """Why the peer's certificate was refused, if it was."""

    @property
    def failure(self) -> MeshError | None:
        """What of this host's ended the connection, where it was neither of its two sides."""

    @property
    def can_open_stream(self) -> bool:
        """Whether the peer's limit leaves room for one more stream of ours."""

    def open_stream(self) -> StreamCore:
        """Open a stream, which the peer learns of with the first byte."""

    def room(self, stream: StreamCore) -> int:
        """Bytes that may be written now; 0 asks for a `StreamChanged`."""

    def write(self, stream: StreamCore, data: bytes | memoryview, *, fin: bool = False) -> None:
        """Write what `room` allowed."""

    def lend(
        self, stream: StreamCore, view: memoryview, is_intact: Callable[[], bool], code: int
    ) -> Lent:
        """Write `view`, which must not change until it is acknowledged, without keeping a copy."""

    def take_back(self, stream: StreamCore) -> None:
        """Let go of what was lent. The stream has to be reset then."""

    def is_spoiled(self, stream: StreamCore) -> bool:
        """Whether the memory that was lent was gone before it was sent."""

    def unacknowledged(self, stream: StreamCore, *, wake_below: int = 0) -> int:
        """Bytes that the peer has not acknowledged; a `StreamChanged` tells of fewer."""

    def post(self, stream: StreamCore, target: memoryview) -> int:
        """Have the next bytes written to `target`; return how many were here already."""

    def owes_credit(self, stream: StreamCore) -> bool:
        """Whether the peer should be told that it may send more."""

    def withdraw(self, stream: StreamCore) -> None:
        """Take posted memory back. Unless it is full, the stream has to be reset."""

    def consumed(self, stream: StreamCore, count: int) -> bool:
        """The application took `count` bytes. Return whether somebody should be told."""

    def reset(self, stream: StreamCore, code: int) -> None:
        """Give up on both directions of the stream."""

    def release(self, stream: StreamCore, code: int) -> None:
        """The application drops the stream."""

    def is_flushed(self) -> bool:
        """Whether the peer has acknowledged everything; if not, it is asked after each pump."""

    def admit(self, *, max_streams: int, connection_window: int) -> None:
        """The peer is authorized: lift the narrow limits it had until now."""

    def ping(self, uid: int) -> None:
        """Send a PING; `PingAcknowledged` reports its answer."""

    def close(self, code: int, reason: str) -> None:
        """Close with an application code."""


InboundHandler: TypeAlias = Callable[[Link, SocketAddress], None]
"""Told of each connection that a stranger begins."""

EventHandler: TypeAlias = Callable[[Link, Event], None]
"""Told of each event of each connection, in order."""

LinkHandler: TypeAlias = Callable[[Link], None]
"""Told of each connection that was just looked after."""


class Engine(Protocol):
    """The moving part of one endpoint. Used in the endpoint's event loop."""

    deadlines: Deadlines
    """Of those who wait for something of a connection's."""

    @property
    def drops(self) -> dict[str, int]:
        """Datagrams that led nowhere, counted by reason."""

    async def open(self) -> None:
        """Begin. `close` has to follow, also if this fails or is cancelled."""

    async def run(self) -> None:
        """Serve until cancelled."""

    async def up(self) -> None:
        """Wait until packets move, or never will."""

    async def drain(self, seconds: float) -> None:
        """Wait until every connection's closing period is over, at most `seconds`."""

    async def close(self) -> None:
        """Let go of everything, the socket too. `run` must have ended."""

    def stop_listening(self) -> None:
        """Meet no more strangers."""

    def offer(self, alpns: list[str]) -> None:
        """Speak these protocols with strangers from now on."""

    def outbound(self, peer: NodeId, alpn: str) -> Link:
        """Make a connection that insists on `peer`, to be given to `dial`."""

    async def dial(self, link: Link, address: SocketAddress) -> Refusal | None:
        """Begin the handshake of an outbound connection; return why this host sends nothing."""

    def admitted(self, link: Link) -> None:
        """The peer is authorized, and no stranger any more."""

    def pump(self, link: Link) -> None:
        """Report what happened on the connection, send what it has to send."""

    def why_refused(self, address: SocketAddress) -> str | None:
        """Return why this host sends nothing to `address`, None if it does or was not asked to."""
