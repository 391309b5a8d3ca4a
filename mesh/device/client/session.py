"""What a program and one peer's executor say to each other, from any thread of the program.

Operations are queued and go on their way in batches; nobody waits for them. Only who asks, for
elements or for a shape that depends on them, waits for an answer. Queueing is one append to a
deque, which orders the operations of all threads and needs no lock: an operation can only use
handles that were queued before it was called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

from auth import MeshError
from mesh.device import wire
from mesh.device.errors import DeviceBusy, DeviceError, SessionLost, UnsupportedOnDevice
from transport import CborValue, ProtocolError

if TYPE_CHECKING:
    from mesh.device.client.moving import Mover

__all__ = ["ORIGINS", "Carrier", "Order", "Recording", "Request", "Session", "forked"]

BATCH = 256
"""Messages after which a batch goes on its way; later ones follow within a tick of the carrier."""

BATCH_BYTES = 1 << 19
"""Bytes of a batch of many messages."""

MAX_UNSENT = 1 << 11
"""Messages that the carrier's own thread may queue while there is no room for them."""

MAX_TEMPLATES = 1 << 14
"""Templates a session keeps; a program whose shapes vary without end forgets the oldest."""

RETIRED = 256
"""Templates that are looked up no more, but that another thread may just be about to use."""

ORIGINS = 1 << 13
"""Operations of which it is known where in the program they were called."""

Origin = tuple[int, CodeType, int]


class Order(bytes):
    """What is sent as a batch of its own: it is for the node, and not for the executor."""


@dataclasses.dataclass(slots=True)
class Recording:
    """What goes to the peer meanwhile.

    Attributes:
        first: every handle from this one on was made meanwhile.
        batches: what was sent, but for `released`.
        released: handles made before and let go of meanwhile. The peer has them until it is over.
        is_tentative: whether what can't be run again is let through, and spoils it.
        is_spoiled: whether there was such a thing.
    """

    first: int
    is_tentative: bool = False
    is_spoiled: bool = False
    batches: list[bytes] = dataclasses.field(default_factory=list)
    released: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, slots=True)
class _Forgotten:
    """Queued like a message: sequences that are not run any more, and what was kept for them."""

    numbers: tuple[int, ...]
    pins: frozenset[int]


class Carrier(Protocol):
    """A session's way to its peer."""

    mover: Mover | None

    def spawn(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `task` in the loop, for as long as the session lives."""

    def send(self, batch: bytes, *, wait: bool) -> bool:
        """Take a batch, waiting for room if need be; return whether it was taken.

        Raises:
            MeshError: it can't be sent.
        """

    def is_in_loop(self) -> bool:
        """Return whether this is the thread that sends, and so must not wait for that."""

    def check_waiting(self) -> None:
        """Raise `DeviceError` if this thread may not wait for an answer."""

    def close(self) -> None:
        """End the session at the peer, once everything queued was sent."""


class Request:
    """An answer that is waited for.

    Args:
        what: for messages.
        sink: where the elements go, if those are wanted.
    """

    def __init__(self, what: str, sink: memoryview | None = None) -> None:
        self.what = what
        self.future: Future[CborValue] = Future()
        self._sink = sink
        self._filled = 0

    def take(self, answer: wire.Answer) -> bool:
        """Take a part of the answer; return whether that was the last.

        Raises:
            ProtocolError: more comes than was asked for, or less.
        """
        if answer.data is None:
            if self._sink is not None:
                raise ProtocolError(self.what, why="a value came where elements were asked for")
            self.future.set_result(answer.value)
            return True
        end = self._filled + len(answer.data)
        if self._sink is None or end > len(self._sink):
            raise ProtocolError(self.what, why="more elements came than were asked for")
        self._sink[self._filled : end] = answer.data
        self._filled = end
        if answer.last:
            if end != len(self._sink):
                raise ProtocolError(self.what, why="fewer elements came than were asked for")
            self.future.set_result(None)
        return answer.last


class Session:
    """One peer's executor, for all of this program's devices there.

    Args:
        label: how to name the peer.

    Attributes:
        queue: what is to be sent: messages, and numbers of handles to be released.
        limit: how many of them make a batch. 1 while the carrier sleeps, 0 when all is lost.
        error: why all is lost.
        moves: whether the peer takes and gives large tensors beside the operations.
        layouts: of the templates that are defined, by number.
    """

    def __init__(self, label: Callable[[], str]) -> None:
        self.label = label
        self.queue: deque[bytes | int | _Forgotten] = deque()
        self.limit = 1
        self.error: MeshError | None = None
        self.moves = False
        self.origins: list[Origin | None] = [None] * ORIGINS
        self.next_id = itertools.count(1).__next__
        self._next_request = itertools.count(1).__next__
        self._next_template = itertools.count(1).__next__
        self.next_sequence = itertools.count(1).__next__
        self.layouts: dict[int, wire.Layout] = {}
        self._lock = threading.Lock()
        self._requests: dict[int, Request] = {}
        self._templates: deque[tuple[int, Callable[[], object]]] = deque()
        self._retired: deque[int] = deque()
        self._recording: Recording | None = None
        self._pins: Counter[int] = Counter()
        self._held: set[int] = set()
        """Handles that were let go of here, and that something captured uses."""
        self._carrier: Carrier | None = None
        _sessions.add(self)

    def carry_by(self, carrier: Carrier) -> None:
        """Set the way to the peer."""
        self._carrier = carrier

    # -- sending

    def define(
        self, template: wire.Template, layout: wire.Layout, forget: Callable[[], object]
    ) -> int:
        """Queue the definition of a template and return its number.

        Args:
            template: which.
            layout: of its operations.
            forget: called, in this or a later call, when it is not to be used any more.
        """
        number = self._next_template()
        self.layouts[number] = layout
        self.queue.append(wire.define(number, template))
        self._templates.append((number, forget))
        if len(self._templates) > MAX_TEMPLATES:
            oldest, drop = self._templates.popleft()
            drop()
            self._retired.append(oldest)
        if len(self._retired) > RETIRED:
            retired = self._retired.popleft()
            self.layouts.pop(retired, None)
            self.queue.append(wire.forget(retired))
        return number

    def emit(self, message: bytes) -> None:
        """Queue a message.

        Raises:
            MeshError: all is lost.
            DeviceBusy: the queue is full, and this thread can't wait.
        """
        queue = self.queue
        queue.append(message)
        if len(queue) >= self.limit:
            self.flush()

    def flush(self, *, wait: bool = True) -> bool:
        """Send what is queued; return whether all of it was.

        Args:
            wait: for room, and for another thread that does the same. In the carrier's own thread
                nobody waits: what is queued goes when there is room.

        Raises:
            MeshError: as `emit`.
        """
        if self.error is not None:
            self.queue.clear()
            raise self.lost()
        carrier = self._carrier
        assert carrier is not None
        must_not_wait = wait and carrier.is_in_loop()
        if self._send_batches(carrier, wait=wait and not must_not_wait):
            return True
        if must_not_wait and len(self.queue) > MAX_UNSENT:
            raise DeviceBusy(
                "sending to a device",
                peer=self.label(),
                why=f"{len(self.queue)} messages are queued, and this thread is the one that "
                "sends them",
                fix="Await mesh.device.synchronize_async(device) now and then, or compute in a "
                "thread.",
            )
        return False

    def _send_batches(self, carrier: Carrier, *, wait: bool) -> bool:
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            while batch := self._next_batch():
                taken = False
                try:
                    taken = carrier.send(batch, wait=wait)
                finally:
                    if not taken:  # what is interrupted is sent later
                        self.queue.appendleft(batch)
                if not taken:
                    return False
                if self._recording is not None:
                    self._recording.batches.append(batch)
            self.limit = BATCH
            return True
        finally:
            self._lock.release()

    def ask(
        self,
        number: int,
        layout: wire.Layout,
        values: tuple[float, ...],
        what: str,
        sink: memoryview | None = None,
    ) -> Request:
        """Send an operation that is answered, after everything before it.

        Raises:
            MeshError: as `emit`.
        """
        return self._request(
            Request(what, sink), lambda key: wire.ask(key, number, layout, *values)
        )

    def order(self, make: Callable[[int], Order], what: str) -> Request:
        """Send the node an order that is answered, after everything before it.

        Args:
            make: returns the order, given the number of the request.
            what: for messages.

        Raises:
            MeshError: as `emit`.
        """
        return self._request(Request(what), make)

    def promise(self, what: str) -> tuple[Request, Callable[[], object]]:
        """Return a request that somebody here answers, and what to call then.

        It fails, as those of the peer's, when all is lost.
        """
        request, key = Request(what), self._next_request()
        self._requests[key] = request
        if self.error is not None:
            self._fail_requests()
        return request, lambda: self._requests.pop(key, None)

    # -- what is captured, see `capturing`

    @contextlib.contextmanager
    def recording(self, *, is_tentative: bool = False) -> Iterator[Recording]:
        """Record what goes to the peer during the block.

        Args:
            is_tentative: let what can't be run again through, and say so in the end.

        Raises:
            DeviceError: something is recorded already, or this thread is the one that sends.
            MeshError: as `emit`.
        """
        if not self.flush():
            raise DeviceError(
                "capture of operations",
                peer=self.label(),
                why="this thread is the one that sends them",
                fix="Capture in another thread.",
            )
        with self._lock:
            if self._recording is not None:
                raise DeviceError(
                    "capture of operations", peer=self.label(), why="others are captured now"
                )
            recording = self._recording = Recording(self.next_id(), is_tentative)
        try:
            yield recording
        finally:
            with self._lock:
                self._recording = None
                self.queue.extend(recording.released)

    def pin(self, choose: Callable[[], Collection[int]]) -> None:
        """Keep handles at the peer, also when they are let go of here.

        Nothing is sent while `choose` returns which.
        """
        with self._lock:
            self._pins.update(choose())

    def forget_captured(self, numbers: tuple[int, ...], pins: frozenset[int]) -> None:
        """Have the peer forget sequences, and what was kept for them. Only queues."""
        self.queue.append(_Forgotten(numbers, pins))

    def check_not_recording(self, what: str) -> None:
        """Raise `UnsupportedOnDevice` while operations are captured: `what` can't be run again."""
        recording = self._recording
        if recording is not None and recording.is_tentative:
            recording.is_spoiled = True
        elif recording is not None:
            raise UnsupportedOnDevice(
                f"{what} while operations are captured",
                peer=self.label(),
                why="it is the program that would go on from it, and that is not run again",
                fix="Do it before or after the block.",
            )

    @property
    def records_tentatively(self) -> bool:
        """Whether what goes to the peer is recorded as far as it can be run again."""
        return self._recording is not None and self._recording.is_tentative

    def _is_kept(self, handle: int) -> bool:
        """Return whether a handle that was let go of must stay at the peer."""
        if handle in self._pins:
            self._held.add(handle)
            return True
        if self._recording is not None and handle < self._recording.first:
            self._recording.released.add(handle)
            return True
        return False

    def _unpinned(self, pins: frozenset[int]) -> list[int]:
        """Return which handles nothing needs any more."""
        self._pins.subtract(pins)
        over = [handle for handle in pins if not self._pins[handle]]
        for handle in over:
            del self._pins[handle]
        gone = [handle for handle in over if handle in self._held]
        self._held.difference_update(gone)
        return gone

    def _request(self, request: Request, make: Callable[[int], bytes]) -> Request:
        self.check_not_recording(request.what)
        key = self._next_request()
        self._requests[key] = request
        try:
            self.queue.append(make(key))
            self.flush()
        except BaseException:
            # Unless all is lost it is queued, or on its way, and will be answered.
            if self.error is not None:
                self._requests.pop(key, None)
            raise
        if self.error is not None:
            self._fail_requests()
        return request

    @property
    def carrier(self) -> Carrier | None:
        """The way to the peer; None until it is set."""
        return self._carrier

    def result(self, request: Request) -> CborValue:
        """Wait for an answer.

        Raises:
            MeshError: the operation failed, or one before it that it depends on; or all is lost.
            DeviceError: this thread can't wait, because it would have to bring the answer.
        """
        if not request.future.done():
            assert self._carrier is not None
            self._carrier.check_waiting()
        return request.future.result()

    def _next_batch(self) -> bytes:
        """Return what is queued as one batch, empty if nothing is."""
        queue = self.queue
        take = queue.popleft
        parts: list[bytes] = []
        put = parts.append
        size = 0
        keeps = self._pins or self._recording is not None
        while queue and size < BATCH_BYTES:
            item = take()
            if type(item) is bytes:
                size += len(item)
                if size > wire.MAX_BATCH - 64 and parts:
                    queue.appendleft(item)
                    break
                put(item)
            elif type(item) is int:
                released = [item]
                while queue and type(following := queue[0]) is int:
                    take()
                    released.append(following)
                if keeps:
                    released = [handle for handle in released if not self._is_kept(handle)]
                if released:
                    put(wire.release(released))
                    size += 8 * len(released)
            elif type(item) is _Forgotten:
                parts.extend(map(wire.drop, item.numbers))
                if released := self._unpinned(item.pins):
                    put(wire.release(released))
            else:
                assert isinstance(item, Order)
                if not parts:
                    return item
                queue.appendleft(item)
                break
        return b"".join(parts)

    # -- called by the carrier, in its thread

    def answered(self, data: memoryview) -> None:
        """Take one answer of the peer's.

        Raises:
            ProtocolError: it can't be; the session is lost.
        """
        answer = wire.read_answer(data, self.label())
        failure = answer.failure
        if answer.request == 0:
            assert failure is not None
            self.fail(failure.error)
            return
        request = self._requests.get(answer.request)
        if request is None:
            raise ProtocolError("an answer from a device", peer=self.label(), why="nobody asked")
        if failure is not None:
            del self._requests[answer.request]
            request.future.set_exception(self._explained(failure))
        elif request.take(answer):
            del self._requests[answer.request]

    def fail(self, error: MeshError) -> None:
        """Lose everything: whoever waits, reads or computes is told of `error` from now on."""
        if self.error is None:
            self.error = error
        self.limit = 0
        self._fail_requests()

    @property
    def waiting(self) -> int:
        """How many answers are awaited."""
        return len(self._requests)

    def close(self) -> None:
        """Let go of everything at the peer."""
        self.fail(SessionLost("use of a device", peer=self.label(), why="it was closed"))
        if self._carrier is not None:
            self._carrier.close()

    def lost(self) -> MeshError:
        """Return an error that says why all is lost, for one more caller."""
        cause = self.error
        assert cause is not None
        return SessionLost(
            "use of a device",
            peer=self.label(),
            why=f"its tensors are lost: {cause}",
            fix="Open the device again and make them anew.",
        )

    def _fail_requests(self) -> None:
        while self._requests:
            try:
                _, request = self._requests.popitem()
            except KeyError:
                return  # another thread took the last
            with contextlib.suppress(InvalidStateError):  # it was answered just now
                request.future.set_exception(self.lost())

    def _explained(self, failure: wire.Failure) -> MeshError:
        """Return the error of a failed operation with where it was called."""
        error = failure.error
        origin = self.origins[failure.handle % ORIGINS]
        if origin is not None and origin[0] == failure.handle and failure.handle:
            error.what = f"{error.what}, called at {_line(origin[1], origin[2])},"
        return error


def _line(code: CodeType, instruction: int) -> str:
    """Return file and line of an instruction: frames tell the latter only at a price."""
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if number is not None and start <= instruction < end:
            line = number
    return f"{code.co_filename}:{line}"


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def forked() -> None:
    """Have no session be used in a process forked from the one that opened it."""
    for session in list(_sessions):
        session._lock = threading.Lock()
        session.fail(
            DeviceError(
                "use of a device",
                why="it was opened by the process that this one was forked from",
                fix="Open it in each process, or start processes with 'spawn'.",
            )
        )
