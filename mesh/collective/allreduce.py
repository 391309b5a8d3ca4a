"""Operations that reduce: all-reduce, reduce, reduce-scatter.

Any two ranks of a group are connected, so nothing takes a detour through a third one. Small tensors
and those of two ranks are exchanged whole, and every rank reduces for itself: one step. Larger ones
are cut into one chunk per rank; each rank reduces its chunk and hands the result to all: two steps,
and the same 2 (n - 1) / n of the tensor that a ring moves, without its 2 (n - 1) steps and without
rounding partial sums between them. Either way contributions are folded in the order of the ranks,
and every rank hears from every other, so that differing calls and missing ranks are known by name.

Messages are cut into pieces. While one is reduced the next ones are under way.

Ranks of one host do all of it in memory that they share, and those of several hosts what they can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from mesh.collective import host, levels
from mesh.collective.exchange import Transfer
from mesh.collective.layout import raw
from mesh.collective.operation import Operation
from mesh.collective.reduction import Reduction, reduce_into

__all__ = ["all_reduce", "reduce", "reduce_scatter"]

WHOLE_BYTES = 64 * 1024
"""Largest tensor that more than two ranks exchange whole. Beyond, bytes cost more than steps."""

PIECE_BYTES = 8 << 20
"""Largest message between two ranks. A sender hears that one has come before it begins the next,
which is not to show."""

LEAST_PIECE_BYTES = 1 << 20
"""Of several ranks each has as much less scratch memory for every other, down to this."""

AHEAD = 2
"""Pieces under way beside the one that is being reduced; bounds the scratch memory."""


def all_reduce(operation: Operation, elements: torch.Tensor, op: Reduction) -> None:
    """Replace `elements` by their reduction over all ranks, bitwise the same everywhere.

    Args:
        operation: entered by the caller.
        elements: one-dimensional, contiguous; the same length on all ranks.
        op: permitted for this dtype by `refuse_unless_reducible`.

    Raises:
        CollectiveError: as from `Operation.wait`.
    """
    if operation.board is not None:
        host.all_reduce(operation.board, operation, elements, op)
        return
    if operation.hosts is not None:
        levels.all_reduce(operation.hosts, operation, elements, op, all_reduce)
        return
    nbytes = elements.numel() * elements.dtype.itemsize
    if operation.size <= 2 or nbytes <= WHOLE_BYTES:
        _exchange_whole(operation, elements, op)
    else:
        _exchange_chunks(operation, elements, op)
    operation.finish()


def reduce(operation: Operation, elements: torch.Tensor, root: int, op: Reduction) -> None:
    """Replace `elements` of rank `root` by their reduction over all ranks. Else as `all_reduce`."""
    if operation.board is not None:
        host.reduce(operation.board, operation, elements, root, op)
        return
    if operation.rank == root:
        _fold(operation, elements, elements, op)
    else:
        for piece in _pieces(elements, operation.size):
            operation.send(root, raw(piece))
    operation.finish()


def reduce_scatter(
    operation: Operation, out: torch.Tensor, chunks: Sequence[torch.Tensor], op: Reduction
) -> None:
    """Write to `out` the reduction over all ranks of the chunks that they have for this rank.

    Args:
        operation: entered by the caller.
        out: one-dimensional, contiguous.
        chunks: one per rank, each of the dtype and the length of that rank's `out`, contiguous.
        op: permitted for this dtype.

    Raises:
        CollectiveError: as from `Operation.wait`.
    """
    if operation.board is not None:
        host.reduce_scatter(operation.board, operation, out, chunks, op)
        return
    for peer in operation.others:
        for piece in _pieces(chunks[peer], operation.size):
            operation.send(peer, raw(piece))
    _fold(operation, out, chunks[operation.rank], op)
    operation.finish()


def _exchange_whole(operation: Operation, elements: torch.Tensor, op: Reduction) -> None:
    pieces = _pieces(elements, operation.size)
    sends: list[list[Transfer]] = []

    def send(at: int) -> None:
        sends.append([operation.send(peer, raw(pieces[at])) for peer in operation.others])

    def before(at: int) -> None:
        operation.wait(sends[at])  # the result goes where the bytes to send lie

    _fold(operation, elements, elements, op, send=send, before=before)


def _exchange_chunks(operation: Operation, elements: torch.Tensor, op: Reduction) -> None:
    size = operation.size
    bounds = [elements.numel() * rank // size for rank in range(size + 1)]
    chunks = [elements[start:stop] for start, stop in pairwise(bounds)]
    # As many pieces of each chunk, so that all ranks post the same messages in the same order.
    count = max(_count(chunk, size) for chunk in chunks)
    pieces = [_pieces(chunk, size, count) for chunk in chunks]

    def send(at: int) -> None:
        for peer in operation.others:
            operation.send(peer, raw(pieces[peer][at]))

    def expect(at: int) -> None:
        # The result lands where the bytes sent lie: it comes only after their receiver has them.
        for peer in operation.others:
            operation.receive(peer, raw(pieces[peer][at]))

    def share(at: int) -> None:
        for peer in operation.others:
            operation.send(peer, raw(pieces[operation.rank][at]))

    own = chunks[operation.rank]
    _fold(operation, own, own, op, count=count, send=send, expect=expect, after=share)


def _nothing(at: int) -> None:
    pass


def _fold(
    operation: Operation,
    out: torch.Tensor,
    own: torch.Tensor,
    op: Reduction,
    *,
    count: int = 0,
    send: Callable[[int], None] = _nothing,
    expect: Callable[[int], None] = _nothing,
    before: Callable[[int], None] = _nothing,
    after: Callable[[int], None] = _nothing,
) -> None:
    """Receive every other rank's contribution, piece by piece, and write the reduction to `out`.

    Args:
        operation: whose messages these are.
        out: where the result goes; may be `own`.
        own: this rank's contribution.
        op: the reduction.
        count: number of pieces; by default what the length asks for.
        send: posts what goes to the others along with each piece.
        expect: posts further receipts, before the wait for a piece.
        before: called before a piece of the result is written.
        after: called when it is written.
    """
    outs, owns = _pieces(out, operation.size, count), _pieces(own, operation.size, count)
    longest = max(piece.numel() for piece in outs)
    slots = min(AHEAD + 1, len(outs))
    scratch = [
        [torch.empty(longest, dtype=out.dtype) for _ in operation.others] for _ in range(slots)
    ]
    posted: list[list[Transfer]] = []
    for at, target in enumerate(outs):
        while len(posted) < min(at + slots, len(outs)):
            new = len(posted)
            length = outs[new].numel()
            buffers = zip(operation.others, scratch[new % slots], strict=True)
            posted.append([operation.receive(peer, raw(slot[:length])) for peer, slot in buffers])
            send(new)
        expect(at)
        operation.wait(posted[at])
        parts = [slot[: target.numel()] for slot in scratch[at % slots]]
        parts.insert(operation.rank, owns[at])
        before(at)
        reduce_into(target, parts, op)
        after(at)


def _count(elements: torch.Tensor, size: int) -> int:
    """Return into how many pieces a run of elements is cut: at least one, which may be empty."""
    longest = max(LEAST_PIECE_BYTES, PIECE_BYTES // max(1, size - 1))
    return max(1, -(-elements.nbytes // longest))


def _pieces(elements: torch.Tensor, size: int, count: int = 0) -> list[torch.Tensor]:
    count = count or _count(elements, size)
    bounds = [elements.numel() * at // count for at in range(count + 1)]
    return [elements[start:stop] for start, stop in pairwise(bounds)]
