"""A connection between two nodes, for the application: streams, calls, pings, its end."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from auth import Grant, MeshError, NodeId, PeerIdentity, SocketAddress
from transport.addresses import format_address
from transport.carrier import NOT_NOW, Carrier, NotNow
from transport.cbor import CborValue
from transport.codes import AppCode, decode_error, encode_error
from transport.deadlines import Deadlines, seconds_of
from transport.endings import error_of_end
from transport.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    LimitExceeded,
)
from transport.frames import LENGTH, MAX_FRAME, request_frame, take_reply
from transport.protocol.events import (
    ConnectionEnded,
    EndedBy,
    Event,
    HandshakeCompleted,
    PingAcknowledged,
    StreamChanged,
    StreamOpened,
    StreamsAvailable,
)
from transport.slots import Slots
from transport.stream import Stream

if TYPE_CHECKING:
    from transport.engine import Engine, Link

__all__ = ["MESH_ALPN", "Connection", "ConnectionInfo"]

MESH_ALPN = "mesh/1"
"""The mesh's own protocol. Others live beside it on the same endpoint."""

CALL_TIMEOUT = 30.0
PING_TIMEOUT = 3.0
MAX_REASON = 256
"""Longest reason phrase of a close, in bytes: it has to fit in one packet with its headers."""

_log = logging.getLogger("quicmesh.transport")


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """Where a connection goes and what it has carried. Times in seconds, sizes in bytes."""

    remote: str
    """The peer's address now in use."""
    outbound: bool
    """Whether this side dialled."""
    rtt: float | None
    """Smoothed round-trip time, once measured."""
    bytes_sent: int
    bytes_received: int
    """UDP payload, headers and retransmissions included: what the socket really carried."""
    datagram_size: int
    """UDP payload of a full packet sent to the peer: what the path is known to carry."""
    streams: int
    """Streams open now."""
    age: float
    """Since the connection was made."""


class Connection:
    """An authenticated QUIC connection; made by `Endpoint`.

    ``peer`` is who is there, ``grant`` what the peer may do here (None: nothing), ``alpn`` the
    protocol spoken. Safe for many tasks of its event loop at once.
    """

    def __init__(
        self, engine: Engine, core: Link, address: SocketAddress, *, outbound: bool
    ) -> None:
        self.core = core
        self.outbound = outbound
        self.alpn = ""
        self.grant: Grant | None = None
        self.remote_boot = b""
        self.max_frame = MAX_FRAME
        """Longest value that the peer accepts in a frame, in bytes."""
        self.observed_address = ""
        """Our own address as the peer sees it."""
        self.handshaken = anyio.Event()
        """Set when TLS is done, or the connection over."""
        self.closed: MeshError | None = None
        """How the connection ended; None while it is open."""
        self.carrier: Carrier | None = None
        """Another way for calls to the peer, where there is one."""

        self._engine = engine
        self._address = address
        self.is_admitted = False
        """Whether the limits of a stranger have been lifted."""
        self._peer: PeerIdentity | None = None
        self._shown = b""
        self._opened_at = time.monotonic()
        self._streams: dict[int, Stream] = {}
        self._incoming: Callable[[Stream], object] | None = None
        self._incoming_framed = True
        self._unclaimed: deque[int] = deque()
        self.max_streams = 1
        """Streams that the peer may have open at a time."""
        self._window = 0
        self._slots = Slots(lambda: self.closed is not None or core.can_open_stream)
        self._opened = anyio.Event()
        """Set when the peer has opened a stream that nobody serves, or the connection is over."""
        self._ended = anyio.Event()
        self._regranted = anyio.Event()
        self._flushed: anyio.Event | None = None
        self._pings: dict[int, tuple[anyio.Event, float]] = {}
        self._next_ping = 1
        self._closing = False
        self._on_close: list[Callable[[Connection], object]] = []
        self._stream_timeout = 60.0

    def __repr__(self) -> str:
        state = "open" if self.closed is None else "closed"
        return f"<Connection {self.alpn} with {self._who()} {state}>"

    # -- facts

    @property
    def peer(self) -> PeerIdentity:
        """Who is at the other end."""
        if self._peer is None:
            raise RuntimeError("the peer has not proved its identity yet")
        return self._peer

    @property
    def seconds_granted(self) -> float | None:
        """How long what the peer may do here still holds; None for as long as it is there."""
        if self.grant is None or self.grant.expires_at is None:
            return None
        return max(0.0, self.grant.expires_at - time.time())

    @property
    def is_open(self) -> bool:
        """Whether streams can be opened: neither ended nor closing."""
        return self.closed is None and not self._closing

    @property
    def was_ended_here(self) -> bool:
        """Whether it was this side that closed the connection."""
        return self.core.ended is not None and self.core.ended.by is EndedBy.LOCAL

    @property
    def was_given_up(self) -> bool:
        """Whether the peer closed the connection because it does not want it any more."""
        ended = self.core.ended
        return ended is not None and ended.by is EndedBy.REMOTE and ended.code == AppCode.CANCELLED

    @property
    def was_left(self) -> bool:
        """Whether the peer said that it is gone for good: its node was closed, or its program."""
        ended = self.core.ended
        left = (AppCode.LEFT, AppCode.GONE)
        return ended is not None and ended.by is EndedBy.REMOTE and ended.code in left

    @property
    def remote_address(self) -> SocketAddress:
        """The peer's address now in use; it changes when the peer migrates."""
        return self.core.remote_address or self._address

    @property
    def info(self) -> ConnectionInfo:
        """Where the connection goes and what it has carried."""
        return ConnectionInfo(
            remote=format_address(self.remote_address),
            outbound=self.outbound,
            rtt=self.core.rtt,
            bytes_sent=self.core.bytes_sent,
            bytes_received=self.core.bytes_received,
            datagram_size=self.core.datagram_size,
            streams=len(self._streams),
            age=time.monotonic() - self._opened_at,
        )

    # -- streams and calls

    async def open_stream(
        self, service: str, value: CborValue = None, *, timeout: float | None = None
    ) -> Stream:
        """Open a stream to one of the peer's services, with a value for it.

        Returns as soon as the request is written: the first read, or ``await stream.reply()``,
        raises if the peer refuses. `timeout` bounds the wait for one of the peer's stream slots,
        and each later wait on the stream; the default is the endpoint's ``idle_timeout``.
        """
        request = request_frame(service, value, max_size=self.max_frame)
        stream = await self._open(framed=True, timeout=timeout)
        try:
            await stream.write_request(request, fin=False)
        except BaseException as error:
            stream.reset(error)
            raise
        return stream

    async def call(
        self,
        service: str,
        value: CborValue = None,
        *,
        timeout: float = CALL_TIMEOUT,
        patience: float = math.inf,
    ) -> CborValue:
        """Send `value` to one of the peer's calls and return its answer.

        It takes a stream, or the connection's `carrier` if that has room for it.

        Args:
            service, value: which call, and what for.
            timeout: seconds for all of it.
            patience: how long to wait for one of the peer's stream slots while no stream ends.

        Raises:
            LimitExceeded: no slot in time.
            MeshError: what the handler raised, of the same class if it is one of the tree.
            DeadlineExceeded: no answer within `timeout` seconds; the handler is cancelled.
        """
        deadline = time.monotonic() + seconds_of(timeout)
        request = request_frame(service, value, max_size=self.max_frame)

        def too_late() -> DeadlineExceeded:
            return self._too_late(service, timeout)

        if self.carrier is not None and self.is_open:
            reply = await self._call_by(self.carrier, request[LENGTH.size :], timeout, too_late)
            if reply is not None:
                return take_reply(reply, peer=self.peer)
        stream = await self._open(framed=True, timeout=timeout, patience=patience)
        stream.expire_at(deadline, too_late)
        async with stream:
            await stream.write_request(request, fin=True)
            return await stream.reply()

    def call_in_thread(
        self,
        service: str,
        value: CborValue = None,
        *,
        timeout: float = CALL_TIMEOUT,
        is_over: Callable[[], bool] = lambda: False,
    ) -> CborValue | NotNow:
        """Do the same as `call` by the connection's `carrier`, for a thread that is not the loop's.

        Args:
            service, value, timeout: as `call`.
            is_over: asked now and then whether nobody wants the answer; then the time is up.

        Returns:
            The answer; `NOT_NOW` if there is no such way for this call, which was not begun then.

        Raises:
            MeshError: as `call`.
        """
        carrier = self.carrier
        if carrier is None or not self.is_open:
            return NOT_NOW
        request = request_frame(service, value, max_size=self.max_frame)[LENGTH.size :]
        if len(request) > carrier.most:
            return NOT_NOW
        try:
            reply = carrier.call_in_thread(request, seconds_of(timeout), is_over)
        except TimeoutError:
            raise self._too_late(service, timeout) from None
        except MeshError:
            self.raise_if_closed("a call", "answer")
            raise
        return NOT_NOW if reply is None else take_reply(reply, peer=self.peer)

    async def open_raw_stream(self, *, timeout: float | None = None) -> Stream:
        """Open a stream without the mesh's framing, for a protocol of the app's own (its ALPN).

        The peer learns of it with the first byte.
        """
        return await self._open(framed=False, timeout=timeout)

    async def accept_raw_stream(self, *, timeout: float | None = None) -> Stream:
        """Wait for the next stream that the peer opens, for a protocol of the app's own.

        Raises:
            DeadlineExceeded: none within `timeout` seconds; the default is ``idle_timeout``.
            MeshError: how the connection ended.
        """
        wait = self._stream_timeout if timeout is None else seconds_of(timeout)
        with anyio.move_on_after(wait):
            return await self.next_stream(framed=False)
        raise DeadlineExceeded(
            "waiting for a stream", peer=self._who(), after=wait, why="the peer has opened none"
        )

    # -- the connection

    async def ping(self, timeout: float = PING_TIMEOUT) -> float:
        """Return the round-trip time of one PING frame in seconds.

        Raises:
            DeadlineExceeded: no answer within `timeout` seconds.
            PeerLost: the connection broke meanwhile.
        """
        seconds_of(timeout)
        self.raise_if_closed("ping", "send")
        uid, self._next_ping = self._next_ping, self._next_ping + 1
        event, began = anyio.Event(), time.perf_counter()
        self._pings[uid] = (event, began)
        try:
            self.core.ping(uid)
            self.pump()
            with anyio.move_on_after(timeout):
                await event.wait()
                self.raise_if_closed("ping", "answer")
                return self._pings[uid][1]
        finally:
            del self._pings[uid]
        raise DeadlineExceeded(
            "ping",
            peer=self._who(),
            after=timeout,
            why="the peer has not answered",
            fix="Give it more time; if it stays silent, it is stopped or its machine overloaded.",
        )

    async def close(
        self, code: AppCode = AppCode.NO_ERROR, reason: str = "", *, linger: float = 5.0
    ) -> None:
        """Deliver what was accepted, waiting at most `linger` seconds for it, then close."""
        if self.closed is not None:
            return
        self._closing = True
        try:
            with anyio.move_on_after(linger):
                while not self._is_settled():
                    if self._flushed is None or self._flushed.is_set():
                        self._flushed = anyio.Event()
                    await self._flushed.wait()
        finally:
            self.abort(code, reason)

    def abort(self, code: AppCode = AppCode.CANCELLED, reason: str = "") -> None:
        """Close at once. What the peer has not acknowledged may be lost."""
        if self.closed is None:
            phrase = reason.encode("utf-8", "replace")[:MAX_REASON].decode("utf-8", "ignore")
            self.core.close(code, phrase)
            self.pump()

    async def wait_closed(self) -> MeshError:
        """Wait until the connection is over, however long that is; return how it ended."""
        await self._ended.wait()
        assert self.closed is not None
        return self.closed

    def on_close(self, callback: Callable[[Connection], object]) -> None:
        """Have `callback` called in the event loop when the connection is over."""
        if self.closed is None:
            self._on_close.append(callback)
        else:
            callback(self)

    def raise_if_closed(self, what: str, stage: str) -> None:
        """Raise how the connection ended, if it has, about `what` at `stage`."""
        if self.closed is not None:
            error = self.closed
            parts = {**encode_error(error), "what": what, "stage": stage}
            raise decode_error(parts, peer=self._who()) from error

    # -- called by the endpoint

    def note_shown(self, credential: bytes) -> None:
        """Remember, by its digest, that the peer has been shown `credential`."""
        if credential:
            self._shown = hashlib.sha256(credential).digest()

    def has_shown(self, credential: bytes) -> bool:
        """Whether `credential` is the latest that the peer has been shown."""
        return self._shown == hashlib.sha256(credential).digest()

    def speaks_for(self, node_id: NodeId) -> bool:
        """Whether `node_id` is at the other end, or a program that it answers for."""
        if self._peer is None:
            return self.core.peer == node_id
        return node_id in (self._peer.node_id, self._peer.machine_id)

    def identify(self, peer: PeerIdentity, alpn: str) -> None:
        """Record who is there."""
        self._peer, self.alpn = peer, alpn

    def admit(
        self, grant: Grant | None, *, max_streams: int, window: int, stream_timeout: float
    ) -> None:
        """Lift the limits of a stranger, as far as `grant` says; later, put another in its place.

        A limit of streams that was given is not taken back.
        """
        self.grant = grant
        self.is_admitted = True
        event, self._regranted = self._regranted, anyio.Event()
        event.set()
        self.max_streams = max(max_streams, self.max_streams)
        self._window = window
        self._stream_timeout = stream_timeout
        self.core.admit(max_streams=max_streams, connection_window=window)
        self.pump()

    def allow_streams(self, count: int) -> None:
        """Let the peer have as many streams open at a time, if it might not yet."""
        if count > self.max_streams and self.closed is None:
            self.max_streams = count
            self.core.admit(max_streams=count, connection_window=self._window)
            self.pump()

    async def wait_regranted(self) -> None:
        """Wait until the peer is granted something else, or the connection is over."""
        await self._regranted.wait()

    def serve_streams(self, incoming: Callable[[Stream], object], *, framed: bool) -> None:
        """Have `incoming` called with every stream the peer opens, those already open first."""
        self._incoming = incoming
        self._incoming_framed = framed
        waiting, self._unclaimed = self._unclaimed, deque()
        for stream_id in waiting:
            self._accept(stream_id)

    async def next_stream(self, *, framed: bool) -> Stream:
        """Wait for the next stream that the peer opens, where nothing serves them as they come."""
        while not self._unclaimed:
            self.raise_if_closed("waiting for a stream", "accept")
            await self._opened.wait()
        return self._wrap(self._unclaimed.popleft(), framed=framed, opener=False)

    @property
    def deadlines(self) -> Deadlines:
        """Watches over those who wait for something on a stream."""
        return self._engine.deadlines

    def pump(self) -> None:
        """Let the engine send what there is to send, and tell us what happened."""
        self._engine.pump(self.core)

    def handle(self, event: Event) -> None:
        """Take one event of the protocol half."""
        match event:
            case StreamChanged(stream_id=stream_id):
                if (stream := self._streams.get(stream_id)) is not None:
                    stream.wake()
            case StreamOpened(stream_id=stream_id):
                if self._incoming is not None:
                    self._accept(stream_id)
                elif len(self._unclaimed) < self.max_streams:
                    self._unclaimed.append(stream_id)
                    self._tell_opened()
                else:
                    # Opened and reset again and again: it would never count as open at one time.
                    self.abort(AppCode.LIMIT, "too many streams that nobody has accepted")
            case StreamsAvailable():
                self._slots.give()
            case PingAcknowledged(uid=uid):
                if (ping := self._pings.get(uid)) is not None:
                    self._pings[uid] = (ping[0], time.perf_counter() - ping[1])
                    ping[0].set()
            case HandshakeCompleted(alpn=alpn):
                self.alpn = alpn
                self.handshaken.set()
            case ConnectionEnded():
                self._finish(error_of_end(self.core, event, self._who()))
            case _:
                pass

    def pumped(self) -> None:
        """The engine has just looked after this connection."""
        if self._flushed is not None and self.core.is_flushed():
            self._flushed.set()

    def drop_stream(self, stream: Stream, code: AppCode) -> None:
        """Forget a stream that the application has done with."""
        self._streams.pop(stream.stream_id, None)
        if self.closed is None:
            core = stream.core
            settled = core.receive_ended and core.send_ended and not core.buffered
            self.core.release(core, code)
            if not settled:
                self.pump()  # a call that ended well leaves nothing to say

    # -- inside

    def _too_late(self, service: str, timeout: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"call of {service!r}",
            peer=self._who(),
            after=timeout,
            why="the peer is there but has not answered",
            fix="Give it more time with timeout=, or look at the peer's log.",
        )

    async def _call_by(
        self,
        carrier: Carrier,
        request: bytes,
        timeout: float,
        too_late: Callable[[], DeadlineExceeded],
    ) -> bytes | None:
        if len(request) > carrier.most:
            return None
        try:
            with anyio.move_on_after(timeout):
                return await carrier.call(request)
        except MeshError:
            self.raise_if_closed("a call", "answer")
            raise
        raise too_late()

    async def _open(
        self, *, framed: bool, timeout: float | None, patience: float = math.inf
    ) -> Stream:
        wait = self._stream_timeout if timeout is None else seconds_of(timeout)
        if not self.is_open:
            self.raise_if_closed("opening a stream", "open")
            raise ConnectionClosed("opening a stream", peer=self._who(), why="we are closing")
        if not self._slots.take():
            await self._wait_for_slot(wait, patience)
        core = self.core.open_stream()
        stream = self._streams[core.stream_id] = Stream(
            self, core, framed=framed, opener=True, timeout=wait
        )
        return stream

    async def _wait_for_slot(self, wait: float, patience: float) -> None:
        if await self._slots.wait(wait, patience):
            self.raise_if_closed("opening a stream", "open")
            return
        raise LimitExceeded(
            "opening a stream",
            peer=self._who(),
            after=min(wait, patience),
            why="the peer allows no more streams at a time",
            fix="Finish some streams first: each counts until both sides have ended it.",
        )

    def _is_settled(self) -> bool:
        return self.closed is not None or self.core.is_flushed()

    def _accept(self, stream_id: int) -> None:
        assert self._incoming is not None
        self._incoming(self._wrap(stream_id, framed=self._incoming_framed, opener=False))

    def _wrap(self, stream_id: int, *, framed: bool, opener: bool) -> Stream:
        core = self.core.streams[stream_id]
        stream = self._streams[stream_id] = Stream(
            self, core, framed=framed, opener=opener, timeout=self._stream_timeout
        )
        return stream

    def _tell_opened(self) -> None:
        event, self._opened = self._opened, anyio.Event()
        event.set()

    def _finish(self, error: MeshError) -> None:
        if self.closed is not None:
            return
        self.closed = error
        self.handshaken.set()
        self._tell_opened()
        self._slots.give()
        if self._flushed is not None:
            self._flushed.set()
        for stream in list(self._streams.values()):
            stream.wake()
        for event, _ in self._pings.values():
            event.set()
        self._ended.set()
        self._regranted.set()
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                _log.exception("a callback failed at the end of %r", self)

    def _who(self) -> str:
        where = format_address(self.remote_address)
        if self._peer is not None:
            return f"{self._peer} at {where}"
        if self.core.peer is not None:
            return f"{self.core.peer.short} at {where}"
        return where
