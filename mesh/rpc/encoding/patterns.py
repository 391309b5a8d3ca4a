"""Short messages by pattern: a few plain values and small tensors, as most calls have.

They are the bytes that `mesh.rpc.encoding.values` and `mesh.rpc.wire` write and read. But programs
make such calls over and over, and what does not depend on the content of tensors is worked out once
and kept: what is left to do for a message is to copy its tensors. What is not so simple has no
pattern, and goes the general way.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mesh.rpc.encoding.heads import (
    SHORT,
    Shapes,
    answer_head,
    read_answer_head,
    read_items,
    read_request_head,
    request_head,
)
from mesh.rpc.names.targets import Target, target_of
from tensor_bridge import TensorMeta, describe
from tensor_bridge.codec import is_plain
from transport import CborValue, ProtocolError, cbor
from transport.frames import MAX_FRAME

__all__ = ["Pattern", "answer_pattern", "request_pattern", "write_answer", "write_request"]

MAX_BYTES = 8192
"""Of all tensors of a message: a pattern keeps some of their shapes."""

MAX_VALUES = 16
MAX_TEXT = 64
"""Longest text or byte string of one."""

KEPT = 512
"""Patterns of each kind that are kept."""


class Pattern:
    """What messages have in common that differ in the content of their tensors alone.

    Args:
        target: what is called; None of an answer.
        values: what the message holds, tensors of the same shapes in place of its own.
        names: of the last of them, which are a call's keyword arguments.
        kind: tuple or list, if that is what the values are in an answer; None for a single one.
    """

    def __init__(
        self,
        target: Target | None,
        values: list[Any],
        names: tuple[str, ...] = (),
        kind: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.target = target
        self.values = values
        self.names = names
        self._kind = kind
        self._tensors = [
            (at, value, _array(nbytes), nbytes)
            for at, value in enumerate(values)
            if isinstance(value, torch.Tensor)
            for nbytes in [value.numel() * value.dtype.itemsize]
        ]
        self._nbytes = sum(nbytes for *_, nbytes in self._tensors)

    def read(self, content: bytes) -> list[Any]:
        """Return the values of one message.

        Args:
            content: of its tensors.

        Raises:
            ProtocolError: it is of another length.
        """
        if len(content) != self._nbytes:
            raise ProtocolError("a call", why="its tensors have content of another length")
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.read(content)
        values = self.values.copy()
        start = 0
        for at, like, array, nbytes in self._tensors:
            values[at] = made = torch.empty_like(like)
            if nbytes:
                array.from_address(made.data_ptr()).raw = content[start : start + nbytes]
            start += nbytes
        return values

    def arguments(self, values: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call, the values of which `read` has returned."""
        if not self.names:
            return values, {}
        count = len(values) - len(self.names)
        return values[:count], dict(zip(self.names, values[count:], strict=True))

    def result(self, values: list[Any]) -> Any:
        """Return the result in an answer."""
        return values[0] if self._kind is None else self._kind(values)


# -- writing


def write_request(
    function: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    seconds: float,
) -> list[CborValue] | None:
    """Return a request as it travels, None if it has no pattern.

    Args:
        function, args, kwargs: what is called, with what.
        seconds: how long it may take; 0 for no limit.

    Raises:
        RpcError: as `target_of`.
    """
    taken = _taken((*args, *kwargs.values()) if kwargs else args)
    if taken is None:
        return None
    key, content = taken
    try:
        start = _request_start(function, seconds, tuple(kwargs), key)
    except TypeError:  # it can't be called, as the general way will say
        return None
    return None if start is None else [*start, content]


def write_answer(value: Any) -> list[CborValue] | None:
    """Return an answer as it travels, None if it has no pattern."""
    kind = type(value)
    mark = "t" if kind is tuple else "l" if kind is list else None
    taken = _taken((value,) if mark is None else value)
    return None if taken is None else [*_answer_start(mark, taken[0]), taken[1]]


def _taken(values: Sequence[Any]) -> tuple[tuple[Any, ...], bytes] | None:
    """Return what values are but for the content of tensors, and that; None if they are not simple.

    Of each there are its type and its value, of a tensor its element type and shape.
    """
    if len(values) > MAX_VALUES:
        return None
    key: list[Any] = []
    content: list[bytes] = []
    seen: list[Any] = []
    total = 0
    for value in values:
        kind = type(value)
        if kind is torch.Tensor:
            if not is_plain(value) or value.requires_grad or any(value is each for each in seen):
                return None
            shape, dtype = value.shape, value.dtype
            nbytes = value.numel() * dtype.itemsize
            end = value.storage_offset() * dtype.itemsize + nbytes
            total += nbytes
            if total > MAX_BYTES or value.untyped_storage().nbytes() < end:
                return None
            seen.append(value)
            key += (kind, dtype, shape)
            content.append(_array(nbytes).from_address(value.data_ptr()).raw if nbytes else b"")
        elif kind is int:
            if not -(1 << 63) <= value < 1 << 63:
                return None
            key += (kind, value)
        elif kind is float:
            key += (kind, value.hex())  # 0.0 and -0.0 are equal
        elif kind is bool or value is None:
            key += (kind, value)
        elif kind is str or kind is bytes:
            if len(value) > MAX_TEXT or not value.isascii():
                return None
            key += (kind, value)
        else:
            return None
    return tuple(key), b"".join(content)


@functools.lru_cache(KEPT)
def _request_start(
    function: Callable[..., Any] | str,
    seconds: float,
    names: tuple[str, ...],
    key: tuple[Any, ...],
) -> tuple[bytes, bytes] | None:
    """Return head and items of a request."""
    values, shapes = _items_of(key)
    if not all(map(str.isascii, names)):
        return None
    count = len(values) - len(names)
    items: list[CborValue] = [["t", count], *values[:count], ["d", len(names)]]
    for name, value in zip(names, values[count:], strict=True):
        items += (name, value)
    return request_head(target_of(function), seconds, shapes), cbor.encode(
        items, max_size=MAX_FRAME
    )


@functools.lru_cache(KEPT)
def _answer_start(mark: str | None, key: tuple[Any, ...]) -> tuple[bytes, bytes]:
    """Return head and items of an answer."""
    values, shapes = _items_of(key)
    if mark is not None:
        values.insert(0, [mark, len(values)])
    return answer_head(shapes), cbor.encode(values, max_size=MAX_FRAME)


def _items_of(key: tuple[Any, ...]) -> tuple[list[CborValue], Shapes]:
    """Return the items that stand for values in a message, and what it says of its tensors."""
    items: list[CborValue] = []
    metas: list[TensorMeta] = []
    parts = iter(key)
    for kind in parts:
        value = next(parts)
        if kind is torch.Tensor:
            items.append(["T", len(metas)])
            metas.append(describe(torch.empty(next(parts), dtype=value, device="cpu")))
        else:
            items.append(float.fromhex(value) if kind is float else value)
    return items, tuple((meta, True, None) for meta in metas)


# -- reading


def request_pattern(head: bytes, items: bytes) -> Pattern | None:
    """Return the pattern of a request, None if it has none; then it may be malformed, too.

    Raises:
        ProtocolError, UnsupportedTensor: it is malformed.
    """
    return _request_pattern(head, items) if len(head) + len(items) <= SHORT else None


@functools.lru_cache(KEPT)
def _request_pattern(head: bytes, items: bytes) -> Pattern | None:
    target, _, shapes = read_request_head(head)
    match read_items(items):
        case [["t", int(count)], *args_and_rest]:
            args, rest = args_and_rest[:count], args_and_rest[count:]
        case _:
            return None
    match rest:
        case [["d", int(count)], *pairs] if len(pairs) == 2 * count:
            names = tuple(name for name in pairs[::2] if isinstance(name, str))
        case _:
            return None
    values = _values([*args, *pairs[1::2]], shapes)
    if values is None or len(set(names)) != count:
        return None
    return Pattern(target, values, names)


def answer_pattern(head: bytes, items: bytes) -> Pattern | None:
    """Return the same of an answer."""
    return _answer_pattern(head, items) if len(head) + len(items) <= SHORT else None


@functools.lru_cache(KEPT)
def _answer_pattern(head: bytes, items: bytes) -> Pattern | None:
    found, shapes = read_items(items), read_answer_head(head)
    kind: Callable[[list[Any]], Any] | None = None
    match found:
        case [["t" | "l" as mark, int(count)], *rest] if count == len(rest):
            found, kind = rest, tuple if mark == "t" else list
        case [_]:
            pass
        case _:
            return None
    values = _values(found, shapes)
    return None if values is None else Pattern(None, values, kind=kind)


def _values(items: list[CborValue], shapes: Shapes) -> list[Any] | None:
    """Return the values that items stand for, with tensors of these shapes, if they are simple."""
    if len(items) > MAX_VALUES or not all(_is_simple(*each) for each in shapes):
        return None
    if sum(meta.nbytes for meta, *_ in shapes) > MAX_BYTES:
        return None
    values: list[Any] = []
    count = 0
    for item in items:
        if item == ["T", count] and count < len(shapes):
            meta = shapes[count][0]
            values.append(torch.empty(meta.shape, dtype=meta.dtype, device="cpu"))
            count += 1
        elif isinstance(item, list | dict):
            return None
        else:
            values.append(item)
    return values if count == len(shapes) else None


def _is_simple(meta: TensorMeta, is_inline: bool, device: str | None) -> bool:
    return (
        is_inline
        and device is None
        and not meta.requires_grad
        and meta.quantization is None
        and meta.order == tuple(range(len(meta.shape)))
    )


@functools.lru_cache(KEPT)
def _array(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * nbytes
