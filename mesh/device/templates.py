"""Templates: one operation but for the tensors and numbers it is applied to.

Operator, options, and the geometry of every tensor. A stranger wrote what is read here: each
length, count and name is checked before anything is made of it.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence
from typing import TypeAlias

import torch

from mesh.device.ops import allows
from tensor_bridge import TensorError, dtype_name, dtype_of
from tensor_bridge.fields import MAX_BYTES
from transport import CborValue, ProtocolError

__all__ = [
    "ALLOCATE",
    "GET_RNG",
    "MAX_TEMPLATE",
    "MOVE",
    "READ",
    "SET_RNG",
    "START",
    "TAKE",
    "WAIT",
    "Argument",
    "DeviceOf",
    "Geometry",
    "Items",
    "Layout",
    "Literal",
    "Number",
    "Output",
    "Template",
    "TensorOf",
    "decode_result",
    "decode_template",
    "encode_template",
    "result_value",
]

ALLOCATE = "mesh::allocate"
"""A new storage filled with zeros."""

MOVE = "mesh::move"
"""A contiguous copy, on the template's device, of a tensor on another of the same peer's."""

READ = "mesh::read"
"""Asked: the elements of one tensor, in row order."""

WAIT = "mesh::wait"
"""Asked: an answer once everything before it was done."""

GET_RNG, SET_RNG = "mesh::get_rng", "mesh::set_rng"
"""Asked: the state of a device's random numbers; run: takes it from a tensor of bytes."""

START, TAKE = "mesh::start", "mesh::take"
"""An operation of a group of devices (`mesh.device.groups`): its start, and its results."""

_OWN = frozenset({ALLOCATE, MOVE, READ, WAIT, GET_RNG, SET_RNG, START, TAKE})

MAX_TEMPLATE = 1 << 19
"""Bytes of an encoded template: one update of a thousand parameters takes 150,000."""

MAX_TENSORS = 8192
"""Tensors that one operation may take, and that it may make."""

MAX_DIMS = 64
MAX_ITEMS = 8192
MAX_TEXT = 64

_DEFAULTS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""What torch's default type can be."""

_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_FORMAT_NAMES = {value: name for name, value in _FORMATS.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor lies in its storage. Sizes and strides are in elements, and so is the offset.

    Attributes:
        span: bytes from the start of the storage to the end of the last element.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    span: int = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        span = 0
        if 0 not in self.shape:
            last = sum(
                (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
            )
            span = (self.offset + last + 1) * self.dtype.itemsize
        object.__setattr__(self, "span", span)  # each operation of a peer asks for it

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A new storage with one tensor in it, at its beginning.

    Attributes:
        geometry: the tensor.
        nbytes: of the storage.
        position: which of the operator's results it is, lists laid out flat.
    """

    geometry: Geometry
    nbytes: int
    position: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Literal:
    """An option: None, bool, int, float, complex, str, a dtype, memory format or layout."""

    value: object


@dataclasses.dataclass(frozen=True, slots=True)
class TensorOf:
    """A tensor, whose handle comes with the operation."""

    geometry: Geometry


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A number that comes with the operation: ``"d"`` a float, ``"q"`` an integer.

    With `dtype` it is made a tensor of no dimensions on the CPU, which torch promotes differently.
    """

    code: str
    dtype: torch.dtype | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceOf:
    """The device that the operation runs on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
    """A list of arguments."""

    items: tuple[Argument, ...]


Argument: TypeAlias = Literal | TensorOf | Number | DeviceOf | Items


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """One operation but for its tensors and numbers.

    Attributes:
        name: the operator, ``"aten::add.Tensor"``, or one of this module's own.
        device: which of the peer's devices it runs on.
        args, kwargs: what it is called with.
        outputs: what it makes. None where only the operation itself can tell; then it is asked,
            `results` new handles come with it, and the answer describes them.
        results: how many tensors it makes.
        floats: torch's default type where it is called, which decides what comes of integers.
    """

    name: str
    device: int
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[Output, ...] | None = ()
    results: int = 0
    floats: torch.dtype = torch.float32


class Layout:
    """How an operation of a template lies in a batch.

    Attributes:
        name: the operator.
        tensors: geometries of its tensors, in order.
        made: how many handles it makes.
        numbers: how many numbers come with it.
        body: the struct of all that follows the template's number.
    """

    __slots__ = ("body", "made", "name", "numbers", "tensors")

    def __init__(self, template: Template) -> None:
        self.name = template.name
        numbers: list[str] = []
        tensors: list[Geometry] = []
        for argument in (*template.args, *(value for _, value in template.kwargs)):
            _collect(argument, tensors, numbers)
        self.tensors = tuple(tensors)
        self.numbers = len(numbers)
        self.made = template.results if template.outputs is None else len(template.outputs)
        self.body = struct.Struct(f"<{len(tensors) + self.made}Q{''.join(numbers)}")

    def packer(self) -> struct.Struct:
        """Return the struct of a whole RUN message: kind and template's number come first."""
        return struct.Struct(f"<BI{self.body.format[1:]}")


def encode_template(template: Template) -> CborValue:
    """Return `template` as it travels."""
    outputs: CborValue = template.results
    if template.outputs is not None:
        outputs = [
            [*_geometry_value(output.geometry), output.nbytes, output.position]
            for output in template.outputs
        ]
    return [
        template.name,
        template.device,
        [_argument_value(argument) for argument in template.args],
        [[name, _argument_value(argument)] for name, argument in template.kwargs],
        outputs,
        dtype_name(template.floats),
    ]


def decode_template(value: CborValue) -> Template:
    """Return the template in `value`.

    Raises:
        ProtocolError: it is none, or its operator is not one that a client may have run.
    """
    match value:
        case [
            str(name),
            int(device),
            [*args],
            [*kwargs],
            (int() | list()) as outputs,
            str(floats),
        ] if not isinstance(device, bool) and not isinstance(outputs, bool):
            pass
        case _:
            raise _bad("a template is malformed")
    if not (name in _OWN or (len(name) <= MAX_TEXT and allows(name))):
        raise ProtocolError(
            f"use of operator {name!r:.80}",
            why="it is not one that may be run on another peer's device",
        )
    default = _dtype(floats)
    if default not in _DEFAULTS or not 0 <= device < 1 << 16 or len(args) + len(kwargs) > MAX_TEXT:
        raise _bad("a template is malformed")
    budget = [MAX_ITEMS]
    decoded = tuple(_argument(item, budget) for item in args)
    named: list[tuple[str, Argument]] = []
    for pair in kwargs:
        match pair:
            case [str(key), item] if key.isidentifier() and len(key) <= MAX_TEXT:
                named.append((key, _argument(item, budget)))
            case _:
                raise _bad("a template is malformed")
    if isinstance(outputs, int):
        if not 0 <= outputs <= MAX_TENSORS:
            raise _bad("a template makes more than can be")
        return Template(name, device, decoded, tuple(named), None, outputs, default)
    if len(outputs) > MAX_TENSORS:
        raise _bad("a template makes more than can be")
    made = tuple(map(_output, outputs))
    return Template(name, device, decoded, tuple(named), made, len(made), default)


def result_value(tensor: torch.Tensor) -> CborValue:
    """Return what tells of a tensor that an operation has made, alone in its storage."""
    return [dtype_name(tensor.dtype), list(tensor.shape), list(tensor.stride()), 0]


def decode_result(value: CborValue) -> Geometry:
    """Return what `result_value` has told.

    Raises:
        ProtocolError: it can't be.
    """
    if not isinstance(value, list):
        raise _bad("a result is malformed")
    return _geometry(value)


def _argument_value(argument: Argument) -> CborValue:
    match argument:
        case TensorOf(geometry):
            return [1, *_geometry_value(geometry)]
        case Number(code, None):
            return [2, code]
        case Number(code, torch.dtype() as dtype):
            return [3, code, dtype_name(dtype)]
        case Items(items):
            return [4, [_argument_value(item) for item in items]]
        case DeviceOf():
            return [5]
        case Literal(torch.dtype() as dtype):
            return [6, dtype_name(dtype)]
        case Literal(torch.memory_format() as form):
            return [7, _FORMAT_NAMES[form]]
        case Literal(torch.layout()):
            return [8]
        case Literal(complex() as number):
            return [9, number.real, number.imag]
        case Literal((bool() | int() | float() | str() | None) as plain):
            return [0, plain]
    raise TypeError(f"{argument!r} can't travel")


def _argument(value: CborValue, budget: list[int]) -> Argument:
    budget[0] -= 1
    if budget[0] < 0:
        raise _bad("a template has more arguments than can be")
    if not isinstance(value, list) or not value or type(value[0]) is not int:  # False == 0
        raise _bad("an argument is malformed")
    match value:
        case [0, (bool() | int() | float() | None) as plain]:
            return Literal(plain)
        case [0, str(text)] if len(text) <= MAX_TEXT and text.isascii():
            return Literal(text)
        case [1, *geometry]:
            return TensorOf(_geometry(geometry))
        case [2, "d" | "q" as code]:
            return Number(str(code))
        case [3, "d" | "q" as code, str(name)]:
            return Number(str(code), _dtype(name))
        case [4, [*items]]:
            return Items(tuple(_argument(item, budget) for item in items))
        case [5]:
            return DeviceOf()
        case [6, str(name)]:
            return Literal(_dtype(name))
        case [7, str(name)] if name in _FORMATS:
            return Literal(_FORMATS[name])
        case [8]:
            return Literal(torch.strided)
        case [9, float(real), float(imaginary)]:
            return Literal(complex(real, imaginary))
    raise _bad("an argument is malformed")


def _geometry_value(geometry: Geometry) -> list[CborValue]:
    return [
        dtype_name(geometry.dtype),
        list(geometry.shape),
        list(geometry.strides),
        geometry.offset,
    ]


def _geometry(value: Sequence[CborValue]) -> Geometry:
    match value:
        case [str(name), [*shape], [*strides], int(offset)] if (
            len(shape) == len(strides) <= MAX_DIMS
        ):
            geometry = Geometry(_dtype(name), _sizes(shape), _sizes(strides), *_sizes([offset]))
            if geometry.span <= MAX_BYTES and geometry.numel <= MAX_BYTES:
                return geometry
    raise _bad("a tensor's geometry is malformed")


def _sizes(values: Sequence[CborValue]) -> tuple[int, ...]:
    sizes = tuple(
        value
        for value in values
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_BYTES
    )
    if len(sizes) != len(values):
        raise _bad("a size is out of bounds")
    return sizes


def _output(value: CborValue) -> Output:
    match value:
        case [*geometry, int(nbytes), int(position)] if (
            not isinstance(nbytes, bool)
            and not isinstance(position, bool)
            and 0 <= position < MAX_TENSORS
        ):
            made = _geometry(geometry)
            if made.offset == 0 and made.span <= nbytes <= MAX_BYTES:
                return Output(made, nbytes, position)
    raise _bad("what a template makes is malformed")


def _dtype(name: str) -> torch.dtype:
    try:
        return dtype_of(name)
    except TensorError as error:
        raise _bad(str(error.why)) from error


def _collect(argument: Argument, tensors: list[Geometry], numbers: list[str]) -> None:
    if isinstance(argument, TensorOf):
        tensors.append(argument.geometry)
    elif isinstance(argument, Number):
        numbers.append(argument.code)
    elif isinstance(argument, Items):
        for item in argument.items:
            _collect(item, tensors, numbers)


def _bad(why: str) -> ProtocolError:
    return ProtocolError("reading of a template for a device", why=why)
