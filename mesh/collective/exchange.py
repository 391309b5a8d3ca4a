"""What the algorithms need of a network: messages between ranks, posted now and awaited later.

Algorithms run on a thread of their group. They post sends and receives, which never blocks, and
wait for the resulting transfers, always with a deadline. An `Exchange` moves the bytes straight
between the posted buffers.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from mesh.collective.errors import CollectiveError

if TYPE_CHECKING:
    from mesh.collective.host.board import Board
    from mesh.collective.levels import Hosts

__all__ = [
    "COLLECTIVE",
    "Channel",
    "Check",
    "Exchange",
    "Header",
    "Messages",
    "Signature",
    "Transfer",
]

Channel: TypeAlias = int
"""Messages of a pair of ranks keep their order within a channel, and have none between two."""

COLLECTIVE: Channel = -1
"""The channel of the operations that all ranks take part in. A tag, from 0 up, is its own."""


class Signature(NamedTuple):
    """What a rank called, as far as all ranks must agree.

    Attributes:
        name: ``"all_reduce"``.
        dtype: torch's name of the element type, ``"float32"``; empty where nothing is moved.
        numel: number of elements where all ranks must have the same, else None.
        detail: what else must be the same: ``"SUM"``, ``"root 0"``.
    """

    name: str
    dtype: str = ""
    numel: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        count = None if self.numel is None else f"{self.numel} elements"
        parts = [part for part in (self.dtype, count, self.detail) if part]
        return f"{self.name}({', '.join(parts)})"


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What goes before a message's bytes.

    Attributes:
        signature: what the sender called.
        sequence: number of the operation in its group; 0 for tagged messages.
        part: number of the message within its operation and pair of ranks.
        nbytes: length of the payload.
    """

    signature: Signature
    sequence: int
    part: int
    nbytes: int


Check: TypeAlias = Callable[[Header], None]
"""Raises `CollectiveMismatch` unless a message is the one expected. Called on any thread."""


class Transfer:
    """One message on its way. The exchange completes it once, on any thread; anyone may wait.

    Attributes:
        peer: rank of the other side; -1 for any, until there is a message.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_latch", "_lock", "peer")

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self._lock = threading.Lock()
        self._latch = threading.Lock()
        self._latch.acquire()
        self._done = False
        self._error: CollectiveError | None = None
        self._callbacks: list[Callable[[Transfer], None]] = []

    @property
    def done(self) -> bool:
        """Whether the transfer ended, one way or the other."""
        return self._done

    @property
    def error(self) -> CollectiveError | None:
        """Why it failed, once it is done."""
        return self._error

    def wait(self, deadline: float) -> None:
        """Wait for the end without holding the GIL.

        Args:
            deadline: on the clock of ``time.monotonic``.

        Raises:
            TimeoutError: the deadline passed first.
            CollectiveError: the transfer failed. The instance is shared: raise one of your own.
        """
        if not self._done:
            left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
            if not self._latch.acquire(timeout=left):
                raise TimeoutError
            self._latch.release()  # the next waiter's turn
        if self._error is not None:
            raise self._error

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call `callback` with this transfer at its end, on the completing thread, or now if over.

        It must be quick and must not raise: the completing thread may be the network's.
        """
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, error: CollectiveError | None = None) -> None:
        """End the transfer; for exchanges. Only the first call counts."""
        with self._lock:
            if self._done:
                return
            self._error = error
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
        self._latch.release()
        for callback in callbacks:
            callback(self)


class Messages(Protocol):
    """What operations that all ranks take part in need. Methods may be called from any thread."""

    @property
    def rank(self) -> int:
        """This side's rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def group(self) -> str:
        """Name of the group, for messages to people."""

    @property
    def board(self) -> Board | None:
        """The memory that all ranks share, if they are on one host."""

    @property
    def hosts(self) -> Hosts | None:
        """Which ranks share memory, if some do, and not all."""

    @property
    def failure(self) -> CollectiveError | None:
        """What broke the group, or None while it is whole."""

    def label(self, rank: int) -> str:
        """Return how to name `rank` to people: ``"rank 2 (k7f3-9q2m)"``."""

    def post_send(
        self,
        peer: int,
        channel: Channel,
        header: Header,
        payload: memoryview,
        deadline: float | None = None,
    ) -> Transfer:
        """Send one message. The payload must not change until its receiver has it.

        In a broken group all transfers fail at once.

        Args:
            peer: rank to send to.
            channel: where it is matched in order.
            header: what the receiver checks.
            payload: its bytes.
            deadline: a transfer that is not done by then fails with `CollectiveTimeout` and breaks
                the group. None if the caller waits with a deadline of its own.
        """

    def post_receive(
        self,
        peer: int,
        channel: Channel,
        check: Check,
        into: memoryview,
        deadline: float | None = None,
    ) -> Transfer:
        """Receive the next message of `channel` into `into`, which has its exact length.

        `check` sees the header first. A mismatch fails the transfer and breaks the group.
        Deadlines as for `post_send`.
        """

    def fail(self, error: CollectiveError) -> None:
        """Break the group: fail all transfers, now and later, and tell the other ranks why."""

    def close(self, timeout: float) -> None:
        """Leave the group: send what was posted, within `timeout` seconds, and say goodbye."""


class Exchange(Messages, Protocol):
    """Messages among the ranks of one group, tagged ones included."""

    def post_receive_any(
        self,
        channel: Channel,
        check: Callable[[int], Check],
        into: memoryview,
        deadline: float | None = None,
    ) -> Transfer:
        """Receive the next message of `channel`, from whichever rank has one, as `post_receive`.

        The transfer's ``peer`` tells from whom. Receives that name a rank come first. `check` is
        called with the rank.
        """
