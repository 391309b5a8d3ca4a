"""What a client and an executor write to each other: templates, batches of messages, replies.

A *template* describes one operation but for the tensors and numbers it is applied to: operator,
options, the geometry of every tensor. It is defined once, as CBOR; an operation is then a few dozen
bytes that name the template, the handles of its tensors, and its numbers. A *batch* holds messages
one after the other, little-endian, without padding::

    RUN      1  u32 template, u64 handle per tensor, u64 per new handle, 8 bytes per number
    ASK      2  u64 request, then as RUN; an answer to that request follows
    DEFINE   3  u32 template, u32 length, CBOR
    RELEASE  4  u32 count, u64 handle each
    WRITE    5  u64 handle, u64 byte offset in its storage, u32 length, bytes
    SEED     6  u16 device, u64 seed
    FORGET   7  u32 template

    DATA     1  u64 request, u8 whether it is the last, bytes
    VALUE    2  u64 request, CBOR
    FAILED   3  u64 request, CBOR: an error, and the handle that the operation was to make
    FATAL    4  u64 0, CBOR: an error; nothing follows

Everything that is read here was written by a stranger: each length, count and name is checked
before anything is made of it. Handles are numbers the client draws, never reused.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from auth import MeshError
from mesh.device.ops import allows
from tensor_bridge import TensorError, dtype_name, dtype_of
from tensor_bridge.fields import MAX_BYTES, Fields
from transport import CborValue, ProtocolError, cbor
from transport.codes import decode_error, encode_error

__all__ = [
    "ALLOCATE",
    "DEVICES_CALL",
    "GET_RNG",
    "MAX_BATCH",
    "MOVE",
    "READ",
    "RUN_KIND",
    "SERVICE",
    "SET_RNG",
    "WAIT",
    "Answer",
    "Argument",
    "Ask",
    "Define",
    "DeviceOf",
    "Failure",
    "Forget",
    "Geometry",
    "Items",
    "Layout",
    "Literal",
    "Message",
    "Number",
    "Output",
    "Release",
    "Run",
    "Seed",
    "Template",
    "TensorOf",
    "Write",
    "answer",
    "ask",
    "data_answer",
    "decode_result",
    "decode_template",
    "define",
    "encode_template",
    "failure",
    "forget",
    "read_answer",
    "read_batch",
    "release",
    "result_value",
    "seed",
    "write",
]

SERVICE = "device.session"
"""The service on whose streams a session travels."""

DEVICES_CALL = "device.list"
"""The call that tells what devices a peer offers."""

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

_OWN = frozenset({ALLOCATE, MOVE, READ, WAIT, GET_RNG, SET_RNG})

MAX_BATCH = 1 << 20
"""Bytes of a batch, and of an answer."""

MAX_TEMPLATE = 1 << 19
"""Bytes of an encoded template: one update of a thousand parameters takes 150,000."""

MAX_TENSORS = 8192
"""Tensors that one operation may take, and that it may make."""

MAX_DIMS = 64
MAX_ITEMS = 8192
MAX_TEXT = 64

_RUN, _ASK, _DEFINE, _RELEASE, _WRITE, _SEED, _FORGET = 1, 2, 3, 4, 5, 6, 7
_DATA, _VALUE, _FAILED, _FATAL = 1, 2, 3, 4

_RUN_HEAD = struct.Struct("<BI")
_ASK_HEAD = struct.Struct("<BQI")
_DEFINE_HEAD = struct.Struct("<BII")
_COUNT_HEAD = struct.Struct("<BI")
_WRITE_HEAD = struct.Struct("<BQQI")
_SEED_HEAD = struct.Struct("<BHQ")
_ANSWER_HEAD = struct.Struct("<BQ")

_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_FORMAT_NAMES = {value: name for name, value in _FORMATS.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor lies in its storage. Sizes and strides are in elements, and so is the offset."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Bytes from the start of the storage to the end of the last element."""
        if 0 in self.shape:
            return 0
        last = sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )
        return (self.offset + last + 1) * self.dtype.itemsize


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
    """

    name: str
    device: int
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[Output, ...] | None = ()
    results: int = 0


class Layout:
    """How an operation of a template lies in a batch.

    Attributes:
        tensors: geometries of its tensors, in order.
        made: how many handles it makes.
        body: the struct of all that follows the template's number.
    """

    __slots__ = ("body", "made", "tensors")

    def __init__(self, template: Template) -> None:
        numbers: list[str] = []
        tensors: list[Geometry] = []
        for argument in (*template.args, *(value for _, value in template.kwargs)):
            _collect(argument, tensors, numbers)
        self.tensors = tuple(tensors)
        self.made = template.results if template.outputs is None else len(template.outputs)
        self.body = struct.Struct(f"<{len(tensors) + self.made}Q{''.join(numbers)}")

    def packer(self) -> struct.Struct:
        """Return the struct of a whole RUN message: kind and template's number come first."""
        return struct.Struct(f"<BI{self.body.format[1:]}")


class Run(NamedTuple):
    """An operation: `values` are handles taken, handles made, and numbers."""

    template: int
    values: tuple[int | float, ...]


class Ask(NamedTuple):
    """The same, with an answer wanted."""

    request: int
    template: int
    values: tuple[int | float, ...]


class Define(NamedTuple):
    """A template that was not there before."""

    number: int
    template: Template


class Release(NamedTuple):
    """Handles that the client has let go of."""

    handles: tuple[int, ...]


class Write(NamedTuple):
    """Bytes for a storage."""

    handle: int
    offset: int
    data: memoryview


class Seed(NamedTuple):
    """The seed of a device's random numbers."""

    device: int
    value: int


class Forget(NamedTuple):
    """A template that will not be used again."""

    template: int


Message: TypeAlias = Run | Ask | Define | Release | Write | Seed | Forget

RUN_KIND = _RUN
"""The first byte of an operation, for whoever packs them by `Layout.packer`."""


# -- writing a batch


def ask(request: int, number: int, layout: Layout, *values: float) -> bytes:
    """Return an operation whose answer is wanted."""
    return _ASK_HEAD.pack(_ASK, request, number) + layout.body.pack(*values)


def define(number: int, template: Template) -> bytes:
    """Return the definition of a template."""
    body = cbor.encode(encode_template(template), max_size=MAX_TEMPLATE)
    return _DEFINE_HEAD.pack(_DEFINE, number, len(body)) + body


def release(handles: Sequence[int]) -> bytes:
    """Return the release of handles."""
    return _COUNT_HEAD.pack(_RELEASE, len(handles)) + struct.pack(f"<{len(handles)}Q", *handles)


def write(handle: int, offset: int, data: bytes | memoryview) -> bytes:
    """Return bytes for a storage."""
    return b"".join((_WRITE_HEAD.pack(_WRITE, handle, offset, len(data)), data))


def seed(device: int, value: int) -> bytes:
    """Return the seeding of a device."""
    return _SEED_HEAD.pack(_SEED, device, value & 0xFFFF_FFFF_FFFF_FFFF)


def forget(number: int) -> bytes:
    """Return that a template is forgotten."""
    return _COUNT_HEAD.pack(_FORGET, number)


# -- reading a batch


def read_batch(data: memoryview, layout_of: Callable[[int], Layout | None]) -> Iterator[Message]:
    """Yield the messages of a batch, one by one: each may define what the next one needs.

    Args:
        data: the batch.
        layout_of: the layout of a template defined before; None if there is none.

    Raises:
        ProtocolError: at the first byte that can't be.
    """
    at, end = 0, len(data)
    try:
        while at < end:
            kind = data[at]
            if kind == _RUN:
                number = _RUN_HEAD.unpack_from(data, at)[1]
                body = _known(layout_of, number).body
                at += _RUN_HEAD.size
                yield Run(number, body.unpack_from(data, at))
                at += body.size
            elif kind == _RELEASE:
                count = _COUNT_HEAD.unpack_from(data, at)[1]
                at += _COUNT_HEAD.size
                if count > (end - at) // 8:
                    raise _bad("more handles are released than it has bytes for")
                yield Release(struct.unpack_from(f"<{count}Q", data, at))
                at += 8 * count
            elif kind == _ASK:
                _, request, number = _ASK_HEAD.unpack_from(data, at)
                body = _known(layout_of, number).body
                at += _ASK_HEAD.size
                yield Ask(request, number, body.unpack_from(data, at))
                at += body.size
            elif kind == _DEFINE:
                _, number, length = _DEFINE_HEAD.unpack_from(data, at)
                at += _DEFINE_HEAD.size
                if length > MAX_TEMPLATE or length > end - at:
                    raise _bad("a template is longer than allowed")
                value = cbor.decode(bytes(data[at : at + length]), max_size=MAX_TEMPLATE)
                yield Define(number, decode_template(value))
                at += length
            elif kind == _WRITE:
                _, handle, offset, length = _WRITE_HEAD.unpack_from(data, at)
                at += _WRITE_HEAD.size
                if length > end - at:
                    raise _bad("bytes to write are missing")
                yield Write(handle, offset, data[at : at + length])
                at += length
            elif kind == _SEED:
                _, device, value = _SEED_HEAD.unpack_from(data, at)
                at += _SEED_HEAD.size
                yield Seed(device, value)
            elif kind == _FORGET:
                number = _COUNT_HEAD.unpack_from(data, at)[1]
                at += _COUNT_HEAD.size
                yield Forget(number)
            else:
                raise _bad(f"there is no message of kind {kind}")
    except struct.error as error:
        raise _bad("it ends within a message") from error


# -- answers


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What an executor says: to a request, or 0 for all of the session.

    Attributes:
        request: which one.
        last: whether nothing more comes for it.
        data: bytes of a tensor, or None.
        value: what was asked for, if that is no tensor.
        failure: what went wrong.
    """

    request: int
    last: bool = True
    data: memoryview | None = None
    value: CborValue = None
    failure: Failure | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """An operation that failed, and so has whatever was made from its results.

    Attributes:
        error: as the executor told it.
        operation: the operator.
        handle: of the first tensor that the operation was to make or to write to; 0 if none.
    """

    error: MeshError
    operation: str = ""
    handle: int = 0


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


def data_answer(request: int, data: bytes | memoryview, *, last: bool) -> bytes:
    """Return a piece of a tensor."""
    return b"".join((_ANSWER_HEAD.pack(_DATA, request), b"\x01" if last else b"\x00", data))


def answer(request: int, value: CborValue) -> bytes:
    """Return an answer that is no tensor."""
    body = cbor.encode(value, max_size=MAX_BATCH - _ANSWER_HEAD.size)
    return _ANSWER_HEAD.pack(_VALUE, request) + body


def failure(request: int, failed: Failure) -> bytes:
    """Return a failure; of request 0 it is the session's, which is over."""
    value: dict[str, CborValue] = {
        "error": encode_error(failed.error),
        "operation": failed.operation[:MAX_TEXT],
        "handle": failed.handle,
    }
    kind = _FAILED if request else _FATAL
    return _ANSWER_HEAD.pack(kind, request) + cbor.encode(value, max_size=MAX_BATCH)


def read_answer(data: memoryview, peer: object) -> Answer:
    """Return what an executor wrote; errors in it are of `peer`.

    Raises:
        ProtocolError: it can't be.
    """
    if len(data) < _ANSWER_HEAD.size:
        raise _bad("it is shorter than any answer")
    kind, request = _ANSWER_HEAD.unpack_from(data)
    rest = data[_ANSWER_HEAD.size :]
    if kind == _DATA:
        if not rest or rest[0] > 1:
            raise _bad("a piece of data does not say whether it is the last")
        return Answer(request, rest[0] == 1, rest[1:])
    if kind not in (_VALUE, _FAILED, _FATAL) or (kind == _FATAL) != (request == 0):
        raise _bad(f"there is no answer of kind {kind} to request {request}")
    value = cbor.decode(bytes(rest), max_size=MAX_BATCH)
    if kind == _VALUE:
        return Answer(request, value=value)
    fields = Fields(value, "failure on a device")
    error = decode_error(fields.value("error"), peer=peer)
    operation = fields.value("operation")
    handle = fields.integer("handle", high=(1 << 64) - 1)
    fields.finish()
    if not isinstance(operation, str) or len(operation) > MAX_TEXT or not operation.isascii():
        raise _bad("a failure does not name its operation")
    if not (operation == "" or operation.isprintable()):
        raise _bad("a failure does not name its operation")
    return Answer(request, failure=Failure(error, operation, handle))


# -- templates


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
    ]


def decode_template(value: CborValue) -> Template:
    """Return the template in `value`.

    Raises:
        ProtocolError: it is none, or its operator is not one that a client may have run.
    """
    match value:
        case [str(name), int(device), [*args], [*kwargs], (int() | list()) as outputs] if (
            not isinstance(device, bool) and not isinstance(outputs, bool)
        ):
            pass
        case _:
            raise _bad("a template is malformed")
    if not (name in _OWN or (len(name) <= MAX_TEXT and allows(name))):
        raise ProtocolError(
            f"use of operator {name!r:.80}",
            why="it is not one that may be run on another peer's device",
        )
    if not 0 <= device < 1 << 16 or len(args) + len(kwargs) > MAX_TEXT:
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
        return Template(name, device, decoded, tuple(named), None, outputs)
    if len(outputs) > MAX_TENSORS:
        raise _bad("a template makes more than can be")
    made = tuple(map(_output, outputs))
    return Template(name, device, decoded, tuple(named), made, len(made))


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


def _known(layout_of: Callable[[int], Layout | None], number: int) -> Layout:
    layout = layout_of(number)
    if layout is None:
        raise _bad(f"template {number} was not defined")
    return layout


def _bad(why: str) -> ProtocolError:
    return ProtocolError("reading of a batch for a device", why=why)
