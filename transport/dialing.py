"""Several addresses, one peer: dial them staggered, take the first that proves the right key.

RFC 8305 (Happy Eyeballs) with QUIC handshakes in place of TCP's. Callers that want the same peer at
the same time share one flight.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Awaitable, Callable, Hashable

import anyio

from auth import AccessDenied, IdentityError, MeshError, SocketAddress
from transport.addresses import PeerAddress, format_address
from transport.background import Background
from transport.codes import AppCode
from transport.connection import Connection
from transport.errors import (
    ConnectionClosed,
    ConnectTimeout,
    EndpointLost,
    IdentityInUse,
    ProtocolError,
    Unreachable,
)
from transport.protocol import NOTHING_LISTENS

__all__ = ["Dialer"]

STAGGER = 0.25
"""Seconds before the next address is tried beside a silent one (RFC 8305 section 5)."""

MAX_ADDRESSES = 16
"""Addresses tried for one peer: more than that is not a hint but a port scan."""

NO_ANSWER = "no answer"

_FIX = "Is the peer running there, and does a firewall let its UDP port through?"

_ANSWERED_FIX = (
    "Something answers there, but not as was asked: does the address still lead to that peer, and "
    "does it offer the protocol?"
)

_SILENCE_FIX = (
    "Nothing came back, not even a refusal: the host is off or elsewhere, or UDP is blocked on the "
    "way. Let UDP to the peer's port in over there (such as: sudo ufw allow PORT/udp) and out here."
)

_log = logging.getLogger("quicmesh.transport")

Attempt = Callable[[PeerAddress, SocketAddress], Awaitable[Connection]]
Elsewhere = Callable[[], Awaitable[Connection]]
Explain = Callable[[SocketAddress], str | None]


class Dialer:
    """Single-flight dialling.

    Args:
        tasks: where flights live: a caller that is cancelled must not end those of others.
        explain: says why an address gives no answer, if this host knows.
    """

    def __init__(self, tasks: Background, explain: Explain = lambda address: None) -> None:
        self._tasks = tasks
        self._explain = explain
        self._flights: dict[Hashable, _Flight] = {}

    async def dial(
        self,
        target: PeerAddress,
        attempt: Attempt,
        *,
        key: Hashable,
        timeout: float,
        elsewhere: Elsewhere | None = None,
    ) -> Connection:
        """Return a connection with `target`, made by `attempt` at one of its addresses.

        Args:
            target: whom to dial and where.
            attempt: dials one address.
            key: callers with equal keys share a flight.
            timeout: seconds this caller waits.
            elsewhere: waits for a connection that comes about without this flight, and ends it.
                A flight without it makes a connection that nobody but its callers knows of.

        Raises:
            AccessDenied: the peer was reached and refuses us.
            Unreachable: each address failed; ``attempts`` and the text say how.
            ConnectTimeout: the time ran out with an address still silent.
        """
        began = anyio.current_time()
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(target, attempt, elsewhere, self._explain)
            self._tasks.start_soon(self._fly, key, flight)
        flight.waiters += 1
        landed = False
        try:
            with anyio.move_on_after(timeout):
                await flight.done.wait()
            landed = flight.connection is not None
        finally:
            flight.waiters -= 1
            flight.taken = flight.taken or landed
            if not flight.waiters:
                self._forget(key, flight)
                flight.scope.cancel()
                flight.drop_orphan()
        if flight.connection is not None:
            return flight.connection
        after = anyio.current_time() - began
        if flight.error is None:
            raise flight.unreachable(ConnectTimeout, after)
        error = copy.copy(flight.error)  # each caller raises its own
        error.after = after
        raise error from flight.error

    async def _fly(self, key: Hashable, flight: _Flight) -> None:
        try:
            with flight.scope:
                await flight.race()
        except MeshError as error:
            flight.error = error
        except BaseException as error:
            flight.error = ConnectionClosed(
                "connecting", peer=flight.target.node_id.short, why="this node is closing"
            )
            if isinstance(error, Exception):
                flight.error.why = "an error of this node, which its log describes"
                _log.exception("dialling %s failed", flight.target)
            else:
                raise
        finally:
            self._forget(key, flight)
            flight.done.set()
            if not flight.waiters:
                flight.drop_orphan()

    def _forget(self, key: Hashable, flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


class _Flight:
    """One race over the addresses of one peer."""

    def __init__(
        self,
        target: PeerAddress,
        attempt: Attempt,
        elsewhere: Elsewhere | None,
        explain: Explain,
    ) -> None:
        self.target = target
        self.done = anyio.Event()
        self.scope = anyio.CancelScope()
        self.waiters = 0
        self.taken = False
        """Whether a caller has the connection."""
        self.connection: Connection | None = None
        self.error: MeshError | None = None
        self._attempts: dict[SocketAddress, str] = {}
        self._strangers = 0
        """Addresses where something spoke and did not prove to be the peer."""
        self._attempt = attempt
        self._elsewhere = elsewhere
        self._explain = explain
        self._verdict: MeshError | None = None

    async def race(self) -> None:
        """Dial until one address answers as the peer, or all have failed."""
        async with anyio.create_task_group() as tasks:
            if self._elsewhere is not None:
                tasks.start_soon(self._look_elsewhere, self._elsewhere, tasks.cancel_scope)
            await self._try_all(tasks.cancel_scope)
            tasks.cancel_scope.cancel()
        if self.connection is None:
            raise self._verdict or self.unreachable(Unreachable, None)

    def unreachable(self, kind: type[Unreachable], after: float | None) -> Unreachable:
        """Return the error that names each address tried so far with what happened there."""
        attempts: dict[str, str] = {}
        for address, what in self._attempts.items():
            said = self._explain(address) if what == NO_ANSWER else None
            attempts[format_address(address)] = said or what
        tried = "; ".join(f"{address}: {what}" for address, what in attempts.items())
        error = kind(
            "connecting",
            peer=self.target.node_id.short,
            after=after,
            why=tried or "no address was tried",
            fix=self._advice(attempts),
        )
        error.attempts = attempts
        error.answered = self._strangers > 0
        found = set(attempts.values())
        error.is_refused = (
            NOTHING_LISTENS in found and NO_ANSWER not in found and not error.answered
        )
        return error

    def _advice(self, attempts: dict[str, str]) -> str:
        if attempts and set(attempts.values()) == {NO_ANSWER}:
            return _SILENCE_FIX
        # Where everything answers no firewall is in the way.
        return _ANSWERED_FIX if attempts and self._strangers == len(attempts) else _FIX

    def drop_orphan(self) -> None:
        """Close a connection that no caller took, unless it is one that others can find."""
        if self.connection is not None and not self.taken and self._elsewhere is None:
            self.connection.abort(AppCode.CANCELLED, "the dialer gave up")

    async def _try_all(self, race: anyio.CancelScope) -> None:
        addresses = self.target.addresses[:MAX_ADDRESSES]
        async with anyio.create_task_group() as tasks:
            for address in addresses:
                failed = anyio.Event()
                tasks.start_soon(self._try, address, failed, race)
                if address != addresses[-1]:
                    with anyio.move_on_after(STAGGER):
                        await failed.wait()

    async def _try(
        self, address: SocketAddress, failed: anyio.Event, race: anyio.CancelScope
    ) -> None:
        self._attempts[address] = NO_ANSWER
        try:
            connection = await self._attempt(self.target, address)
        except (AccessDenied, EndpointLost, IdentityInUse) as error:
            # The peer itself has spoken, or this node is unable: at other addresses it is the same.
            self._verdict = error
            race.cancel()
        except MeshError as error:
            self._attempts[address] = error.why or error.what
            self._strangers += isinstance(error, IdentityError | ProtocolError)
            failed.set()
        else:
            self._land(connection, race)

    async def _look_elsewhere(self, elsewhere: Elsewhere, race: anyio.CancelScope) -> None:
        self._land(await elsewhere(), race)

    def _land(self, connection: Connection, race: anyio.CancelScope) -> None:
        if self.connection is None:
            self.connection = connection
            race.cancel()
        elif connection is not self.connection:
            connection.abort(AppCode.SUPERSEDED, "another address answered first")
