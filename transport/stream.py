"""A QUIC stream with back-pressure in both directions, for the application."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import anyio.lowlevel

from auth import MeshError, PeerIdentity
from transport.cbor import CborValue, decode, encode
from transport.codes import AppCode, code_of, error_of_code
from transport.deadlines import Wait
from transport.errors import (
    BufferGone,
    DeadlineExceeded,
    ProtocolError,
    StreamReset,
    TransportError,
)
from transport.frames import LENGTH, MAX_FRAME, error_reply, frame, ok_reply, parse_reply
from transport.looks import LookStep
from transport.protocol import StreamCore

if TYPE_CHECKING:
    from transport.connection import Connection

__all__ = ["Stream"]

DEFAULT_CHUNK = 65536

POST_BYTES = 1 << 16
"""Memory of this size and more is posted for what is to come: below, a copy costs less."""

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
        self._waits: list[Wait] = []
        self._expiry: tuple[float, Callable[[], MeshError]] | None = None
        self._reading = anyio.ResourceGuard("reading from this stream")
        self._writing = anyio.ResourceGuard("writing to this stream")
        # A framed stream carries one reply frame towards its opener, before anything else.
        self._awaits_reply = framed and opener
        self._owes_reply = framed and not opener
        self._reply: CborValue = None
        self._closed = False
        self._is_half_read = False
        self._is_half_sent = False
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
            data = self.core.incoming.take(max_bytes)
            self._credit(len(data))
            return data

    async def receive_exactly(self, count: int) -> bytes:
        """Return exactly `count` bytes, or raise like `receive_into`."""
        data = bytearray(count)
        await self.receive_into(memoryview(data))
        return bytes(data)

    async def receive_into(
        self, target: memoryview, moved: Callable[[int], object] | None = None
    ) -> int:
        """Fill `target` with the next bytes; return its length.

        Bytes go from the packets they come in to their place, in whatever order packets come, and
        the sender may be ahead by more than the stream's window. `moved` is told of bytes that
        have come, in order, a quarter of a megabyte or more at a time. Given up before the end, the
        stream can only be reset.

        Raises:
            ProtocolError: the stream ended before.
            MeshError: as `receive`.
        """
        target = target.cast("B")
        if target.readonly:
            raise TypeError("receive_into needs memory that can be written to")
        with self._reading:
            await self._skip_reply()
            if len(target) < POST_BYTES:
                await self._fill(target)
                (moved or _ignore)(len(target))
            else:
                await self._fill_in_place(target, moved or _ignore)
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

    async def send_lent(
        self,
        view: memoryview,
        *,
        is_intact: Callable[[], bool] = lambda: True,
        moved: Callable[[int], object] | None = None,
    ) -> None:
        """Write all of `view` without a copy, and return when the peer has acknowledged it.

        Until then its bytes must not change. `is_intact` is asked before each look at them, so that
        nobody reads memory that its owner has given back meanwhile. `moved` is told of bytes that
        were acknowledged, a quarter of a megabyte or more at a time. Given up before the end, it
        lets go of `view`, and the stream can only be reset.

        Raises:
            BufferGone: `is_intact` said no.
            MeshError: as `send`.
        """
        with self._writing:
            if self._owes_reply:
                self._owes_reply = False
                await self._write(ok_reply(None))
            lending = self._lend(view.cast("B"), is_intact, moved or _ignore)
            del view  # a traceback keeps frames alive, and with them what they hold
            await lending

    async def send_message(self, value: CborValue) -> None:
        """Write `value` as deterministic CBOR, framed by its length."""
        await self.send(frame(encode(value, max_size=self.connection.max_frame)))

    async def send_reply(self, value: CborValue) -> None:
        """Take the stream, answering its opener's request with `value`. At most once, and first."""
        with self._writing:
            reply = ok_reply(value, max_size=self.connection.max_frame)
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

    async def drained(self, moved: Callable[[int], object]) -> None:
        """Return when the peer has all that was sent; `moved` is told of bytes as they arrive.

        Not while `send_lent` runs, which is told itself. Raises as `send`.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        core = self.connection.core
        while left := core.unacknowledged(self.core):
            await self._check_writable()
            below = max(0, left - POST_BYTES)
            if core.unacknowledged(self.core, wake_below=below) > below:
                await self._wait("send")
            moved(left - core.unacknowledged(self.core))

    # -- ending

    async def aclose(self) -> None:
        """End our direction and give up the other, without waiting for the peer."""
        if self._is_half_sent:
            self.reset()  # half of something must not be taken for the whole
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
        if self._waits:
            waits, self._waits = self._waits, []
            for wait in waits:
                wait.wake()

    def expire_at(self, deadline: float, error: Callable[[], MeshError]) -> None:
        """Have waits after this raise `error` at `deadline`, of `time.monotonic`.

        Their own time limit holds beside it.
        """
        self._expiry = (deadline, error)

    def never_expire(self) -> None:
        """Take back what `expire_at` has said."""
        self._expiry = None

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

    async def _lend(
        self,
        view: memoryview,
        is_intact: Callable[[], bool],
        moved: Callable[[int], object],
    ) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()
        await self._check_writable()
        core, connection = self.core, self.connection
        told = 0
        step = LookStep()
        part = connection.core.lend(core, view, is_intact, AppCode.INTERNAL)
        try:
            connection.pump()
            while told < len(view):
                if connection.core.is_spoiled(core):
                    raise BufferGone(
                        "sending", peer=self.peer, why="its memory was given back meanwhile"
                    )
                below = len(view) - step.after(told, len(view))
                connection.core.unacknowledged(core, wake_below=below)
                come = len(view) - part.unacknowledged
                if come > told:
                    moved(come - told)
                    told = come
                    continue
                is_over = part.is_finished or self._closed or connection.closed is not None
                if is_over or core.remote_stop != AppCode.NO_ERROR:
                    await self._check_writable()
                # Else the peer wants no more, and may have taken all: acknowledgements will tell.
                if part.is_finished:
                    raise StreamReset(
                        "a stream", peer=self.peer, stage="send", why="it was reset meanwhile"
                    )
                await self._wait("send")
                step.looked()
        finally:
            if told < len(view):
                self._is_half_sent = True
                connection.core.take_back(core)
            del view

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
            except BaseException:
                self._is_half_read = self._is_half_read or done > 0
                raise
            count = self.core.incoming.take_into(target[done:])
            done += count
            self._credit(count)

    async def _fill_in_place(self, target: memoryview, moved: Callable[[int], object]) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()
        core, connection = self.core, self.connection
        self._check_readable("receive")
        start = core.incoming.consumed
        goal = start + len(target)
        step = LookStep()
        connection.core.post(core, target)
        told = come = start
        try:
            if connection.core.owes_credit(core):
                connection.pump()
            while True:
                if self._closed:  # by another task: what came since then went nowhere
                    raise anyio.ClosedResourceError
                come = min(core.incoming.delivered, goal)
                if come > told:
                    moved(come - told)
                    told = come
                if come == goal:
                    return
                if core.fin_received:
                    raise ProtocolError(
                        "receiving",
                        peer=self.peer,
                        why=f"the stream ended after {come - start} of {len(target)} bytes",
                    )
                self._check_readable("receive")
                core.incoming.wake_at(start + step.after(come - start, len(target)))
                await self._wait("receive")
                step.looked()
        finally:
            if come < goal:
                self._is_half_read = True
                come = min(core.incoming.delivered, goal)
                if come > told:
                    moved(come - told)
            connection.core.withdraw(core)

    async def _receive_frame(self, max_size: int) -> bytes:
        await self._readable("receive")
        incoming = self.core.incoming
        if incoming.buffered >= LENGTH.size:
            (length,) = LENGTH.unpack(incoming.take(LENGTH.size))
            if length <= min(max_size, incoming.buffered):
                body = incoming.take(length)
                self._credit(LENGTH.size + length)
                return body
            self._credit(LENGTH.size)
        else:
            (length,) = LENGTH.unpack(await self._filled(LENGTH.size))
        if length > max_size:
            raise ProtocolError(
                "receiving a message",
                peer=self.peer,
                why=f"it announces {length} bytes, and at most {max_size} are accepted here",
            )
        # Grown as the bytes come: a length alone makes us hold nothing.
        parts = bytearray()
        try:
            while len(parts) < length:
                parts += await self._filled(min(length - len(parts), DEFAULT_CHUNK))
        except BaseException:
            self._is_half_read = True  # what comes next is no frame
            raise
        return bytes(parts)

    async def _filled(self, count: int) -> bytearray:
        part = bytearray(count)
        await self._fill(memoryview(part))
        return part

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
        if self.core.is_readable:  # otherwise the wait is cancelled
            await anyio.lowlevel.checkpoint_if_cancelled()
        while True:
            self._check_readable(stage)
            if self.core.buffered:
                return
            if self.core.fin_received:
                raise anyio.EndOfStream
            await self._wait(stage)

    def _check_readable(self, stage: str) -> None:
        """Raise if nothing more can come; what has come, or that all has, is not looked at."""
        core = self.core
        if self._is_half_read:
            raise self._given_up_halfway(stage)
        if core.buffered or core.fin_received:
            return
        if self._closed:
            raise anyio.ClosedResourceError
        if core.remote_reset is not None:
            raise error_of_code(core.remote_reset, "a stream", peer=self.peer, stage=stage)
        self.connection.raise_if_closed("a stream", stage)

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
        if self._is_half_sent:
            raise self._given_up_halfway("send")
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

    def _given_up_halfway(self, stage: str) -> TransportError:
        return TransportError(
            "a stream",
            peer=self.peer,
            stage=stage,
            why="an earlier transfer on it was given up halfway",
            fix="Reset the stream, and begin anew on another.",
        )

    async def _wait(self, stage: str) -> None:
        """Wait until `wake` is called."""
        expiry = self._expiry
        deadline = time.monotonic() + self.timeout
        wait = self.connection.deadlines.begin(
            deadline if expiry is None else min(deadline, expiry[0])
        )
        self._waits.append(wait)
        try:
            if await wait.over():
                return
        finally:
            if not wait.is_woken:
                self._waits.remove(wait)
        if expiry is not None and expiry[0] <= deadline:
            raise expiry[1]()
        raise DeadlineExceeded(
            "a stream",
            peer=self.peer,
            stage=stage,
            after=self.timeout,
            why="the peer is there but neither sent nor read anything",
            fix="Look at what it is doing, or give it more time: stream.timeout.",
        )

    def _credit(self, count: int) -> None:
        if self.connection.core.consumed(self.core, count):
            self.connection.pump()


def _ignore(count: int) -> None:
    """Nobody wants to know how much has moved."""
