"""Operations that reduce, in the memory that all ranks share.

A small tensor each rank shows whole, and reduces for itself: one round. So do two ranks with any,
piece by piece: as many bytes are moved as if each reduced a half, in fewer rounds.

Of larger ones of more ranks each reduces a part. A box has then a lane for each of the others'
parts, and one for the own: while the contributions to one piece of each part are shown, so are the
results for the piece before. A result is reduced where it is shown, and contributions are read
where they were shown: each is copied once.

Contributions are folded in the order of the ranks, as `mesh.collective.reduction` does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import torch

from mesh.collective.host.board import Board
from mesh.collective.host.rounds import Rounds
from mesh.collective.layout import raw
from mesh.collective.operation import Operation
from mesh.collective.reduction import Reduction, reduce_into

__all__ = ["all_reduce", "reduce", "reduce_scatter"]

WHOLE_BYTES = 64 * 1024
"""Largest tensor that each of several ranks reduces for itself. Beyond, bytes cost more than a
round."""

PIECE_BYTES = 2 << 20
"""What two ranks show each other of a tensor in one round."""

FOLD_ELEMENTS = 32768
"""Elements folded at a time: as many as torch does on the calling thread alone. The ranks of a host
have its cores among them, and threads of its own would wait for each other's turns. And as many as
the cache holds while one contribution after the other is folded in."""

ALONE_ELEMENTS = 65536
"""The same, of up to four bytes each, where torch has one thread anyway: in half as many calls."""


def all_reduce(board: Board, operation: Operation, elements: torch.Tensor, op: Reduction) -> None:
    """See `mesh.collective.all_reduce`."""
    nbytes = elements.numel() * elements.dtype.itemsize
    if board.layout.size == 2 or nbytes <= min(WHOLE_BYTES, board.layout.box_bytes):
        _reduce_whole(board, operation, elements, nbytes, op)
    else:
        _reduce_parts(board, operation, elements, nbytes, op)


def reduce(
    board: Board, operation: Operation, elements: torch.Tensor, root: int, op: Reduction
) -> None:
    """See `mesh.collective.reduce`."""
    size, dtype = board.layout.size, elements.dtype
    nbytes, is_root = elements.numel() * dtype.itemsize, operation.rank == root
    step = board.layout.box_bytes // dtype.itemsize
    view = raw(elements)
    with Rounds(
        board,
        operation,
        count=-(-elements.numel() // step),
        sizes=[0 if is_root or place != root else nbytes for place in range(size)],
        wanted=[nbytes if is_root and place != root else 0 for place in range(size)],
    ) as turns:
        while not turns.is_over:
            start = turns.at * step
            if not is_root:
                _put(turns.own_box(), view, start * dtype.itemsize, step * dtype.itemsize)
            turns.turn()
            piece = elements[start : start + step]
            if is_root and piece.numel():
                parts = [turns.elements(place, dtype)[: piece.numel()] for place in range(size)]
                parts[root] = piece
                _fold(piece, parts, op, is_apart=root < 2)


def reduce_scatter(
    board: Board,
    operation: Operation,
    out: torch.Tensor,
    chunks: Sequence[torch.Tensor],
    op: Reduction,
) -> None:
    """See `mesh.collective.reduce_scatter`."""
    size, place, dtype = board.layout.size, board.place, out.dtype
    lane, views = board.layout.lane_bytes(), [raw(chunk) for chunk in chunks]
    step = lane // dtype.itemsize
    with Rounds(
        board,
        operation,
        count=-(-max(map(len, views)) // lane),
        sizes=[len(view) for view in views],
        wanted=[len(views[place])] * size,
    ) as turns:
        while not turns.is_over:
            at, box = turns.at, turns.own_box()
            for other in board.others:
                _put(box[other * lane :], views[other], at * lane, lane)
            turns.turn()
            target = out[at * step : (at + 1) * step]
            if count := target.numel():
                span = slice(place * step, place * step + count)
                parts = [turns.elements(each, dtype)[span] for each in range(size)]
                parts[place] = chunks[place][at * step : (at + 1) * step]
                _fold(target, parts, op, is_apart=False)


def _reduce_whole(
    board: Board, operation: Operation, elements: torch.Tensor, nbytes: int, op: Reduction
) -> None:
    size, place, dtype, numel = board.layout.size, board.place, elements.dtype, elements.numel()
    step = min(PIECE_BYTES, board.layout.box_bytes) // dtype.itemsize
    count, sizes = max(1, -(-numel // step)), (nbytes,) * size
    with Rounds(board, operation, count=count, sizes=sizes, wanted=sizes) as turns:
        while turns.at < count:  # whatever others say: they have as much
            start = turns.at * step
            piece = elements if count == 1 else elements[start : start + step]
            parts = board.heads(dtype, numel if count == 1 else piece.numel())
            _copy(parts[place], piece)
            turns.turn()
            if size == 2:
                parts = [piece, parts[1]] if place == 0 else [parts[0], piece]
            _fold(piece, parts, op)


def _reduce_parts(
    board: Board, operation: Operation, elements: torch.Tensor, nbytes: int, op: Reduction
) -> None:
    size, place, dtype = board.layout.size, board.place, elements.dtype
    bounds = [elements.numel() * each // size for each in range(size + 1)]
    parts = [elements[start:stop] for start, stop in pairwise(bounds)]
    lane, views = board.layout.lane_bytes(), [raw(part) for part in parts]
    pieces, step = -(-max(map(len, views)) // lane), lane // dtype.itemsize
    sizes = (nbytes,) * size
    with Rounds(board, operation, count=pieces + 1, sizes=sizes, wanted=sizes) as turns:
        while not turns.is_over:
            at, box = turns.at, turns.own_box()
            for other in board.others:
                _put(box[other * lane :], views[other], at * lane, lane)
            turns.turn()
            own = parts[place][at * step : (at + 1) * step]
            if count := own.numel():
                span = slice(place * step, place * step + count)
                shown = [turns.elements(each, dtype)[span] for each in range(size)]
                shown[place] = own
                # Where it is shown next, and to the tensor while it is in the cache.
                _fold(turns.own_elements(dtype)[span], shown, op, own)
            for other in board.others if at else ():
                _put(views[other][(at - 1) * lane :], turns.box(other)[other * lane :], 0, lane)


def _put(target: memoryview, source: memoryview, start: int, longest: int) -> None:
    """Copy `longest` bytes from `start` on, or as many as there are and there is room for."""
    count = max(0, min(longest, len(source) - start, len(target)))
    target[:count] = source[start : start + count]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy as the C library does: faster than torch, where other processors have the memory."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def _fold(
    out: torch.Tensor,
    parts: Sequence[torch.Tensor],
    op: Reduction,
    copy: torch.Tensor | None = None,
    *,
    is_apart: bool = True,
) -> None:
    """Reduce `parts`.

    Args:
        out: where the result goes.
        parts: the contributions, as long.
        op: the reduction.
        copy: where the result goes, too.
        is_apart: as for `reduce_into`.
    """
    count = out.numel()
    is_alone = torch.get_num_threads() == 1
    if count <= FOLD_ELEMENTS or (is_alone and len(parts) == 2 and copy is None):
        reduce_into(out, parts, op, is_apart=is_apart)
        if copy is not None:
            copy.copy_(out)
        return
    step = ALONE_ELEMENTS if is_alone and out.itemsize <= 4 else FOLD_ELEMENTS
    for start in range(0, count, step):
        target = out[start : start + step]
        stop = start + target.numel()
        reduce_into(target, [part[start:stop] for part in parts], op, is_apart=is_apart)
        if copy is not None:
            copy[start:stop].copy_(target)
