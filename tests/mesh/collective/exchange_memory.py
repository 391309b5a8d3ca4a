"""An exchange in memory, with threads as ranks; hostile in timing, exact in what it promises."""

from __future__ import annotations

import dataclasses
import mmap
import os
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from mesh.collective import CollectiveError, CollectiveTimeout, Header, Hosts, RankLeft, Transfer
from mesh.collective.exchange import Channel, Check
from mesh.collective.host import Board, Layout
from tensor_bridge.lanes.shared.doorbell import make_eventfd

T = TypeVar("T")


@dataclasses.dataclass
class _Sent:
    header: Header
    payload: memoryview
    transfer: Transfer


@dataclasses.dataclass
class _Posted:
    check: Check
    into: memoryview
    transfer: Transfer


@dataclasses.dataclass
class _Wanted:
    check: Callable[[int], Check]
    into: memoryview
    transfer: Transfer


class MemoryNetwork:
    """What the exchanges of one group share.

    Args:
        size: number of ranks.
        eager: complete sends at once, from a copy, instead of when they are received.
        jitter: seed for random pauses before each post; None for none.
        slow: rank whose messages leave its memory only some time after it sent them.
        box_bytes: share memory with boxes of so many bytes; None for messages alone.
        hosts: on how many hosts the ranks are, in turn.
    """

    def __init__(
        self,
        size: int,
        *,
        eager: bool = False,
        jitter: int | None = None,
        slow: int | None = None,
        box_bytes: int | None = None,
        hosts: int = 1,
    ) -> None:
        self.size = size
        self.eager = eager
        self.random = None if jitter is None else random.Random(jitter)
        self.lock = threading.RLock()
        self.sent: dict[tuple[int, int, Channel], deque[_Sent]] = defaultdict(deque)
        self.posted: dict[tuple[int, int, Channel], deque[_Posted]] = defaultdict(deque)
        self.wanted: dict[tuple[int, Channel], deque[_Wanted]] = defaultdict(deque)
        self.left: set[int] = set()
        self.ranks = [MemoryExchange(self, rank) for rank in range(size)]
        self.hosts = hosts
        self.boards: list[Board] = []
        leader_of = tuple(rank % hosts for rank in range(size))
        for first in range(min(hosts, size) if box_bytes is not None else 0):
            ranks = tuple(range(first, size, hosts))
            boards = make_boards(len(ranks), box_bytes, ranks=ranks) if len(ranks) > 1 else [None]
            for rank, board in zip(ranks, boards, strict=True):
                if hosts == 1:
                    self.ranks[rank].board = board
                else:
                    self.ranks[rank].hosts = Hosts(board, leader_of)
            self.boards += filter(None, boards)
        self.slow = slow
        self.messages = 0
        self.nbytes = 0

    def close(self) -> None:
        for board in self.boards:
            board.close()

    def match(self, key: tuple[int, int, Channel]) -> None:
        sent, posted = self.sent[key], self.posted[key]
        wanted = self.wanted[key[1:]]
        while len(sent) > len(posted) and wanted:
            want = wanted.popleft()
            want.transfer.peer = key[0]
            posted.append(_Posted(want.check(key[0]), want.into, want.transfer))
        while sent and posted:
            message, receipt = sent.popleft(), posted.popleft()
            self.messages += 1
            self.nbytes += message.payload.nbytes
            try:
                receipt.check(message.header)
            except CollectiveError as error:
                self.ranks[key[1]].fail(error)
                message.transfer.finish(error)
                receipt.transfer.finish(error)
                return
            receipt.into[:] = message.payload
            message.transfer.finish()
            receipt.transfer.finish()


class MemoryExchange:
    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self.network = network
        self.rank = rank
        self.size = network.size
        self.group = "test"
        self.failure: CollectiveError | None = None
        self.board: Board | None = None
        self.hosts: Hosts | None = None

    def label(self, rank: int) -> str:
        return f"rank {rank} (node-{rank})"

    def post_send(
        self,
        peer: int,
        channel: Channel,
        header: Header,
        payload: memoryview,
        deadline: float | None = None,
    ) -> Transfer:
        self.pause()
        transfer = Transfer(peer)
        if self.network.eager:
            payload = memoryview(bytes(payload))
        with self.network.lock:
            if self.failure is not None:
                transfer.finish(self.failure)
                return transfer
            key = (self.rank, peer, channel)
            message = _Sent(header, payload, transfer)
            if self.rank == self.network.slow:
                threading.Timer(0.02, self.deliver, (key, message)).start()
            else:
                self.deliver(key, message)
        if self.network.eager:
            transfer.finish()
        self.expire(transfer, deadline)
        return transfer

    def deliver(self, key: tuple[int, int, Channel], message: _Sent) -> None:
        with self.network.lock:
            # Timers may fire out of turn.
            queue = self.network.sent[key]
            queue.append(message)
            ordered = sorted(queue, key=lambda sent: (sent.header.sequence, sent.header.part))
            self.network.sent[key] = deque(ordered)
            self.network.match(key)

    def post_receive(
        self,
        peer: int,
        channel: Channel,
        check: Check,
        into: memoryview,
        deadline: float | None = None,
    ) -> Transfer:
        self.pause()
        transfer = Transfer(peer)
        with self.network.lock:
            if self.failure is not None:
                transfer.finish(self.failure)
                return transfer
            key = (peer, self.rank, channel)
            self.network.posted[key].append(_Posted(check, into, transfer))
            self.network.match(key)
            if peer in self.network.left and not transfer.done:
                left = RankLeft("receipt", ranks=(peer,), why=f"{self.label(peer)} left")
                transfer.finish(left)
        self.expire(transfer, deadline)
        return transfer

    def post_receive_any(
        self,
        channel: Channel,
        check: Callable[[int], Check],
        into: memoryview,
        deadline: float | None = None,
    ) -> Transfer:
        self.pause()
        transfer = Transfer(-1)
        with self.network.lock:
            if self.failure is not None:
                transfer.finish(self.failure)
                return transfer
            self.network.wanted[self.rank, channel].append(_Wanted(check, into, transfer))
            for peer in range(self.size):
                self.network.match((peer, self.rank, channel))
        self.expire(transfer, deadline)
        return transfer

    def fail(self, error: CollectiveError) -> None:
        with self.network.lock:
            for rank in self.network.ranks:
                if rank.failure is None:
                    rank.failure = error
                    rank.drop(error)
            for board in self.network.boards:
                board.wake()

    def drop(self, error: CollectiveError) -> None:
        for (source, target, _), sends in list(self.network.sent.items()):
            if source == self.rank:
                for message in sends:
                    message.transfer.finish(error)
            if self.rank in (source, target):
                sends.clear()
        for (_, target, _), receipts in list(self.network.posted.items()):
            if target == self.rank:
                for receipt in receipts:
                    receipt.transfer.finish(error)
                receipts.clear()
        for (target, _), wanted in list(self.network.wanted.items()):
            if target == self.rank:
                for want in wanted:
                    want.transfer.finish(error)
                wanted.clear()

    def close(self, timeout: float) -> None:
        if self.board is not None:
            self.board.close(is_broken=self.failure is not None)
        with self.network.lock:
            self.network.left.add(self.rank)

    def expire(self, transfer: Transfer, deadline: float | None) -> None:
        if transfer.done or deadline is None:
            return

        def late() -> None:
            if not transfer.done:
                why = f"timed out, and {self.label(transfer.peer)} is still awaited"
                self.fail(CollectiveTimeout("message", ranks=(transfer.peer,), why=why))

        timer = threading.Timer(max(deadline - time.monotonic(), 0), late)
        timer.daemon = True
        timer.start()
        transfer.add_done_callback(lambda _: timer.cancel())

    def pause(self) -> None:
        if self.network.random is not None:
            time.sleep(self.network.random.random() * 1e-3)


def make_boards(
    size: int, box_bytes: int, pidfds: Sequence[int] = (), ranks: tuple[int, ...] = ()
) -> list[Board]:
    """Return one board per rank, all on one memory, watching the processes of `pidfds`."""
    layout = Layout.of(size, box_bytes)
    memory = mmap.mmap(-1, layout.nbytes)
    eventfds = [make_eventfd() for _ in range(size)]
    boards = [
        Board(
            memory,
            layout,
            ranks or tuple(range(size)),
            place,
            own=os.dup(eventfds[place]),
            eventfds={each: os.dup(eventfds[each]) for each in range(size) if each != place},
            pidfds={each: os.dup(fd) for each, fd in enumerate(pidfds) if each != place},
        )
        for place in range(size)
    ]
    for descriptor in eventfds:
        os.close(descriptor)
    return boards


def run_ranks(size: int, body: Callable[[int], T], *, timeout: float = 20.0) -> list[T]:
    """Run `body` for each rank in a thread; return the results or raise the first error."""
    results = outcomes(size, body, timeout=timeout)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def outcomes(size: int, body: Callable[[int], Any], *, timeout: float = 20.0) -> list[Any]:
    """As `run_ranks`, but an error is its rank's result."""
    results: list[Any] = [TimeoutError(f"rank {rank} hangs") for rank in range(size)]

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = body(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    return results
