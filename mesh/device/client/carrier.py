"""A session's way to its peer, in the event loop of a node: batches out, answers in, reconnects.

Threads of the program hand batches over and go on; they wait only when a full window of them is on
its way. When the connection breaks, the carrier opens another, and the session goes on where it
was, for as long as the peer keeps it: for the lease that it tells when the session begins.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import anyio.abc

from auth import MeshError
from mesh.device import wire
from mesh.device.client.moving import Mover
from mesh.device.client.session import Session
from mesh.device.errors import DeviceError, SessionLost
from mesh.device.link import BROKEN, Link
from mesh.tasks import helpers
from tensor_bridge.fields import Fields
from transport import (
    Backoff,
    CborValue,
    Connection,
    Stream,
    Unreachable,
)

__all__ = ["TICK", "StreamCarrier"]

MAX_QUEUED = 64
"""Batches handed over and not in the link's window yet; who hands over more waits."""

TICK = 0.001
"""Seconds that an operation is queued at most while the program computes."""

TICKS_AWAKE = 50
"""Ticks without an operation after which the carrier sleeps, and the next one wakes it."""

NAP = 0.1
"""Seconds after which a sleeping carrier looks for handles to be released, which wake nobody."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5
"""Seconds between two tries to reconnect."""

FIRST_TRY, LONGEST_TRY = 1.0, 8.0
"""Seconds that such a try may take, which double each time. A handshake that began while there was
no way repeats itself ever more rarely, so that a new one is there before it."""

REFUSED_SECONDS = 3.0
"""How long the peer's host has to say that nothing listens there until that is believed: such a
report can be forged."""

MAX_LEASE = 3600.0
"""The longest that a peer can have this program wait for it."""

_log = logging.getLogger("quicmesh.device")


class StreamCarrier:
    """Carries one session. Made and run in the loop; `send` is for every thread.

    Args:
        session: what is carried.
        connect: returns an open connection with the peer, or fails after a single try.

    Attributes:
        number: what the peer knows the session by.
        mover: how it takes part in moves between peers; None until it is set.
    """

    def __init__(
        self,
        session: Session,
        connect: Callable[[], Awaitable[Connection]],
    ) -> None:
        self._session = session
        self._connect = connect
        self._lease = 0.0
        self.number = secrets.token_bytes(16)
        self.mover: Mover | None = None
        self._link = Link(self._take)
        self._outbox: deque[bytes] = deque()
        self._tasks: deque[Callable[[], Coroutine[Any, Any, None]]] = deque()
        self._room = threading.Condition()
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._is_closing = False
        self._ended = anyio.Event()
        self._first: tuple[Stream, int] | None = None
        self.devices: list[dict[str, CborValue]] = []
        """What the peer offers, known once it has begun."""

    # -- for every thread

    def send(self, batch: bytes, *, wait: bool) -> bool:
        """Take a batch; see `session.Carrier`."""
        with self._room:
            if len(self._outbox) >= MAX_QUEUED:
                if not wait:
                    return False
                self._room.wait_for(
                    lambda: len(self._outbox) < MAX_QUEUED or self._session.error is not None
                )
            if self._session.error is not None:
                raise self._session.lost()
            self._outbox.append(batch)
        self._stir()
        return True

    def is_in_loop(self) -> bool:
        """Return whether this is the thread that sends, and so must not wait for that."""
        return threading.get_ident() == self._thread

    def check_waiting(self) -> None:
        """Raise `DeviceError` in the loop's own thread: it would wait for itself."""
        if self.is_in_loop():
            raise DeviceError(
                "reading from a device",
                peer=self._session.label(),
                why="a blocking read in the node's own event loop would wait for itself",
                fix="Use: await mesh.device.read(tensor).",
            )

    def spawn(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `task` in the loop, for as long as the session lives."""
        self._tasks.append(task)
        self._stir()

    def close(self) -> None:
        """End the session at the peer, once everything queued was sent."""
        self._is_closing = True
        with self._room:
            self._room.notify_all()
        self._stir()

    @property
    def has_ended(self) -> bool:
        """Whether it carries nothing any more, or is of the process that this was forked from."""
        return self._ended.is_set() or os.getpid() != self._process

    def _stir(self) -> None:
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):  # full: it will wake; closed: it has ended
                self._waker.send(b"\0")

    # -- in the loop

    async def begin(self) -> None:
        """Open the session at the peer.

        Raises:
            AccessDenied, ServiceUnknown, LimitExceeded: the peer does not allow it.
            Unreachable, DeadlineExceeded: there is no way to it.
        """
        try:
            self._first = await self._open(new=True)
        except BaseException:
            self._close_sockets()
            raise

    async def run(self) -> None:
        """Carry the session until it is closed or lost. Raises nothing but cancellation."""
        try:
            async with helpers() as tasks:
                tasks.start_soon(self._pump, tasks)
                await self._keep_carrying()
            self._lose(SessionLost("use of a device", why="the session was closed"))
        except MeshError as error:
            self._lose(error)
        except Exception as error:
            _log.exception("a session with a device failed")
            self._lose(DeviceError("use of a device", why=f"{type(error).__name__} in this node"))
        finally:
            self._lose(SessionLost("use of a device", why="its node was closed"))
            self._close_sockets()
            self._ended.set()

    async def ended(self) -> None:
        """Wait until it carries nothing any more."""
        await self._ended.wait()

    def _close_sockets(self) -> None:
        self._wake.close()
        self._waker.close()

    def _lose(self, error: MeshError) -> None:
        self._session.fail(error)
        with self._room:
            self._outbox.clear()
            self._room.notify_all()

    async def _keep_carrying(self) -> None:
        assert self._first is not None, "begin comes first"
        stream, received = self._first
        while True:
            try:
                async with stream:
                    await self._link.carry(stream, received)
                return
            except BROKEN as error:
                cause = error
            if stream.connection.was_left:
                raise cause  # its sessions went with it
            again = await self._open_again(cause)
            if again is None:
                return
            stream, received = again

    async def _open_again(self, cause: MeshError) -> tuple[Stream, int] | None:
        """Open another stream; None if the session is closed meanwhile.

        Raises:
            MeshError: `cause`, once the lease is over, or the peer's process is; or the peer does
                not have the session.
        """
        until = anyio.current_time() + self._lease
        refused_until = math.inf
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        patience = FIRST_TRY
        while self._session.error is None:
            left = until - anyio.current_time()
            if left <= 0:
                raise cause
            try:
                with anyio.fail_after(min(patience, left)):
                    return await self._open(new=False)
            except (*BROKEN, TimeoutError) as error:
                now = anyio.current_time()
                if not isinstance(error, Unreachable) or not error.is_refused:
                    refused_until = math.inf
                elif refused_until == math.inf:
                    refused_until = now + REFUSED_SECONDS
                elif now >= refused_until:
                    raise cause from error
                patience = min(2 * patience, LONGEST_TRY)
                await anyio.sleep(backoff.pause())
        return None

    async def _open(self, *, new: bool) -> tuple[Stream, int]:
        connection = await self._connect()
        opening: CborValue = {
            "session": self.number,
            "received": self._link.received,
            "new": new,
        }
        stream = await connection.open_stream(wire.SERVICE, opening)
        try:
            return stream, self._opened(await stream.reply())
        except BaseException:
            stream.reset()
            raise

    def _opened(self, reply: CborValue) -> int:
        fields = Fields(reply, "beginning of a session with a device")
        received = fields.integer("received")
        self.devices = [each for each in fields.items("devices", 1024) if isinstance(each, dict)]
        self._session.moves = fields.flag("moves")
        self._lease = min(fields.integer("lease") / 1000, MAX_LEASE)
        fields.finish()
        return received

    async def _take(self, payload: bytearray) -> None:
        if payload:
            self._session.answered(memoryview(payload))

    async def _pump(self, tasks: anyio.abc.TaskGroup) -> None:
        """Move batches from the threads to the link, and what is queued into batches."""
        session = self._session
        quiet = 0
        while True:
            while self._tasks:
                tasks.start_soon(self._tasks.popleft())
            while self._outbox:
                await self._link.post(self._outbox[0])
                with self._room:
                    self._outbox.popleft()
                    self._room.notify_all()
                quiet = 0
            if session.error is not None and not self._is_closing:
                return
            if session.queue:
                with contextlib.suppress(MeshError):
                    if session.flush(wait=False):
                        quiet = 0
                        continue
            elif self._is_closing:
                await self._link.post(b"")
                return
            quiet += 1
            asleep = quiet > TICKS_AWAKE
            if asleep and session.error is None:
                session.limit = 1
                if session.queue:  # queued before its thread could see that
                    continue
            await self._rest(NAP if asleep else TICK)

    async def _rest(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await anyio.wait_readable(self._wake)
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(4096)
