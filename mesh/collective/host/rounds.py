"""One operation in the shared memory: its rounds, what is checked in them, and how it fails."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from mesh.collective.errors import CollectiveError, GroupAborted, RankFailed, RankLeft, RankLost
from mesh.collective.exchange import Header
from mesh.collective.host.board import Board, BoardClosed, Gone
from mesh.collective.host.header import CALL_BYTES, decode_call, decode_rest, encode

if TYPE_CHECKING:
    from mesh.collective.operation import Operation

__all__ = ["Rounds"]

_CALL_REST = CALL_BYTES - 8
"""Bytes of a call behind its number."""

_FIX = "Leave the group and form a new one without it."


class Rounds:
    """The rounds of one operation on this rank. A context manager: the memory stays for the block.

    Args:
        board: the memory.
        operation: whose rounds these are.
        count: how many this rank needs; all ranks take part in as many as any of them needs.
        sizes: bytes that this rank has for each place.
        wanted: bytes that it expects from each place.

    Raises:
        GroupAborted: on entry or in a round: this rank leaves the group, or has left it.
        CollectiveError: the group is broken.

    Attributes:
        at: the number of the round, from 0.
        total: how many there are, known after the first.
    """

    def __init__(
        self,
        board: Board,
        operation: Operation,
        count: int,
        sizes: Sequence[int],
        wanted: Sequence[int],
    ) -> None:
        self.at = 0
        self.total = max(1, count)
        self._board = board
        self._operation = operation
        self._wanted = wanted
        self._own = sizes[board.place]
        self._header = encode(operation.signature, self.total, tuple(sizes))
        self._pending: Sequence[int] = ()

    def __enter__(self) -> Self:
        board = self._board
        board.in_use.acquire()
        failure = self._operation.exchange.failure
        if board.is_closed or failure is not None:
            error = self._closed() if board.is_closed or failure is None else self._broken(failure)
            board.in_use.release()
            raise error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._board.in_use.release()

    @property
    def is_over(self) -> bool:
        """Whether no round is left."""
        return self.at >= self.total

    def own_box(self) -> memoryview:
        """Return this rank's box of the next round, to fill."""
        board = self._board
        return board.boxes[board.place][(board.count + 1) & 1]

    def own_elements(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the same as elements of `dtype`."""
        board = self._board
        return board.elements(board.place, (board.count + 1) & 1, dtype)

    def box(self, place: int) -> memoryview:
        """Return another rank's box of the last round, to read."""
        return self._board.boxes[place][self._board.count & 1]

    def elements(self, place: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the same as elements of `dtype`."""
        return self._board.elements(place, self._board.count & 1, dtype)

    def turn(self) -> None:
        """Show this rank's box, and wait for those of all others.

        Raises:
            CollectiveMismatch: another rank has called something else.
            CollectiveTimeout: names all who did not come.
            RankLost: names all whose processes are gone.
            RankLeft, RankFailed, GroupAborted: as they say.
        """
        board, operation = self._board, self._operation
        if self.at == 0:
            board.call(operation.sequence, self._header)
        board.show()
        self._pending = board.others
        try:
            board.wait(self._have_come, operation.deadline)
        except TimeoutError:
            raise operation.timeout([board.ranks[each] for each in self._pending]) from None
        except Gone as gone:
            lost = board.lost(gone)
            failure = operation.exchange.failure
            raise (self._broken(failure) if failure else self._lost(lost)) from None
        except BoardClosed:
            raise self._closed() from None
        self.at += 1

    def _have_come(self) -> bool:
        board = self._board
        if board.is_closed:
            raise BoardClosed
        words, counters, count = board.words, board.counters, board.count
        missing = []
        for place in self._pending:
            found = words[counters[place]]
            if found == count or found == count + 1:
                if self.at == 0:
                    self._check(place)
            elif found == count - 1:
                missing.append(place)
            else:
                raise self._at_fault(place, "the counter that it shows is none")
        self._pending = missing
        if not missing:
            return True
        failure = self._operation.exchange.failure
        if failure is not None:
            raise self._broken(failure)
        for place in missing:
            if board.has_left(place) and words[counters[place]] < count:
                raise self._left(place)
        return False

    def _check(self, place: int) -> None:
        """Raise unless another rank has called the same, with as much for this rank as expected."""
        board, header = self._board, self._header
        start = board.headers[place][board.count & 1]
        sequence = board.words[start // 8]
        found = bytes(board.bytes[start + 8 : start + 8 + len(header)])
        is_own = found == header and sequence == self._operation.sequence
        if is_own and self._own == self._wanted[place]:
            return
        rounds, *sizes = decode_rest(found[_CALL_REST:])
        nbytes = sizes[board.place]
        is_same = found[:_CALL_REST] == header[:_CALL_REST]
        if not is_same or nbytes != self._wanted[place] or sequence != self._operation.sequence:
            self._mismatch(place, sequence.to_bytes(8, "little") + found[:_CALL_REST], nbytes)
        self.total = max(self.total, rounds)

    def _mismatch(self, place: int, data: bytes, nbytes: int) -> None:
        try:
            signature, sequence = decode_call(data)
        except ValueError:
            raise self._at_fault(place, "what it shows as its call is none") from None
        found = Header(signature, sequence, 0, nbytes)
        self._operation.expect(self._board.ranks[place], 0, self._wanted[place])(found)
        raise self._at_fault(place, "what it shows has changed")

    # How it fails.

    def _closed(self) -> CollectiveError:
        what = str(self._operation)
        failure = (
            self._operation.exchange.failure
            or self._board.why_closed
            or GroupAborted(what, why="this rank has left the group, or its node was closed")
        )
        return failure.during(what, after=self._operation.elapsed())

    def _broken(self, failure: CollectiveError) -> CollectiveError:
        """Return the group's failure in terms of this operation; who else is lost is named, too."""
        operation = self._operation
        if isinstance(failure, RankLost):
            ranks = {*failure.ranks, *(self._board.ranks[each] for each in self._board.lost())}
            if ranks != set(failure.ranks):
                return self._lost_ranks(tuple(sorted(ranks)))
        return failure.during(str(operation), after=operation.elapsed())

    def _lost(self, places: tuple[int, ...]) -> CollectiveError:
        left = [place for place in places if self._board.has_left(place)]
        if len(left) == len(places):
            return self._left(left[0])
        return self._lost_ranks(
            tuple(self._board.ranks[place] for place in places if place not in left)
        )

    def _lost_ranks(self, ranks: tuple[int, ...]) -> RankLost:
        names = ", ".join(map(self._operation.exchange.label, ranks))
        verb = "is" if len(ranks) == 1 else "are"
        return RankLost(
            str(self._operation),
            ranks=ranks,
            after=self._operation.elapsed(),
            why=f"{names} {verb} lost: the process has ended or is stopped",
            fix=_FIX,
        )

    def _left(self, place: int) -> RankLeft:
        rank = self._board.ranks[place]
        return RankLeft(
            str(self._operation),
            ranks=(rank,),
            after=self._operation.elapsed(),
            why=f"{self._operation.exchange.label(rank)} is gone: it left the group",
            fix=_FIX,
        )

    def _at_fault(self, place: int, why: str) -> RankFailed:
        rank = self._board.ranks[place]
        label = self._operation.exchange.label(rank)
        return RankFailed(
            str(self._operation),
            ranks=(rank,),
            after=self._operation.elapsed(),
            why=f"{label} breaks the protocol of shared memory: {why}",
            fix=_FIX,
        )
