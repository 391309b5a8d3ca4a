"""Calls between two processes of a host, by rings in memory that they share.

Whoever of the two has asked for shared memory makes the rings and gives their descriptors over the
Unix socket of the link; from then on calls go by them, in both directions, if they are short.
What a call may do is asked on the side that serves it exactly as for a stream
(``transport.Endpoint.begin_answer``). Memory that garbles a message ends the link, and the calls on
it fail as with a broken connection; calls after it take streams again.

A thread that calls writes to the ring itself, and looks for its reply itself for a moment.

    request    the body of a request frame; `call` is a number that the caller draws
    part       the beginning of a reply that is longer than a message
    reply      the body of a reply frame, or the rest of it
    elsewhere  the call was not begun, and is to come on a stream
    cancel     the caller has given up
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

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

_ANSWERS = (PART, REPLY, ELSEWHERE)

RINGS = 3
"""Descriptors of a pair of rings: the memory, where the maker sleeps, and where the other does."""

MAX_RUNNING = 1024
"""Calls served at a time for the peer: those that call back need as many as they are deep. Further
ones come on streams, as the grant allows."""

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

SPIN_SECONDS, LONGEST_SPIN = 200e-6, 500e-6
"""How long a thread that waits for a reply looks for it itself, before it sleeps: most replies that
are computed at once are there by then, and to be woken takes as long again. On a machine on which
they have lately taken somewhat longer, it looks for longer."""

LOOK_SECONDS = 0.2
"""Between two looks whether a thread is still to wait."""

TURN_SECONDS = 1e-3
"""How long calls that are answered at once may keep the event loop from others."""

Serve = Callable[[bytes], bytes | Coroutine[Any, Any, bytes | None]]
"""What is answered at once, or what is to be awaited for it."""


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
        self._waiting: dict[int, _Waiting | _Sleeping] = {}
        self._lock = threading.Lock()
        """Held by whoever writes to a ring or takes from one."""
        self._spinning = 0
        """Threads that look for replies themselves."""
        self._spin_seconds = SPIN_SECONDS
        """For how long the next one does."""
        self._found: deque[Message] = deque()
        """What they have found for the event loop."""
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

    def call_in_thread(
        self, request: bytes, timeout: float, is_over: Callable[[], bool]
    ) -> bytes | None:
        """See ``transport.Carrier``."""
        number, waiting = next(self._numbers), _Sleeping()
        self._waiting[number] = waiting
        try:
            if self._tasks is None or self._unsent:
                return None
            if not self._put(Message(REQUEST, number, request)):
                return None
            began = time.perf_counter()
            self._spin(waiting)
            end = time.monotonic() + timeout
            while not waiting.over.wait(max(0.0, min(end - time.monotonic(), LOOK_SECONDS))):
                if time.monotonic() >= end or is_over():
                    raise TimeoutError
            took = time.perf_counter() - began
            is_long = took > LONGEST_SPIN
            self._spin_seconds = SPIN_SECONDS if is_long else max(SPIN_SECONDS, 2 * took)
        except BaseException:
            if not waiting.over.is_set():
                self._put(Message(CANCEL, number))  # without room, its own limit ends it there
            raise
        finally:
            self._waiting.pop(number, None)
        if waiting.is_lost:
            raise ConnectionClosed("a call", peer=self._peer, stage="answer")
        return bytes(waiting.reply) if waiting.is_answered else None

    def close(self) -> None:
        """Let go of everything; calls under way fail. May be repeated."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self.release()
        for waiting in tuple(self._waiting.values()):
            if not waiting.over.is_set():
                waiting.is_lost = True
                waiting.over.set()

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
        end = time.perf_counter() + TURN_SECONDS
        for _ in range(MESSAGES_A_TURN):
            message = self._next()
            if message is None:
                return False
            self._took(message)
            if time.perf_counter() > end:
                break
        return True

    def _next(self) -> Message | None:
        """Take what comes next for the event loop; give threads what is theirs on the way.

        What threads have found for it comes first: it was taken before.
        """
        with self._lock:
            if self._found:
                return self._found.popleft()
            while not self._is_over and (message := self._inbox.take()) is not None:
                if not self._has_woken(message):
                    return message
            return None

    def _has_woken(self, message: Message) -> bool:
        """Give a message to the thread that waits for it, if one does. With the lock held.

        For two threads that take parts of one reply must not change their order.
        """
        waiting = self._waiting.get(message.call) if message.kind in _ANSWERS else None
        if not isinstance(waiting, _Sleeping):
            return False
        waiting.take(message)
        return True

    def _spin(self, waiting: _Sleeping) -> None:
        """Look for a reply, in its own thread, for a moment."""
        end = time.perf_counter() + min(self._spin_seconds, LONGEST_SPIN)
        with self._lock:
            if self._is_over:
                return
            self._spinning += 1
            self._waiter.disarm()
        try:
            while not waiting.over.is_set() and time.perf_counter() < end:
                if self._look():
                    continue
                os.sched_yield()
        finally:
            with self._lock:
                self._spinning -= 1
                if not self._spinning and not self._is_over:
                    self._waiter.arm()
                    if not self._inbox.is_empty:
                        self._waiter.wake()

    def _look(self) -> bool:
        """Take a message in a thread that waits for one; return whether there was one."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            # Those found before are the loop's, and come before what is there now.
            message = None if self._is_over or self._found else self._inbox.take()
            if message is None:
                return False
            if not self._has_woken(message):
                self._found.append(message)
                self._waiter.wake()
        except ProtocolError as error:
            self._failure = error
            self._waiter.wake()
            return False
        finally:
            self._lock.release()
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
        served = self._serve(body)
        if isinstance(served, bytes):
            if len(self._unsent) < FEW_UNSENT:
                for message in _replies(call, served):
                    self._post(message)
                return
            served = _given(served)
        scope = self._running[call] = anyio.CancelScope()
        self._tasks.start_soon(self._answer, call, served, scope)

    async def _answer(
        self, call: int, serving: Coroutine[Any, Any, bytes | None], scope: anyio.CancelScope
    ) -> None:
        try:
            with scope:
                reply = await serving
                if reply is None:
                    self._post(Message(ELSEWHERE, call))
                    return
                for message in _replies(call, reply):
                    while len(self._unsent) >= FEW_UNSENT:
                        await self._has_room.wait()
                    self._post(message)
        finally:
            serving.close()  # if it was cancelled before it began
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
            with self._lock:
                return not self._is_over and self._outbox.put(message)
        except ProtocolError as error:
            self._fail(error)
            return False

    def _fail(self, error: ProtocolError) -> None:
        """End, in the task that takes what comes."""
        with self._lock:  # else its eventfd may be closed under it, and the number another's
            self._failure = error
            if not self._is_over:
                self._waiter.wake()

    def _take_replies(self) -> None:
        """Take what was still answered by one who has left since."""
        with contextlib.suppress(ProtocolError):
            while (message := self._next()) is not None:
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


def _replies(call: int, reply: bytes) -> Iterator[Message]:
    """Cut a reply into messages."""
    while len(reply) > MAX_BODY:
        yield Message(PART, call, reply[:MAX_BODY])
        reply = reply[MAX_BODY:]
    yield Message(REPLY, call, reply)


async def _given(reply: bytes) -> bytes:
    return reply


class _Reply:
    """What comes of a call's reply."""

    over: anyio.Event | _Once

    def __init__(self) -> None:
        self.reply = bytearray()
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


class _Waiting(_Reply):
    """A call that a task waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.over: anyio.Event = anyio.Event()


class _Once:
    """A `threading.Event` for one thread that waits: made in a tenth of the time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def wait(self, timeout: float) -> bool:
        return self._is_set or self._lock.acquire(timeout=timeout)


class _Sleeping(_Reply):
    """A call that a thread waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.over: _Once = _Once()


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
