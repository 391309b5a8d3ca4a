"""What a node holds of others: references whose values are elsewhere, and what their owners hear.

An owner is told what has come here and what nobody here has any more, in batches, again and again
until it has heard, or has not been there for so long that its leases are over.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

import anyio

from auth import MeshError, NodeId
from mesh.rpc.wire import MAX_NOTES, Fork, RefNotes
from transport import Backoff

__all__ = ["Held", "Holdings"]

FLUSH_SECONDS = 0.2
"""How often it is looked for references that nobody has any more. A finalizer may run amid
anything, in any thread: all that it can do is to leave a note."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two tries to tell an owner."""

PATIENCE = 60.0
"""Seconds for which an owner that can't be reached is tried."""

_log = logging.getLogger("quicmesh.rpc")

Tell = Callable[[NodeId, RefNotes], Awaitable[None]]


@dataclasses.dataclass(eq=False, slots=True)
class Held:
    """One fork of a reference of another node's, as long as somebody here has it.

    Attributes:
        owner: whose value it is.
        fork: what it is called there.
        created: done once the owner has it, or says why it can't; done from the start where the
            reference came from elsewhere.
    """

    owner: NodeId
    fork: Fork
    created: Future[None]


class Holdings:
    """The references that a node holds of others. In its event loop; what notes news, anywhere.

    Args:
        tell: says something to an owner; raises if it can't be known to have been heard.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._released: deque[tuple[NodeId, Fork]] = deque()
        self._arrived: deque[tuple[NodeId, Fork]] = deque()
        self._confirmed: defaultdict[NodeId, deque[Fork]] = defaultdict(deque)
        self._dropped: defaultdict[NodeId, deque[Fork]] = defaultdict(deque)
        self._telling: set[NodeId] = set()
        self._live: set[Fork] = set()

    def __len__(self) -> int:
        """Return how many references there are, or are still to be told of."""
        return len(self._live)

    def hold(self, held: Held) -> None:
        """Count a reference that somebody here has from now on."""
        self._live.add(held.fork)

    def released(self, owner: NodeId, fork: Fork) -> None:
        """Note that nobody here has it any more; may be called anywhere, as by a finalizer."""
        self._released.append((owner, fork))

    def arrived(self, held: Held) -> None:
        """Have its owner told that it has come; may be called in any thread."""
        self._arrived.append((held.owner, held.fork))

    def is_telling(self, owner: NodeId) -> bool:
        """Return whether an owner is still to be told something; may be called in any thread."""
        return (
            owner in self._telling
            or owner in self._confirmed
            or owner in self._dropped
            or any(owner == each for each, _ in (*self._arrived, *self._released))
        )

    async def run(self) -> None:
        """Tell owners what there is to tell, until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                self._collect()
                for owner in {*self._confirmed, *self._dropped} - self._telling:
                    self._telling.add(owner)
                    tasks.start_soon(self._tell_all, owner)
                await anyio.sleep(FLUSH_SECONDS)

    async def settle(self) -> None:
        """Tell owners now what there is to tell, one try each; for an end in good order."""
        self._collect()
        async with anyio.create_task_group() as tasks:
            for owner in {*self._confirmed, *self._dropped}:
                tasks.start_soon(self._try_once, owner)

    def _collect(self) -> None:
        while self._arrived:
            owner, fork = self._arrived.popleft()
            self._confirmed[owner].append(fork)
        while self._released:
            owner, fork = self._released.popleft()
            self._dropped[owner].append(fork)

    async def _tell_all(self, owner: NodeId) -> None:
        backoff, end = Backoff(FIRST_PAUSE, LONGEST_PAUSE), anyio.current_time() + PATIENCE
        try:
            while notes := self._take(owner):
                try:
                    await self._tell(owner, notes)
                    self._heard(notes)
                    backoff.reset()
                    continue
                except MeshError as error:
                    if anyio.current_time() > end:
                        _log.info("%s was not told of references: %s", owner.short, error)
                        self._heard(notes)
                        return
                    self._put_back(owner, notes)
                await anyio.sleep(backoff.pause())
        finally:
            self._telling.discard(owner)

    async def _try_once(self, owner: NodeId) -> None:
        while notes := self._take(owner):
            try:
                await self._tell(owner, notes)
            except MeshError as error:
                _log.info("%s was not told of references: %s", owner.short, error)
            self._heard(notes)

    def _take(self, owner: NodeId) -> RefNotes | None:
        confirmed = _first(self._confirmed, owner)
        dropped = _first(self._dropped, owner)
        if not confirmed and not dropped:
            return None
        return RefNotes(confirmed=confirmed, dropped=dropped)

    def _put_back(self, owner: NodeId, notes: RefNotes) -> None:
        self._confirmed[owner].extendleft(reversed(notes.confirmed))
        self._dropped[owner].extendleft(reversed(notes.dropped))

    def _heard(self, notes: RefNotes) -> None:
        self._live.difference_update(notes.dropped)


def _first(queues: defaultdict[NodeId, deque[Fork]], owner: NodeId) -> tuple[Fork, ...]:
    queue = queues.get(owner)
    if queue is None:
        return ()
    found = tuple(queue.popleft() for _ in range(min(MAX_NOTES, len(queue))))
    if not queue:
        del queues[owner]
    return found
