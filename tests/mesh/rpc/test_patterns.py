"""Short messages by pattern are those of the general way, byte for byte, and read as there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from mesh.rpc.encoding.patterns import answer_pattern, request_pattern, write_answer, write_request
from mesh.rpc.encoding.values import Packer, Unpacker
from mesh.rpc.names.exposed import Exposures
from mesh.rpc.names.targets import target_of
from mesh.rpc.names.types import TypeTable
from mesh.rpc.tensors.carriage import beside, together
from mesh.rpc.wire import Answer, Request
from transport import ProtocolError


class NoRefs:
    def pack(self, ref: Any) -> None:
        return None

    def unpack(self, item: Any) -> Any:
        raise AssertionError(item)


TENSORS: list[Any] = [
    torch.ones(2),
    torch.arange(6, dtype=torch.int16).view(2, 3),
    torch.zeros(0),
    torch.tensor(2.5, dtype=torch.float64),
    torch.tensor([True, False]),
    torch.arange(8.0)[2:5],
    torch.ones(1, 5),
    torch.ones(3, 1, dtype=torch.bfloat16),
]

PLAIN: list[Any] = [
    *(None, True, False, 0, 1, -1, 23, 24, 255, 256, 1 << 32, -(1 << 63), (1 << 63) - 1),
    *(0.0, -0.0, 1.0, 1.5, 0.1, 1e300, float("inf"), float("nan")),
    *("", "a" * 64, b"", b"\x00" * 63),
]

GENERAL: list[Any] = [
    torch.ones(2, requires_grad=True),
    torch.ones(4, 4).t()[:, 1:],
    torch.ones(4096),
    torch.nn.Parameter(torch.ones(2), requires_grad=False),
    torch.ones(2, dtype=torch.complex64),
    *(1 << 63, 1j, "\u00e9", "a" * 65, b"a" * 65, {"a": 1}, {1}, [[1]], torch.float32),
]


def the_general_way(function: Any, args: Any, kwargs: Any, seconds: float) -> Any:
    packer = Packer(TypeTable(), NoRefs())
    packer.pack(args, "args")
    packer.pack(kwargs, "kwargs")
    packed = packer.packed
    what = beside(packed.tensors)
    return Request(target_of(function), packed.items, what, seconds).encode()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype and one.shape == other.shape
    return type(one) is type(other) and repr(one) == repr(other)


@pytest.mark.parametrize("kwargs", [{}, {"alpha": 2, "other": torch.ones(3)}])
@pytest.mark.parametrize("value", [*TENSORS, *PLAIN], ids=repr)
def test_a_request_by_pattern_is_the_general_one(value: Any, kwargs: dict[str, Any]) -> None:
    args = (torch.ones(2), value, 1)
    for _ in range(2):  # worked out, and kept
        written: Any = write_request(torch.add, args, kwargs, 60.0)
        assert written == the_general_way(torch.add, args, kwargs, 60.0)
        pattern = request_pattern(written[0], written[1])
        assert pattern is not None
        assert pattern.target == target_of(torch.add)
        read = pattern.arguments(pattern.read(written[2]))
        assert len(read[0]) == 3
        assert all(map(same, read[0], args))
        assert read[1].keys() == kwargs.keys()
        assert all(map(same, read[1].values(), kwargs.values()))


@pytest.mark.parametrize("value", [*GENERAL], ids=repr)
def test_what_is_not_simple_has_no_pattern(value: Any) -> None:
    assert write_request(torch.add, (value,), {}, 60.0) is None
    assert write_request(torch.add, (), {"other": value}, 60.0) is None
    assert write_answer(value) is None


def test_what_looks_alike_is_told_apart() -> None:
    one = torch.ones(2)
    for args in [(one, one), tuple(range(17)), (torch.ones(1500), torch.ones(1500))]:
        assert write_request(torch.add, args, {}, 60.0) is None
    assert write_request(torch.add, (1,), {"\u00e9": 1}, 60.0) is None
    written: list[Any] = [
        write_request(torch.add, (value,), {}, 60.0) for value in (1, True, 1.0, 0, -0.0, 0.0)
    ]
    assert len({items for _, items, _ in written}) == 6


@pytest.mark.parametrize(
    "value",
    [*TENSORS, *PLAIN, (), [], (torch.ones(2), 1), [torch.ones(2), None, torch.zeros(3)]],
    ids=repr,
)
def test_an_answer_by_pattern_is_the_general_one(value: Any) -> None:
    packer = Packer(TypeTable(), NoRefs())
    packer.pack(value, "the result")
    packed = packer.packed
    for _ in range(2):
        written: Any = write_answer(value)
        assert written == Answer(packed.items, beside(packed.tensors)).encode()
        pattern = answer_pattern(written[0], written[1])
        assert pattern is not None
        read = pattern.result(pattern.read(written[2]))
        unpacker = Unpacker(
            packed.items,
            together(Answer.decode(written).beside, {}),
            TypeTable(),
            NoRefs(),
            Exposures(),
        )
        general = unpacker.unpack()
        if isinstance(value, tuple | list):
            assert type(read) is type(value)
            assert all(map(same, read, general))
        else:
            assert same(read, general)
            assert same(read, value)


def test_content_of_another_length_is_refused() -> None:
    written: Any = write_request(torch.add, (torch.ones(2), 1), {}, 60.0)
    pattern = request_pattern(written[0], written[1])
    assert pattern is not None
    for content in (b"", bytes(7), bytes(9)):
        with pytest.raises(ProtocolError):
            pattern.read(content)


def test_what_a_pattern_makes_is_its_own() -> None:
    written: Any = write_answer(torch.ones(2))
    pattern = answer_pattern(written[0], written[1])
    assert pattern is not None
    one, other = (pattern.read(written[2])[0] for _ in range(2))
    one.add_(1)
    one.resize_(64)
    assert same(other, torch.ones(2))
    assert same(pattern.read(written[2])[0], torch.ones(2))
    with torch.inference_mode():
        made = pattern.read(written[2])[0]
    assert not made.is_inference()


def test_a_default_device_is_not_taken_for_that_of_tensors() -> None:
    value = torch.arange(5.0)  # of no other test: nothing is kept of it
    with torch.device("meta"):
        request: Any = write_request(torch.div, (value, 5), {}, 60.0)
        answer: Any = write_answer([value, 5])
        patterns = [request_pattern(*request[:2]), answer_pattern(*answer[:2])]
    for pattern, message in zip(patterns, (request, answer), strict=True):
        assert pattern is not None
        assert same(pattern.read(message[2])[0], value)


def test_threads_may_write_and_read_at_once() -> None:
    wrong: list[Any] = []

    def work(number: int) -> None:
        for each in range(200):
            args = (torch.full((2,), float(number)), each % 7)
            written: Any = write_request(torch.add, args, {}, 60.0)
            pattern = request_pattern(written[0], written[1])
            assert pattern is not None
            if not all(map(same, pattern.read(written[2]), args)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
