"""States in files: tensors, numbers, texts, lists and dicts, and nothing that runs when it is read.

A file is ``quicmesh checkpoint 1`` and a newline, u64 length, deterministic CBOR (RFC 8949) of that
length, and the elements of all tensors, one after the other in row order. In the CBOR, what JSON
could not say is a list that begins with a word::

    ["tensor", dtype, [size, ..], offset in bytes]    ["tuple", [..]]    ["list", [..]]
    ["dict", [[key, value], ..]]                      ["bytes", ..]
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from pathlib import Path
from typing import Any

import torch

from auth import MeshError
from mesh.train.errors import CheckpointError
from tensor_bridge import dtype_name, dtype_of, tensor_bytes
from transport import CborValue, cbor

__all__ = ["load_checkpoint", "save_checkpoint"]

_MAGIC = b"quicmesh checkpoint 1\n"
_LENGTH = struct.Struct("<Q")

MAX_TREE = 1 << 28
"""Bytes of the CBOR: some hundred for each tensor."""


def save_checkpoint(path: Path | str, state: dict[str, Any]) -> None:
    """Write a state to a file, whole or not at all.

    Raises:
        CheckpointError: it holds something else than can be told.
        OSError: it can't be written.
    """
    path = Path(path)
    tensors: list[torch.Tensor] = []
    tree = cbor.encode(_encoded(state, tensors, [0]), max_size=MAX_TREE)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(_MAGIC + _LENGTH.pack(len(tree)) + tree)
            for tensor in tensors:
                if tensor.numel():
                    file.write(tensor_bytes(tensor))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync(path.parent)


def load_checkpoint(path: Path | str) -> dict[str, Any]:
    """Return the state in a file, its tensors on the CPU.

    Raises:
        CheckpointError: the file holds none.
        OSError: it can't be read.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise _bad(path, "it is no checkpoint, or one of a later version")
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > min(MAX_TREE, path.stat().st_size):
                raise _bad(path, "it is cut off")
            tree = cbor.decode(file.read(length), max_size=MAX_TREE)
            data = bytearray(file.read())
        state = _decoded(tree, data, path)
    except CheckpointError:
        raise
    except (struct.error, MeshError) as error:
        raise _bad(path, str(error)) from error
    if not isinstance(state, dict):
        raise _bad(path, "it holds no state")
    return state


def _encoded(value: Any, tensors: list[torch.Tensor], end: list[int]) -> CborValue:
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        start = end[0]
        end[0] += plain.numel() * plain.dtype.itemsize
        tensors.append(plain)
        return ["tensor", dtype_name(plain.dtype), list(plain.shape), start]
    if isinstance(value, dict):
        items: list[CborValue] = [
            [_encoded(key, tensors, end), _encoded(item, tensors, end)]
            for key, item in value.items()
        ]
        return ["dict", items]
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [_encoded(item, tensors, end) for item in value]]
    if isinstance(value, bytes):
        return ["bytes", value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        "writing of a checkpoint",
        why=f"it holds a {type(value).__name__}, and not only tensors, numbers, texts and "
        "collections of those",
    )


def _decoded(value: CborValue, data: bytearray, path: Path) -> Any:
    match value:
        case ["tensor", str(name), [*sizes], int(start)]:
            return _tensor(name, sizes, start, data, path)
        case ["dict", [*items]]:
            found = {}
            for item in items:
                if not isinstance(item, list) or len(item) != 2:
                    raise _bad(path, "it is damaged")
                key = _decoded(item[0], data, path)
                if not isinstance(key, str | int | float | bool | tuple | None):
                    raise _bad(path, "it is damaged")
                found[key] = _decoded(item[1], data, path)
            return found
        case ["tuple", [*items]]:
            return tuple(_decoded(item, data, path) for item in items)
        case ["list", [*items]]:
            return [_decoded(item, data, path) for item in items]
        case ["bytes", bytes(content)]:
            return content
        case bool() | int() | float() | str() | None:
            return value
    raise _bad(path, "it is damaged")


def _tensor(
    name: str, sizes: list[CborValue], start: int, data: bytearray, path: Path
) -> torch.Tensor:
    shape = [size for size in sizes if isinstance(size, int) and size >= 0]
    dtype = dtype_of(name)
    nbytes = math.prod(shape) * dtype.itemsize
    if len(shape) != len(sizes) or not 0 <= start <= start + nbytes <= len(data):
        raise _bad(path, "it is cut off")
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    part = bytearray(memoryview(data)[start : start + nbytes])
    return torch.frombuffer(part, dtype=dtype).view(shape)


def _sync(directory: Path) -> None:
    with contextlib.suppress(OSError):  # some systems can't open directories
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _bad(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"reading of checkpoint {path}", why=why)
