"""What is learned about an operation when it is called for the first time with such arguments.

It is run on meta tensors, which have shapes and no elements: that tells what it will make at the
peer, which results are its own arguments again, and whether only the elements can tell the shapes.
From then on the operation is a template, and calling it again is to send a few dozen bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from mesh.device import wire
from mesh.device.client.forms import Form
from mesh.device.client.layouts import dtype_of, strides_of
from mesh.device.client.tensors import (
    Device,
    form_of,
    geometry_of,
    handle_of,
    is_mesh,
    new_tensor,
    set_meta,
)
from mesh.device.errors import DeviceError, UnsupportedOnDevice
from mesh.device.ops import VALUE_SHAPED
from tensor_bridge.codec import memory_order
from transport import CborValue

__all__ = [
    "Entry",
    "Resize",
    "learn",
    "number_code",
    "number_codes",
    "operator_name",
    "wrapped_number",
]

_INT64 = range(-(1 << 63), 1 << 63)

_HALF = torch.zeros((), dtype=torch.float16, device="cpu")
_BYTE = torch.zeros((), dtype=torch.int8, device="cpu")
_COMPLEX = torch.zeros((), dtype=torch.complex64, device="cpu")


class Entry:
    """A template on a device, and what to make of its results here.

    Attributes:
        number: of the template in its session.
        pack: packs a whole message.
        forms: of what it makes; None if it has to be asked.
        one: for a call that returns the one new tensor, all that it takes: the address of its form,
            the device, the next handle's number, `pack`, `number`, the session, and its queue.
        returned: else, what the call returns: of a number that argument, or what a function makes
            of new tensors and arguments.
        is_plain: whether no number travels with a call.
    """

    __slots__ = (
        "device",
        "forms",
        "is_plain",
        "layout",
        "name",
        "number",
        "one",
        "pack",
        "results",
        "returned",
        "session",
    )

    def __init__(
        self,
        device: Device,
        template: wire.Template,
        returned: int | Callable[[Sequence[Any], Sequence[Any], dict[str, Any]], Any] | None,
        drop: Callable[[], object],
    ) -> None:
        self.device = device
        device.is_used = True
        self.session = device.session
        self.name = template.name
        self.layout = wire.Layout(template)
        self.pack = self.layout.packer().pack
        self.is_plain = not self.layout.numbers
        self.results = template.results
        self.returned = returned
        self.number = device.session.define(template, self.layout, drop)
        self.forms: tuple[Form, ...] | None = None
        self.one: tuple[Any, ...] | None = None
        if template.outputs is None:
            return
        self.forms = tuple(form_of(device, output.geometry) for output in template.outputs)
        if len(self.forms) == 1 and returned is None:
            address, session = self.forms[0].address, self.session
            if address:
                self.one = (
                    *(address, device, device.next_id, self.pack),
                    *(self.number, session, session.queue),
                )
            else:
                self.returned = _first

    def ask(self, ids: Sequence[int], numbers: Sequence[float]) -> Any:
        """Run the operation and wait for what it has made.

        Raises:
            MeshError: it failed, or something it depends on did.
        """
        device, session = self.device, self.session
        made = [device.next_id() for _ in range(self.results)]
        request = session.ask(self.number, self.layout, (*ids, *made, *numbers), self.name)
        answer = session.result(request)
        if not isinstance(answer, list):
            return answer
        tensors = [
            new_tensor(device, number, geometry)
            for number, geometry in zip(made, _described(answer, self.results), strict=True)
        ]
        return tensors[0] if len(tensors) == 1 else tuple(tensors)


class Resize(Exception):
    """An ``out=`` argument has another shape than the result."""

    def __init__(self, tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__(shape)
        self._tensor = tensor
        self._shape = tuple(shape)
        self._strides = tuple(strides)

    def apply(self) -> None:
        """Give the tensor the shape and layout of the result."""
        tensor, shape = self._tensor, self._shape
        tensor.resize_(shape)
        if memory_order(shape, self._strides) is not None:
            offset = int(tensor.storage_offset())
            set_meta(tensor, tensor.untyped_storage(), offset, shape, self._strides)


def operator_name(operator: Any) -> str:
    """Return ``aten::NAME`` with ``.OVERLOAD`` unless it is the default one."""
    schema = operator._schema
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    return f"{schema.name}{overload}"


def learn(
    operator: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: Device,
    drop: Callable[[], object],
) -> Entry:
    """Return a new entry for a call; its template is queued for the peer.

    Args:
        operator: what is called.
        args, kwargs: with what.
        device: where it runs.
        drop: called when the session forgets the template.

    Raises:
        Resize: results don't fit the tensor given for them; resize it and call again.
        UnsupportedOnDevice: an argument that can't travel.
        RuntimeError: torch refuses the arguments, as it would anywhere.
    """
    on_cpu = device.facts.get("type", "cpu") == "cpu"
    inference = _Inference(operator, args, kwargs, on_cpu=on_cpu)
    name = operator_name(operator)
    base = name.removeprefix("aten::").partition(".")[0]
    describe = _Describer(name)
    by_name = {argument.name: argument for argument in operator._schema.arguments}

    def described_as(argument: Any, value: Any) -> wire.Argument:
        if argument.name == "pin_memory":
            return wire.Literal(None)
        return describe(value, str(argument.type), number_codes(argument, base))

    described = tuple(map(described_as, operator._schema.arguments, args))
    named = tuple((key, described_as(by_name[key], value)) for key, value in kwargs.items())
    results, floats = len(operator._schema.returns), torch.get_default_dtype()
    if not inference.is_static:
        template = wire.Template(name, device.remote, described, named, None, results, floats)
        return Entry(device, template, None, drop)
    outputs, returned = inference.outputs()
    template = wire.Template(name, device.remote, described, named, outputs, len(outputs), floats)
    return Entry(device, template, returned, drop)


def wrapped_number(tensor: torch.Tensor) -> bool:
    """Return whether a tensor without dimensions is a Python number in disguise.

    torch promotes types differently for those, and that is the one way to tell them apart.
    """
    dtype = tensor.dtype
    if dtype is torch.float64:
        return torch.result_type(tensor, _HALF) is torch.float16
    if dtype is torch.int64:
        return torch.result_type(tensor, _BYTE) is torch.int8
    if dtype is torch.complex128:
        return torch.result_type(tensor, _COMPLEX) is torch.complex64
    return False


def number_code(value: Any) -> str | None:
    """Return how a number travels with each call; None if it is a part of the template."""
    if type(value) is float:
        return "d"
    if type(value) is int and value in _INT64:
        return "q"
    return None


class _Describer:
    """Makes arguments of templates."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, value: Any, kind: str, codes: str) -> wire.Argument:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            return wire.Items(tuple(self(item, kind, codes) for item in value))
        if isinstance(value, torch.device) or (value is None and kind == "Device"):
            return wire.DeviceOf()
        if isinstance(value, torch.Generator):
            raise UnsupportedOnDevice(
                f"operation {self._name}",
                why="it was given a generator, which lives in this process",
                fix="Seed the device: torch.manual_seed, or its module's manual_seed.",
            )
        code = number_code(value)
        if code is not None and code in codes:
            return wire.Number(code)
        return wire.Literal(value)

    def _tensor(self, value: torch.Tensor) -> wire.Argument:
        if is_mesh(value):
            return wire.TensorOf(geometry_of(value))
        number = value.item()
        if wrapped_number(value):
            code = number_code(number)
            return wire.Literal(number) if code is None else wire.Number(code)
        code = "d" if value.dtype.is_floating_point else "q"
        if value.dtype.is_complex:
            raise UnsupportedOnDevice(
                f"operation {self._name}",
                why="a complex tensor on the CPU was mixed in",
                fix="Move it to the device first.",
            )
        return wire.Number(code, value.dtype)


def number_codes(argument: Any, base: str) -> str:
    """Return of which kinds numbers for a schema's argument travel with each call.

    Args:
        argument: of the schema.
        base: the operator's name without overload.

    Returns:
        ``""`` where a shape may depend on them, ``"d"`` for floats alone where the argument has a
        default, as ``alpha`` has: an integer there is nearly always that. Else ``"dq"``.
    """
    kind = str(argument.type)
    if base in VALUE_SHAPED:
        return ""
    if "Tensor" in kind:  # `x + 2.5`: torch hands over the number
        return "dq"
    if not ("number" in kind or "float" in kind):
        return ""
    return "d" if argument.has_default_value() else "dq"


class _Inference:
    """One run of an operator on meta tensors, as if `on_cpu`, or elsewhere."""

    def __init__(
        self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], *, on_cpu: bool
    ) -> None:
        self._on_cpu = on_cpu
        self._args = args
        self._kwargs = kwargs
        self._operator = operator
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._metas: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._results: Any = None
        self._empty = _empty_results(operator, args, kwargs)
        tags = operator.tags
        self.is_static = (
            torch.Tag.dynamic_output_shape not in tags
            and torch.Tag.data_dependent_output not in tags
        )
        if self.is_static:
            self._meta_args = [self._meta(value) for value in args]
            self._meta_kwargs = {key: self._meta(value) for key, value in kwargs.items()}
            try:
                with torch.no_grad():
                    self._results = operator(*self._meta_args, **self._meta_kwargs)
            except NotImplementedError:
                self.is_static = False
        self._check_writes()

    def outputs(self) -> tuple[tuple[wire.Output, ...], Any]:
        """Return what the operator makes, and what its call returns."""
        for meta, tensor in self._metas:
            if meta.shape != tensor.shape:
                raise Resize(tensor, meta.shape, self._strides_grown(meta))
        outputs: list[wire.Output] = []
        position = 0

        def walk(result: Any) -> Any:
            nonlocal position
            if isinstance(result, list | tuple):
                return [walk(each) for each in result]
            here, position = position, position + 1
            if not isinstance(result, torch.Tensor):
                return _Constant(result)
            place = self._place(result)
            if place is not None:
                return place
            if here in self._empty:
                result = result.new_empty(0)
            name, inputs = self._operator._schema.name, self._meta_args
            strides = strides_of(name, here, inputs, result)
            dtype = dtype_of(name, here, inputs, result, on_cpu=self._on_cpu)
            geometry = wire.Geometry(dtype, tuple(result.shape), tuple(strides))
            outputs.append(wire.Output(geometry, geometry.span, here))
            return _New(len(outputs) - 1)

        if isinstance(self._results, list | tuple):
            plan = walk(self._results)
            several = len(self._operator._schema.returns) > 1
            return tuple(outputs), _builder(plan, tuple if several else list)
        plan = walk(self._results)
        if isinstance(plan, _New):
            return tuple(outputs), None
        if isinstance(plan, int):
            return tuple(outputs), plan
        return tuple(outputs), _builder(plan, list)

    def _strides_grown(self, out: torch.Tensor) -> Sequence[int]:
        """Return the strides that an ``out=`` argument takes when it gets another shape.

        They are those of a result that the operator makes itself, as on a CPU. What torch infers
        with ``out=`` forgets about the layout of the other arguments.
        """
        plain = _without_out(self._operator)
        if plain is None:
            return out.stride()
        rest = {key: v for key, v in self._meta_kwargs.items() if key not in plain.left_out}
        try:
            with torch.no_grad():
                made = plain.operator(*self._meta_args, **rest)
        except NotImplementedError:
            return out.stride()
        results = made if isinstance(made, list | tuple) else (made,)
        given = [self._meta_kwargs.get(name) for name in plain.left_out]
        strides = (each.stride() for each, one in zip(results, given, strict=True) if one is out)
        return next(strides, out.stride())

    def _place(self, result: torch.Tensor) -> int | str | tuple[int, int] | None:
        """Return which argument a result is, if it is one."""
        # By the meta tensor, of which each argument has one: a tensor may be several arguments.
        for index, value in enumerate(self._meta_args):
            if value is result:
                return index
            if isinstance(value, list):
                for inner, item in enumerate(value):
                    if item is result:
                        return (index, inner)
        return next((key for key, value in self._meta_kwargs.items() if value is result), None)

    def _meta(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not is_mesh(value):
                return value
            storage = value.untyped_storage()
            handle = handle_of(value).id
            if handle not in self._storages:
                meta_storage: Any = torch.UntypedStorage
                self._storages[handle] = meta_storage(storage.nbytes(), device="meta")
            meta = torch.empty(0, dtype=value.dtype, device="meta")
            meta.set_(self._storages[handle], value.storage_offset(), value.shape, value.stride())
            self._metas.append((meta, value))
            return meta
        if isinstance(value, torch.device):
            return torch.device("meta")
        if isinstance(value, list | tuple):
            return [self._meta(item) for item in value]
        return value

    def _check_writes(self) -> None:
        """Refuse to write to what is here: whatever a peer makes of it would be lost."""
        for argument, value in (
            *zip(self._operator._schema.arguments, self._args, strict=False),
            *(
                (argument, self._kwargs[argument.name])
                for argument in self._operator._schema.arguments
                if argument.name in self._kwargs
            ),
        ):
            written = argument.alias_info is not None and argument.alias_info.is_write
            values = value if isinstance(value, list | tuple) else (value,)
            if written and any(isinstance(v, torch.Tensor) and not is_mesh(v) for v in values):
                raise RuntimeError(
                    f"{operator_name(self._operator)} would write to a tensor on the CPU what is "
                    "made of tensors on a mesh device"
                )


class _Plain(NamedTuple):
    """An operator that makes what another writes into the arguments `left_out`."""

    operator: Any
    left_out: tuple[str, ...]


@functools.cache
def _without_out(operator: Any) -> _Plain | None:
    """Return the form of an operator that makes its results; None if it has none."""
    arguments = operator._schema.arguments
    outs = tuple(each.name for each in arguments if each.is_out)
    wanted = [(each.name, str(each.type)) for each in arguments if not each.is_out]
    packet = operator.overloadpacket
    for name in packet.overloads():
        form = getattr(packet, name)
        taken = [(each.name, str(each.type)) for each in form._schema.arguments]
        if outs and taken == wanted and len(form._schema.returns) == len(outs):
            return _Plain(form, outs)
    return None


_NORMS = frozenset(
    f"aten::{name}"
    for name in (
        *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_no_update"),
        *("_native_batch_norm_legit_no_training", "_batch_norm_with_update"),
    )
)


def _empty_results(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> frozenset[int]:
    """Return which results are empty although torch's inference of shapes says otherwise.

    Those are the statistics that a batch normalization saves, where it uses those it has.
    """
    schema = operator._schema
    if schema.name not in _NORMS or schema.overload_name not in ("", "no_stats"):
        return frozenset()
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    trains = given.get("training", given.get("train", "no_training" not in schema.name))
    trains = trains and "no_update" not in schema.name
    return frozenset() if trains else frozenset({1, 2})


class _New(int):
    """A result that is new, by its number among those."""


class _Constant:
    """A result that is no tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _builder(plan: Any, outer: Callable[[Iterator[Any]], Any]) -> Callable[..., Any]:
    """Return what makes a call's results of new tensors and arguments."""

    def build(part: Any, new: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(part, _New):
            return new[part]
        if isinstance(part, _Constant):
            return part.value
        if isinstance(part, int):
            return args[part]
        if isinstance(part, str):
            return kwargs[part]
        if isinstance(part, tuple):
            return args[part[0]][part[1]]
        return [build(each, new, args, kwargs) for each in part]

    def results(new: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(plan, list):
            return outer(build(each, new, args, kwargs) for each in plan)
        return build(plan, new, args, kwargs)

    return results


def _first(new: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return new[0]


def _described(answer: list[CborValue], results: int) -> list[wire.Geometry]:
    """Return how each tensor lies that an answer tells of."""
    found = [wire.decode_result(each) for each in answer]
    if len(found) != results:
        raise DeviceError("an answer from a device", why="it tells of another number of tensors")
    return found
