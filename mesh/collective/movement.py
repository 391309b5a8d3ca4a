"""Operations that move elements as they are: broadcast, gather, scatter, all-to-all, barrier.

Each message goes straight from the rank that has it to the rank that wants it, or, among ranks of
one host, through the memory that they share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mesh.collective import host, levels
from mesh.collective.layout import raw
from mesh.collective.operation import Operation

__all__ = ["all_gather", "all_to_all", "barrier", "broadcast", "gather", "scatter"]

_EMPTY = memoryview(b"")


def broadcast(operation: Operation, elements: torch.Tensor, root: int) -> None:
    """Replace `elements` by those of rank `root`.

    Args:
        operation: entered by the caller.
        elements: one-dimensional, contiguous; the same length on all ranks.
        root: rank in the group.

    Raises:
        CollectiveError: as from `Operation.wait`.
    """
    if operation.board is not None:
        host.broadcast(operation.board, operation, elements, root)
        return
    if operation.hosts is not None:
        levels.broadcast(operation.hosts, operation, elements, root, broadcast)
        return
    if operation.rank == root:
        for peer in operation.others:
            operation.send(peer, raw(elements))
    else:
        operation.receive(root, raw(elements))
    operation.finish()


def all_gather(operation: Operation, outs: Sequence[torch.Tensor], own: torch.Tensor) -> None:
    """Fill ``outs[r]`` with what rank ``r`` has as `own`.

    Lengths may differ between ranks, as long as each receiver expects what its sender has.
    """
    if operation.board is not None:
        host.all_gather(operation.board, operation, outs, own)
        return
    all_to_all(operation, outs, [own] * operation.size)


def gather(
    operation: Operation, outs: Sequence[torch.Tensor] | None, own: torch.Tensor, root: int
) -> None:
    """Fill ``outs[r]`` on rank `root` with what rank ``r`` has as `own`. Others pass no `outs`."""
    if operation.board is not None:
        host.gather(operation.board, operation, outs, own, root)
        return
    if outs is not None:
        for peer in operation.others:
            operation.receive(peer, raw(outs[peer]))
        _keep(own, outs[root])
    else:
        operation.send(root, raw(own))
    operation.finish()


def scatter(
    operation: Operation, out: torch.Tensor, chunks: Sequence[torch.Tensor] | None, root: int
) -> None:
    """Fill `out` with the chunk that rank `root` has for this rank. Others pass no `chunks`."""
    if operation.board is not None:
        host.scatter(operation.board, operation, out, chunks, root)
        return
    if chunks is not None:
        for peer in operation.others:
            operation.send(peer, raw(chunks[peer]))
        _keep(chunks[root], out)
    else:
        operation.receive(root, raw(out))
    operation.finish()


def all_to_all(
    operation: Operation, outs: Sequence[torch.Tensor], chunks: Sequence[torch.Tensor]
) -> None:
    """Fill ``outs[r]`` with the chunk that rank ``r`` has for this rank.

    Args:
        operation: entered by the caller.
        outs: one per rank; one-dimensional, contiguous, not overlapping each other or `chunks`,
            but for the own chunk.
        chunks: one per rank, of any lengths that match those of the receivers' `outs`.

    Raises:
        CollectiveError: as from `Operation.wait`.
    """
    if operation.board is not None:
        host.all_to_all(operation.board, operation, outs, chunks)
        return
    for peer in operation.others:
        operation.receive(peer, raw(outs[peer]))
    for peer in operation.others:
        operation.send(peer, raw(chunks[peer]))
    _keep(chunks[operation.rank], outs[operation.rank])
    operation.finish()


def barrier(operation: Operation) -> None:
    """Return once every rank has come here."""
    if operation.board is not None:
        host.barrier(operation.board, operation)
        return
    if operation.hosts is not None:
        levels.barrier(operation.hosts, operation, barrier)
        return
    for peer in operation.others:
        operation.receive(peer, memoryview(bytearray()))
        operation.send(peer, _EMPTY)
    operation.finish()


def _keep(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a rank's message to itself, byte by byte: not every dtype has kernels of its own."""
    raw(target)[:] = raw(source)
