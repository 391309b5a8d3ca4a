"""Elements of tensors in an accelerator's memory, which operations work on in the CPU's.

They are copied through pinned memory on the calling thread's current stream of the device: whoever
calls sees to it that this comes after the stream that wrote them, and before the one that reads
them (see `mesh.distributed.streams`).
"""

from __future__ import annotations

import torch

__all__ = ["STAGED", "deliver", "fetch", "room"]

STAGED = frozenset({"cuda"})
"""Types of devices whose tensors are taken."""


def room(tensor: torch.Tensor) -> torch.Tensor:
    """Return CPU memory for the elements of `tensor` in row order: pinned, where that can be."""
    pinned = torch.cuda.is_available()
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=pinned)


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the elements of `tensor` in row order. Blocks until it is there."""
    elements = room(tensor)
    elements.view(tensor.shape).copy_(tensor)
    return elements


def deliver(elements: torch.Tensor, tensor: torch.Tensor) -> None:
    """Have `elements`, of `room` or `fetch`, copied to `tensor`. Does not wait for it."""
    tensor.copy_(elements.view(tensor.shape), non_blocking=True)
    if torch.cuda.is_available():  # whoever frees it may not have waited
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
