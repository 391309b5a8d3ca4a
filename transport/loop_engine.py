"""The engine in the endpoint's own event loop: nothing lies between a write and the wire."""

from __future__ import annotations

import time

from auth import NodeId, SecretKey, SocketAddress
from transport.config import EndpointConfig
from transport.driver import Driver
from transport.engine import EventHandler, InboundHandler, Link, LinkHandler
from transport.observing import Observing
from transport.protocol import ConnectionCore, Demultiplexer
from transport.protocol.aioquic_adapter import (
    AdaptedConnection,
    client_configuration,
    server_configuration,
)
from transport.protocol.connection_ids import ConnectionIds
from transport.protocol.hello import HELLO_MAX
from transport.protocol.newcomers import NewcomerFilter, StrangerBudget
from transport.protocol.stateless_reset import StatelessResets
from transport.protocol.turns import Turns
from transport.socket_filter import FloodGuard
from transport.udp import Refusal, UdpSocket

__all__ = ["LoopEngine"]

STRANGER_WINDOW = HELLO_MAX + 4096
"""Receive window of a connection that is not yet authorized, in bytes: one hello."""

QUIC_IDLE_TIMEOUT = 60.0
"""QUIC's own idle timeout, in seconds: a backstop, for liveness notices long before."""


class LoopEngine:
    """Moves the packets of one endpoint in the event loop that runs it.

    Args:
        sock: the bound socket; closed by `close`.
        key: the node's identity.
        config: limits and times.
        turns: told of the time that each connection takes.
        alpns: the protocols to speak with strangers.
        on_inbound: told of each connection that a stranger begins.
        on_event: told of each event of each connection.
        on_pumped: told of each connection that was looked after.

    Raises:
        TransportError: what is to be written down for debugging can't be.
    """

    def __init__(
        self,
        sock: UdpSocket,
        key: SecretKey,
        config: EndpointConfig,
        turns: Turns,
        *,
        alpns: list[str],
        on_inbound: InboundHandler,
        on_event: EventHandler,
        on_pumped: LinkHandler,
    ) -> None:
        self._key = key
        self._config = config
        self._alpns = alpns
        self._on_inbound = on_inbound
        self._on_pumped = on_pumped
        self._observing = Observing(config)
        self._ids = ConnectionIds.of(key, sock.address[1])
        self._resets = StatelessResets(key, sock.address[1])
        rules, budget = config.newcomers, StrangerBudget()
        self.demux = Demultiplexer(
            make_listener=self._make_listener if config.listen else None,
            max_connections=config.max_connections,
            max_half_open=config.max_half_open,
            max_half_open_per_host=config.max_half_open_per_host,
            retry_threshold=config.retry_threshold,
            new_connection_id=self._ids.draw,
            newcomers=None if rules is None else NewcomerFilter(rules),
            strangers=budget,
            resets=self._resets,
        )
        guard = FloodGuard(sock.raw, self._ids, self.demux, budget)
        self.driver = Driver(
            sock, self.demux, guard, turns, on_event=on_event, on_pumped=self._pumped
        )
        self.deadlines = self.driver.deadlines
        self.run = self.driver.run
        self.drain = self.driver.drain
        self.stop_listening = self.demux.stop_listening
        self.why_refused = sock.why_refused

    @property
    def drops(self) -> dict[str, int]:
        """Datagrams that led nowhere, counted by reason."""
        return dict(self.demux.drops)

    async def open(self) -> None:
        """There is nothing to begin before `run`."""

    async def up(self) -> None:
        """They move as soon as `run` does."""

    async def close(self) -> None:
        """Close the socket."""
        self.driver.close()
        for core in self.demux.connections:
            self._observing.note(core.quic.trace)
        self._observing.close()

    def offer(self, alpns: list[str]) -> None:
        """Speak these protocols with strangers from now on."""
        self._alpns = alpns

    def outbound(self, peer: NodeId, alpn: str) -> ConnectionCore:
        """Make a connection that insists on `peer`."""
        return self._core(
            AdaptedConnection(
                configuration=self._observing.watch(
                    client_configuration(
                        self._key,
                        alpn,
                        max_data=STRANGER_WINDOW,
                        max_stream_data=self._config.stream_window,
                        idle=QUIC_IDLE_TIMEOUT,
                        congestion=self._config.congestion_control,
                    )
                ),
                expected_peer=peer,
                max_streams=0,
                new_connection_id=self._ids.draw,
                reset_token=self._resets.token,
            )
        )

    async def dial(self, link: Link, address: SocketAddress) -> Refusal | None:
        """Begin the handshake; return why this host sends nothing there, if it does not."""
        return self.begin(link, address)

    def begin(self, link: Link, address: SocketAddress) -> Refusal | None:
        """As `dial`, which never waits here."""
        sock = self.driver.socket
        sock.refused.pop(address, None)
        self.driver.dial(_own(link), address)
        return sock.refused.get(address)

    def admitted(self, link: Link) -> None:
        """The peer is authorized, and no stranger any more."""
        self.demux.admitted(_own(link))

    def pump(self, link: Link) -> None:
        """Report what happened on the connection, send what it has to send."""
        self.driver.pump(_own(link))

    def _make_listener(
        self, original: bytes, retried: bytes | None, address: SocketAddress, now: float
    ) -> ConnectionCore:
        core = self._core(
            AdaptedConnection(
                configuration=self._observing.watch(
                    server_configuration(
                        self._key,
                        self._alpns,
                        max_data=STRANGER_WINDOW,
                        max_stream_data=self._config.stream_window,
                        idle=QUIC_IDLE_TIMEOUT,
                        congestion=self._config.congestion_control,
                    )
                ),
                expected_peer=None,
                max_streams=1,
                original_destination_connection_id=original,
                retry_source_connection_id=retried,
                new_connection_id=self._ids.draw,
                reset_token=self._resets.token,
            )
        )
        self._on_inbound(core, address)
        return core

    def _pumped(self, core: ConnectionCore) -> None:
        self._observing.note(core.quic.trace)
        self._on_pumped(core)

    def _core(self, quic: AdaptedConnection) -> ConnectionCore:
        return ConnectionCore(
            quic,
            liveness=self._config.liveness,
            send_buffer=self._config.send_buffer,
            now=time.monotonic(),
        )


def _own(link: Link) -> ConnectionCore:
    assert isinstance(link, ConnectionCore), "a connection of another engine"
    return link
