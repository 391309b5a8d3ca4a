"""The links of one endpoint: with whom there is one, with whom not, and why."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVarTuple, Unpack

import anyio

from auth import AccessDenied, MeshError, PeerIdentity
from tensor_bridge.lanes.shared.host import (
    ANSWERER,
    ASKER,
    NONCE_BYTES,
    apart,
    here,
    unavailable,
)
from tensor_bridge.lanes.shared.link import Link
from tensor_bridge.lanes.shared.meeting import (
    ADDRESS_BYTES,
    LANE_CALL,
    SECRET_BYTES,
    LaneAsked,
    LaneOffered,
    LaneRefused,
    decode_answer,
)
from tensor_bridge.lanes.shared.rendezvous import Found, admit, introduce
from tensor_bridge.lanes.shared.ring import MAX_BODY
from tensor_bridge.lanes.shared.sockets import listen
from transport import (
    CborValue,
    Connection,
    ConnectionClosed,
    Endpoint,
    Incoming,
    ServiceUnknown,
)

__all__ = ["Sharing"]

SCOPE = "tensor:lane"
"""What a peer needs to ask for shared memory: a part of the scope ``tensor``."""

MEETING_SECONDS = 5.0
"""For two processes to get together. On one host it takes milliseconds."""

MARGIN = 1.0
"""Beyond that, for moves that wait for it: they are not to end before it has."""

MAX_MEETINGS = 16
"""Listeners that wait for a peer at a time."""


_Arguments = TypeVarTuple("_Arguments")

_log = logging.getLogger("quicmesh.tensors")


class _Pair:
    """What is known of shared memory with the peer of one connection."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.why: str | None = None
        """Why there is none, once that has been found out."""
        self.settled: anyio.Event | None = None
        """Set when it is known whether there will be one; None when nobody here has asked."""
        self.linked = anyio.Event()
        self.meeting: _Meeting | None = None

    @property
    def is_asking(self) -> bool:
        """Whether the peer was asked here, and nobody knows yet whether there will be one."""
        return self.settled is not None and not self.settled.is_set()

    @property
    def is_meeting(self) -> bool:
        """Whether there may be one soon, whoever has asked."""
        return self.meeting is not None or self.is_asking

    def give_up(self) -> None:
        """The connection is over."""
        if self.meeting is not None:
            self.meeting.cancel()
        if self.link is not None:
            self.link.end("the connection is over")


class _Meeting:
    """A listener that waits for one peer."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        self._scope = anyio.CancelScope()
        self._has_begun = False

    async def run(self, peer: PeerIdentity) -> Found | None:
        """Wait for the peer, and close the listener."""
        if self._scope.cancel_called:
            return None
        self._has_begun = True
        with self._listener, self._scope, anyio.move_on_after(MEETING_SECONDS):
            return await admit(self._listener, self._secret, peer)
        return None

    def cancel(self) -> None:
        """Wait no longer."""
        self._scope.cancel()
        if not self._has_begun:
            self._listener.close()


class _Carrier:
    """The link of a connection, for the connection's calls."""

    most = MAX_BODY

    def __init__(self, link: Link) -> None:
        self._link = link

    async def call(self, request: bytes) -> bytes | None:
        """See ``transport.Carrier``."""
        calls = self._link.calls
        if calls is None:
            return None
        with self._telling():
            return await calls.call(request)

    def call_in_thread(
        self, request: bytes, timeout: float, is_over: Callable[[], bool]
    ) -> bytes | None:
        """See ``transport.Carrier``."""
        calls = self._link.calls
        if calls is None:
            return None
        with self._telling():
            return calls.call_in_thread(request, timeout, is_over)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except ConnectionClosed as error:
            error.why = f"the memory shared with it is given up: {self._link.why_ended}"
            error.fix = "Whether it was served, nobody knows. Calls take streams from now on."
            raise


class Sharing:
    """Shared memory between an endpoint and those of its peers that run on this host.

    Args:
        endpoint: whose connections they are; it also runs the tasks.
        max_links: with how many peers at a time; each costs up to two pools of memory.
        is_off: answer every peer that there is none.
    """

    def __init__(self, endpoint: Endpoint, *, max_links: int, is_off: bool = False) -> None:
        self._endpoint = endpoint
        self._max_links = max_links
        self._off = "it is switched off" if is_off else unavailable()
        self._pairs: dict[Connection, _Pair] = {}
        endpoint.register_call(LANE_CALL, self._answer, scope=SCOPE)

    def link(self, connection: Connection) -> Link | None:
        """Return the link with the peer of `connection`, if there is one that works."""
        pair = self._pairs.get(connection)
        if pair is None or pair.link is None:
            return None
        try:
            pair.link.look()
        except MeshError:
            return None
        return pair.link

    async def linked(self, connection: Connection) -> Link | None:
        """Return the same for who was told by the peer that there is one: it may come here yet."""
        pair = self._pairs.get(connection)
        if pair is not None and pair.link is None and pair.is_meeting:
            with anyio.move_on_after(MEETING_SECONDS):
                await pair.linked.wait()
        return self.link(connection)

    def why_not(self, connection: Connection) -> str | None:
        """Return why there is no link; None if there is one, or if nobody has asked yet."""
        if self._off is not None:
            return self._off
        pair = self._pairs.get(connection)
        return None if pair is None or pair.link is not None else pair.why

    async def meet(self, connection: Connection) -> Link | None:
        """Return the link with the peer of `connection`; the first time, ask for one."""
        if self._off is not None or not connection.is_open:
            return None
        pair = self._pair(connection)
        if pair.link is None and pair.why is None:
            if pair.settled is None:
                pair.settled = anyio.Event()
                self._endpoint.start_soon(_surviving, self._ask_and_run, connection, pair)
            with anyio.move_on_after(MEETING_SECONDS + MARGIN):
                await pair.settled.wait()
        return self.link(connection)

    def _pair(self, connection: Connection) -> _Pair:
        pair = self._pairs.get(connection)
        if pair is None:
            pair = self._pairs[connection] = _Pair()
            connection.on_close(self._forget)
        return pair

    def _forget(self, connection: Connection) -> None:
        self._pairs.pop(connection).give_up()

    # -- asking

    async def _ask_and_run(self, connection: Connection, pair: _Pair) -> None:
        found, why = None, "the peer did not answer in time"
        assert pair.settled is not None
        try:
            with anyio.move_on_after(MEETING_SECONDS):
                found, why = await self._ask(connection, pair)
            if found is None and pair.link is None:
                pair.why = why
        finally:
            if found is None:
                pair.settled.set()
        if found is not None:
            await self._run(found, connection, pair, makes_rings=True)

    async def _ask(self, connection: Connection, pair: _Pair) -> tuple[Found | None, str]:
        ids = self._endpoint.node_id, connection.peer.node_id
        nonce = os.urandom(NONCE_BYTES)
        if self._is_full():
            return None, "this node shares memory with as many peers as it may"
        asked = LaneAsked(nonce, here().marks(ASKER, *ids, nonce))
        try:
            answer = decode_answer(
                await connection.call(LANE_CALL, asked.encode(), timeout=MEETING_SECONDS)
            )
            if isinstance(answer, LaneRefused):
                if answer.now:
                    await pair.linked.wait()
                return None, answer.why
            # Also so that nobody from elsewhere can have us connect to anything here.
            why = apart(here().marks(ANSWERER, *ids, nonce), answer.marks)
            if why is not None:
                return None, why
            return await introduce(answer.address, answer.secret), ""
        except ServiceUnknown:
            return None, "the peer shares no memory"
        except AccessDenied:
            return None, f"the peer does not grant {SCOPE}"
        except MeshError as error:
            return None, error.why or error.what
        except OSError as error:
            return None, error.strerror or str(error)

    # -- answering

    async def _answer(self, incoming: Incoming) -> CborValue:
        asked, connection = LaneAsked.decode(incoming.value), incoming.connection
        pair = self._pair(connection)
        ids = connection.peer.node_id, self._endpoint.node_id
        if self._off is not None:
            return LaneRefused(self._off).encode()
        if pair.link is not None:
            return LaneRefused("there is some already").encode()
        if pair.is_asking and connection.outbound:
            # Both ask at once: who has dialled goes on.
            return LaneRefused("the peer was asking, too, and did not go on", now=True).encode()
        why = apart(here().marks(ASKER, *ids, asked.nonce), asked.marks)
        if why is not None:
            pair.why = why
            return LaneRefused(why).encode()
        meetings = sum(each.meeting is not None for each in self._pairs.values())
        if self._is_full() or (pair.meeting is None and meetings >= MAX_MEETINGS):
            return LaneRefused("the peer shares memory with as many as it may").encode()
        return self._offer(connection, pair, here().marks(ANSWERER, *ids, asked.nonce))

    def _offer(self, connection: Connection, pair: _Pair, marks: tuple[bytes, ...]) -> CborValue:
        address, secret = os.urandom(ADDRESS_BYTES), os.urandom(SECRET_BYTES)
        try:
            listener = listen(address)
        except OSError as error:
            return LaneRefused(f"the peer can't listen: {error.strerror}").encode()
        if pair.meeting is not None:
            pair.meeting.cancel()
        pair.meeting = _Meeting(listener, secret)
        self._endpoint.start_soon(_surviving, self._wait_and_run, connection, pair, pair.meeting)
        return LaneOffered(address, secret, marks).encode()

    async def _wait_and_run(self, connection: Connection, pair: _Pair, meeting: _Meeting) -> None:
        try:
            found = await meeting.run(connection.peer)
        finally:
            if pair.meeting is meeting:
                pair.meeting = None
        if found is not None:
            await self._run(found, connection, pair)

    # -- both

    async def _run(
        self, found: Found, connection: Connection, pair: _Pair, *, makes_rings: bool = False
    ) -> None:
        serve = functools.partial(self._endpoint.begin_answer, connection)
        link = Link(found.sock, connection.peer, found.process, serve)
        if connection.closed is not None:
            link.end("the connection is over")
        elif pair.link is not None:
            link.end("there is one already")
        else:
            pair.link, pair.why = link, None
            pair.linked.set()
            if makes_rings:
                link.offer_calls()
            connection.carrier = _Carrier(link)
        if pair.settled is None:
            pair.settled = anyio.Event()
        pair.settled.set()
        try:
            await link.run()
        finally:
            if pair.link is link:
                pair.link, pair.why = None, link.why_ended
                connection.carrier = None

    def _is_full(self) -> bool:
        return sum(pair.link is not None for pair in self._pairs.values()) >= self._max_links


async def _surviving(
    work: Callable[[Unpack[_Arguments]], Awaitable[None]], *arguments: *_Arguments
) -> None:
    """Do the work; a failure is logged, and is not the end of the endpoint whose task this is."""
    try:
        await work(*arguments)
    except Exception:
        _log.exception("shared memory with a peer failed")
