"""From a call with the caller's tensors to steps for the operation thread.

Each function checks its arguments where the caller can see the error, before any other rank is
involved, and returns what is left to do. Contributions are read, and results written, on the
operation thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from mesh import collective
from mesh.collective import (
    Operation,
    Reduction,
    Signature,
    UnsupportedCollective,
    apart,
    blank,
    check_distinct,
    check_readable,
    check_writable,
    gathered,
    refuse_unless_reducible,
    refuse_unless_sparse_reducible,
    scatter_back,
)
from mesh.distributed.inside import Inside
from tensor_bridge import dtype_name

__all__ = [
    "Step",
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "message",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
]

Tensors = Sequence[torch.Tensor]


class Step(NamedTuple):
    """One operation to run.

    Attributes:
        signature: what all ranks must agree on.
        run: what this one does.
        device: where its tensors are, None for the CPU.
    """

    signature: Signature
    run: Callable[[Operation], None]
    device: torch.device | None = None


def barrier() -> Step:
    """Meet all ranks."""
    return Step(Signature("barrier"), collective.barrier)


def monitored_barrier(*, name_all: bool) -> Step:
    """Meet all ranks, or have rank 0 name those that are missing."""
    return Step(
        Signature("monitored_barrier"),
        lambda operation: collective.monitored_barrier(operation, name_all=name_all),
    )


def all_reduce(tensor: torch.Tensor, op: Reduction, inside: Inside | None = None) -> Step:
    """Replace `tensor` by its reduction over all ranks.

    Args:
        tensor: of any layout.
        op: the reduction.
        inside: another backend for it among the ranks of a host.
    """
    if tensor.is_sparse:
        return _all_reduce_sparse(tensor, op)
    check_writable(tensor, "all_reduce")

    def run(operation: Operation) -> None:
        if inside is not None and inside.can_reduce(tensor, op):
            inside.all_reduce(operation, tensor, op)
            return
        elements = gathered(tensor)
        collective.all_reduce(operation, elements, op)
        scatter_back(elements, tensor)

    return Step(_reduced(tensor.dtype, tensor.numel(), op), run, _device(tensor))


def _all_reduce_sparse(tensor: torch.Tensor, op: Reduction) -> Step:
    refuse_unless_sparse_reducible(tensor, op)

    def run(operation: Operation) -> None:
        # Into the tensor itself: a detached sparse tensor would keep the result to itself.
        tensor.copy_(collective.all_reduce_sparse(operation, tensor, op))

    shape = f"{op}, shape {tuple(tensor.shape)}, {tensor.sparse_dim()} sparse"
    return Step(_varied("all_reduce sparse", tensor.dtype, shape), run)


def reduce(tensor: torch.Tensor, root: int, op: Reduction) -> Step:
    """Replace `tensor` on rank `root` by its reduction over all ranks."""
    check_writable(tensor, "reduce")
    refuse_unless_reducible(tensor.dtype, op)

    def run(operation: Operation) -> None:
        elements = gathered(tensor)
        collective.reduce(operation, elements, root, op)
        if operation.rank == root:
            scatter_back(elements, tensor)

    return Step(_equal("reduce", tensor, f"{op}, root {root}"), run, _device(tensor))


def broadcast(tensor: torch.Tensor, root: int, rank: int, inside: Inside | None = None) -> Step:
    """Replace `tensor` by that of rank `root`; `inside` as for `all_reduce`."""
    (check_readable if rank == root else check_writable)(tensor, "broadcast")

    def run(operation: Operation) -> None:
        if inside is not None and inside.can_move(tensor):
            inside.broadcast(operation, tensor, root)
            return
        elements = gathered(tensor) if rank == root else blank(tensor)
        collective.broadcast(operation, elements, root)
        if rank != root:
            scatter_back(elements, tensor)

    return Step(_equal("broadcast", tensor, f"root {root}"), run, _device(tensor))


def all_gather(outs: Tensors, tensor: torch.Tensor, rank: int, size: int) -> Step:
    """Fill ``outs[r]`` with rank ``r``'s tensor. Sizes may differ between ranks."""
    _check_outs("all_gather", outs, tensor, size)
    check_readable(tensor, "all_gather")
    _same_length("all_gather", f"output {rank}", outs[rank], "this rank's input", tensor)

    def run(operation: Operation) -> None:
        buffers = [blank(out) for out in outs]
        (own,) = apart([gathered(tensor)], buffers, own=0, place=rank)
        collective.all_gather(operation, buffers, own)
        _scatter_all(buffers, outs)

    return Step(_varied("all_gather", tensor.dtype), run, _device(tensor))


def all_gather_single(out: torch.Tensor, tensor: torch.Tensor, size: int) -> Step:
    """Fill `out` with the tensors of all ranks, one after the other."""
    check_writable(out, "all_gather_single")
    check_readable(tensor, "all_gather_single")
    _same_kind("all_gather_single", (out, tensor))
    if out.numel() != size * tensor.numel():
        raise UnsupportedCollective(
            f"all_gather_single of {tensor.numel()} elements from each of {size} ranks",
            why=f"the output has {out.numel()} elements",
        )

    def run(operation: Operation) -> None:
        elements = blank(out)
        buffers = list(elements.view(size, tensor.numel()).unbind(0))
        (own,) = apart([gathered(tensor)], buffers, own=0, place=operation.rank)
        collective.all_gather(operation, buffers, own)
        scatter_back(elements, out)

    return Step(_equal("all_gather_single", tensor), run, _device(tensor))


def gather(outs: Tensors | None, tensor: torch.Tensor, root: int, rank: int, size: int) -> Step:
    """Fill ``outs[r]`` on rank `root` with rank ``r``'s tensor."""
    check_readable(tensor, "gather")
    if rank == root:
        outs = outs or ()
        _check_outs("gather", outs, tensor, size)
        _same_length("gather", f"output {rank}", outs[rank], "this rank's input", tensor)
    elif outs:
        raise UnsupportedCollective("gather", why=f"only rank {root} may pass outputs")

    def run(operation: Operation) -> None:
        if rank != root or outs is None:
            collective.gather(operation, None, gathered(tensor), root)
            return
        buffers = [blank(out) for out in outs]
        (own,) = apart([gathered(tensor)], buffers, own=0, place=root)
        collective.gather(operation, buffers, own, root)
        _scatter_all(buffers, outs)

    return Step(_varied("gather", tensor.dtype, f"root {root}"), run, _device(tensor))


def scatter(out: torch.Tensor, chunks: Tensors | None, root: int, rank: int, size: int) -> Step:
    """Fill `out` with the chunk that rank `root` has for this rank."""
    check_writable(out, "scatter")
    if rank == root:
        chunks = chunks or ()
        _check_chunks("scatter", chunks, out, size)
        _same_length("scatter", "this rank's output", out, f"input {rank}", chunks[rank])
    elif chunks:
        raise UnsupportedCollective("scatter", why=f"only rank {root} may pass inputs")

    def run(operation: Operation) -> None:
        elements = blank(out)
        sent = None
        if rank == root and chunks:
            sent = apart([gathered(chunk) for chunk in chunks], [elements], own=root, place=0)
        collective.scatter(operation, elements, sent, root)
        scatter_back(elements, out)

    return Step(_varied("scatter", out.dtype, f"root {root}"), run, _device(out))


def reduce_scatter(out: torch.Tensor, chunks: Tensors, op: Reduction, rank: int, size: int) -> Step:
    """Write to `out` the reduction over all ranks of the chunks that they have for this rank."""
    check_writable(out, "reduce_scatter")
    _check_chunks("reduce_scatter", chunks, out, size)
    _same_length("reduce_scatter", "the output", out, f"input {rank}", chunks[rank])
    refuse_unless_reducible(out.dtype, op)

    def run(operation: Operation) -> None:
        elements = blank(out)
        parts = apart([gathered(chunk) for chunk in chunks], [elements], own=rank, place=0)
        collective.reduce_scatter(operation, elements, parts, op)
        scatter_back(elements, out)

    return Step(_varied("reduce_scatter", out.dtype, str(op)), run, _device(out))


def reduce_scatter_single(
    out: torch.Tensor, tensor: torch.Tensor, op: Reduction, size: int
) -> Step:
    """Write to `out` this rank's part of the reduction of `tensor`, which is all parts in a row."""
    check_writable(out, "reduce_scatter_single")
    check_readable(tensor, "reduce_scatter_single")
    _same_kind("reduce_scatter_single", (out, tensor))
    refuse_unless_reducible(out.dtype, op)
    if tensor.numel() != size * out.numel():
        raise UnsupportedCollective(
            f"reduce_scatter_single of {tensor.numel()} elements over {size} ranks",
            why=f"the output has {out.numel()} elements",
        )

    def run(operation: Operation) -> None:
        elements = blank(out)
        chunks = gathered(tensor).view(size, out.numel()).unbind(0)
        parts = apart(chunks, [elements], own=operation.rank, place=0)
        collective.reduce_scatter(operation, elements, parts, op)
        scatter_back(elements, out)

    return Step(_equal("reduce_scatter_single", out, str(op)), run, _device(out))


def all_to_all(outs: Tensors, chunks: Tensors, rank: int, size: int) -> Step:
    """Fill ``outs[r]`` with the chunk that rank ``r`` has for this rank."""
    _check_count("all_to_all", "outputs", outs, size)
    _check_outs("all_to_all", outs, outs[0], size)
    _check_chunks("all_to_all", chunks, outs[0], size)
    _same_length("all_to_all", f"output {rank}", outs[rank], f"input {rank}", chunks[rank])

    def run(operation: Operation) -> None:
        buffers = [blank(out) for out in outs]
        sent = apart([gathered(chunk) for chunk in chunks], buffers, own=rank, place=rank)
        collective.all_to_all(operation, buffers, sent)
        _scatter_all(buffers, outs)

    return Step(_varied("all_to_all", outs[0].dtype), run, _device(outs[0]))


def all_to_all_single(
    out: torch.Tensor,
    tensor: torch.Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    rank: int,
    size: int,
) -> Step:
    """Split `tensor` along its first dimension, send part ``r`` to rank ``r``, and join what comes.

    Args:
        out: where parts are joined along the first dimension.
        tensor: what is split.
        out_splits: lengths of the parts that come; empty for equal ones.
        in_splits: lengths of the parts that go; empty for equal ones.
        rank: this rank, which hands its own part to itself.
        size: number of ranks.
    """
    check_writable(out, "all_to_all_single")
    check_readable(tensor, "all_to_all_single")
    _same_kind("all_to_all_single", (out, tensor))
    out_lengths = _lengths("output", out, out_splits, size)
    in_lengths = _lengths("input", tensor, in_splits, size)
    if in_lengths[rank] != out_lengths[rank]:
        why = f"part {rank}, which stays here, has {in_lengths[rank]} elements in the input, and "
        raise UnsupportedCollective(
            "all_to_all_single", why=f"{why}{out_lengths[rank]} in the output"
        )

    def run(operation: Operation) -> None:
        elements = blank(out)
        buffers = torch.split(elements, out_lengths)
        chunks = torch.split(gathered(tensor), in_lengths)
        sent = apart(chunks, buffers, own=operation.rank, place=operation.rank)
        collective.all_to_all(operation, buffers, sent)
        scatter_back(elements, out)

    return Step(_varied("all_to_all_single", tensor.dtype), run, _device(tensor))


def message(tensor: torch.Tensor, name: str) -> Signature:
    """Return what both sides of a tagged message must agree on. `name` is for errors."""
    (check_writable if name == "recv" else check_readable)(tensor, name)
    return _equal("send/recv", tensor)


def _device(tensor: torch.Tensor) -> torch.device | None:
    return None if tensor.is_cpu else tensor.device


@functools.lru_cache(maxsize=1024)
def _reduced(dtype: torch.dtype, numel: int, op: Reduction) -> Signature:
    refuse_unless_reducible(dtype, op)
    return _signature("all_reduce", dtype, numel, str(op))


def _equal(name: str, tensor: torch.Tensor, detail: str = "") -> Signature:
    return _signature(name, tensor.dtype, tensor.numel(), detail)


def _varied(name: str, dtype: torch.dtype, detail: str = "") -> Signature:
    return _signature(name, dtype, None, detail)


@functools.lru_cache(maxsize=1024)
def _signature(name: str, dtype: torch.dtype, numel: int | None, detail: str) -> Signature:
    return Signature(name, dtype_name(dtype), numel, detail)


def _scatter_all(buffers: Tensors, outs: Tensors) -> None:
    for buffer, out in zip(buffers, outs, strict=True):
        scatter_back(buffer, out)


def _check_outs(name: str, outs: Tensors, like: torch.Tensor, size: int) -> None:
    _check_count(name, "outputs", outs, size)
    for out in outs:
        check_writable(out, name)
    check_distinct(outs, name)
    _same_kind(name, (*outs, like))


def _check_chunks(name: str, chunks: Tensors, like: torch.Tensor, size: int) -> None:
    _check_count(name, "inputs", chunks, size)
    for chunk in chunks:
        check_readable(chunk, name)
    _same_kind(name, (*chunks, like))


def _check_count(name: str, kind: str, tensors: Tensors, size: int) -> None:
    if len(tensors) != size:
        raise UnsupportedCollective(
            name, why=f"{len(tensors)} {kind} for a group of {size} ranks", fix="Pass one per rank."
        )


def _same_kind(name: str, tensors: Tensors) -> None:
    kinds = sorted({str(tensor.dtype) for tensor in tensors})
    if len(kinds) > 1:
        raise UnsupportedCollective(name, why=f"tensors of different types: {', '.join(kinds)}")
    places = sorted({str(tensor.device) for tensor in tensors})
    if len(places) > 1:
        raise UnsupportedCollective(name, why=f"tensors on different devices: {', '.join(places)}")


def _same_length(
    name: str, first: str, one: torch.Tensor, second: str, other: torch.Tensor
) -> None:
    if one.numel() != other.numel():
        why = f"{first} has {one.numel()} elements, and {second} has {other.numel()}"
        raise UnsupportedCollective(name, why=why)


def _lengths(kind: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return how many elements each rank's part has."""
    what = f"all_to_all_single with an {kind} of shape {tuple(tensor.shape)}"
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise UnsupportedCollective(what, why=f"{rows} rows don't divide among {size} ranks")
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        why = f"split sizes {list(splits)} don't add up to {rows} rows for {size} ranks"
        raise UnsupportedCollective(what, why=why)
    row = tensor.numel() // rows if rows else 0
    return [split * row for split in splits]
