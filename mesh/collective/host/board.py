"""The memory that the ranks of one host share, and the rounds in which they use it.

In a *round* each rank fills its box, raises its counter, waits until all others have raised theirs,
and reads of their boxes what is for it. Rounds are counted through the life of the group, and boxes
of even and odd ones are two: who shows round k + 1 has read all of round k - 1, so that the box of
that round may be filled again. Nothing is ever acknowledged.

Whatever lies there may change at any moment, at the will of another rank, who is a member of the
job, but may be in error: numbers are read once and checked, and no memory is addressed by them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from mesh.collective.errors import CollectiveError
from mesh.collective.host.layout import Layout
from tensor_bridge.lanes.shared.doorbell import Bell, Gone, Waiter

__all__ = ["Board", "BoardClosed", "Gone"]

CLOSE_SECONDS = 5.0
"""For the operation that is under way to notice that its group is left."""

TOGETHER_SECONDS = 0.25
"""Who dies within this time of another is told of together with it."""

MAX_LENGTHS = 64
"""Lengths of whole tensors for which views are kept; they cost a call more than they are looked at.
"""

_LEFT, _BROKEN = 1, 2


class BoardClosed(Exception):
    """This rank has left the group meanwhile."""


class Board:
    """One rank's part in the shared memory. It owns the memory and the descriptors.

    Args:
        memory: mapped, of ``layout.nbytes``.
        layout: what lies where.
        ranks: for each place the rank in the group; ascending.
        place: this rank's place.
        own: this rank's eventfd.
        eventfds: the others', by place.
        pidfds: their processes, by place.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        layout: Layout,
        ranks: tuple[int, ...],
        place: int,
        *,
        own: int,
        eventfds: Mapping[int, int],
        pidfds: Mapping[int, int],
    ) -> None:
        self.layout = layout
        self.ranks = ranks
        self.place = place
        self.others = tuple(each for each in range(layout.size) if each != place)
        self.count = 0
        """Rounds that this rank has shown."""
        self.bytes = memoryview(memory)
        self.words = memoryview(memory).cast("Q")
        self.boxes = [(self._box(each, 0), self._box(each, 1)) for each in range(layout.size)]
        """For each place its boxes of even and odd rounds."""
        self.counters = [layout.counter(each) for each in range(layout.size)]
        self.headers = [
            (layout.header(each, 0), layout.header(each, 1)) for each in range(layout.size)
        ]
        """For each place the offsets of its headers of even and odd rounds."""
        self.is_closed = False
        """Whether this rank has left."""
        self._calls = [b"", b""]
        """What this rank's headers hold."""
        self.why_closed: CollectiveError | None = None
        """What ended the group, if it is closed and this rank has not left it."""
        self._memory = memory
        self._own = own
        self._eventfds = dict(eventfds)
        self._pidfds = dict(pidfds)
        self._places = {pidfd: each for each, pidfd in pidfds.items()}
        self._bell = Bell(
            self.words,
            layout.counter(place),
            [(layout.flag(each), descriptor) for each, descriptor in eventfds.items()],
        )
        self._waiter = Waiter(self.words, layout.flag(place), own, list(pidfds.values()))
        self.wait = self._waiter.wait
        """Wait for the others, as `Waiter.wait`. Let `is_ready` raise `BoardClosed` if so."""
        self._boxes: dict[torch.dtype, list[torch.Tensor]] = {}
        self._heads: dict[tuple[torch.dtype, int], list[list[torch.Tensor]]] = {}
        self._process = os.getpid()
        self.in_use = threading.Lock()
        """Held by an operation, for which the memory is kept."""
        self._lock = threading.Lock()
        """Held by other threads to use this rank's eventfd: its number may be another's soon."""

    # An operation's.

    def call(self, sequence: int, header: bytes) -> None:
        """Write the header of the next round, as `encode` returned it.

        A header that is there already stays, and with it the other processors' copies of it.
        """
        parity = (self.count + 1) & 1
        start = self.headers[self.place][parity]
        self.words[start // 8] = sequence
        if header is not self._calls[parity]:
            self.bytes[start + 8 : start + 8 + len(header)] = header
            self._calls[parity] = header

    def show(self) -> None:
        """Begin the next round: let the others read what was written to its header and box."""
        self.count += 1
        self._bell.ring(self.count)

    def elements(self, place: int, parity: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a box as elements of `dtype`."""
        boxes = self._boxes.get(dtype)
        if boxes is None:
            count = self.layout.box_bytes // dtype.itemsize
            with torch.inference_mode(False):  # they are kept for operations in any mode
                boxes = self._boxes[dtype] = [
                    torch.frombuffer(
                        self._memory, dtype=dtype, count=count, offset=self.layout.box(each, odd)
                    )
                    for each in range(self.layout.size)
                    for odd in (0, 1)
                ]
        return boxes[2 * place + parity]

    def heads(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """Return the first `count` elements of all places' boxes of the next round."""
        heads = self._heads.get((dtype, count))
        if heads is None:
            if len(self._heads) >= MAX_LENGTHS:
                self._heads.clear()
            heads = self._heads[dtype, count] = [
                [self.elements(each, odd, dtype)[:count] for each in range(self.layout.size)]
                for odd in (0, 1)
            ]
        return heads[(self.count + 1) & 1]

    def _box(self, place: int, parity: int) -> memoryview:
        start = self.layout.box(place, parity)
        return self.bytes[start : start + self.layout.box_bytes]

    # Who is there.

    def has_left(self, place: int) -> bool:
        """Return whether a rank has left the group, which was whole."""
        return self.words[self.layout.left(place)] == _LEFT

    @property
    def is_deserted(self) -> bool:
        """Whether all others have left."""
        try:
            return self.is_closed or all(map(self.has_left, self.others))
        except ValueError:  # closed just now
            return True

    def lost(self, gone: Gone | None = None) -> tuple[int, ...]:
        """Return the places whose processes have ended, are ending, or are stopped.

        Args:
            gone: what has just been noticed; others may follow within a moment.
        """
        found = {self._places[each] for each in gone.descriptors} if gone else set()
        if gone:
            time.sleep(TOGETHER_SECONDS)
        watch = select.poll()
        for pidfd in self._places:
            watch.register(pidfd, select.POLLIN)
        found.update(self._places[pidfd] for pidfd, _ in watch.poll(0))
        found.update(each for each, pidfd in self._pidfds.items() if _is_ending(pidfd))
        return tuple(sorted(found))

    # From any thread.

    def wake(self) -> None:
        """Have an operation that waits look whether its group is broken."""
        with self._lock:
            if not self.is_closed:
                self._waiter.wake()

    def close(self, *, is_broken: bool = False, why: CollectiveError | None = None) -> None:
        """Leave: tell the others, and give up memory and descriptors. May be repeated.

        An operation that waits fails with `BoardClosed`. In a forked child nothing is done: both
        are the parent's.

        Args:
            is_broken: the group is, and the others are told why in another way: they are to wait
                for that.
            why: what ended the group here, if it was not this rank that has left.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self.is_closed:
                return
            self.why_closed = why
            self.is_closed = True
            self._waiter.wake()
        if not self.in_use.acquire(timeout=CLOSE_SECONDS):
            return  # some thread is in the memory, and does not come on: it is left where it is
        self.words[self.layout.left(self.place)] = _BROKEN if is_broken else _LEFT
        self._bell.ring(self.count)  # so that who waits for this rank looks
        self._boxes.clear()
        self._heads.clear()
        self.boxes.clear()
        for descriptor in (self._own, *self._eventfds.values(), *self._pidfds.values()):
            os.close(descriptor)
        self.words.release()
        self.bytes.release()
        with contextlib.suppress(BufferError):  # freed with the last tensor that lies there
            self._memory.close()
        self.in_use.release()


def _is_ending(pidfd: int) -> bool:
    """Return whether a process is stopped, or killed but not gone yet (proc(5)).

    On a busy machine one that was killed first may be gone last.
    """
    try:
        info = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
        process = Path(f"/proc/{int(_field(info, 'Pid'))}")
        state, *rest = (process / "stat").read_text().rpartition(")")[2].split()
        status = (process / "status").read_text()
        pending = int(_field(status, "SigPnd"), 16) | int(_field(status, "ShdPnd"), 16)
        return (
            state in _STOPPED_OR_DEAD
            or bool(int(rest[_FLAGS]) & _PF_EXITING)
            or bool(pending >> (signal.SIGKILL - 1) & 1)
        )
    except (OSError, ValueError, LookupError):
        return False  # it is gone, or hidden: its pidfd tells


def _field(text: str, name: str) -> str:
    return text.partition(f"{name}:")[2].split(maxsplit=1)[0]


_STOPPED_OR_DEAD = frozenset("TtZX")
_FLAGS = 5
"""Index of the kernel's flags of a process among what follows its state in ``/proc/PID/stat``."""
_PF_EXITING = 0x4
