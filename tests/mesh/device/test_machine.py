"""An executor against clients that send whatever they like."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from auth import MeshError
from mesh.device import ops, wire
from mesh.device.server.machine import Machine, MachineLimits
from mesh.device.wire import Geometry, Items, Literal, Number, Output, Template, TensorOf
from transport import LimitExceeded, ProtocolError

LIMITS = MachineLimits(max_bytes=1 << 16, max_handles=64, max_templates=32)
VECTOR = Geometry(torch.float32, (4,), (1,))
ADD = Template(
    "aten::add.Tensor", 0, (TensorOf(VECTOR), Number("d")), outputs=(Output(VECTOR, 16),), results=1
)
ALLOCATE = Template(wire.ALLOCATE, 0, outputs=(Output(VECTOR, 16),), results=1)
READ = Template(wire.READ, 0, (TensorOf(VECTOR),))


class Client:
    """Writes batches for a machine by hand."""

    def __init__(self, limits: MachineLimits = LIMITS) -> None:
        self.machine = Machine([torch.device("cpu")], limits)
        self.answers: list[wire.Answer] = []
        self._numbers: dict[Template, int] = {}
        self._requests = 0

    def send(self, *messages: bytes) -> None:
        self.machine.execute(
            memoryview(bytearray(b"".join(messages))),
            lambda data: self.answers.append(wire.read_answer(memoryview(data), "a peer")),
        )

    def number(self, template: Template) -> int:
        if template not in self._numbers:
            self._numbers[template] = len(self._numbers) + 1
            self.send(wire.define(self._numbers[template], template))
        return self._numbers[template]

    def run(self, template: Template, *values: float) -> None:
        number = self.number(template)
        self.send(wire.Layout(template).packer().pack(wire.RUN_KIND, number, *values))

    def ask(self, template: Template, *values: float) -> wire.Answer:
        self._requests += 1
        self.send(wire.ask(self._requests, self.number(template), wire.Layout(template), *values))
        return self.answers[-1]

    def elements(self, handle: int) -> list[float]:
        answer = self.ask(READ, handle)
        assert answer.data is not None, answer.failure
        return torch.frombuffer(bytearray(answer.data), dtype=torch.float32).tolist()

    def why(self, handle: int) -> str:
        answer = self.ask(READ, handle)
        assert answer.failure is not None
        return str(answer.failure.error)


def computes(client: Client) -> bool:
    """The positive control: the same machine does what it is for."""
    client.run(ALLOCATE, 1001)
    client.run(ADD, 1001, 1002, 2.5)
    found = client.elements(1002)
    client.send(wire.release([1001, 1002]))
    return found == [2.5] * 4


def test_allocates_computes_and_releases() -> None:
    client = Client()
    assert computes(client)
    client.run(ALLOCATE, 1)
    client.send(wire.write(1, 4, torch.tensor([5.0]).numpy().tobytes()))
    assert client.elements(1) == [0.0, 5.0, 0.0, 0.0]
    assert client.machine.used == 16
    client.send(wire.release([1, 77]))
    assert (client.machine.used, client.machine.handles) == (0, 0)


@pytest.mark.parametrize(
    ("geometry", "why"),
    [
        (Geometry(torch.float32, (5,), (1,)), "ends at byte 20 of a storage of 16"),
        (Geometry(torch.float32, (1,), (1,), 4), "ends at byte 20"),
        (Geometry(torch.float32, (2,), (1 << 40,)), "of a storage of 16"),
        (Geometry(torch.complex128, (2,), (1,)), "ends at byte 32"),
        (Geometry(torch.uint8, (17,), (1,)), "ends at byte 17"),
    ],
)
def test_no_view_reaches_beyond_its_storage(geometry: Geometry, why: str) -> None:
    client = Client()
    client.run(ALLOCATE, 1)
    with pytest.raises(ProtocolError, match=why):
        client.ask(Template(wire.READ, 0, (TensorOf(geometry),)), 1)
    assert computes(client)


def negative() -> bytes:
    return wire.cbor.encode(
        ["mesh::read", 0, [[1, "float32", [1], [1], -1]], [], [], "float32"], max_size=1000
    )


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda c: c.run(ADD, 9, 2, 1.0), "there is no handle 9"),
        (lambda c: c.run(ALLOCATE, 1), "handle 1 is taken"),
        (lambda c: c.run(ADD, 1, 1, 1.0), "handle 1 is taken"),
        (lambda c: c.send(wire.write(1, 13, b"1234")), "bytes up to 17 of a storage of 16"),
        (lambda c: c.send(wire.write(1, (1 << 64) - 2, b"1234")), "of a storage of 16"),
        (lambda c: c.send(wire.write(9, 0, b"1234")), "there is no handle 9"),
        (lambda c: c.send(b"\x01\x09\x00\x00\x00"), "template 9 was not defined"),
        (lambda c: c.send(b"\x63"), "no message of kind 99"),
        (lambda c: c.send(wire.replay(1)), "there is no sequence 1"),
        (lambda c: c.send(wire.drop(1)), "there is no sequence 1"),
        (lambda c: c.send(wire.capture(1, b""), wire.capture(1, b"")), "is there already"),
        (lambda c: c.send(wire.capture(1, wire.seed(0, 1))), "more than operations and releases"),
        (lambda c: c.send(wire.capture(1, wire.release([1]))[:-1]), "a sequence is cut off"),
        (lambda c: c.send(b"\x04\xff\xff\xff\xff"), "more handles are released"),
        (lambda c: c.send(wire.release([1])[:-1]), "more handles are released"),
        (lambda c: c.send(wire.write(1, 0, b"1234")[:-1]), "bytes to write are missing"),
        (lambda c: c.send(b"\x03\x01"), "ends within a message"),
        (lambda c: c.send(wire.seed(7, 1)), "there is no device 7"),
        (lambda c: c.send(wire.forget(44)), "template 44 was not defined"),
        (lambda c: c.run(READ, 1), "what only answers was not asked"),
        (lambda c: c.send(wire.define(1, READ), wire.define(1, READ)), "is there already"),
        (lambda c: c.run(Template("aten::add.Tensor", 3)), "there is no device 3"),
        (lambda c: c.send(b"\x03\x63\0\0\0", len(negative()).to_bytes(4, "little"), negative()),
         "a size is out of bounds"),
    ],
)  # fmt: skip
def test_what_no_client_of_ours_sends_ends_the_session(
    act: Callable[[Client], Any], why: str
) -> None:
    client = Client()
    client.run(ALLOCATE, 1)
    with pytest.raises(ProtocolError, match=why):
        act(client)


@pytest.mark.parametrize(
    "name",
    [
        *("aten::from_file", "aten::empty.memory_format", "aten::view", "aten::as_strided"),
        *("aten::set_.source_Storage", "aten::resize_", "aten::_cudnn_rnn", "prims::add"),
        *("aten::__class__", "aten::_thnn_fused_lstm_cell", "os::system", "aten", "aten::"),
        *("mesh::read2", "aten::record_stream", "aten::_to_sparse", "aten::load", "aten::save"),
    ],
)
def test_operators_that_are_not_on_the_list_have_no_way_in(name: str) -> None:
    client = Client()
    with pytest.raises(ProtocolError, match="may be run"):
        client.run(Template(name, 0))
    assert computes(client)


@pytest.mark.parametrize("floats", ["int64", "complex64", "float8_e4m3fn", "nope", 1])
def test_a_default_type_that_torch_can_not_have_is_refused(floats: Any) -> None:
    value = wire.cbor.encode(["mesh::read", 0, [], [], [], floats], max_size=1000)
    message = b"\x03\x63\0\0\0" + len(value).to_bytes(4, "little") + value
    with pytest.raises(ProtocolError):
        Client().send(message)


@pytest.mark.parametrize("name", ["aten::add.Nope", "aten::add.__class__", "aten::add._schema"])
def test_overloads_that_torch_has_not(name: str) -> None:
    with pytest.raises(ProtocolError, match="has none such"):
        Client().run(Template(name, 0))


def test_the_list_has_no_views_and_nothing_that_is_not_there() -> None:
    allowed = [name for name in torch._C._dispatch_get_all_op_names() if ops.allows(name)]
    assert len(allowed) > 1500
    for full in allowed:
        base, _, overload = full.removeprefix("aten::").partition(".")
        operator = getattr(getattr(torch.ops.aten, base), overload or "default", None)
        if operator is None or not isinstance(operator, torch._ops.OpOverload):
            continue
        for result in operator._schema.returns:
            if result.alias_info is not None and not result.alias_info.is_write:
                with pytest.raises(ProtocolError, match="views are made by the client"):
                    Client().run(Template(full, 0))
        kinds = {str(argument.type) for argument in operator._schema.arguments}
        assert not kinds & {"Storage", "Stream", "Any"}, full


def test_devices_and_generators_are_the_sessions() -> None:
    full = Template(
        "aten::full", 0, (Items((Literal(2),)), Number("d")), (("device", Literal("cuda:0")),)
    )
    with pytest.raises(ProtocolError, match="the device is the session's"):
        Client().run(full, 1.0)
    draw = Template(
        "aten::rand.generator", 0, (Items((Literal(2),)),), (("generator", Literal(3)),)
    )
    with pytest.raises(ProtocolError, match="don't travel"):
        Client().run(draw)


def test_allocations_are_refused_before_they_are_made() -> None:
    client = Client()
    huge = Geometry(torch.float32, (1 << 50,), (1,))
    client.run(Template(wire.ALLOCATE, 0, outputs=(Output(huge, huge.span),), results=1), 1)
    assert "bytes are left" in client.why(1)
    many = Template(
        "aten::full", 0, (Items((Literal(1 << 40),)), Number("d")), outputs=(Output(VECTOR, 16),)
    )
    client.run(many, 2, 1.0)  # a lie about what comes of it
    assert "memory" in client.why(2).lower() or "expected" in client.why(2)
    assert client.machine.used == 0
    assert computes(client)


def test_lies_about_results_are_found_out() -> None:
    client = Client()
    client.run(ALLOCATE, 1)
    for geometry in (
        Geometry(torch.float32, (8,), (1,)),
        Geometry(torch.float64, (4,), (1,)),
        Geometry(torch.float32, (2, 2), (2, 1)),
    ):
        liar = Template(ADD.name, 0, ADD.args, outputs=(Output(geometry, geometry.span),))
        handle = 10 + client.machine.handles
        client.run(liar, 1, handle, 1.0)
        assert "was expected" in client.why(handle)
    other = Template(ADD.name, 0, ADD.args, outputs=(Output(VECTOR, 16, 5),))
    client.run(other, 1, 99, 1.0)
    assert "no tensor where one was expected" in client.why(99)
    assert computes(client)


def test_results_never_share_memory_with_arguments() -> None:
    """Two handles over one memory would let a client see writes it did not order."""
    client = Client()
    client.run(ALLOCATE, 1)
    noop = Template(
        "aten::_conj_physical", 0, (TensorOf(VECTOR),), outputs=(Output(VECTOR, 16),), results=1
    )
    client.run(noop, 1, 2)
    client.run(Template("aten::add_.Tensor", 0, (TensorOf(VECTOR), Number("d"))), 1, 1.0)
    assert client.elements(1) == [1.0] * 4
    assert client.elements(2) == [0.0] * 4


def test_handles_and_templates_are_bounded() -> None:
    client = Client()
    for handle in range(1, 65):
        client.run(ALLOCATE, handle)
    with pytest.raises(LimitExceeded, match="64 storages"):
        client.run(ALLOCATE, 65)
    assert client.machine.handles == 64

    other = Client()

    def define(size: int) -> None:
        geometry = Geometry(torch.float32, (size,), (1,))
        other.number(Template(wire.ALLOCATE, 0, outputs=(Output(geometry, 4 * size),)))

    for size in range(1, 33):
        define(size)
    with pytest.raises(LimitExceeded, match="has 32 already"):
        define(33)


def test_poison_spreads_to_what_is_made_and_written_and_no_further() -> None:
    client = Client()
    client.run(ALLOCATE, 1)
    client.run(ALLOCATE, 2)
    bad = Template(
        "aten::mm", 0, (TensorOf(VECTOR), TensorOf(VECTOR)), outputs=(Output(VECTOR, 16),)
    )
    client.run(bad, 1, 2, 3)
    add = Template("aten::add_.Tensor", 0, (TensorOf(VECTOR), TensorOf(VECTOR)))
    client.run(add, 2, 3)
    client.run(ADD, 2, 4, 1.0)
    for handle in (3, 2, 4):
        assert "aten::mm" in client.why(handle)
    assert client.elements(1) == [0.0] * 4
    client.send(wire.release([1, 2, 3, 4]))
    assert (client.machine.used, client.machine.handles) == (0, 0)


def test_random_batches_do_nothing_but_fail() -> None:
    """Whatever the bytes, the machine answers, poisons or refuses; it holds no more than it may."""
    draw = random.Random(5)
    good = [
        wire.define(1, ALLOCATE),
        wire.define(2, ADD),
        wire.define(3, READ),
        *(wire.Layout(ALLOCATE).packer().pack(1, 1, n) for n in range(1, 6)),
        *(wire.Layout(ADD).packer().pack(1, 2, n, n + 10, 1.5) for n in range(1, 6)),
        wire.ask(1, 3, wire.Layout(READ), 11),
        wire.write(2, 4, b"12345678"),
        wire.release([3]),
        wire.seed(0, 5),
    ]
    refused = 0
    for _ in range(400):
        client = Client()
        batch = bytearray(b"".join(draw.choices(good, k=12) if draw.random() < 0.5 else good))
        for _ in range(draw.randrange(4)):
            batch[draw.randrange(len(batch))] = draw.randrange(256)
        try:
            client.send(bytes(batch[: draw.randrange(len(batch)) if draw.random() < 0.3 else None]))
        except MeshError:
            refused += 1
        assert client.machine.used <= LIMITS.max_bytes
        assert client.machine.handles <= LIMITS.max_handles
    assert 50 < refused < 400
