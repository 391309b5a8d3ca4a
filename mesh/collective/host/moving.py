"""Operations that move elements as they are, in the memory that all ranks share.

Each rank copies what it has for others into its box, and what there is for it out of theirs. What
is for all of them is shown once, in the whole box; otherwise it has a lane for each of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mesh.collective.host.board import Board
from mesh.collective.host.rounds import Rounds
from mesh.collective.layout import raw
from mesh.collective.operation import Operation

__all__ = ["all_gather", "all_to_all", "barrier", "broadcast", "gather", "keep", "scatter"]

_NONE = memoryview(b"")


def broadcast(board: Board, operation: Operation, elements: torch.Tensor, root: int) -> None:
    """See `mesh.collective.broadcast`; `root` is a place."""
    view = raw(elements)
    if board.place == root:
        _show(board, operation, view, board.others, {})
    else:
        _show(board, operation, _NONE, (), {root: view})


def all_gather(
    board: Board, operation: Operation, outs: Sequence[torch.Tensor], own: torch.Tensor
) -> None:
    """See `mesh.collective.all_gather`."""
    wanted = {place: raw(outs[place]) for place in board.others}
    _show(board, operation, raw(own), board.others, wanted)
    keep(own, outs[operation.rank])


def gather(
    board: Board,
    operation: Operation,
    outs: Sequence[torch.Tensor] | None,
    own: torch.Tensor,
    root: int,
) -> None:
    """See `mesh.collective.gather`."""
    if outs is None:
        _show(board, operation, raw(own), (root,), {})
        return
    _show(board, operation, _NONE, (), {place: raw(outs[place]) for place in board.others})
    keep(own, outs[root])


def scatter(
    board: Board,
    operation: Operation,
    out: torch.Tensor,
    chunks: Sequence[torch.Tensor] | None,
    root: int,
) -> None:
    """See `mesh.collective.scatter`."""
    if chunks is None:
        _deal(board, operation, {}, {root: raw(out)})
        return
    _deal(board, operation, {place: raw(chunks[place]) for place in board.others}, {})
    keep(chunks[root], out)


def all_to_all(
    board: Board,
    operation: Operation,
    outs: Sequence[torch.Tensor],
    chunks: Sequence[torch.Tensor],
) -> None:
    """See `mesh.collective.all_to_all`."""
    sent = {place: raw(chunks[place]) for place in board.others}
    _deal(board, operation, sent, {place: raw(outs[place]) for place in board.others})
    keep(chunks[operation.rank], outs[operation.rank])


def barrier(board: Board, operation: Operation) -> None:
    """See `mesh.collective.barrier`."""
    _show(board, operation, _NONE, (), {})


def keep(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a rank's message to itself, byte by byte: not every dtype has kernels of its own."""
    if source.data_ptr() != target.data_ptr():
        raw(target)[:] = raw(source)


def _show(
    board: Board,
    operation: Operation,
    payload: memoryview,
    readers: Sequence[int],
    wanted: dict[int, memoryview],
) -> None:
    """Show one payload to `readers`, and fill what is wanted from others with theirs."""
    box_bytes = board.layout.box_bytes
    with Rounds(
        board,
        operation,
        count=-(-len(payload) // box_bytes),
        sizes=[len(payload) if place in readers else 0 for place in range(board.layout.size)],
        wanted=_lengths(board, wanted),
    ) as turns:
        while not turns.is_over:
            start = turns.at * box_bytes
            piece = payload[start : start + box_bytes]
            if piece:
                turns.own_box()[: len(piece)] = piece
            turns.turn()
            for place, view in wanted.items():
                target = view[start : start + box_bytes]
                if target:
                    target[:] = turns.box(place)[: len(target)]


def _deal(
    board: Board,
    operation: Operation,
    sent: dict[int, memoryview],
    wanted: dict[int, memoryview],
) -> None:
    """Show each payload in its reader's lane, and fill what is wanted from others."""
    lane = board.layout.lane_bytes()
    longest = max((len(payload) for payload in sent.values()), default=0)
    with Rounds(
        board,
        operation,
        count=-(-longest // lane),
        sizes=_lengths(board, sent),
        wanted=_lengths(board, wanted),
    ) as turns:
        while not turns.is_over:
            start, box = turns.at * lane, turns.own_box()
            for place, payload in sent.items():
                piece = payload[start : start + lane]
                if piece:
                    box[place * lane : place * lane + len(piece)] = piece
            turns.turn()
            at = board.place * lane
            for place, view in wanted.items():
                target = view[start : start + lane]
                if target:
                    target[:] = turns.box(place)[at : at + len(target)]


def _lengths(board: Board, views: dict[int, memoryview]) -> list[int]:
    return [len(views.get(place, _NONE)) for place in range(board.layout.size)]
