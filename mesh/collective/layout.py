"""From tensors of any layout to runs of elements in row order, and back.

Every operation works on one-dimensional contiguous CPU tensors. A contiguous one is worked on in
its own memory; of any other a copy is made, and results are scattered back in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from mesh.collective import staging
from mesh.collective.errors import UnsupportedCollective

__all__ = [
    "apart",
    "blank",
    "check_distinct",
    "check_readable",
    "check_writable",
    "gathered",
    "raw",
    "scatter_back",
]

_increment_version = torch._C._increment_version
"""As ``torch.autograd.graph.increment_version``, which looks at its argument first."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_readable(tensor: torch.Tensor, name: str) -> None:
    """Raise unless the tensor's elements can be sent.

    Raises:
        UnsupportedCollective: it is not a strided CPU or CUDA tensor of plain elements.
    """
    if not tensor.is_cpu and tensor.device.type not in staging.STAGED:
        raise UnsupportedCollective(
            _on(name, tensor),
            why=f"it is on device '{tensor.device}'",
            fix="Move it to the CPU first.",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise UnsupportedCollective(
            _on(name, tensor),
            why=f"its elements are not plain numbers ({kind})",
            fix="Convert it to dense.",
        )


def check_writable(tensor: torch.Tensor, name: str) -> None:
    """Raise unless results can be written to the tensor.

    Raises:
        UnsupportedCollective: as `check_readable`; or elements share memory, as after ``expand``
            and ``unfold``.
    """
    check_readable(tensor, name)
    if not tensor.is_contiguous() and tensor.numel() and _has_shared_places(tensor):
        raise UnsupportedCollective(
            f"{name} into a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}",
            why="several of its elements share one place in memory, as after expand() or unfold()",
            fix="Pass a clone().",
        )


def check_distinct(tensors: Sequence[torch.Tensor], name: str) -> None:
    """Raise if two output tensors share memory: the later result would overwrite the earlier.

    Raises:
        UnsupportedCollective: names the indices.
    """
    spans = [(*_span(tensor), index) for index, tensor in enumerate(tensors) if tensor.numel()]
    spans.sort()
    for at, (_, end, index) in enumerate(spans):
        for start, _, other in spans[at + 1 :]:
            if start >= end:
                break
            if _overlap(tensors[index], tensors[other]):
                first, second = sorted((index, other))
                raise UnsupportedCollective(
                    f"{name} into a list of {len(tensors)} tensors",
                    why=f"outputs {first} and {second} share memory, as in [t] * n",
                    fix="Give each rank's result a tensor of its own.",
                )


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in row order: the tensor's own memory if contiguous, else a copy."""
    is_plain = type(tensor) is torch.Tensor and not tensor.requires_grad
    plain = tensor if is_plain else tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if not plain.is_cpu:
        return staging.fetch(plain)
    if plain.is_contiguous():
        return plain if plain.dim() == 1 else plain.view(-1)
    bits = _BITS.get(plain.dtype.itemsize)
    if bits is None:  # complex128, which torch can copy as it is
        return plain.contiguous().view(-1)
    # As integers, since not every type has kernels of its own.
    return plain.view(bits).contiguous().view(-1).view(plain.dtype)


def blank(tensor: torch.Tensor) -> torch.Tensor:
    """Return room for a result of the tensor's length: its own memory as `gathered`, or new."""
    if not tensor.is_cpu:
        return staging.room(tensor)
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return gathered(tensor)
    return torch.empty(tensor.numel(), dtype=tensor.dtype)


def scatter_back(elements: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write `elements`, in row order, to `tensor`, unless they already lie in its memory.

    Autograd learns that the tensor was written to, as from any operation in place.
    """
    if not tensor.is_cpu:
        staging.deliver(elements, tensor.detach())
    elif elements.numel() and elements.data_ptr() != tensor.data_ptr():
        shaped = elements.view(tensor.shape)
        plain = tensor.detach()
        bits = _BITS.get(plain.dtype.itemsize)
        if bits is None or plain.is_conj() or plain.is_neg():
            plain.copy_(shaped)
        else:
            plain.view(bits).copy_(shaped.view(bits))
    elif not tensor.is_inference():
        _increment_version((tensor,))


def apart(
    sent: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], *, own: int, place: int
) -> list[torch.Tensor]:
    """Return `sent`, with copies of those that results would overwrite before they are sent.

    Args:
        sent: as of `gathered`.
        outs: where results go, as of `blank`.
        own: which of `sent` this rank has for itself, and
        place: which of `outs` it goes to: those two may be the same memory.
    """
    spans = [(*_reach(out), at) for at, out in enumerate(outs) if out.numel()]
    low = min((start for start, _, _ in spans), default=0)
    high = max((end for _, end, _ in spans), default=0)

    def is_apart(at: int) -> bool:
        start, end = _reach(sent[at])
        if end <= low or high <= start:
            return True
        return all(
            end <= first or last <= start or (at == own and to == place and first == start)
            for first, last, to in spans
        )

    return [each if is_apart(at) else _copied(each) for at, each in enumerate(sent)]


def raw(elements: torch.Tensor) -> memoryview:
    """Return the bytes of what `gathered` returned. The view keeps the memory alive."""
    nbytes = elements.numel() * elements.dtype.itemsize
    if not nbytes:
        return memoryview(bytearray())
    span = (ctypes.c_ubyte * nbytes).from_address(elements.data_ptr())
    span.owner = elements  # type: ignore[attr-defined]  # the view holds the span, it the tensor
    return memoryview(span).cast("B")


def _copied(elements: torch.Tensor) -> torch.Tensor:
    copied = torch.empty_like(elements)
    raw(copied)[:] = raw(elements)  # not every type has kernels of its own
    return copied


def _on(name: str, tensor: torch.Tensor) -> str:
    return f"{name} on a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"


def _reach(elements: torch.Tensor) -> tuple[int, int]:
    """Return the same as `_span` of what is contiguous."""
    start = elements.data_ptr()
    return start, start + elements.nbytes


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte and the one after the last."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.dtype.itemsize


def _has_shared_places(tensor: torch.Tensor) -> bool:
    """Return whether two elements of a tensor that has some lie in one place."""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                break
            reach += (size - 1) * step
    else:
        return False  # each dimension steps over all of the smaller ones
    start, end = _span(tensor)
    marks = torch.zeros((end - start) // tensor.dtype.itemsize, dtype=torch.bool)
    _places(marks, tensor, int(tensor.storage_offset())).fill_(True)
    return int(marks.sum()) < tensor.numel()


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors whose spans intersect share an element."""
    if (first.is_contiguous() and second.is_contiguous()) or first.dtype != second.dtype:
        return True
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return False
    # Mark the one's places in memory, and look whether the other has any of them.
    start = int(min(first.storage_offset(), second.storage_offset()))
    end = max(_span(first)[1], _span(second)[1])
    size = (end - first.untyped_storage().data_ptr()) // first.dtype.itemsize - start
    marks = torch.zeros(size, dtype=torch.bool)
    _places(marks, first, start).fill_(True)
    return bool(_places(marks, second, start).any())


def _places(marks: torch.Tensor, tensor: torch.Tensor, start: int) -> torch.Tensor:
    return marks.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()) - start)
