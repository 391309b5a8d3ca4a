"""One operation of one group: its messages, its deadline, and what it says when it fails."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from mesh.collective.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    RankFailed,
)
from mesh.collective.exchange import COLLECTIVE, Check, Header, Messages, Signature, Transfer

__all__ = ["Operation", "expect"]


class Operation:
    """The messages of one collective operation on this rank, in order for each other rank.

    A context manager: an exception inside breaks the group and tells the other ranks, since they
    wait for messages that will never come.

    Args:
        exchange: the group.
        signature: what this rank called.
        sequence: number of the operation in the group, the same on all ranks.
        deadline: on the clock of ``time.monotonic``.
    """

    def __init__(
        self, exchange: Messages, signature: Signature, sequence: int, deadline: float
    ) -> None:
        self.exchange = exchange
        self.rank = exchange.rank
        self.size = exchange.size
        self.signature = signature
        self.sequence = sequence
        self.deadline = deadline
        self.board = exchange.board
        self.hosts = exchange.hosts
        self._members: Sequence[int] | None = None
        self.began = time.monotonic()
        self._sends: dict[int, list[Transfer]] = {}
        self._receives: dict[int, list[Transfer]] = {}

    @property
    def others(self) -> tuple[int, ...]:
        """All ranks but this one."""
        return _others(self.rank, self.size)

    def __str__(self) -> str:
        name = f"{self.signature.name} #{self.sequence}"
        return f"{name} of group '{self.exchange.group}' on rank {self.exchange.rank}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, CollectiveError):
            self.exchange.fail(error)
        elif error is not None:
            why = f"{type(error).__name__}: {error}"
            self.exchange.fail(RankFailed(str(self), ranks=(self.exchange.rank,), why=why))

    def among(self, members: Sequence[int]) -> Operation:
        """Return the part of this operation that some ranks have alone, this one among them.

        They are numbered from 0, in their order. One part of an operation sends messages.
        """
        part = copy.copy(self)
        part._members = members
        part.rank, part.size = members.index(self.rank), len(members)
        part.board = part.hosts = None
        return part

    def send(self, peer: int, payload: memoryview) -> Transfer:
        """Post the next message to `peer`."""
        peer = self._named(peer)
        posted = self._sends.setdefault(peer, [])
        header = Header(self.signature, self.sequence, len(posted), payload.nbytes)
        posted.append(self.exchange.post_send(peer, COLLECTIVE, header, payload))
        return posted[-1]

    def receive(self, peer: int, into: memoryview) -> Transfer:
        """Post the receipt of the next message from `peer`."""
        peer = self._named(peer)
        posted = self._receives.setdefault(peer, [])
        check = self.expect(peer, len(posted), into.nbytes)
        posted.append(self.exchange.post_receive(peer, COLLECTIVE, check, into))
        return posted[-1]

    def wait(self, transfers: Iterable[Transfer]) -> None:
        """Wait until all of `transfers` are done.

        Raises:
            CollectiveTimeout: the deadline passed; names the ranks that are awaited.
            CollectiveError: a transfer or the whole group failed.
        """
        for transfer in transfers:
            try:
                transfer.wait(self.deadline)
            except TimeoutError:
                raise self.timeout(self._awaited()) from None
            except CollectiveError as error:
                raise error.during(str(self), after=self.elapsed()) from error

    def finish(self) -> None:
        """Wait for everything posted."""
        for posted in (*self._receives.values(), *self._sends.values()):
            self.wait(posted)

    def expect(self, peer: int, part: int, nbytes: int) -> Check:
        """Return a check that refuses any message of `peer` but that part of this operation."""
        header = Header(self.signature, self.sequence, part, nbytes)
        return expect(header, peer, self.exchange, str(self))

    def elapsed(self) -> float:
        """Return the seconds since the operation began."""
        return time.monotonic() - self.began

    def timeout(self, ranks: Sequence[int]) -> CollectiveTimeout:
        """Return the error for a deadline that passed while `ranks` were awaited."""
        if not ranks:
            return CollectiveTimeout(
                str(self),
                after=self.elapsed(),
                why="its time ran out on this rank, with no other awaited: it was queued behind "
                "earlier operations, or this process had no time to run",
                fix="Give it more time, or the process more CPU.",
            )
        names = ", ".join(self.exchange.label(rank) for rank in ranks)
        verb = "is" if len(ranks) == 1 else "are"
        return CollectiveTimeout(
            str(self),
            ranks=tuple(ranks),
            after=self.elapsed(),
            why=f"timed out, and {names} {verb} still awaited",
            fix="Check that they are alive and reach this operation, or raise the timeout of the "
            "group.",
        )

    def _named(self, peer: int) -> int:
        """Return the number in the group of one of those that take part."""
        return peer if self._members is None else self._members[peer]

    def _awaited(self) -> tuple[int, ...]:
        """Return whom to blame: those from whom nothing came, or else those with anything open.

        A rank that waits itself has sent its first message; one that is not there has not. Whose
        time ran out a moment sooner may have broken the group by now, and ended what was open.
        """
        absent = {peer for peer, posted in self._receives.items() if not _arrived(posted[0])}
        for table in (self._receives, self._sends):
            if not absent:
                absent = {peer for peer, posted in table.items() if not all(map(_arrived, posted))}
        return tuple(sorted(absent))


@functools.lru_cache(maxsize=1024)
def _others(rank: int, size: int) -> tuple[int, ...]:
    return tuple(each for each in range(size) if each != rank)


def _arrived(transfer: Transfer) -> bool:
    return transfer.done and transfer.error is None


def expect(expected: Header, peer: int, exchange: Messages, what: str) -> Check:
    """Return a check that refuses any message of `peer` but the one that `expected` describes."""

    def check(found: Header) -> None:
        if found == expected:
            return
        theirs, ours = str(found.signature), str(expected.signature)
        if found.sequence != expected.sequence:
            theirs, ours = f"{theirs} as #{found.sequence}", f"{ours} as #{expected.sequence}"
        elif found.nbytes != expected.nbytes:
            theirs, ours = (
                f"{theirs} with {found.nbytes} bytes",
                f"{ours} with {expected.nbytes} bytes",
            )
        raise CollectiveMismatch(
            what,
            ranks=(peer, exchange.rank),
            why=f"{exchange.label(peer)} called {theirs}, "
            f"and {exchange.label(exchange.rank)} called {ours}",
            fix="All ranks must call the same operations, in the same order, on alike tensors.",
        )

    return check
