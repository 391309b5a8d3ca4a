"""Plain tensors on ``mesh:k``: shapes and strides here, elements at a peer.

A storage here has a size and no memory; an attribute of it holds the handle of the storage at the
peer, and lives exactly as long as it. Views share the storage, so that nothing has to be told of
them, whoever makes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from mesh.device.client.forms import Form
from mesh.device.errors import DeviceError
from mesh.device.wire import Geometry
from transport import CborValue

if TYPE_CHECKING:
    from mesh.device.client.session import Session

__all__ = [
    "BACKEND",
    "MAX_DEVICES",
    "Device",
    "Handle",
    "dense_strides",
    "device_of",
    "devices",
    "form_of",
    "geometry_of",
    "handle_of",
    "is_mesh",
    "new_tensor",
    "tensor_over",
    "with_handle",
]

BACKEND = "mesh"
"""The name of the device type."""

MAX_DEVICES = 128
"""Devices of one program: torch counts them in a signed byte."""


class Handle:
    """A storage at a peer. Letting go of it tells the peer, with what is sent next."""

    __slots__ = ("device", "id")

    def __init__(self, device: Device, number: int) -> None:
        self.device = device
        self.id = number

    def __del__(self) -> None:
        # Called anywhere, by the garbage collector too: one append, and no lock.
        self.device.release(self.id)


class Device:
    """One device of a peer, as this program has it.

    Args:
        session: with the peer.
        index: k of ``mesh:k``.
        remote: its number at the peer.
        facts: what the peer says of it.

    Attributes:
        float_dtype: of new tensors of floats, where no type is given; None for torch's default.
        is_used: whether any operation was called on it.
        is_configured: whether it was configured, which can be done once.
    """

    def __init__(
        self, session: Session, index: int, remote: int, facts: dict[str, CborValue]
    ) -> None:
        self.session = session
        self.index = index
        self.remote = remote
        self.facts = facts
        self.float_dtype: torch.dtype | None = None
        self.is_used = False
        self.is_configured = False
        self.torch_device = torch.device(BACKEND, index)
        self.release: Callable[[int], object] = session.queue.append
        self.next_id: Callable[[], int] = session.next_id


devices: list[Device] = []
"""Every device this program has opened, ``mesh:k`` at k."""


def device_of(device: torch.device | None) -> Device:
    """Return the device that torch calls `device`; without an index it is the first.

    Raises:
        DeviceError: it was not opened.
    """
    index = 0 if device is None or device.index is None else device.index
    try:
        return devices[index]
    except IndexError:
        raise DeviceError(
            f"use of device '{BACKEND}:{index}'",
            why=f"{len(devices)} devices are open",
            fix="Open it first: mesh.device(ticket, index).",
        ) from None


def new_tensor(device: Device, number: int, geometry: Geometry) -> torch.Tensor:
    """Return a plain tensor alone in a new storage, whose handle is `number`."""
    return with_handle(form_of(device, geometry).make(), device, number)


def form_of(device: Device, geometry: Geometry) -> Form:
    """Return what makes tensors of `geometry`, whose offset is 0, on a device."""
    return Form(device.torch_device, geometry.dtype, geometry.shape, geometry.strides)


def with_handle(tensor: torch.Tensor, device: Device, number: int) -> torch.Tensor:
    """Return `tensor`, whose storage is new and gets the handle `number`."""
    tensor.untyped_storage()._mesh = Handle(device, number)  # type: ignore[attr-defined]
    return tensor


def tensor_over(
    storage: torch.UntypedStorage, geometry: Geometry, device: torch.device
) -> torch.Tensor:
    """Return a plain tensor of `geometry` over a storage of a mesh device."""
    tensor: torch.Tensor = Form(device, geometry.dtype, (0,), (1,)).make()
    set_meta(tensor, storage, geometry.offset, geometry.shape, geometry.strides)
    return tensor


_set = torch.ops.aten.set_.source_Storage_storage_offset._handle.redispatch_boxed
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def set_meta(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> None:
    """Have `tensor` be over `storage`; touches no memory."""
    _set(_CPU, tensor, storage, offset, list(shape), list(strides))


def handle_of(tensor: torch.Tensor) -> Handle:
    """Return the handle of a tensor on a mesh device.

    Raises:
        DeviceError: it has none: its storage was made by other means than this package.
    """
    try:
        handle: Handle = tensor.untyped_storage()._mesh  # type: ignore[attr-defined]
    except AttributeError:
        raise DeviceError(
            "use of a tensor", why=f"it is on '{tensor.device}', and no peer knows of it"
        ) from None
    return handle


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Return how `tensor` lies in its storage."""
    return Geometry(
        tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    )


def is_mesh(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is on a mesh device."""
    return tensor.device.type == BACKEND


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    sizes = [max(size, 1) for size in shape[1:]]
    products = itertools.accumulate(reversed(sizes), lambda one, other: one * other, initial=1)
    return tuple(reversed(tuple(products)))[: len(shape)] if shape else ()
