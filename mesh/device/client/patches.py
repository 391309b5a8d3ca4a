"""Where torch takes it for granted that storages have memory, and would crash where there is none.

Each of these wraps what torch has, and does as that did for every other device.
"""

from __future__ import annotations

from copy import deepcopy as deep_copy
from typing import Any

import torch
import torch.utils.dlpack

from mesh.device.client.tensors import (
    BACKEND,
    devices,
    geometry_of,
    handle_of,
    is_mesh,
    tensor_over,
)
from mesh.device.errors import UnsupportedOnDevice
from mesh.device.wire import Geometry

__all__ = ["patch"]

PAGE_BITS = 12
"""Addresses that stand for handles are this far apart, so that each is a storage's own."""


def patch() -> None:
    """Put the wrappers in place, once."""
    storage: Any = torch.UntypedStorage
    tensor: Any = torch.Tensor
    _patch_new(storage)
    _patch_copy(storage)
    _patch_data_ptr(storage)
    _patch_files(storage)
    _patch_deepcopy(tensor)
    _patch_dlpack(tensor)
    _patch_backward()


def _patch_new(storage: Any) -> None:
    original = storage.__new__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None:
            return original(cls, *args, **kwargs)
        if torch.device(device).type != BACKEND:
            return original(cls, *args, device=device, **kwargs)
        nbytes = args[0] if args else 0
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    storage.__new__ = new


def _patch_copy(storage: Any) -> None:
    original = storage.copy_

    def copy(self: Any, source: Any, non_blocking: bool | None = None) -> Any:
        if BACKEND not in (self.device.type, source.device.type):
            return original(self, source, non_blocking)
        _bytes(self).copy_(_bytes(source))
        return self

    storage.copy_ = copy


def _patch_data_ptr(storage: Any) -> None:
    original = storage.data_ptr

    def data_ptr(self: Any) -> int:
        if self.device.type != BACKEND:
            return int(original(self))
        handle = getattr(self, "_mesh", None)  # torch.save tells storages apart by this
        return 0 if handle is None else handle.id << PAGE_BITS

    storage.data_ptr = data_ptr


def _patch_files(storage: Any) -> None:
    """Have ``pickle``, and ``torch.save`` in its older format, write and read the elements."""
    write, read = storage._write_file, storage._set_from_file

    def write_file(self: Any, *args: Any) -> Any:
        return write(self if self.device.type != BACKEND else self.cpu(), *args)

    def set_from_file(self: Any, *args: Any) -> Any:
        if self.device.type != BACKEND:
            return read(self, *args)
        self.copy_(read(storage(self.nbytes()), *args))
        return self

    storage._write_file, storage._set_from_file = write_file, set_from_file


def _patch_deepcopy(tensor: Any) -> None:
    original = tensor.__deepcopy__

    def deepcopy(self: Any, memo: dict[Any, Any]) -> Any:
        if type(self) is not torch.Tensor or not is_mesh(self) or not self.is_leaf:
            return original(self, memo)
        if id(self) in memo:
            return memo[id(self)]
        # Tensors that share a storage share it after the copy, too.
        key = (BACKEND, handle_of(self).id)
        if key not in memo:
            memo[key] = _bytes(self.untyped_storage()).clone().untyped_storage()
        copy = tensor_over(memo[key], geometry_of(self), self.device)
        if self.is_conj():
            copy = copy.conj_physical()
        if self.is_neg():
            copy = copy.neg()
        copy.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copy.grad = deepcopy(self.grad, memo)
        copy.__dict__ = deep_copy(self.__dict__, memo)
        memo[id(self)] = copy
        return copy

    tensor.__deepcopy__ = deepcopy


def _patch_dlpack(tensor: Any) -> None:
    for place, name in (
        (tensor, "__dlpack__"),
        (tensor, "__dlpack_device__"),
        (torch, "to_dlpack"),
        (torch.utils.dlpack, "to_dlpack"),
    ):
        setattr(place, name, _without_dlpack(getattr(place, name)))


def _without_dlpack(original: Any) -> Any:
    def export(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_mesh(self):
            raise UnsupportedOnDevice(
                "export of a tensor by DLPack",
                why="its memory is at a peer",
                fix="Export tensor.cpu().",
            )
        return original(self, *args, **kwargs)

    return export


def _patch_backward() -> None:
    """Have backward passes run on the thread that calls them.

    With a device guard in Python, torch has a thread for the backward pass of the first device
    alone; without threads the one that called runs it all.
    """
    module: Any = torch.autograd.graph
    original = module._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        if not devices:
            return original(*args, **kwargs)
        with torch.autograd.set_multithreading_enabled(False):
            return original(*args, **kwargs)

    places: tuple[Any, ...] = (module, torch.autograd)
    for place in places:
        place._engine_run_backward = run


def _bytes(storage: Any) -> torch.Tensor:
    """Return all of a storage as a tensor of bytes."""
    if storage.device.type != BACKEND:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    geometry = Geometry(torch.uint8, (storage.nbytes(),), (1,))
    return tensor_over(storage, geometry, storage.device)
