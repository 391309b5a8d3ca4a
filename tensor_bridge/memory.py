"""A tensor's elements as bytes, without copying where they already lie in order.

Memory is reached through ``data_ptr``: ``Tensor.numpy()`` would make the storage impossible to
resize ever after, which breaks whoever frees and regrows storages, such as FSDP.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Generator, Iterator

import torch

from tensor_bridge.codec import Quantization, TensorMeta, describe, is_plain, memory_order
from tensor_bridge.errors import QuotaExceeded, TensorChanged, UnsupportedTensor
from tensor_bridge.huge_pages import prefer

__all__ = [
    "CHUNK_BYTES",
    "NEW_WRITES",
    "Payload",
    "allocate",
    "chunks",
    "copied",
    "filled",
    "new_storage",
    "tensor_bytes",
]

CHUNK_BYTES = 256 * 1024
"""Bytes handled per turn of the event loop: so many that the cost of a turn does not show, so few
that gathering them takes well under a millisecond."""

# Element types of torch's own copy kernels by size. Read as one of these, elements of any type are
# copied bit by bit, whether or not torch has a kernel for the type itself.
_RAW = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


NEW_WRITES = 1
"""How often torch counts to have written in place to a tensor that `allocate` returns."""


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of `tensor` itself as writable bytes, in memory order.

    The view keeps the tensor alive. It dangles if the tensor's storage is resized.

    Args:
        tensor: on the CPU and dense in memory (contiguous, transposed, channels_last), with no
            conjugate or negative bit.

    Raises:
        UnsupportedTensor: the elements don't lie in one span of CPU memory as they are.
    """
    if not _in_place(tensor, describe(tensor)):
        raise UnsupportedTensor(
            f"byte view of a tensor of shape {tuple(tensor.shape)}",
            why="its elements don't fill one span of CPU memory as they are",
            fix="Take the view of a contiguous copy.",
        )
    return _span(tensor, tensor.data_ptr(), tensor.numel() * tensor.dtype.itemsize)


def chunks(tensor: torch.Tensor, meta: TensorMeta, offset: int = 0) -> Iterator[memoryview]:
    """Yield the bytes of `tensor` from `offset` on, in pieces of at most `CHUNK_BYTES`.

    Elements that lie in order are not copied; all others are gathered one piece at a time, so that
    a view never costs a copy of its size. Pieces of a CUDA tensor are copied to the CPU on the
    calling thread's current stream, and waited for.

    Args:
        tensor: what to read. It must not be written to meanwhile; whoever reads checks its version.
        meta: ``describe(tensor)``, taken before.
        offset: bytes to leave out, from 0 to ``meta.nbytes``.

    Yields:
        Byte views, valid until the next one is asked for.

    Raises:
        TensorChanged: the tensor's memory was resized or replaced meanwhile.
    """
    if _in_place(tensor, meta):
        yield from _spans(tensor, meta.nbytes, offset)
        return
    for size, skip, block in _blocks(_elements(tensor).permute(meta.order), offset):
        gathered = block.resolve_conj().resolve_neg().contiguous().cpu()
        yield _span(gathered, gathered.data_ptr(), size)[skip:]


def copied(tensor: torch.Tensor, meta: TensorMeta) -> bytes:
    """Return the bytes of a small tensor, in one piece. Arguments and errors as `chunks`."""
    if not is_plain(tensor):
        return b"".join(chunks(tensor, meta))
    end = tensor.storage_offset() * tensor.dtype.itemsize + meta.nbytes
    if tensor.untyped_storage().nbytes() < end:
        raise TensorChanged("reading of a tensor", why="its storage was resized meanwhile")
    return ctypes.string_at(tensor.data_ptr(), meta.nbytes)


class Payload:
    """A tensor's bytes from an offset on, for a lane to send.

    Args:
        tensor, meta, offset: as `chunks`.
    """

    def __init__(self, tensor: torch.Tensor, meta: TensorMeta, offset: int = 0) -> None:
        self._tensor = tensor
        self._meta = meta
        self._offset = offset
        self._address = tensor.data_ptr() if _in_place(tensor, meta) else None

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return self._meta.nbytes - self._offset

    def pieces(self) -> Iterator[memoryview]:
        """Yield them piece by piece, as `chunks` does."""
        return chunks(self._tensor, self._meta, self._offset)

    def spans(self, size: int) -> Generator[memoryview]:
        """Yield them in parts of at most `size`: not copied, where they lie in one span.

        Raises:
            TensorChanged: the tensor's memory was resized or replaced meanwhile.
        """
        whole = self.whole()
        if whole is None:
            for piece in self.pieces():
                yield from (piece[start : start + size] for start in range(0, len(piece), size))
            return
        for start in range(0, len(whole), size):
            if not self.is_intact():
                raise TensorChanged("reading of a tensor", why="its storage was resized meanwhile")
            yield whole[start : start + size]

    def whole(self) -> memoryview | None:
        """Return them all as they lie in memory, None if they don't lie there in one span.

        Nothing is copied: reading them is safe for as long as `is_intact` holds.
        """
        if self._address is None or self.nbytes <= 0 or not self.is_intact():
            return None
        return _span(self._tensor, self._address + self._offset, self.nbytes)

    def sealed_by(self, look: Callable[[torch.Tensor, int], int | None]) -> int | None:
        """Return the descriptor that `look` finds for the tensor, if all of it is to be sent."""
        if self._address is None or self._offset or not self.is_intact():
            return None
        return look(self._tensor, self._meta.nbytes)

    def is_intact(self) -> bool:
        """Whether the tensor's memory is still where it was, and as long."""
        tensor = self._tensor
        end = tensor.storage_offset() * tensor.dtype.itemsize + self._meta.nbytes
        return tensor.data_ptr() == self._address and tensor.untyped_storage().nbytes() >= end


def allocate(meta: TensorMeta, storage: torch.UntypedStorage | None = None) -> torch.Tensor:
    """Return a new CPU tensor as `meta` describes it, allocated once and not initialized.

    Args:
        meta: what it is to be.
        storage: memory of just its size to have it in; by default new memory.

    Raises:
        QuotaExceeded: this machine has no room for it.
    """
    if storage is None:
        storage = new_storage(meta.nbytes)
    with torch.inference_mode(False):
        tensor = _empty(meta).set_(storage, 0, meta.shape, meta.strides)
        return tensor.requires_grad_(meta.requires_grad)


def filled(meta: TensorMeta, data: bytes) -> torch.Tensor:
    """Return a new CPU tensor of the elements in `data`, as many bytes as `meta` has.

    Raises:
        QuotaExceeded: as `allocate`.
    """
    is_ordered = meta.order == tuple(range(len(meta.shape))) and meta.quantization is None
    if not is_ordered or torch.is_inference_mode_enabled():
        tensor = allocate(meta)
        tensor_bytes(tensor)[:] = data
        return tensor
    tensor = torch.empty(meta.shape, dtype=meta.dtype, device="cpu")
    ctypes.memmove(tensor.data_ptr(), data, meta.nbytes)
    return tensor.requires_grad_() if meta.requires_grad else tensor


def new_storage(nbytes: int) -> torch.UntypedStorage:
    """Return memory of the CPU, not initialized.

    Raises:
        QuotaExceeded: this machine has no room for it.
    """
    try:
        room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    except (RuntimeError, MemoryError) as error:
        raise QuotaExceeded(
            f"allocation of {nbytes} bytes", why="this machine does not have that much memory"
        ) from error
    # Touched page by page for the first time, 64 MiB take 43 ms in pages of 4 KiB, 18 ms in huge.
    prefer(room.data_ptr(), nbytes)
    return room.untyped_storage()


def _in_place(tensor: torch.Tensor, meta: TensorMeta) -> bool:
    """Return whether the bytes to move lie in one span of CPU memory as they are."""
    return is_plain(tensor) or (
        tensor.device.type == "cpu"
        and not tensor.is_conj()
        and not tensor.is_neg()
        and memory_order(meta.shape, tensor.stride()) is not None
    )


def _span(owner: torch.Tensor, address: int, nbytes: int) -> memoryview:
    array = (ctypes.c_ubyte * nbytes).from_address(address) if nbytes else (ctypes.c_ubyte * 0)()
    array.owner = owner  # type: ignore[attr-defined]  # the view holds the array, the array the tensor
    return memoryview(array).cast("B")


def _spans(tensor: torch.Tensor, nbytes: int, offset: int) -> Iterator[memoryview]:
    start = tensor.data_ptr()
    end = tensor.storage_offset() * tensor.dtype.itemsize + nbytes
    while offset < nbytes:
        # Asked again each time: resizing a storage moves it.
        if tensor.data_ptr() != start or tensor.untyped_storage().nbytes() < end:
            raise TensorChanged("reading of a tensor", why="its storage was resized meanwhile")
        size = min(CHUNK_BYTES, nbytes - offset)
        yield _span(tensor, start + offset, size)
        offset += size


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of `tensor` that torch can copy exactly, free of autograd and quantizers."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.detach()
    alias = torch.empty(0, dtype=_RAW[tensor.dtype.itemsize], device=tensor.device)
    return alias.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _blocks(tensor: torch.Tensor, skip: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Cut `tensor` into consecutive parts, in row order, of at most `CHUNK_BYTES` each.

    Begins with the part that byte `skip` is in: going through those before it, of a tensor of many
    gigabytes, would take as long as a good part of its move. Each comes with its bytes, and how
    many of them to leave out.
    """
    nbytes = tensor.numel() * tensor.dtype.itemsize
    if nbytes <= CHUNK_BYTES:
        if skip < nbytes:
            yield nbytes, skip, tensor
        return
    row = nbytes // tensor.shape[0]
    if row > CHUNK_BYTES:
        first, skip = divmod(skip, row)
        for index in range(first, tensor.shape[0]):
            yield from _blocks(tensor[index], skip)
            skip = 0
        return
    step = CHUNK_BYTES // row
    first, skip = divmod(skip, step * row)
    for start in range(first * step, tensor.shape[0], step):
        part = tensor[start : start + step]
        size = part.shape[0] * row
        if skip < size:
            yield size, skip, part
        skip = 0


def _empty(meta: TensorMeta) -> torch.Tensor:
    """Return an empty CPU tensor that has everything of `meta` but its shape."""
    if meta.quantization is None and meta.dtype is not torch.complex32:
        return torch.empty(0, dtype=meta.dtype, device="cpu")
    with warnings.catch_warnings():
        # torch calls complex32 experimental and quantized types deprecated. Who made the tensor has
        # been told; who is sent it has no choice.
        warnings.simplefilter("ignore", UserWarning)
        if meta.quantization is None:
            return torch.empty(0, dtype=meta.dtype, device="cpu")
        return _empty_quantized(meta.dtype, meta.quantization)


def _empty_quantized(dtype: torch.dtype, quantization: Quantization) -> torch.Tensor:
    # torch's own way to rebuild a quantized tensor around a storage: torch._utils._rebuild_qtensor.
    if quantization.axis is None:
        return torch._empty_affine_quantized(
            (0,),
            scale=quantization.scales[0],
            zero_point=quantization.zero_points[0],
            dtype=dtype,
            device="cpu",
        )
    return torch._empty_per_channel_affine_quantized(
        (0,),
        scales=torch.tensor(quantization.scales, dtype=torch.float64, device="cpu"),
        zero_points=torch.tensor(quantization.zero_points, dtype=torch.int64, device="cpu"),
        axis=quantization.axis,
        dtype=dtype,
        device="cpu",
    )
