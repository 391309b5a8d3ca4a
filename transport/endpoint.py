"""An endpoint: one UDP socket that dials and listens, under one key, in the caller's event loop."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVarTuple, Unpack

import anyio

from auth import (
    AccessDenied,
    Authorizer,
    Delegation,
    MeshError,
    NodeId,
    SecretKey,
    SharedSecret,
    SocketAddress,
)
from auth.shared_secret import secret_of
from transport.addresses import (
    PeerAddress,
    format_address,
    parse_address,
)
from transport.admission import Admission
from transport.background import Background
from transport.codes import AppCode
from transport.config import EndpointConfig
from transport.connection import MESH_ALPN, Connection
from transport.deadlines import seconds_of
from transport.dialing import Dialer
from transport.engine import Engine, Link
from transport.errors import (
    AddressError,
    ConnectionClosed,
    StreamReset,
    Superseded,
    TransportError,
    Unreachable,
)
from transport.events import EndpointEvent, PeerJoined, PeerLeft, PeerRefused, PeerRevoked
from transport.loop_engine import LoopEngine
from transport.observing import Observing, observed
from transport.offers import ProtocolTable, check_alpn
from transport.pool import Pool
from transport.process import ProcessEngine
from transport.protocol.events import Event
from transport.protocol.hello import BOOT_ID_LENGTH
from transport.protocol.turns import Turns
from transport.reception import Reception
from transport.renewal import RENEWAL_CALL, RENEWAL_SCOPE, Renewal
from transport.services import (
    AlpnHandler,
    CallHandler,
    PromptHandler,
    ServiceTable,
    StreamHandler,
)
from transport.udp import UdpSocket
from transport.whereabouts import MAX_ADDRESSES, Whereabouts

__all__ = ["Endpoint"]

CLOSING_SECONDS = 0.5
"""How long a closed endpoint stays, at most, to repeat its farewell to peers who missed it."""

CLOSING_ROUND_TRIPS = 3
"""The same in round trips: who missed it has asked again by then, or will find nobody here."""

HURRIED_LINGER = 0.5
"""How long a close waits for acknowledgements when an error or a cancellation is the cause."""

HANDLER_GRACE = 5.0
"""How long the handlers of a connection that the peer has ended may work on what it had sent."""

REDIAL_SECONDS = 0.2
"""How long a dialer that was refused for another connection waits for it before it dials again."""

_Arguments = TypeVarTuple("_Arguments")

_log = logging.getLogger("quicmesh.transport")


class Endpoint:
    """A node on the network.

    Use it as an async context manager; it lives in the event loop that enters it, and leaving it
    closes every connection after delivering what was accepted. Several may live in one process.
    The task that enters should be the one that leaves: another one closes everything just as well,
    but reports it as an error as long as the first runs on, whose cancel scopes are out of order.

    Args:
        key: the node's identity.
        authorizer: decides who may connect and what they may do. There is no default.
        config: everything else.
        delegation: a machine's statement that `key` acts under it, shown to every peer.
        secret: proved, never sent, to peers that ask for it; by default the one that `authorizer`
            is or is combined of.

    Raises:
        AddressError: ``config.bind`` is malformed or not an address of this host.
        AddressInUse: another socket has that address.
        TransportError: what ``config`` has written down for debugging can't be.
    """

    def __init__(
        self,
        key: SecretKey,
        authorizer: Authorizer,
        config: EndpointConfig | None = None,
        *,
        delegation: Delegation | None = None,
        secret: SharedSecret | None = None,
    ) -> None:
        self.config = observed(config or EndpointConfig())
        self.node_id: NodeId = key.node_id
        self.boot = os.urandom(BOOT_ID_LENGTH)
        """Drawn anew at each start: tells a restarted peer from a second one with its key."""
        self.authorizer = authorizer
        self._key = key
        self._pool = Pool(self.node_id)
        self._admission = Admission(
            self.node_id,
            self.boot,
            delegation,
            secret or secret_of(authorizer),
            authorizer,
            self.config,
            self._pool,
        )
        self._services = ServiceTable(
            authorizer,
            request_timeout=self.config.handshake_timeout,
            authorizer_timeout=self.config.authorizer_timeout,
        )
        self._renewal = Renewal(self._admission)
        self._services.register_call(RENEWAL_CALL, self._renewal.serve, scope=RENEWAL_SCOPE)
        self._turns = Turns()
        self._reception = Reception(self._services.serve, self._turns)
        self._protocols = ProtocolTable(MESH_ALPN)
        self._connections: dict[Link, Connection] = {}
        self._whereabouts = Whereabouts()
        self._observers: list[Callable[[EndpointEvent], object]] = []
        self._tasks = Background("an endpoint")
        self._told: tuple[str, ...] = ()
        self._closing = False
        self._has_engine = False

    # -- life

    async def __aenter__(self) -> Endpoint:
        observing = Observing(self.config)  # the engine's own may be in another process
        self._told = observing.warnings
        observing.close()
        for warning in self._told:
            _log.warning("%s", warning)
        sock = self._socket = UdpSocket(self.config.bind)
        placed = ProcessEngine if self.config.placement == "process" else LoopEngine
        self._engine: Engine = placed(
            sock,
            self._key,
            self.config,
            self._turns,
            alpns=self._protocols.names,
            on_inbound=self._on_inbound,
            on_event=self._on_event,
            on_pumped=self._pumped,
        )
        self._has_engine = True
        self._driving = anyio.CancelScope(shield=True)
        self._dialer = Dialer(self._tasks, self._engine.why_refused)
        if sock.warning is not None and self.config.listen:
            _warn_once(sock.warning)
        try:
            await self._engine.open()
            await self._tasks.open()
        except BaseException:
            await self._engine.close()
            raise
        self._tasks.start_soon(self._drive)
        self._tasks.start_soon(self._reception.run)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing = True
        self._engine.stop_listening()
        round_trip = max((core.rtt or 0.0 for core in self._connections), default=0.0)
        linger = self.config.linger if exc is None else min(self.config.linger, HURRIED_LINGER)
        try:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as closing:
                    for connection in list(self._connections.values()):
                        closing.start_soon(self._say_goodbye, connection, linger)
                await self._engine.drain(min(CLOSING_SECONDS, round_trip * CLOSING_ROUND_TRIPS))
        finally:
            self._driving.cancel()
            try:
                await self._tasks.close()
            finally:
                await self._engine.close()

    # -- facts

    @property
    def addresses(self) -> tuple[SocketAddress, ...]:
        """Where others may reach this node, the likeliest first."""
        if self.config.advertise:
            return tuple(parse_address(text) for text in self.config.advertise)
        return self._socket.reachable()[:MAX_ADDRESSES]

    @property
    def bound(self) -> SocketAddress:
        """The address that the socket listens on, perhaps a wildcard, with the real port."""
        return self._socket.address

    @property
    def port(self) -> int:
        """The UDP port bound."""
        return self.bound[1]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What its owner has to know: what this host withholds, what is written down of it."""
        warning = self._socket.warning
        return self._told if warning is None else (*self._told, warning)

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The open ``mesh/1`` connections, one for each peer."""
        return self._pool.connections

    @property
    def services(self) -> tuple[str, ...]:
        """Names of the services and calls offered."""
        return self._services.names

    @property
    def drops(self) -> dict[str, int]:
        """Datagrams that led nowhere, counted by reason."""
        in_kernel = self._socket.kernel_drops
        return self._engine.drops | ({"in the kernel": in_kernel} if in_kernel else {})

    def subscribe(self, observer: Callable[[EndpointEvent], object]) -> None:
        """Have `observer` called in the event loop with each `EndpointEvent`."""
        self._observers.append(observer)

    def start_soon(
        self,
        function: Callable[[Unpack[_Arguments]], Coroutine[Any, Any, object]],
        *arguments: *_Arguments,
    ) -> None:
        """Run a task that serves beside the endpoint's own, until that is closed.

        Its failure ends the endpoint's block.
        """
        self._tasks.start_soon(function, *arguments)

    # -- what is offered

    def register_service(self, name: str, handler: StreamHandler, *, scope: str) -> None:
        """Offer a service on streams to peers whose grant covers `scope`.

        Raises:
            TransportError: `name`, `handler` or `scope` can't be one, or the name is taken.
        """
        self._services.register(name, handler, scope=scope)

    def register_call(
        self, name: str, handler: CallHandler, *, scope: str, prompt: PromptHandler | None = None
    ) -> None:
        """Offer a call, one value in and one value out, to peers whose grant covers `scope`.

        `prompt` answers at once what it can of what comes by a `Carrier`.
        """
        self._services.register_call(name, handler, scope=scope, prompt=prompt)

    def begin_answer(
        self, connection: Connection, request: bytes
    ) -> bytes | Coroutine[Any, Any, bytes | None]:
        """Serve a call that came otherwise than on a stream of `connection`, from its peer.

        For a `Carrier`. The peer's grant and the authorizer are asked as for a stream.

        Args:
            connection: with whom it came from.
            request: the body of its request frame.

        Returns:
            The body of the reply frame, also of an error, if that takes no waiting; else what is to
            be awaited for it. That is None for what has to come on a stream.
        """
        return self._services.begin_answer(connection, request)

    def register_call_family(self, name: str, handler: CallHandler, *, scope: str) -> None:
        """Offer all calls ``NAME:WORD``, each to peers whose grant covers ``SCOPE:WORD``."""
        self._services.register_call_family(name, handler, scope=scope)

    def register_alpn(self, alpn: str, handler: AlpnHandler) -> None:
        """Serve a protocol of the app's own beside the mesh's, to peers the authorizer admits.

        Raises:
            TransportError: `alpn` or `handler` can't be one, or the name is taken.
        """
        self._protocols.register(alpn, handler)
        if self._has_engine:
            self._engine.offer(self._protocols.names)

    # -- peers

    def add_addresses(self, node_id: NodeId, addresses: tuple[SocketAddress, ...]) -> None:
        """Remember where `node_id` may be reached, before what was known of it."""
        self._whereabouts.add(node_id, addresses)

    def known_addresses(self, node_id: NodeId) -> tuple[SocketAddress, ...]:
        """Return the addresses known for `node_id`, the latest first."""
        return self._whereabouts.of(node_id)

    def connection(self, node_id: NodeId) -> Connection | None:
        """Return the open connection with `node_id`, if there is one."""
        return self._pool.get(node_id)

    async def connect(
        self,
        target: PeerAddress | NodeId,
        *,
        alpn: str = MESH_ALPN,
        credential: bytes = b"",
        timeout: float | None = None,
    ) -> Connection:
        """Return a connection with `target`, an open one if there is one.

        Args:
            target: the node id to insist on, with addresses or with those known of it.
            alpn: the protocol to speak; another than the mesh's gets a connection of its own, and a
                refusal shows at the first read, for nothing but the mesh's hello waits for a yes.
            credential: opaque to everyone but the peer's authorizer; at most 4096 bytes. It travels
                in the mesh's hello, so an open connection without it is not enough: the peer is
                dialled once more, and grants what it grants for the connection there is.
            timeout: seconds over all addresses; default ``config.connect_timeout``. They begin when
                this node's packets move: a process that is to move them takes a while to come up.

        Raises:
            AccessDenied: the peer refuses us.
            Unreachable: no address led to it; the text has each with its own error.
            ConnectTimeout: the time ran out.
            AddressError: `target` is this node itself.
            TransportError: `alpn` can't be the name of a protocol.
        """
        check_alpn("connecting with", alpn)
        limit = self.config.connect_timeout if timeout is None else seconds_of(timeout)
        await self._engine.up()
        if isinstance(target, NodeId):
            target = PeerAddress(target)
        if self._closing:
            raise ConnectionClosed("connecting", peer=target.node_id.short, why="we are closing")
        if target.node_id == self.node_id:
            raise AddressError(
                "connecting", peer=target.node_id.short, why="that is this node itself"
            )
        if alpn == MESH_ALPN:
            open_one = self._pool.get(target.node_id)
            if open_one is not None and (not credential or open_one.has_shown(credential)):
                return open_one
        elif credential:
            raise TransportError("connecting", why="only the mesh's own protocol has a credential")
        addresses = self._whereabouts.to_dial(target.node_id, target.addresses)
        if not addresses:
            raise Unreachable(
                "connecting",
                peer=target.node_id.short,
                why="no address of it is known",
                fix="Give one, or join with a ticket of that node (mesh1...), which holds them.",
            )

        async def attempt(peer: PeerAddress, address: SocketAddress) -> Connection:
            return await self._dial(peer, address, alpn, credential)

        async def elsewhere() -> Connection:
            if credential:
                await anyio.sleep_forever()  # only our own hello can show it
            return await self._pool.wait(target.node_id)

        shared = alpn == MESH_ALPN
        connection = await self._dialer.dial(
            PeerAddress(target.node_id, addresses),
            attempt,
            key=(target.node_id, credential) if shared else object(),
            timeout=limit,
            elsewhere=elsewhere if shared else None,
        )
        connection.note_shown(credential)
        return connection

    def revoke(self, node_id: NodeId, reason: str) -> int:
        """Close every connection of `node_id` and of programs it answers for; return how many.

        Observers get a `PeerRevoked` also where there was none.
        """
        revoked = [
            connection
            for connection in self._connections.values()
            if connection.speaks_for(node_id)
        ]
        for connection in revoked:
            connection.abort(AppCode.DENIED, reason)
        self._notify(PeerRevoked(node_id, reason))
        return len(revoked)

    async def reconsider(self, node_id: NodeId) -> None:
        """Ask the authorizer again about the connections of `node_id` and of its programs.

        What it grants now holds from now on: streams under way that need more are ended, and so is,
        at its time, a connection whose grant expires. A connection that the peer has dialled,
        and on which it is granted nothing any more, is closed. No credential is shown again, and no
        secret proved.
        """
        for connection in tuple(self._connections.values()):
            if not (connection.is_admitted and connection.speaks_for(node_id)):
                continue
            try:
                await self._admission.reconsider(connection)
            except AccessDenied as error:
                self._cut_off(connection, error.why or error.what)
            except MeshError:
                continue  # it has ended meanwhile
            self._services.enforce(connection)

    async def present(self, delegation: Delegation) -> None:
        """Act under `delegation` from now on: tell peers that are connected, and those to come.

        For a program that runs for longer than its machine's first statement holds. A peer that
        does not take it is logged; what it grants ends when it would have ended.

        Raises:
            IdentityError: it is for another key, or not valid now.
        """
        await self._renewal.present(delegation, tuple(self._connections.values()))

    # -- connections

    async def _dial(
        self, target: PeerAddress, address: SocketAddress, alpn: str, credential: bytes
    ) -> Connection:
        while True:
            try:
                return await self._dial_once(target, address, alpn, credential)
            except Superseded:
                with anyio.move_on_after(REDIAL_SECONDS):
                    return await self._pool.wait(target.node_id)

    async def _dial_once(
        self, target: PeerAddress, address: SocketAddress, alpn: str, credential: bytes
    ) -> Connection:
        link = self._engine.outbound(target.node_id, alpn)
        connection = self._connection(link, address, outbound=True)
        try:
            refusal = await self._engine.dial(link, address)
            if refusal is not None and refusal.is_final:
                raise Unreachable("connecting", peer=target.node_id.short, why=refusal.why)
            await self._admission.introduce(connection, credential)
        except BaseException as error:
            reason = str(error) if isinstance(error, MeshError) else "the dialer gave up"
            connection.abort(AppCode.CANCELLED, reason)
            raise
        self._welcome(connection)
        return connection

    def _on_inbound(self, link: Link, address: SocketAddress) -> None:
        connection = self._connection(link, address, outbound=False)
        self._tasks.start_soon(self._receive_connection, connection, address)

    def _connection(self, link: Link, address: SocketAddress, *, outbound: bool) -> Connection:
        connection = Connection(self._engine, link, address, outbound=outbound)
        self._connections[link] = connection
        connection.on_close(lambda _: self._connections.pop(link, None))
        return connection

    async def _receive_connection(self, connection: Connection, address: SocketAddress) -> None:
        try:
            await self._admission.receive_introduction(connection)
        except Superseded as error:
            _log.debug("a connection from %s gave way: %s", format_address(address), error)
        except MeshError as error:
            if isinstance(error, StreamReset) and connection.was_given_up:
                # The peer found another way, such as the connection that we were dialling.
                _log.debug("a dialer at %s gave up: %s", format_address(address), error)
                return
            _log.info("refused a connection from %s: %s", format_address(address), error)
            self._notify(PeerRefused(address, connection.core.peer, error))
        except Exception:
            _log.exception("the introduction of %s failed", format_address(address))
            connection.abort(AppCode.INTERNAL, "internal error")
        except BaseException:
            connection.abort(AppCode.LEFT, "left")
            raise
        else:
            self._welcome(connection)

    def _welcome(self, connection: Connection) -> None:
        """Begin to serve a connection whose peer is admitted."""
        self._engine.admitted(connection.core)
        if connection.alpn == MESH_ALPN:
            self._whereabouts.reached(connection.peer.node_id, connection.remote_address)
        self._notify(PeerJoined(connection))
        connection.on_close(self._left)
        self._tasks.start_soon(self._serve, connection)

    async def _serve(self, connection: Connection) -> None:
        handler = None if connection.outbound else self._protocols.get(connection.alpn)
        async with anyio.create_task_group() as tasks:
            if connection.alpn == MESH_ALPN:
                connection.serve_streams(
                    lambda stream: self._reception.receive(connection, stream, tasks),
                    framed=True,
                )
            elif handler is not None:
                tasks.start_soon(self._run_protocol, handler, connection)
            try:
                while connection.closed is None and connection.seconds_granted != 0:
                    # A later hello of the peer, or the authorizer, may bring another one meanwhile.
                    with anyio.move_on_after(connection.seconds_granted):
                        await connection.wait_regranted()
            finally:
                # In a program that was cancelled but is held up, the connection still stands.
                if connection.alpn == MESH_ALPN:
                    connection.serve_streams(lambda stream: stream.reset(AppCode.LEFT), framed=True)
                    self._reception.forget(connection)
            if connection.closed is None:
                self._cut_off(connection, "the grant has expired")
            # What the peer sent before it left is still to be read; what we ended is over.
            grace = 0.0 if connection.was_ended_here else HANDLER_GRACE
            tasks.cancel_scope.deadline = anyio.current_time() + grace

    def _cut_off(self, connection: Connection, reason: str) -> None:
        """Close a connection whose peer is granted nothing on it any more."""
        connection.abort(AppCode.DENIED, reason)
        if connection.alpn == MESH_ALPN:
            self._notify(PeerRevoked(connection.peer.node_id, reason))

    async def _run_protocol(self, handler: AlpnHandler, connection: Connection) -> None:
        try:
            await handler(connection)
            await connection.close(linger=self.config.linger)
        except (MeshError, anyio.EndOfStream, anyio.ClosedResourceError) as error:
            _log.info("protocol %r ended: %s", connection.alpn, error)
        except Exception:
            _log.exception("the handler of protocol %r failed", connection.alpn)
        finally:
            connection.abort(AppCode.INTERNAL, "the handler has ended")

    async def _say_goodbye(self, connection: Connection, linger: float) -> None:
        if connection.core.peer is None:
            connection.abort(AppCode.LEFT, "left")
        await connection.close(AppCode.LEFT, "left", linger=linger)

    async def _drive(self) -> None:
        # Shielded, so that a cancelled program still says goodbye: `__aexit__` ends it.
        with self._driving:
            await self._engine.run()

    # -- called by the engine

    def _on_event(self, link: Link, event: Event) -> None:
        connection = self._connections.get(link)
        if connection is not None:
            connection.handle(event)

    def _pumped(self, link: Link) -> None:
        connection = self._connections.get(link)
        if connection is not None:
            connection.pumped()

    def _left(self, connection: Connection) -> None:
        assert connection.closed is not None
        self._notify(PeerLeft(connection, connection.closed))

    def _notify(self, event: EndpointEvent) -> None:
        for observer in self._observers:
            try:
                observer(event)
            except Exception:
                _log.exception("an observer failed on %r", event)


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)
