"""Calls between two processes of a host, by rings in memory that they share.

Whoever of the two has asked for shared memory makes the rings and gives their descriptors over the
Unix socket of the link; from then on calls go by them, in both directions, if they are short.
What a call may do is asked on the side that serves it exactly as for a stream
(``transport.Endpoint.answer``). Memory that garbles a message ends the link, and the calls on it
fail as with a broken connection; calls after it take streams again.

    request    the body of a request frame; `call` is a number that the caller draws
    part       the beginning of a reply that is longer than a message
    reply      the body of a reply frame, or the rest of it
    elsewhere  the call was not begun, and is to come on a stream
    cancel     the caller has given up
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
from collections import deque
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

from auth import PeerIdentity
from tensor_bridge.lanes.shared.doorbell import Waiter, check_eventfd, make_eventfd
from tensor_bridge.lanes.shared.pool import anonymous_memory, check_memory, seal_size
from tensor_bridge.lanes.shared.ring import (
    FIRST,
    MAX_BODY,
    MEMORY_BYTES,
    SECOND,
    Inbox,
    Message,
    Outbox,
    flag_of,
)
from transport import ConnectionClosed, ProtocolError
from transport.readiness import serve_readable

__all__ = ["RINGS", "Calls", "make_rings", "take_rings"]

REQUEST, PART, REPLY, ELSEWHERE, CANCEL = range(1, 6)

RINGS = 3
"""Descriptors of a pair of rings: the memory, where the maker sleeps, and where the other does."""

MAX_RUNNING = 128
"""Calls served at a time for the peer; further ones come on streams, as the grant allows."""

MAX_REPLY = 1 << 20
"""Longest reply, that of a frame."""

MESSAGES_A_TURN = 32
"""Messages taken before others on the event loop have their turn."""

RETRY_SECONDS = 0.001
LONGEST_RETRY = 0.05
"""Between two tries to write what the ring had no room for; each time twice as long as before."""

FEW_UNSENT = 32
"""With so many messages that wait for room, replies wait with their calls: who takes none makes
this process hold the replies to those that it serves at a time, and no more."""

MAX_UNSENT = 4096
"""Messages that wait for room. Who takes none of so many does not keep to the protocol."""

_log = logging.getLogger("quicmesh.tensors")

Serve = Callable[[bytes], Awaitable[bytes | None]]


class Calls:
    """The calls between this process and one other. A ``transport.Carrier``.

    Args:
        memory: what both have.
        side: `FIRST` or `SECOND`, which this process is.
        sleeps: the eventfd of this process; it becomes this object's, as `wakes`.
        wakes: that of the other.
        peer: who is there.
        serve: serves a request.
    """

    most = MAX_BODY

    def __init__(
        self,
        memory: mmap.mmap,
        side: int,
        sleeps: int,
        wakes: int,
        peer: PeerIdentity,
        serve: Serve,
    ) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._words = self._view[: mmap.PAGESIZE].cast("Q")
        self._inbox = Inbox(self._view, side)
        self._outbox = Outbox(self._view, side, wakes)
        self._waiter = Waiter(self._words, flag_of(side), sleeps)
        self._descriptors: tuple[int, ...] = (sleeps, wakes)
        self._peer = peer
        self._serve = serve
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._running: dict[int, anyio.CancelScope] = {}
        self._unsent: deque[Message] = deque()
        self._is_stuck = anyio.Event()
        self._has_room = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._is_over = False
        self._failure: ProtocolError | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Calls of this side's under way, calls served, messages that wait for room."""
        return len(self._waiting), len(self._running), len(self._unsent)

    async def run(self) -> None:
        """Take what comes, until cancelled; then nothing of it is left.

        Raises:
            ProtocolError: the other end does not keep to the protocol.
        """
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._send_on)
                self._waiter.arm()
                self._waiter.wake()  # for what has come before
                try:
                    await serve_readable(self._descriptors[0], self._turn)
                finally:
                    self._tasks.cancel_scope.cancel()
        except* ProtocolError as group:
            error = group.exceptions[0]
            assert isinstance(error, ProtocolError)
            raise ProtocolError(error.what, why=error.why) from None
        finally:
            self._take_replies()
            self.close()

    async def call(self, request: bytes) -> bytes | None:
        """See ``transport.Carrier``."""
        number, waiting = next(self._numbers), _Waiting()
        if self._is_over or self._tasks is None or self._unsent:
            return None
        if not self._put(Message(REQUEST, number, request)):
            return None
        self._waiting[number] = waiting
        try:
            await waiting.over.wait()
        except BaseException:
            if number in self._waiting and not waiting.over.is_set():
                self._post(Message(CANCEL, number))
            raise
        finally:
            self._waiting.pop(number, None)
        if waiting.is_lost:
            raise ConnectionClosed("a call", peer=self._peer, stage="answer")
        return bytes(waiting.reply) if waiting.is_answered else None

    def close(self) -> None:
        """Let go of everything; calls under way fail. May be repeated."""
        if self._is_over:
            return
        self._is_over = True
        for waiting in self._waiting.values():
            if not waiting.over.is_set():
                waiting.is_lost = True
                waiting.over.set()
        self.release()

    def release(self) -> None:
        """Let go of memory and descriptors alone, as a forked child has to. May be repeated."""
        self._is_over = True
        if not self._descriptors:
            return
        self._unsent.clear()
        self._inbox.close()
        self._outbox.close()
        with contextlib.suppress(BufferError):  # a forked child may find it in use
            self._words.release()
            self._view.release()
            self._memory.close()
        descriptors, self._descriptors = self._descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)

    # -- inside

    def _turn(self) -> bool:
        """Take messages; return whether there may be more."""
        self._waiter.drain()
        if self._failure is not None:
            raise self._failure
        for _ in range(MESSAGES_A_TURN):
            message = self._inbox.take()
            if message is None:
                return False
            self._took(message)
        return True

    def _took(self, message: Message) -> None:
        call = message.call
        match message.kind:
            case 1:  # REQUEST
                self._begin(call, message.body)
            case 2 | 3 | 4:  # PART, REPLY, ELSEWHERE
                waiting = self._waiting.get(call)
                if waiting is not None:  # else it was given up here
                    waiting.take(message)
            case 5:  # CANCEL
                if call in self._running:
                    self._running[call].cancel()
            case _:
                raise ProtocolError("shared memory", why="a message of no known kind")

    def _begin(self, call: int, body: bytes) -> None:
        assert self._tasks is not None
        if call in self._running:
            raise ProtocolError("shared memory", why="a call twice")
        if len(self._running) >= MAX_RUNNING:
            self._post(Message(ELSEWHERE, call))
            return
        scope = self._running[call] = anyio.CancelScope()
        self._tasks.start_soon(self._answer, call, body, scope)

    async def _answer(self, call: int, body: bytes, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                reply = await self._serve(body)
                if reply is None:
                    self._post(Message(ELSEWHERE, call))
                    return
                for start in range(0, len(reply) or 1, MAX_BODY):
                    while len(self._unsent) >= FEW_UNSENT:
                        await self._has_room.wait()
                    is_last = start + MAX_BODY >= len(reply)
                    body = reply[start : start + MAX_BODY]
                    self._post(Message(REPLY if is_last else PART, call, body))
        finally:
            del self._running[call]

    def _post(self, message: Message) -> None:
        """Write a message now, or as soon as there is room."""
        if self._is_over or (not self._unsent and self._put(message)):
            return
        self._unsent.append(message)
        self._is_stuck.set()
        if len(self._unsent) > MAX_UNSENT:
            self._fail(ProtocolError("shared memory", why="it takes no messages"))

    def _put(self, message: Message) -> bool:
        try:
            return self._outbox.put(message)
        except ProtocolError as error:
            self._fail(error)
            return False

    def _fail(self, error: ProtocolError) -> None:
        """End, in the task that takes what comes."""
        self._failure = error
        if not self._is_over:
            self._waiter.wake()

    def _take_replies(self) -> None:
        """Take what was still answered by one who has left since."""
        with contextlib.suppress(ProtocolError):
            while (message := self._inbox.take()) is not None:
                if message.kind in (PART, REPLY) and message.call in self._waiting:
                    self._waiting[message.call].take(message)

    async def _send_on(self) -> None:
        while True:
            await self._is_stuck.wait()
            self._is_stuck = anyio.Event()
            pause = RETRY_SECONDS
            while self._unsent:
                while self._unsent and self._put(self._unsent[0]):
                    self._unsent.popleft()
                    pause = RETRY_SECONDS
                if len(self._unsent) < FEW_UNSENT:
                    self._has_room.set()
                    self._has_room = anyio.Event()
                await anyio.sleep(pause)
                pause = min(2 * pause, LONGEST_RETRY)


class _Waiting:
    """A call that waits for its reply."""

    __slots__ = ("is_answered", "is_lost", "over", "reply")

    def __init__(self) -> None:
        self.reply = bytearray()
        self.over = anyio.Event()
        self.is_answered = False
        self.is_lost = False

    def take(self, message: Message) -> None:
        """Take a message about it.

        Raises:
            ProtocolError: more than a reply can be.
        """
        if self.over.is_set():
            raise ProtocolError("shared memory", why="an answer after the answer")
        self.reply += message.body
        if len(self.reply) > MAX_REPLY:
            raise ProtocolError("shared memory", why="a reply that is too long")
        self.is_answered = message.kind == REPLY
        if message.kind != PART:
            self.over.set()


def make_rings(peer: PeerIdentity, serve: Serve) -> tuple[Calls, tuple[int, ...]]:
    """Make a pair of rings; return it, and the `RINGS` descriptors for the other end.

    The descriptors are the caller's to close.

    Raises:
        OSError: the system has no such memory, or no more.
    """
    with contextlib.ExitStack() as undo:
        made: list[int] = []
        for make in (anonymous_memory, make_eventfd, make_eventfd):
            made.append(make())
            undo.callback(os.close, made[-1])
        os.ftruncate(made[0], MEMORY_BYTES)
        seal_size(made[0])
        calls = _open(made, FIRST, peer, serve)
        undo.pop_all()
    return calls, tuple(made)


def take_rings(descriptors: list[int], peer: PeerIdentity, serve: Serve) -> Calls:
    """Return what another process has made; the descriptors stay the caller's.

    Raises:
        ProtocolError: they are not what they must be.
        OSError: the memory can't be mapped.
    """
    if check_memory(descriptors[0]) != MEMORY_BYTES:
        raise ProtocolError("shared memory", why="rings of another size")
    check_eventfd(descriptors[1:])
    return _open(descriptors, SECOND, peer, serve)


def _open(descriptors: list[int], side: int, peer: PeerIdentity, serve: Serve) -> Calls:
    with contextlib.ExitStack() as undo:
        memory = mmap.mmap(descriptors[0], MEMORY_BYTES)
        undo.callback(memory.close)
        own = []
        for descriptor in (descriptors[1 + side], descriptors[2 - side]):
            own.append(os.dup(descriptor))
            undo.callback(os.close, own[-1])
        undo.pop_all()
    return Calls(memory, side, own[0], own[1], peer, serve)
