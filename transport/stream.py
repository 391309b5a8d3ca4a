"""A QUIC stream with back-pressure in both directions, for the application."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import anyio.lowlevel

from auth import MeshError, PeerIdentity
from transport.cbor import CborValue, decode, encode
from transport.codes import AppCode, code_of, error_of_code
from transport.errors import DeadlineExceeded, ProtocolError, StreamReset, TransportError
from transport.frames import LENGTH, MAX_FRAME, error_reply, frame, ok_reply, parse_reply
from transport.protocol import StreamCore

if TYPE_CHECKING:
    from transport.connection import Connection

__all__ = ["Stream"]

DEFAULT_CHUNK = 65536

_log = logging.getLogger("quicmesh.transport")


class Stream(anyio.abc.ByteStream):
    """A bidirectional stream of bytes; one task may read and another write at the same time.

    `send` returns once the bytes are in the bounded send buffer, and waits while that is full: a
    peer that stops reading stops us. The receive window moves only as bytes are read here: not
    reading stops the peer. A wait longer than `timeout` raises `DeadlineExceeded`; the loss of the
    peer ends it sooner.

    Leaving ``async with`` normally ends the stream; leaving it by an exception resets it, so that
    the other side never takes half of something for the whole.
    """

    def __init__(
        self,
        connection: Connection,
        core: StreamCore,
        *,
        framed: bool,
        opener: bool,
        timeout: float,
    ) -> None:
        self.connection = connection
        self.timeout = timeout
        """Seconds that one wait on this stream may take."""
        self.core = core
        self._event = anyio.Event()
        self._reading = anyio.ResourceGuard("reading from this stream")
        self._writing = anyio.ResourceGuard("writing to this stream")
        # A framed stream carries one reply frame towards its opener, before anything else.
        self._awaits_reply = framed and opener
        self._owes_reply = framed and not opener
        self._reply: CborValue = None
        self._closed = False
        self._abandoned: Callable[[], object] | None = None

    @property
    def peer(self) -> PeerIdentity:
        """Who is at the other end."""
        return self.connection.peer

    @property
    def is_closed(self) -> bool:
        """Whether this side has done with the stream, by `aclose` or `reset`."""
        return self._closed

    @property
    def stream_id(self) -> int:
        """The QUIC stream id."""
        return self.core.stream_id

    # -- reading

    async def receive(self, max_bytes: int = DEFAULT_CHUNK) -> bytes:
        """Return between 1 and `max_bytes` bytes as soon as there are any.

        Raises:
            anyio.EndOfStream: the peer ended the stream.
            MeshError: of the class that the peer's reset or the end of the connection stands for.
        """
        with self._reading:
            await self._skip_reply()
            await self._readable("receive")
            return self._credit_bytes(self.core.take(max_bytes))

    async def receive_exactly(self, count: int) -> bytes:
        """Return exactly `count` bytes, or raise like `receive_into`."""
        data = bytearray(count)
        await self.receive_into(memoryview(data))
        return bytes(data)

    async def receive_into(self, target: memoryview) -> int:
        """Fill `target` with the next bytes; return its length.

        Bytes go from the receive buffer to their place and nowhere else on the way.

        Raises:
            ProtocolError: the stream ended before.
            MeshError: as `receive`.
        """
        with self._reading:
            await self._skip_reply()
            await self._fill(target)
        return len(target)

    async def receive_message(self, max_size: int = DEFAULT_CHUNK) -> CborValue:
        """Return the next CBOR value framed by its length.

        Raises:
            anyio.EndOfStream: the stream ended where a message might have begun.
            ProtocolError: longer than `max_size`, cut off, or not deterministic CBOR.
        """
        with self._reading:
            await self._skip_reply()
            return decode(await self._receive_frame(max_size), max_size=max_size)

    async def reply(self) -> CborValue:
        """Return the value with which the service took the stream, or raise what it answered."""
        with self._reading:
            await self._skip_reply()
        return self._reply

    # -- writing

    async def send(self, data: bytes | memoryview) -> None:
        """Write all of `data`, waiting for room in the send buffer as often as it takes."""
        with self._writing:
            if self._owes_reply:
                self._owes_reply = False
                await self._write(ok_reply(None))
            await self._write(data)

    async def send_message(self, value: CborValue) -> None:
        """Write `value` as deterministic CBOR, framed by its length."""
        await self.send(frame(encode(value, max_size=MAX_FRAME)))

    async def send_reply(self, value: CborValue) -> None:
        """Take the stream, answering its opener's request with `value`. At most once, and first."""
        with self._writing:
            reply = ok_reply(value)
            if not self._owes_reply:
                raise RuntimeError("this stream's reply has been sent")
            self._owes_reply = False
            await self._write(reply)

    async def send_eof(self) -> None:
        """End our direction: the peer reads `anyio.EndOfStream` after what was sent."""
        with self._writing:
            await anyio.lowlevel.checkpoint_if_cancelled()
            if not self.core.fin_sent:
                await self._check_writable()
                self._finish()

    # -- ending

    async def aclose(self) -> None:
        """End our direction and give up the other, without waiting for the peer."""
        if not self._closed:
            self._finish()
            self._drop(AppCode.NO_ERROR)

    def reset(self, error: BaseException | AppCode = AppCode.CANCELLED) -> None:
        """Give up on both directions at once; the peer raises an error of the same class."""
        if not self._closed:
            code = error if isinstance(error, AppCode) else code_of(error)
            self.connection.core.reset(self.core, code)
            self._drop(code)

    async def fail(self, error: BaseException) -> None:
        """End the stream with `error`: whole where the reply is still owed, else as a code.

        Raises nothing but cancellation, and then too the stream has ended.
        """
        try:
            if self._owes_reply and not self._closed and self.connection.closed is None:
                self._owes_reply = False
                await self._write(error_reply(error), fin=True)
                await self.aclose()
        except Exception:
            _log.debug("an error could not be told whole to %s", self.peer, exc_info=True)
        finally:
            self.reset(error)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            await self.aclose()
        else:
            self.reset(exc)

    # -- called by the connection

    def wake(self) -> None:
        """Something about the stream or its connection changed: let those who wait look again."""
        if self._abandoned is not None and self._is_abandoned:
            self._abandoned()
        event, self._event = self._event, anyio.Event()
        event.set()

    def on_abandoned(self, callback: Callable[[], object] | None) -> None:
        """Have `callback` called when the peer gives the stream up, or is gone."""
        self._abandoned = callback
        if callback is not None and self._is_abandoned:
            callback()

    @property
    def _is_abandoned(self) -> bool:
        core = self.core
        lost = core.remote_reset is not None or core.remote_stop is not None
        return lost or self.connection.closed is not None

    async def write_request(self, data: bytes, *, fin: bool) -> None:
        """Write a frame that is no reply, such as a request; with `fin`, end the stream as well."""
        with self._writing:
            await self._write(data, fin=fin)

    async def write_answer(self, reply: bytes) -> None:
        """Write the reply frame of a call and end the stream, all in one packet if it fits."""
        with self._writing:
            self._owes_reply = False
            await self._write(reply, fin=True)
        await self.aclose()

    async def receive_request(self, max_size: int) -> bytes:
        """Return the body of the next frame as it is: a request, or any frame of a hello."""
        with self._reading:
            return await self._receive_frame(max_size)

    # -- inside

    async def _write(self, data: bytes | memoryview, *, fin: bool = False) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()
        view = memoryview(data).cast("B")
        core, connection = self.core, self.connection
        done = 0
        while True:
            await self._check_writable()
            room = connection.core.room(core)
            if room:
                part = view[done : done + room]
                done += len(part)
                connection.core.write(core, part, fin=fin and done == len(view))
                connection.pump()
                if done == len(view):
                    return
            else:
                await self._wait("send")

    def _finish(self) -> None:
        if not self.core.send_ended and self.connection.closed is None:
            # A service that ends the stream without a word has taken it.
            last = ok_reply(None) if self._owes_reply else b""
            self._owes_reply = False
            self.connection.core.write(self.core, last, fin=True)
            self.connection.pump()

    def _drop(self, code: AppCode) -> None:
        self._closed = True
        self.connection.drop_stream(self, code)
        self.wake()

    async def _fill(self, target: memoryview) -> None:
        done = 0
        while done < len(target):
            try:
                await self._readable("receive")
            except anyio.EndOfStream:
                raise ProtocolError(
                    "receiving",
                    peer=self.peer,
                    why=f"the stream ended after {done} of {len(target)} bytes",
                ) from None
            count = self.core.take_into(target[done:])
            done += count
            self._credit(count)

    async def _receive_frame(self, max_size: int) -> bytes:
        await self._readable("receive")
        header = bytearray(LENGTH.size)
        await self._fill(memoryview(header))
        (length,) = LENGTH.unpack(header)
        if length > max_size:
            raise ProtocolError(
                "receiving a message",
                peer=self.peer,
                why=f"it announces {length} bytes, and at most {max_size} are accepted here",
            )
        # Grown as the bytes come: a length alone makes us hold nothing.
        body = bytearray()
        while len(body) < length:
            part = bytearray(min(length - len(body), DEFAULT_CHUNK))
            await self._fill(memoryview(part))
            body += part
        return bytes(body)

    async def _skip_reply(self) -> None:
        """Take the reply frame off the stream, where it is still to come; raise the error in it."""
        if not self._awaits_reply:
            return
        try:
            body = await self._receive_frame(MAX_FRAME)
        except anyio.EndOfStream:
            raise ProtocolError(
                "a reply", peer=self.peer, why="the stream ended without one"
            ) from None
        self._awaits_reply = False
        reply = parse_reply(body, peer=self.peer)
        if isinstance(reply, MeshError):
            raise reply
        self._reply = reply

    async def _readable(self, stage: str) -> None:
        """Return when there are bytes to take; raise at the end of the stream and on errors."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        core = self.core
        while not core.buffered:
            if self._closed:
                raise anyio.ClosedResourceError
            if core.remote_reset is not None:
                raise error_of_code(core.remote_reset, "a stream", peer=self.peer, stage=stage)
            if core.fin_received:
                raise anyio.EndOfStream
            self.connection.raise_if_closed("a stream", stage)
            await self._wait(stage)

    async def _check_writable(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        self.connection.raise_if_closed("a stream", "send")
        code = self.core.remote_stop
        if code is not None:
            await self._raise_refusal()
            if code != AppCode.NO_ERROR:
                raise error_of_code(code, "a stream", peer=self.peer, stage="send")
            raise StreamReset(
                "a stream", peer=self.peer, stage="send", why="the other side stopped reading"
            )
        if self.core.fin_sent:
            raise TransportError("a stream", peer=self.peer, stage="send", why="its end was sent")

    async def _raise_refusal(self) -> None:
        """Raise what the service answered instead of reading on, if its answer is here."""
        if self._awaits_reply and self.core.buffered:
            try:
                with self._reading:
                    await self._skip_reply()
            except anyio.BusyResourceError:
                pass  # whoever reads will get it

    async def _wait(self, stage: str) -> None:
        event = self._event
        with anyio.move_on_after(self.timeout):
            await event.wait()
            return
        raise DeadlineExceeded(
            "a stream",
            peer=self.peer,
            stage=stage,
            after=self.timeout,
            why="the peer is there but neither sent nor read anything",
            fix="Look at what it is doing, or give it more time: stream.timeout.",
        )

    def _credit_bytes(self, data: bytes) -> bytes:
        self._credit(len(data))
        return data

    def _credit(self, count: int) -> None:
        if self.connection.core.consumed(self.core, count):
            self.connection.pump()
