"""The parsers of `mesh.device`: templates, batches, and what executors answer."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from auth import MeshError
from mesh.device import handover, templates, wire
from mesh.device.server import orders
from tensor_bridge import TensorMeta
from tests.parsers.of_transport import encoded, errors, same_error
from tests.parsers.parser import Parser, cbor_values
from transport import ProtocolError

__all__ = ["PARSERS"]

_dtypes = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64, torch.uint8])
_sizes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), max_size=4)


def _geometry(dtype: torch.dtype, sizes: list[tuple[int, int]], offset: int) -> wire.Geometry:
    shape, strides = (tuple(each) for each in zip(*sizes, strict=True)) if sizes else ((), ())
    return wire.Geometry(dtype, shape, strides, offset)


_geometries = st.builds(_geometry, _dtypes, _sizes, st.integers(0, 99))
_outputs = st.builds(
    lambda geometry, more, position: wire.Output(geometry, geometry.span + more, position),
    st.builds(_geometry, _dtypes, _sizes, st.just(0)),
    st.integers(0, 9),
    st.integers(0, 9),
)
_numbers = st.builds(wire.Number, st.sampled_from("dq"), st.none() | _dtypes)
_literals = st.builds(
    wire.Literal,
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 63), (1 << 63) - 1),
        st.floats(allow_nan=False),
        st.complex_numbers(allow_nan=False),
        st.sampled_from(["mean", "none", torch.float32, torch.channels_last, torch.strided]),
    ),
)
_arguments = st.recursive(
    st.builds(wire.TensorOf, _geometries) | _numbers | _literals | st.just(wire.DeviceOf()),
    lambda inner: st.builds(wire.Items, st.lists(inner, max_size=3).map(tuple)),
    max_leaves=4,
)
_templates = st.one_of(
    st.builds(
        lambda name, device, args, kwargs, outputs, floats: wire.Template(
            name, device, args, kwargs, outputs, len(outputs), floats
        ),
        st.sampled_from(["aten::add.Tensor", "aten::cat", wire.READ, wire.ALLOCATE]),
        st.integers(0, 99),
        st.lists(_arguments, max_size=3).map(tuple),
        st.lists(st.tuples(st.sampled_from(["dim", "alpha"]), _arguments), max_size=2).map(tuple),
        st.lists(_outputs, max_size=2).map(tuple),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    ),
    st.builds(
        lambda results: wire.Template("aten::nonzero", 0, (), (), None, results), st.integers(0, 9)
    ),
)

_ADD = wire.Template(
    "aten::add.Tensor",
    0,
    (wire.TensorOf(wire.Geometry(torch.float32, (2,), (1,))), wire.Number("d")),
    outputs=(wire.Output(wire.Geometry(torch.float32, (2,), (1,)), 8),),
)
_LAYOUTS = {1: wire.Layout(_ADD), 2: wire.Layout(wire.Template(wire.WAIT, 0))}
_handles = st.integers(0, (1 << 64) - 1)
_messages = st.one_of(
    st.builds(
        lambda one, other, number: wire.Run(1, (one, other, number)),
        _handles,
        _handles,
        st.floats(allow_nan=False),
    ),
    st.builds(wire.Ask, _handles, st.just(2), st.just(())),
    st.builds(wire.Define, st.integers(0, 9), _templates),
    st.builds(wire.Release, st.lists(_handles, max_size=4).map(tuple)),
    st.builds(wire.Write, _handles, _handles, st.binary(max_size=20).map(memoryview)),
    st.builds(wire.Seed, st.integers(0, 99), _handles),
    st.builds(wire.Forget, st.integers(0, 99)),
    st.builds(wire.Poison, _handles, errors()),
    st.builds(
        wire.Capture,
        st.integers(0, 99),
        st.lists(
            st.builds(wire.Release, st.lists(_handles, max_size=4).map(tuple))
            | st.builds(wire.Run, st.just(1), st.just((1, 2, 3.5))),
            max_size=3,
        ).map(tuple),
    ),
    st.builds(wire.Replay, st.integers(0, 99)),
    st.builds(wire.Drop, st.integers(0, 99)),
    st.builds(wire.Content, _handles),
)


def _write_batch(messages: list[wire.Message]) -> bytes:
    return b"".join(map(_write_message, messages))


def _write_message(message: wire.Message) -> bytes:
    match message:
        case wire.Run(number, values):
            return _LAYOUTS[number].packer().pack(wire.RUN_KIND, number, *values)
        case wire.Ask(request, number, values):
            return wire.ask(request, number, _LAYOUTS[number], *values)
        case wire.Define(number, template):
            return wire.define(number, template)
        case wire.Release(handles):
            return wire.release(handles)
        case wire.Write(handle, offset, data):
            return wire.write(handle, offset, data)
        case wire.Seed(device, value):
            return wire.seed(device, value)
        case wire.Forget(number):
            return wire.forget(number)
        case wire.Poison(handle, error):
            return wire.poison(handle, error)
        case wire.Capture(number, steps):
            return wire.capture(number, b"".join(map(_write_message, steps)))
        case wire.Replay(number):
            return wire.replay(number)
        case wire.Drop(number):
            return wire.drop(number)
        case wire.Content(max_bytes):
            return wire.content(max_bytes)


def _read_batch(data: bytes) -> list[wire.Message]:
    return list(wire.read_batch(memoryview(data), _LAYOUTS.get))


_answers = st.one_of(
    st.builds(
        lambda request, last, data: wire.Answer(request, last, memoryview(data)),
        _handles,
        st.booleans(),
        st.binary(max_size=20),
    ),
    st.builds(lambda request, value: wire.Answer(request, value=value), _handles, cbor_values),
    st.builds(
        lambda request, error, operation, handle: wire.Answer(
            request, failure=wire.Failure(error, operation, handle)
        ),
        _handles,
        errors(),
        st.sampled_from(["", "aten::add.Tensor"]),
        _handles,
    ),
).filter(lambda answer: answer.request or answer.failure)


def _write_answer(answer: wire.Answer) -> bytes:
    if answer.data is not None:
        return wire.data_answer(answer.request, answer.data, last=answer.last)
    if answer.failure is not None:
        return wire.failure(answer.request, answer.failure)
    return wire.answer(answer.request, answer.value)


def _same_answer(one: wire.Answer, other: wire.Answer) -> bool:
    if one.failure is None or other.failure is None:
        return _write_answer(one) == _write_answer(other)
    same = same_error(one.failure.error, other.failure.error)
    return same and one.failure.operation == other.failure.operation


_numbers64 = st.integers(0, (1 << 63) - 1)
_object_ids = st.binary(min_size=16, max_size=16).map(bytes.hex)
_orders = st.one_of(
    st.builds(
        handover.PutIn,
        st.integers(1, (1 << 63) - 1),
        *(_numbers64, _numbers64, _numbers64, _numbers64),
    ),
    st.builds(
        handover.TakeOut,
        st.integers(1, (1 << 63) - 1),
        st.integers(0, (1 << 32) - 1),
        _numbers64,
        st.builds(TensorMeta, _dtypes, st.just((2, 3)), st.sampled_from([(0, 1), (1, 0)])),
    ),
)
_executor_orders = st.one_of(
    st.builds(orders.Await, _numbers64, _numbers64, _numbers64, _numbers64),
    st.builds(orders.Fill, _numbers64, _numbers64),
    st.builds(orders.Fail, _numbers64, errors()),
    st.builds(orders.Hand, _numbers64, _numbers64, _numbers64),
)
_arrived = st.one_of(
    st.builds(
        handover.Arrived, st.binary(min_size=16, max_size=16), _numbers64, object_id=_object_ids
    ),
    st.builds(handover.Arrived, st.binary(min_size=16, max_size=16), _numbers64, error=errors()),
)


def _some(order: object) -> object:
    if order is None:
        raise ValueError("a batch")
    return order


PARSERS = [
    Parser(
        name="mesh.device_template",
        covers=("mesh.device.templates.decode_template",),
        form="message",
        values=_templates,
        write=wire.encode_template,
        read=wire.decode_template,
        refuses=(ProtocolError,),
        same=lambda one, other: (
            encoded(wire.encode_template(one)) == encoded(wire.encode_template(other))
        ),
    ),
    Parser(
        name="mesh.device_result",
        covers=("mesh.device.templates.decode_result",),
        form="message",
        values=_geometries,
        write=templates._geometry_value,
        read=wire.decode_result,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="mesh.device_batch",
        covers=("mesh.device.wire.read_batch",),
        form="bytes",
        values=st.lists(_messages, max_size=4),
        write=_write_batch,
        read=_read_batch,
        refuses=(ProtocolError,),
        same=lambda one, other: _write_batch(one) == _write_batch(other),
        is_canonical=False,  # whatever an error in it is, it is some error
    ),
    Parser(
        name="mesh.device_answer",
        covers=("mesh.device.wire.read_answer",),
        form="bytes",
        values=_answers,
        write=_write_answer,
        read=lambda data: wire.read_answer(memoryview(data), "a peer"),
        refuses=(ProtocolError,),
        same=_same_answer,
        is_canonical=False,  # whatever the error is, it is some error
    ),
    Parser(
        name="mesh.device_order",
        covers=("mesh.device.handover.decode_order",),
        form="bytes",
        values=_orders,
        write=lambda order: order.encode(),
        read=lambda data: _some(handover.decode_order(bytearray(data))),
        refuses=(MeshError, ValueError),
    ),
    Parser(
        name="mesh.device_executor_order",
        covers=("mesh.device.server.orders.decode",),
        form="bytes",
        values=_executor_orders,
        write=orders.encode,
        read=orders.decode,
        refuses=(MeshError, ValueError),
        same=lambda one, other: (
            (
                isinstance(one, orders.Fail)
                and one.arrival == other.arrival
                and same_error(one.error, other.error)
            )
            or one == other
        ),
        is_canonical=False,  # whatever the error is, it is some error
    ),
    Parser(
        name="mesh.device_taken",
        covers=("mesh.device.handover.Taken.decode",),
        form="message",
        values=st.builds(handover.Taken, _object_ids, _numbers64),
        write=lambda taken: taken.encode(),
        read=handover.Taken.decode,
        refuses=(ProtocolError,),
    ),
    Parser(
        name="mesh.device_arrived",
        covers=("mesh.device.handover.Arrived.decode",),
        form="message",
        values=_arrived,
        write=lambda arrived: arrived.encode(),
        read=handover.Arrived.decode,
        refuses=(ProtocolError,),
        same=lambda one, other: (
            (one.session, one.arrival, one.object_id)
            == (other.session, other.arrival, other.object_id)
        ),
        is_canonical=False,  # whatever the error is, it is some error
    ),
]
