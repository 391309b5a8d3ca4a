"""Operators that are not sent as they are: copies, reads, new memory, what has to look alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mesh.device import wire
from mesh.device.client.entries import Entry
from mesh.device.client.kernels import emit, general_kernel
from mesh.device.client.moving import MOVE_BYTES, Mover
from mesh.device.client.session import Request, Session
from mesh.device.client.tensors import (
    Device,
    dense_strides,
    device_of,
    geometry_of,
    handle_of,
    is_mesh,
    set_meta,
)
from mesh.device.errors import UnsupportedOnDevice
from tensor_bridge import TensorMeta, describe, tensor_bytes
from tensor_bridge.codec import memory_order

__all__ = [
    "KERNELS",
    "LOCAL",
    "ask_elements",
    "elements",
    "empty",
    "finish_elements",
    "resolved",
    "resolving",
]

aten = torch.ops.aten

UPLOAD_CHUNK = 1 << 18
"""Bytes of a tensor that go into one message."""

LOCAL = (
    "view",
    "as_strided",
    "_reshape_alias",
    "unfold",
    "view_as_real",
    "view_as_complex",
    "set_",
    "set_.source_Storage",
    "set_.source_Tensor",
)
"""Operators that only change how a tensor lies in its storage: nobody has to be told of them."""

_copy_there = general_kernel(aten.copy_.default)
_allocations: dict[Any, Entry] = {}
_moves: dict[Any, Entry] = {}
_reads: dict[Any, Entry] = {}


def empty(
    device: Device, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, nbytes: int
) -> torch.Tensor:
    """Return a tensor in new memory, which is zero at the peer."""
    key = (device, tuple(shape), tuple(strides), dtype, nbytes)
    entry = _allocations.get(key)
    if entry is None:
        made = wire.Output(wire.Geometry(dtype, key[1], key[2]), nbytes)
        template = wire.Template(wire.ALLOCATE, device.remote, outputs=(made,), results=1)
        entry = Entry(device, template, None, partial(_allocations.pop, key, None))
        _allocations[key] = entry
    tensor: torch.Tensor = emit(entry, (), (), (), {})
    return tensor


def elements(tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """Wait for the elements of a tensor on a mesh device; return them in a CPU tensor.

    Args:
        tensor: whose.
        into: contiguous CPU tensor of the same shape and type to put them in; by default a new one.

    Raises:
        MeshError: an operation that it was made by has failed, or the session is lost.
    """
    request, target = ask_elements(tensor, into)
    handle_of(tensor).device.session.result(request)
    return finish_elements(tensor, target)


def ask_elements(
    tensor: torch.Tensor, into: torch.Tensor | None = None
) -> tuple[Request, torch.Tensor]:
    """Ask for the elements of a tensor; return the request and the tensor that they land in."""
    handle = handle_of(tensor)
    entry = _reading(handle.device, geometry_of(tensor))
    if into is None:
        into = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
    session = handle.device.session
    mover = _mover(session)
    meta = _dense(tensor)
    if mover is not None and meta.nbytes >= MOVE_BYTES:
        return mover.download(entry.number, handle.id, meta, into), into
    sink = tensor_bytes(into) if into.numel() else memoryview(bytearray())
    what = f"read of a tensor of shape {tuple(tensor.shape)}"
    request = session.ask(entry.number, entry.layout, (handle.id,), what, sink)
    return request, into


def finish_elements(tensor: torch.Tensor, landed: torch.Tensor) -> torch.Tensor:
    """Return what has landed as the elements of `tensor`, whose bits may stand for others."""
    if tensor.is_conj():
        landed = landed.conj_physical()
    return -landed if tensor.is_neg() else landed


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose bits are its elements, with no conjugate or negative bit beside."""
    if not is_mesh(tensor):
        return tensor.resolve_conj().resolve_neg()
    if tensor.is_conj():
        tensor = torch.conj_physical(tensor.conj())
    if tensor.is_neg():
        tensor = -tensor._neg_view()
    return tensor


def resolving(operator: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return `kernel` for an operator whose kernels see to conjugate and negative bits themselves.

    torch's own do, and no peer knows of the bits.
    """
    written = operator._schema.arguments[0].alias_info
    is_in_place = written is not None and written.is_write

    def run(*args: Any, **kwargs: Any) -> Any:
        first = args[0]
        if is_in_place and (first.is_conj() or first.is_neg()):
            raise UnsupportedOnDevice(
                f"operation {operator._schema.name}",
                why="it would write to a conjugate or negative view",
                fix="Write to the tensor that it is a view of, or to a clone().",
            )
        return kernel(
            *map(_all_resolved, args),
            **{name: _all_resolved(value) for name, value in kwargs.items()},
        )

    return run


def _all_resolved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return resolved(value) if value.is_conj() or value.is_neg() else value
    return [_all_resolved(item) for item in value] if isinstance(value, list) else value


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if target.is_conj() or target.is_neg():
        # What is to be written is the target's bits, and not what they stand for.
        plain = target._neg_view() if target.is_neg() else target
        if plain.is_conj():
            plain, source = plain.conj(), source.conj()
        if target.is_neg():
            source = -source
        _copy(plain, source)
        return target
    source = resolved(source)
    if not is_mesh(target):
        _download(target, source)
    elif not is_mesh(source):
        _upload(target, source.detach().to("cpu"))
    else:
        here, there = handle_of(target).device, handle_of(source).device
        if here.session is not there.session and _is_whole(target, source):
            _moved_between_peers(source, here, target)
            return target
        if here is not there:
            source = _moved(source, here)
        _copy_there(target, source)
    return target


def _download(target: torch.Tensor, source: torch.Tensor) -> None:
    direct = (
        target.dtype is source.dtype
        and target.shape == source.shape
        and target.is_contiguous()
        and target.device.type == "cpu"
        and not target.requires_grad
    )
    landed = elements(source, target.detach() if direct else None)
    if not direct:
        target.copy_(landed)


def _upload(target: torch.Tensor, source: torch.Tensor) -> None:
    shape = tuple(target.shape)
    direct = (
        source.dtype is target.dtype
        and tuple(source.shape) == shape
        and memory_order(shape, target.stride()) is not None
    )
    if not direct:
        device = handle_of(target).device
        strides = dense_strides(source.shape)
        nbytes = source.numel() * source.dtype.itemsize
        staged = empty(device, tuple(source.shape), strides, source.dtype, nbytes)
        _upload(staged, source)
        _copy_there(target, staged)
        return
    if source.stride() != target.stride():
        laid_out = torch.empty_strided(shape, target.stride(), dtype=source.dtype, device="cpu")
        source = laid_out.copy_(source)
    if not source.numel():
        return
    handle = handle_of(target)
    session = handle.device.session
    start = int(target.storage_offset()) * target.dtype.itemsize
    mover = _mover(session)
    data = tensor_bytes(source)
    if mover is not None and len(data) >= MOVE_BYTES:
        mover.upload(source, describe(source), handle.id, start)
        return
    for offset in range(0, len(data), UPLOAD_CHUNK):
        # Copied: the program may write to its own tensor as soon as this returns.
        part = data[offset : offset + UPLOAD_CHUNK]
        session.emit(wire.write(handle.id, start + offset, part))
        if offset + len(part) < len(data):
            session.flush()


def _moved(source: torch.Tensor, device: Device) -> torch.Tensor:
    """Return a copy of `source` on another mesh device."""
    there = handle_of(source).device
    if there.session is not device.session:
        return _moved_between_peers(source, device)
    geometry = geometry_of(source)
    key = (device, geometry)
    entry = _moves.get(key)
    if entry is None:
        made = wire.Geometry(geometry.dtype, geometry.shape, dense_strides(geometry.shape))
        template = wire.Template(
            wire.MOVE,
            device.remote,
            (wire.TensorOf(geometry),),
            outputs=(wire.Output(made, made.span),),
            results=1,
        )
        entry = _moves[key] = Entry(device, template, None, partial(_moves.pop, key, None))
    tensor: torch.Tensor = emit(entry, (handle_of(source).id,), (), (source,), {})
    return tensor


def _is_whole(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether the elements of `source` as they travel are a span of a storage."""
    return target.dtype is source.dtype and target.shape == source.shape and target.is_contiguous()


def _moved_between_peers(
    source: torch.Tensor, device: Device, target: torch.Tensor | None = None
) -> torch.Tensor:
    """Order one peer to fetch a tensor from another; return what it will be: `target`, or new.

    Nobody waits here. What needs it waits at the target; whatever goes wrong is told to who reads.
    """
    handle = handle_of(source)
    ends = _mover(handle.device.session), _mover(device.session)
    meta = _dense(source)
    moved = target
    if moved is None:
        moved = empty(device, meta.shape, dense_strides(meta.shape), meta.dtype, meta.nbytes)
    if ends[0] is None or ends[1] is None or ends[0].node is not ends[1].node:
        # Two nodes of this program are two strangers to the peers: none may order for the other.
        _upload(moved, elements(source))
        return moved
    reading = _reading(handle.device, geometry_of(source))
    offset = int(moved.storage_offset()) * moved.dtype.itemsize
    ends[1].bring(ends[0], reading.number, handle.id, meta, handle_of(moved).id, offset)
    return moved


def _mover(session: Session) -> Mover | None:
    """Return how a session takes part in moves, if it does."""
    carrier = session.carrier
    return carrier.mover if carrier is not None and session.moves else None


def _dense(tensor: torch.Tensor) -> TensorMeta:
    """Return what the elements of a tensor are as they travel."""
    return TensorMeta(tensor.dtype, tuple(tensor.shape), tuple(range(tensor.dim())))


def _reading(device: Device, geometry: wire.Geometry) -> Entry:
    """Return the entry for reads of tensors that lie in their storage like that."""
    key = (device, geometry)
    entry = _reads.get(key)
    if entry is None:
        template = wire.Template(wire.READ, device.remote, (wire.TensorOf(geometry),))
        entry = _reads[key] = Entry(device, template, None, partial(_reads.pop, key, None))
    return entry


def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    kind = dtype or _float_dtype(device)
    plain = memory_format in (None, torch.contiguous_format, torch.preserve_format)
    if plain:
        strides = dense_strides(size)
    else:
        strides = torch.empty(tuple(size), device="meta", memory_format=memory_format).stride()
    return _empty_strided(size, strides, dtype=kind, device=device)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    geometry = wire.Geometry(dtype or _float_dtype(device), tuple(size), tuple(stride))
    return empty(device_of(device), geometry.shape, geometry.strides, geometry.dtype, geometry.span)


def _float_dtype(device: torch.device | None) -> torch.dtype:
    return device_of(device).float_dtype or torch.get_default_dtype()


def _set(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int] = (),
) -> torch.Tensor:
    # Not as with meta tensors: those would have the storage grow here alone.
    set_meta(tensor, storage, offset, size, stride or dense_strides(size))
    return tensor


def _resize(
    tensor: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    if memory_format is None and tuple(size) == tuple(tensor.shape):
        return tensor  # torch leaves the layout of what has the size already
    strides = torch.empty(
        tuple(size), device="meta", memory_format=memory_format or torch.contiguous_format
    ).stride()
    offset = int(tensor.storage_offset())
    need = wire.Geometry(tensor.dtype, tuple(size), strides, offset).span
    storage = tensor.untyped_storage()
    if need > storage.nbytes():
        # Other tensors keep the storage that they had; torch's own would see this one grow.
        grown = empty(handle_of(tensor).device, (need,), (1,), torch.uint8, need)
        if storage.nbytes():
            old = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            set_meta(old, storage, 0, (storage.nbytes(),), (1,))
            _copy_there(grown[: storage.nbytes()], old)
        storage = grown.untyped_storage()
    set_meta(tensor, storage, offset, tuple(size), strides)
    return tensor


def _item(tensor: torch.Tensor) -> Any:
    return elements(tensor).item()


def _equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.shape == other.shape and bool(aten.eq(tensor, other).all().item())


def _nothing(*args: Any) -> None:
    """Say nothing of streams: there are none."""


KERNELS: dict[str, Callable[..., Any]] = {
    "copy_": _copy,
    "_copy_from": lambda source, target, non_blocking=False: _copy(target, source),
    "_copy_from_and_resize": lambda source, target: _copy(target.resize_(source.shape), source),
    "_local_scalar_dense": _item,
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "resize_": _resize,
    "set_.source_Storage_storage_offset": _set,
    "equal": _equal,
    "record_stream": _nothing,
}
"""What torch calls for these operators on a mesh device."""
