"""What torch calls for each operator on a mesh device: look up what was learned, and send it.

An operation is called hundreds of times with arguments of the same kind, and each call costs the
program what is done here. Operators that take tensors one by one get a function written for their
schema, which looks at just what the kind depends on; lists of tensors, numbers in tensors' places
and all else go through `_General`, which looks at everything.
"""

from __future__ import annotations

import keyword
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from mesh.device.client.entries import (
    Entry,
    Resize,
    learn,
    number_code,
    number_codes,
    operator_name,
    wrapped_number,
)
from mesh.device.client.forms import DLPACK, capsule, from_dlpack
from mesh.device.client.session import ORIGINS, Session
from mesh.device.client.tensors import Device, Handle, device_of, is_mesh, with_handle
from mesh.device.errors import UnsupportedOnDevice
from mesh.device.ops import VALUE_SHAPED
from mesh.device.wire import RUN_KIND

__all__ = ["emit", "fast_kernel", "general_kernel"]

_MASK = ORIGINS - 1

_INDEXING = frozenset(
    {
        *("aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"),
        *("aten::_unsafe_index.Tensor", "aten::_unsafe_index_put"),
    }
)
"""Operators whose indices may be on the CPU, as on every device of torch's own."""

_FLOATS = frozenset({"ones", "zeros", "eye", "rand", "randn", "linspace", "logspace"})
"""Operators that make floats of torch's default type, unless another is given."""

_getframe = sys._getframe
_floats = torch.get_default_dtype


class _Inside(dict[str, bool]):
    """Whether a file belongs to torch or to this package, so that it tells a user nothing."""

    _places = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")

    def __missing__(self, name: str) -> bool:
        self[name] = inside = name.startswith(self._places)
        return inside


_inside = _Inside()


def general_kernel(operator: Any) -> Callable[..., Any]:
    """Return the function that torch calls for `operator`, for whatever arguments."""
    return _General(operator)


def fast_kernel(operator: Any) -> Callable[..., Any]:
    """Return the same, written for the operator's schema where that pays."""
    general = _General(operator)
    source = _source(operator)
    if source is None:
        return general
    entries: dict[Any, Entry] = {}

    def teach(key: Any, args: Sequence[Any], kwargs: dict[str, Any], device: Device) -> Any:
        """Learn an entry, and call again."""
        try:
            entry = learn(operator, args, kwargs, device, partial(entries.pop, key, None))
        except Resize as resize:
            resize.apply()
        else:
            entries[key] = entry
        return kernel(*args, **kwargs)

    space: dict[str, Any] = {
        "general": general,
        "get": entries.get,
        "teach": teach,
        "emit": emit,
        "floats": _floats,
        "from_dlpack": from_dlpack,
        "capsule": capsule,
        "Handle": Handle,
        "getframe": _getframe,
        "inside": _inside,
        "outside": _outside,
    }
    schema = operator._schema
    space |= {
        f"d{index}": argument.default_value for index, argument in enumerate(schema.arguments)
    }
    exec(source, space)  # noqa: S102 - written here, of a schema that torch has checked
    kernel: Callable[..., Any] = space["kernel"]
    return kernel


class _General:
    """Calls of one operator, whatever it is given."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._name = operator_name(operator)
        base = self._name.removeprefix("aten::").partition(".")[0]
        arguments = operator._schema.arguments
        self._codes = [number_codes(each, base) for each in arguments]
        self._codes_by_name = {
            each.name: codes for each, codes in zip(arguments, self._codes, strict=True)
        }
        self._takes_indices = self._name in _INDEXING
        self._makes_floats = base in _FLOATS
        self._entries: dict[Any, Entry] = {}
        self.__name__ = self._name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._makes_floats and kwargs.get("dtype") is None and "out" not in kwargs:
            chosen = device_of(kwargs.get("device")).float_dtype
            if chosen is not None:
                kwargs["dtype"] = chosen
        scan = _Scan()
        while True:
            if self._takes_indices:
                args = _with_indices(args)
            for value, codes in zip(args, self._codes, strict=False):
                scan.see(value, codes)
            for name, value in kwargs.items():
                scan.key.append(name)
                scan.see(value, self._codes_by_name[name])
            device = scan.device or device_of(kwargs.get("device"))
            key = (device, _floats(), *scan.key)
            entry = self._entries.get(key)
            if entry is not None:
                return emit(entry, scan.ids, scan.numbers, args, kwargs)
            scan.check(self._name)
            try:
                drop = partial(self._entries.pop, key, None)
                entry = learn(self._operator, args, kwargs, device, drop)
            except Resize as resize:
                resize.apply()
                scan = _Scan()
                continue
            self._entries[key] = entry
            return emit(entry, scan.ids, scan.numbers, args, kwargs)


class _Scan:
    """What a call's kind depends on, and what is sent with each call."""

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.ids: list[int] = []
        self.numbers: list[float] = []
        self.device: Device | None = None
        self._strays: list[torch.device] = []

    def see(self, value: Any, codes: str) -> None:
        """Take an argument."""
        key = self.key
        if isinstance(value, torch.Tensor):
            self._see_tensor(value)
        elif isinstance(value, list | tuple):
            key.append(len(value))
            for item in value:
                self.see(item, codes)
        elif codes and (code := number_code(value)) is not None and code in codes:
            key.append(code)
            self.numbers.append(value)
        else:
            key.append((type(value), _told_apart(value)))  # True == 1

    def check(self, name: str) -> None:
        """Raise `RuntimeError` where torch would: for tensors of several devices."""
        if self._strays:
            here = self.device.torch_device if self.device is not None else "a mesh device"
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found at least two "
                f"devices, {here} and {self._strays[0]}"
            )

    def _see_tensor(self, value: torch.Tensor) -> None:
        storage = None if value.layout is not torch.strided else value.untyped_storage()
        handle: Handle | None = getattr(storage, "_mesh", None)
        if handle is not None:
            if self.device is None:
                self.device = handle.device
            elif self.device is not handle.device:
                self._strays.append(value.device)
            self.key.append(
                (handle.device, value.dtype, value.shape, value.stride(), value.storage_offset())
            )
            self.ids.append(handle.id)
        elif value.dim() == 0 and not is_mesh(value):
            number = value.item()
            wrapped = wrapped_number(value)
            code = number_code(number) if wrapped or not value.dtype.is_complex else None
            if code is None and value.dtype is torch.bool and not wrapped:
                code, number = "q", int(number)
            if code is None:
                self.key.append((value.dtype, wrapped, _told_apart(number)))
            else:
                self.key.append((value.dtype, wrapped, code))
                self.numbers.append(number)
        elif value.layout is not torch.strided:
            raise UnsupportedOnDevice(
                "operation on a device",
                why=f"tensors of layout {value.layout} don't go there",
                fix="Use to_dense() first.",
            )
        else:
            self.key.append(value.device)
            self._strays.append(value.device)


def _told_apart(value: Any) -> Any:
    """Return what stands for an option: of complex numbers, signs of zeros matter."""
    return repr(value) if type(value) is complex else value


def _with_indices(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return arguments of an indexing operator with indices on the device."""
    source, indices, *rest = args
    moved = [
        index if index is None or is_mesh(index) or not is_mesh(source) else index.to(source.device)
        for index in indices
    ]
    return (source, moved, *rest)


def emit(
    entry: Entry,
    ids: Sequence[int],
    numbers: Sequence[float],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Send an operation; return what its call returns."""
    one = entry.one
    if one is not None:
        # Written out once more in functions for a schema, see `_source`.
        address, device, next_id, pack, template, session, _ = one
        number = next_id()
        result: Any = from_dlpack(capsule(address, DLPACK, None))
        result.untyped_storage()._mesh = Handle(device, number)
        send(session, pack(RUN_KIND, template, *ids, number, *numbers), number)
        return result
    forms = entry.forms
    if forms is None:
        return entry.ask(ids, numbers)
    new: list[torch.Tensor] = []
    made: list[int] = []
    for form in forms:
        number = entry.device.next_id()
        made.append(number)
        new.append(with_handle(form.make(), entry.device, number))
    number = made[0] if made else ids[0] if ids else 0
    message = entry.pack(RUN_KIND, entry.number, *ids, *made, *numbers)
    returned = entry.returned
    if type(returned) is int:
        result = args[returned]
    elif callable(returned):
        result = returned(new, args, kwargs)
    else:
        result = None
    send(entry.session, message, number)
    return result


def send(session: Session, message: bytes, number: int) -> None:
    """Send an operation, which makes or writes to the handle `number`."""
    frame = _getframe(2)
    if _inside[frame.f_code.co_filename]:
        frame = _outside(frame)
    session.origins[number & _MASK] = (number, frame.f_code, frame.f_lasti)
    queue = session.queue
    queue.append(message)
    if len(queue) >= session.limit:
        session.flush()


def _outside(frame: FrameType) -> FrameType:
    """Return the frame of the program's own that an operation was called from."""
    while _inside[frame.f_code.co_filename] and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _source(operator: Any) -> str | None:
    """Return a function for operators that take tensors one by one; None for all others."""
    schema = operator._schema
    base = operator_name(operator).removeprefix("aten::").partition(".")[0]
    kinds = [str(argument.type) for argument in schema.arguments]
    lists_tensors = any("Tensor]" in kind and "List" in kind for kind in kinds)
    if lists_tensors or base in VALUE_SHAPED:
        return None
    if kinds.count("Tensor") == 0 or any("Device" in kind for kind in kinds):
        return None
    if any("List" in str(each.type) and number_codes(each, base) for each in schema.arguments):
        return None
    parameters: list[str] = []
    handles: list[str] = []
    optional: list[str] = []
    keys: list[str] = []
    ids: list[str] = []
    numbers: list[str] = []
    call: list[str] = []
    positional: list[str] = []
    named: list[str] = []
    for index, argument in enumerate(schema.arguments):
        variable = argument.name if argument.kwarg_only else f"a{index}"
        if keyword.iskeyword(variable):
            return None
        if argument.kwarg_only:
            if "*" not in parameters:
                parameters.append("*")
            call.append(f"{variable}={variable}")
            named.append(f"{variable!r}: {variable}")
        else:
            call.append(variable)
            positional.append(variable)
        has_default = argument.has_default_value()
        parameters.append(f"{variable}=d{index}" if has_default else variable)
        geometry = (
            f"{variable}.dtype, {variable}.shape, {variable}.stride(), {variable}.storage_offset()"
        )
        kind = kinds[index]
        if kind == "Tensor":
            handles.append(f"h{index} = {variable}.untyped_storage()._mesh")
            keys.append(f"h{index}.device, {geometry}")
            ids.append(f"h{index}.id")
        elif kind == "Optional[Tensor]":
            optional.append(f"h{index}")
            handles.append(
                f"h{index} = None if {variable} is None else {variable}.untyped_storage()._mesh"
            )
            keys.append(f"None if h{index} is None else (h{index}.device, {geometry})")
            ids.append(f"h{index}.id")
        elif codes := number_codes(argument, base):
            handles.append(f"t{index} = type({variable})")
            travels = f"t{index} is float"
            if "q" in codes:
                travels += f" or t{index} is int and {-(1 << 63)} <= {variable} < {1 << 63}"
            option = f"(t{index}, {variable} if t{index} is not complex else repr({variable}))"
            if has_default and not isinstance(argument.default_value, float):
                option = f"None if {variable} is d{index} else {option}"
            keys.append(f"t{index} if {travels} else {option}")
            numbers.append(f"*(({variable},) if {travels} else ())")
        elif "List" in kind:
            keys.append(f"None if {variable} is None else tuple({variable})")
        else:
            keys.append(f"type({variable}), {variable}")
    first = next(index for index, kind in enumerate(kinds) if kind == "Tensor")
    if optional:
        sent = ", ".join(
            f"*(() if {each[:-3]} is None else ({each},))" if each[:-3] in optional else each
            for each in ids
        )
    else:
        sent = ", ".join(ids)
    args = f"({', '.join(positional)},)" if positional else "()"
    kwargs = f"{{{', '.join(named)}}}"
    body = "\n        ".join(handles)
    message = f"pack({RUN_KIND}, template, {sent}, number)"
    if numbers:
        with_numbers = f"pack({RUN_KIND}, template, {sent}, number, {', '.join(numbers)})"
        message = f"{message} if entry.is_plain else {with_numbers}"
    return f"""
def kernel({", ".join(parameters)}):
    try:
        {body}
    except (AttributeError, RuntimeError):
        return general({", ".join(call)})
    key = (floats(), {", ".join(keys)})
    entry = get(key)
    if entry is None:
        devices = {{each.device for each in ({", ".join(ids).replace(".id", "")},) if each}}
        if len(devices) > 1:
            return general({", ".join(call)})
        return teach(key, {args}, {kwargs}, h{first}.device)
    one = entry.one
    if one is not None:
        address, device, next_id, pack, template, session, queue = one
        number = next_id()
        result = from_dlpack(capsule(address, {DLPACK!r}, None))
        result.untyped_storage()._mesh = Handle(device, number)
        frame = getframe(1)
        if inside[frame.f_code.co_filename]:
            frame = outside(frame)
        session.origins[number & {_MASK}] = (number, frame.f_code, frame.f_lasti)
        queue.append({message})
        if len(queue) >= session.limit:
            session.flush()
        return result
    return emit(entry, ({sent},), ({", ".join(numbers)}{"," if numbers else ""}), {args}, {kwargs})
"""
