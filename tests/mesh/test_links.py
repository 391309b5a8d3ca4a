"""Links to the machines in the peers book, under a clock that the test moves."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from auth import AccessDenied, MeshError, NodeId, SecretKey
from mesh.daemon.links import FIRST_PAUSE, LONGEST_PAUSE, MAX_DIALS, keep_links
from mesh.peerbook import PeerBook
from transport import Unreachable

pytestmark = pytest.mark.anyio


TURNS = 50
"""Turns of the loop in which everybody has come to a wait: a dial takes a few of them."""


class VirtualTime:
    """A clock that goes on when everybody waits, and then to the one that is due next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, int, anyio.Event]] = []
        self._order = itertools.count()

    async def sleep(self, seconds: float) -> None:
        due = anyio.Event()
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._order), due))
        await due.wait()

    async def run_until(self, end: float) -> None:
        while True:
            for _ in range(TURNS):
                await anyio.lowlevel.checkpoint()
            if not self._sleepers or self._sleepers[0][0] > end:
                self.now = end
                return
            self.now, _, due = heapq.heappop(self._sleepers)
            due.set()


class Connection:
    outbound = False

    def __init__(self) -> None:
        self.closed = anyio.Event()

    async def wait_closed(self) -> None:
        await self.closed.wait()


class FakeNode:
    """A node whose dials fail or succeed as a test says, each noted with its time."""

    def __init__(self, time: VirtualTime, node_id: NodeId) -> None:
        self.node_id = node_id
        self.dials: list[tuple[float, NodeId]] = []
        self.error: MeshError | None = Unreachable("connecting", why="nobody there")
        self.open: dict[NodeId, Connection] = {}
        self.hang = False
        self._time = time

    async def dial(self, node_id: NodeId, *, once: bool) -> Connection:
        assert once, "the pauses are the links' own"
        self.dials.append((self._time.now, node_id))
        if self.hang:
            await anyio.sleep_forever()
        if self.error is not None:
            raise self.error
        return self.open.setdefault(node_id, Connection())

    def pauses(self) -> list[float]:
        times = [time for time, _ in self.dials]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@asynccontextmanager
async def links(path: Path, peers: int = 1) -> AsyncIterator[Any]:
    """Keep links to peers in a book, under virtual time."""
    time = VirtualTime()
    node = FakeNode(time, SecretKey.generate().node_id)
    book = PeerBook(path / "peers.json")
    ids = [SecretKey.generate().node_id for _ in range(peers)]
    for node_id in (*ids, node.node_id):
        book.remember(node_id, addresses=[("192.0.2.1", 4433)])
    refusals: list[MeshError] = []

    async def keep() -> None:
        await keep_links(
            node,  # type: ignore[arg-type]
            book,
            lambda _, error: refusals.append(error),
            sleep=time.sleep,
        )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep)
        yield SimpleNamespace(time=time, node=node, book=book, ids=ids, refusals=refusals)
        tasks.cancel_scope.cancel()


async def test_pauses_double_to_a_minute_and_are_jittered(tmp_path: Path) -> None:
    async with links(tmp_path) as it:
        await it.time.run_until(400.0)
        pauses = it.node.pauses()
        assert len(pauses) > 8
        for number, pause in enumerate(pauses):
            longest = min(FIRST_PAUSE * 2**number, LONGEST_PAUSE)
            assert longest / 2 <= pause <= longest or math.isclose(pause, longest)
        assert max(pauses) <= LONGEST_PAUSE
        assert len({round(pause, 6) for pause in pauses}) == len(pauses)


async def test_a_success_begins_anew(tmp_path: Path) -> None:
    async with links(tmp_path) as it:
        await it.time.run_until(200.0)
        assert it.node.pauses()[-1] >= LONGEST_PAUSE / 2
        it.node.error = None
        await it.time.run_until(300.0)
        (peer,) = it.ids
        linked, dials = it.node.open.pop(peer), len(it.node.dials)
        await it.time.run_until(900.0)
        assert len(it.node.dials) == dials, "an open link is left alone"
        it.node.error = Unreachable("connecting", why="nobody there")
        lost_at = it.time.now
        linked.closed.set()
        await it.time.run_until(910.0)
        again = [time - lost_at for time, _ in it.node.dials[dials:]]
        assert FIRST_PAUSE / 2 <= again[0] <= FIRST_PAUSE
        assert again[1] - again[0] <= 2 * FIRST_PAUSE


async def test_a_lost_peer_is_dialled_at_least_three_times_in_five_seconds(tmp_path: Path) -> None:
    async with links(tmp_path) as it:
        it.node.error = None
        await it.time.run_until(10.0)
        it.node.error = Unreachable("connecting", why="nobody there")
        it.node.open[it.ids[0]].closed.set()
        dials = len(it.node.dials)
        await it.time.run_until(15.0)
        assert len(it.node.dials) - dials >= 3


async def test_its_own_key_in_the_book_is_itself(tmp_path: Path) -> None:
    async with links(tmp_path, peers=3) as it:
        await it.time.run_until(60.0)
        assert it.node.node_id in {entry.node_id for entry in it.book.entries()}
        assert {node_id for _, node_id in it.node.dials} == set(it.ids)


async def test_dials_at_a_time_are_bounded_and_many_do_not_come_together(tmp_path: Path) -> None:
    async with links(tmp_path, peers=3 * MAX_DIALS) as it:
        await it.time.run_until(30.0)
        second = [
            [time for time, node_id in it.node.dials if node_id == peer][1] for peer in it.ids
        ]
        assert len(set(second)) == len(second), "jitter spreads them"
        it.node.hang = True
        dials = len(it.node.dials)
        await it.time.run_until(200.0)
        assert len(it.node.dials) - dials == MAX_DIALS


async def test_a_peer_that_is_forgotten_is_dialled_no_more(tmp_path: Path) -> None:
    async with links(tmp_path) as it:
        await it.time.run_until(1.0)
        it.book.forget(it.ids[0])
        await it.time.run_until(5.0)
        dials = len(it.node.dials)
        await it.time.run_until(200.0)
        assert len(it.node.dials) == dials
        it.book.remember(it.ids[0], addresses=[("192.0.2.1", 4433)])
        await it.time.run_until(203.0)
        assert len(it.node.dials) > dials


async def test_a_refusal_is_told_once_for_each_reason(tmp_path: Path) -> None:
    async with links(tmp_path) as it:
        it.node.error = AccessDenied("connecting", why="not today")
        await it.time.run_until(100.0)
        it.node.error = AccessDenied("connecting", why="nor tomorrow")
        await it.time.run_until(300.0)
        assert [error.why for error in it.refusals] == ["not today", "nor tomorrow"]
