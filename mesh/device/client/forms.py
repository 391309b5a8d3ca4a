"""New tensors of one kind: each operation makes one, and costs its program that more than all else.

What torch makes of a DLPack description of a tensor whose data is nowhere is a plain `torch.Tensor`
over a storage that has a size and no memory, in 0.7 microseconds. The other way, a wrapper of a
class with ``__torch_dispatch__`` that an operator makes plain, takes 2.1; it is for types that
DLPack has no name for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["DLPACK", "Form", "capsule", "from_dlpack"]

DLPACK = b"dltensor"
"""What a capsule is called whose description was not taken yet."""

_EXTENSION = 12
"""kDLExtDev, which is torch's PrivateUse1."""

_CODES: dict[int, tuple[torch.dtype, ...]] = {
    0: (torch.int8, torch.int16, torch.int32, torch.int64),
    1: (torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    2: (torch.float16, torch.float32, torch.float64),
    4: (torch.bfloat16,),
    5: (torch.complex32, torch.complex64, torch.complex128),
    6: (torch.bool,),
}
"""DLDataTypeCode, for types of one element each."""

_KINDS = {dtype: code for code, dtypes in _CODES.items() for dtype in dtypes}

from_dlpack = torch._C._from_dlpack
"""Returns the tensor that a capsule describes."""

capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
"""Returns a new capsule: ``capsule(form.address, DLPACK, None)``."""

_make = torch.Tensor._make_wrapper_subclass
_alias = torch.ops.aten.alias.default._handle.redispatch_boxed
_PRIVATE = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


class Form:
    """Tensors of one geometry, each alone in a new storage of just its size.

    Args:
        device: a mesh device.
        dtype: any.
        shape, strides: in elements.

    Attributes:
        address: to make a `capsule` for; 0 for types that DLPack has no name for. Whoever uses it
            holds on to the form meanwhile.
    """

    __slots__ = ("_description", "_numbers", "_wrapper", "address")

    def __init__(
        self, device: torch.device, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
    ) -> None:
        self.address = 0
        kind = _KINDS.get(dtype)
        if kind is None:
            self._wrapper = (_Wrapper, shape, strides, None, None, dtype, torch.strided, device)
            return
        numbers = ctypes.c_int64 * len(shape)
        self._numbers = numbers(*shape), numbers(*strides)
        self._description = made = _description()
        made.device_type, made.device_id = _EXTENSION, device.index
        made.ndim = len(shape)
        made.code, made.bits, made.lanes = kind, 8 * dtype.itemsize, 1
        made.shape, made.strides = map(ctypes.addressof, self._numbers)
        self.address = ctypes.addressof(made)

    def __del__(self) -> None:
        if self.address:
            _free.append(self._description)

    def make(self) -> Any:
        """Return a new tensor; its storage has no handle yet."""
        if self.address:
            return from_dlpack(capsule(self.address, DLPACK, None))
        return _alias(_PRIVATE, _make(*self._wrapper))


class _Description(ctypes.Structure):
    """DLManagedTensor, which begins with a DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_free: list[_Description] = []
"""Descriptions of no form. When the storage of a tensor goes, torch asks the description that the
tensor was made of for a deleter. It has none, and no other form that has the description by then
has one; but it must be there, whatever else the interpreter has let go of."""


def _description() -> _Description:
    """Return one that no form has, and that stays for ever."""
    try:
        return _free.pop()
    except IndexError:
        made = _Description()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
        return made


class _Wrapper(torch.Tensor):
    """What tensors of a type without a name are for the moment until they are plain."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it so
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError("a tensor that is not made yet was used")
