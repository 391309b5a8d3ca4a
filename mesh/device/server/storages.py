"""The memory that storages of a session are: made, viewed, filled, and handed over by the node.

Large memory is the kernel's own zeros until something is written there, and in huge pages then.
What arrives for all of a storage is not copied there: the sealed memory that it came in is the
storage from then on, mapped so that what is written to it shows nowhere else. A write to such
memory copies it page by page, in small ones, which takes four times as long as to copy all of it at
once; so an operation that writes to it has it copied before. Until then it can be handed on.
"""

from __future__ import annotations

import mmap
import os

import torch

from mesh.device import wire
from mesh.device.errors import DeviceError
from tensor_bridge import tensor_bytes
from tensor_bridge.copying import copy_now
from tensor_bridge.huge_pages import HUGE_PAGE, prefer
from tensor_bridge.lanes import map_sealed
from transport import ProtocolError

__all__ = ["MAX_VIEWS", "Slot", "over", "zeros"]

MAX_VIEWS = 16
"""Views of one storage that are kept made: a weight is used in two or three."""


class Slot:
    """One storage.

    Args:
        base: a tensor over all of it, alone there.
        geometry: of that, where it is known.
        device: the number of its device in the session.

    Attributes:
        nbytes: its size.
        views: those that are kept made.
        is_sealed: whether it lies in memory that was handed over, and is slow to write to.
    """

    __slots__ = ("base", "device", "geometry", "is_sealed", "nbytes", "views")

    def __init__(self, base: torch.Tensor, geometry: wire.Geometry | None, device: int) -> None:
        self.base = base
        self.geometry = geometry
        self.device = device
        self.nbytes = base.untyped_storage().nbytes()
        self.views: dict[wire.Geometry, torch.Tensor] | None = None
        self.is_sealed = False

    def keep_view(self, geometry: wire.Geometry, view: torch.Tensor) -> None:
        """Keep a view made, if there is room."""
        if self.views is None:
            self.views = {geometry: view}
        elif len(self.views) < MAX_VIEWS:
            self.views[geometry] = view

    def fill(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Fill a span of it, which lies within it, from memory that begins with the bytes.

        Args:
            descriptor: of the memory; it stays the caller's.
            offset, nbytes: the span.

        Raises:
            OSError: the memory can't be read or mapped.
            DeviceError: it ends too soon.
        """
        if nbytes == self.nbytes >= HUGE_PAGE and self.base.device.type == "cpu":
            try:
                memory = map_sealed(descriptor, nbytes)
            except ProtocolError:
                pass  # it may change after it was looked at, and is copied
            else:
                memory.keep(descriptor)
                self._lie_in(memory.storage)
                self.is_sealed = True
                return
        self.make_writable()
        _fill_from(descriptor, over(self.base, wire.Geometry(torch.uint8, (nbytes,), (1,), offset)))

    def make_writable(self) -> None:
        """Have it lie in memory of this process's own, where it is fast to write to."""
        if self.is_sealed:
            fresh = zeros(None, self.nbytes, self.base.device)
            copy_now(tensor_bytes(fresh), tensor_bytes(_flat(self.base)))
            self._lie_in(fresh.untyped_storage())
            self.is_sealed = False

    def _lie_in(self, storage: torch.UntypedStorage) -> None:
        """Take other memory; what still refers to the former has that for itself."""
        self.views = None
        base = self.base
        alias = torch.empty(0, dtype=base.dtype, device=base.device)
        self.base = alias.set_(storage, base.storage_offset(), base.shape, base.stride())


def zeros(geometry: wire.Geometry | None, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a tensor of `geometry`, by default of bytes, over new memory that is zero.

    Raises:
        OSError, RuntimeError: there is no such memory.
    """
    if device.type != "cpu" or nbytes < HUGE_PAGE:
        flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    else:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        prefer(flat.data_ptr(), nbytes)
    return flat if geometry is None else over(flat, geometry)


def over(base: torch.Tensor, geometry: wire.Geometry) -> torch.Tensor:
    """Return a tensor of `geometry`, which was found to fit, over the storage of `base`."""
    alias = torch.empty(0, dtype=geometry.dtype, device=base.device)
    return alias.set_(base.untyped_storage(), geometry.offset, geometry.shape, geometry.strides)


def _flat(base: torch.Tensor) -> torch.Tensor:
    nbytes = base.untyped_storage().nbytes()
    return over(base, wire.Geometry(torch.uint8, (nbytes,), (1,)))


def _fill_from(descriptor: int, target: torch.Tensor) -> None:
    """Fill a tensor of bytes from the beginning of memory. Raises as `Slot.fill`."""
    landed = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
    room = tensor_bytes(landed)
    start = 0
    while start < len(room):
        count = os.preadv(descriptor, [room[start:]], start)
        if not count:
            raise DeviceError("a move into a device", why="its memory was cut short")
        start += count
    if landed is not target:
        target.copy_(landed)
