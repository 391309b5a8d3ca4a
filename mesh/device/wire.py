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
    POISON   8  u64 handle, u32 length, CBOR: the error that whoever reads it is told
    CAPTURE  9  u32 sequence, u32 length, messages: RUN and RELEASE alone
    REPLAY  10  u32 sequence
    DROP    11  u32 sequence
    CONTENT 12  u64 bytes: that the session makes do with

    DATA     1  u64 request, u8 whether it is the last, bytes
    VALUE    2  u64 request, CBOR
    FAILED   3  u64 request, CBOR: an error, and the handle that the operation was to make
    FATAL    4  u64 0, CBOR: an error; nothing follows

Everything that is read here was written by a stranger: each length, count and name is checked
before anything is made of it. Handles are numbers the client draws, never reused.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from auth import MeshError
from mesh.device.templates import (
    ALLOCATE,
    GET_RNG,
    MAX_TEMPLATE,
    MOVE,
    READ,
    SET_RNG,
    START,
    TAKE,
    WAIT,
    Argument,
    DeviceOf,
    Geometry,
    Items,
    Layout,
    Literal,
    Number,
    Output,
    Template,
    TensorOf,
    decode_result,
    decode_template,
    encode_template,
    result_value,
)
from tensor_bridge.fields import Fields
from transport import CborValue, ProtocolError, cbor
from transport.codes import decode_error, encode_error

__all__ = [
    "ALLOCATE",
    "ASK_KIND",
    "DEVICES_CALL",
    "GET_RNG",
    "MAX_BATCH",
    "MOVE",
    "READ",
    "RUN_KIND",
    "SERVICE",
    "SET_RNG",
    "START",
    "TAKE",
    "WAIT",
    "Answer",
    "Argument",
    "Ask",
    "Capture",
    "Content",
    "Define",
    "DeviceOf",
    "Drop",
    "Failure",
    "Forget",
    "Geometry",
    "Items",
    "Layout",
    "Literal",
    "Message",
    "Number",
    "Output",
    "Poison",
    "Release",
    "Replay",
    "Run",
    "Seed",
    "Template",
    "TensorOf",
    "Write",
    "answer",
    "ask",
    "capture",
    "content",
    "data_answer",
    "decode_result",
    "decode_template",
    "define",
    "drop",
    "encode_template",
    "failure",
    "forget",
    "poison",
    "read_answer",
    "read_batch",
    "release",
    "replay",
    "result_value",
    "seed",
    "write",
]

SERVICE = "device.session"
"""The service on whose streams a session travels."""

DEVICES_CALL = "device.list"
"""The call that tells what devices a peer offers."""

MAX_BATCH = 1 << 20
"""Bytes of a batch, and of an answer."""

MAX_TEXT = 64

_RUN, _ASK, _DEFINE, _RELEASE, _WRITE, _SEED, _FORGET, _POISON = 1, 2, 3, 4, 5, 6, 7, 8
_CAPTURE, _REPLAY, _DROP, _CONTENT = 9, 10, 11, 12
_DATA, _VALUE, _FAILED, _FATAL = 1, 2, 3, 4

_RUN_HEAD = struct.Struct("<BI")
_ASK_HEAD = struct.Struct("<BQI")
_DEFINE_HEAD = struct.Struct("<BII")
_COUNT_HEAD = struct.Struct("<BI")
_RELEASE_FORM = struct.Struct("<BIQ")
_WRITE_HEAD = struct.Struct("<BQQI")
_POISON_HEAD = struct.Struct("<BQI")
_SEED_HEAD = struct.Struct("<BHQ")
_CONTENT_FORM = struct.Struct("<BQ")
_ANSWER_HEAD = struct.Struct("<BQ")


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


class Poison(NamedTuple):
    """A storage that did not get what it was made for."""

    handle: int
    error: MeshError


class Capture(NamedTuple):
    """Operations that may be run again together; handles that they make are made anew then."""

    sequence: int
    steps: tuple[Run | Release, ...]


class Replay(NamedTuple):
    """Run what was captured once more."""

    sequence: int


class Drop(NamedTuple):
    """What was captured will not be run again."""

    sequence: int


class Content(NamedTuple):
    """The bytes that the session makes do with, of those it may have."""

    max_bytes: int


Message: TypeAlias = (
    Run
    | Ask
    | Define
    | Release
    | Write
    | Seed
    | Forget
    | Poison
    | Capture
    | Replay
    | Drop
    | Content
)

RUN_KIND, ASK_KIND = _RUN, _ASK
"""The first byte of an operation, for whoever packs them by `Layout.packer` or by hand."""


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
    count = len(handles)
    if count == 1:  # as nearly always, with each operation
        return _RELEASE_FORM.pack(_RELEASE, count, handles[0])
    return struct.pack(f"<BI{count}Q", _RELEASE, count, *handles)


def write(handle: int, offset: int, data: bytes | memoryview) -> bytes:
    """Return bytes for a storage."""
    return b"".join((_WRITE_HEAD.pack(_WRITE, handle, offset, len(data)), data))


def seed(device: int, value: int) -> bytes:
    """Return the seeding of a device."""
    return _SEED_HEAD.pack(_SEED, device, value & 0xFFFF_FFFF_FFFF_FFFF)


def forget(number: int) -> bytes:
    """Return that a template is forgotten."""
    return _COUNT_HEAD.pack(_FORGET, number)


def poison(handle: int, error: MeshError) -> bytes:
    """Return that a storage did not get what it was made for, because of `error`."""
    body = cbor.encode(encode_error(error), max_size=MAX_BATCH)
    return _POISON_HEAD.pack(_POISON, handle, len(body)) + body


def capture(sequence: int, messages: bytes) -> bytes:
    """Return what may be run again: operations and releases, as they lie in a batch."""
    return _DEFINE_HEAD.pack(_CAPTURE, sequence, len(messages)) + messages


def replay(sequence: int) -> bytes:
    """Return that a sequence is to be run once more."""
    return _COUNT_HEAD.pack(_REPLAY, sequence)


def drop(sequence: int) -> bytes:
    """Return that a sequence will not be run again."""
    return _COUNT_HEAD.pack(_DROP, sequence)


def content(max_bytes: int) -> bytes:
    """Return that the session makes do with so many bytes."""
    return _CONTENT_FORM.pack(_CONTENT, max_bytes)


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
                released, at = _read_release(data, at)
                yield released
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
            elif kind == _POISON:
                _, handle, length = _POISON_HEAD.unpack_from(data, at)
                at += _POISON_HEAD.size
                if length > end - at:
                    raise _bad("an error is cut off")
                value = cbor.decode(bytes(data[at : at + length]), max_size=MAX_BATCH)
                yield Poison(handle, decode_error(value, peer=None))
                at += length
            elif kind == _REPLAY:
                yield Replay(_COUNT_HEAD.unpack_from(data, at)[1])
                at += _COUNT_HEAD.size
            elif kind == _CAPTURE:
                _, number, length = _DEFINE_HEAD.unpack_from(data, at)
                at += _DEFINE_HEAD.size
                if length > end - at:
                    raise _bad("a sequence is cut off")
                yield Capture(number, _steps(data[at : at + length], layout_of))
                at += length
            elif kind == _DROP:
                yield Drop(_COUNT_HEAD.unpack_from(data, at)[1])
                at += _COUNT_HEAD.size
            elif kind == _CONTENT:
                yield Content(_CONTENT_FORM.unpack_from(data, at)[1])
                at += _CONTENT_FORM.size
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


def _steps(
    data: memoryview, layout_of: Callable[[int], Layout | None]
) -> tuple[Run | Release, ...]:
    """Return the messages of a sequence, of which none holds another."""
    steps: list[Run | Release] = []
    at = 0
    while at < len(data):
        if data[at] not in (_RUN, _RELEASE):
            raise _bad("a sequence holds more than operations and releases")
        if data[at] == _RELEASE:
            released, at = _read_release(data, at)
            steps.append(released)
            continue
        number = _RUN_HEAD.unpack_from(data, at)[1]
        body = _known(layout_of, number).body
        at += _RUN_HEAD.size
        steps.append(Run(number, body.unpack_from(data, at)))
        at += body.size
    return tuple(steps)


def _read_release(data: memoryview, at: int) -> tuple[Release, int]:
    """Return the release at a place, and where it ends."""
    count = _COUNT_HEAD.unpack_from(data, at)[1]
    at += _COUNT_HEAD.size
    if count > (len(data) - at) // 8:
        raise _bad("more handles are released than it has bytes for")
    return Release(struct.unpack_from(f"<{count}Q", data, at)), at + 8 * count


def _known(layout_of: Callable[[int], Layout | None], number: int) -> Layout:
    layout = layout_of(number)
    if layout is None:
        raise _bad(f"template {number} was not defined")
    return layout


def _bad(why: str) -> ProtocolError:
    return ProtocolError("reading of a batch for a device", why=why)
