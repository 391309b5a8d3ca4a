"""Descriptions of tensors: what they say, what they refuse, and what can't get in through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from torch.testing._internal.two_tensor import TwoTensor

from tensor_bridge import (
    DTYPES,
    TensorMeta,
    UnsupportedTensor,
    decode_meta,
    describe,
    dtype_name,
    dtype_of,
    encode_meta,
)
from tests.parsers.of_tensor_bridge import metas
from tests.tensor_bridge.tensors import quantized, quiet
from transport import CborValue, ProtocolError

GOOD: dict[str, CborValue] = {"dtype": "float32", "shape": [2, 3, 4], "order": [0, 2, 1]}


def test_every_element_type_of_torch_is_known_or_refused_by_name() -> None:
    of_torch = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert of_torch - set(DTYPES.values()) == {torch.quint4x2, torch.quint2x4}
    for name, dtype in DTYPES.items():
        assert dtype_name(dtype) == name
        assert dtype_of(name) is dtype
    with pytest.raises(UnsupportedTensor, match="quint4x2"):
        dtype_name(torch.quint4x2)
    with pytest.raises(UnsupportedTensor, match="float1024"):
        dtype_of("float1024")


@given(metas(), metas())
def test_a_description_survives_the_wire(meta: TensorMeta, other: TensorMeta) -> None:
    assert decode_meta(encode_meta(meta)) == meta
    assert len(meta.digest()) == 32
    assert (meta.digest() == other.digest()) == (meta == other)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"shape": [-1, 3, 4]}, "integer from 0"),
        ({"shape": [True, 3, 4]}, "integer from 0"),
        ({"shape": [1 << 32, 1 << 32, 4]}, "2\\^63"),
        ({"shape": [0, 1 << 62, 4]}, "2\\^63"),
        ({"shape": [1] * 65}, "at most 64"),
        ({"order": [0, 1, 2]}, "left out"),
        ({"grad": False}, "left out"),
        ({"order": [0, 1]}, "permutation"),
        ({"order": [0, 1, 1]}, "permutation"),
        ({"order": [1, 2, 3]}, "permutation"),
        ({"dtype": "int32", "grad": True}, "gradient"),
        ({"quantization": {"scales": b"", "zero_points": b""}}, "only with them"),
        ({"dtype": "qint8"}, "only with them"),
        ({"storage": 3}, "unknown field 'storage'"),
    ],
)
def test_descriptions_that_no_tensor_has(change: dict[str, CborValue], why: str) -> None:
    assert decode_meta(dict(GOOD)).strides == (12, 1, 3)
    with pytest.raises(ProtocolError, match=why):
        decode_meta(GOOD | change)


@pytest.mark.parametrize(
    "change",
    [
        {"axis": 3},
        {"axis": -1},
        {"scales": b"\x00" * 24},
        {"zero_points": b"\x00" * 40},
        {"more": 1},
    ],
)
def test_quantizations_that_no_tensor_has(change: dict[str, CborValue]) -> None:
    value = encode_meta(describe(quantized("qint8", per_channel=True)))
    quantization = value["quantization"]
    assert isinstance(quantization, dict)
    assert decode_meta(value).quantization is not None
    with pytest.raises(ProtocolError):
        decode_meta(value | {"quantization": quantization | change})


def _vmapped() -> torch.Tensor:
    kept: list[torch.Tensor] = []
    torch.func.vmap(lambda inner: kept.append(inner) or inner)(torch.ones(2, 3))
    return kept[0]


def _freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _many_channels() -> torch.Tensor:
    with quiet():
        channels = torch.ones(1025, dtype=torch.float64)
        zeros = torch.zeros(1025, dtype=torch.int64)
        return torch.quantize_per_channel(torch.ones(1025, 1), channels, zeros, 0, torch.qint8)


def _float_parameters() -> torch.Tensor:
    with quiet():
        ones, zeros = torch.ones(2), torch.zeros(2)
        return torch.quantize_per_channel(torch.ones(2, 3), ones, zeros, 0, torch.quint8)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "sparse_coo"),
        (lambda: torch.empty(3, device="meta"), "a shape and no elements"),
        (lambda: [1, 2, 3], "it is no torch.Tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: TwoTensor(torch.ones(2), torch.ones(2)), "wrapper"),
        (lambda: torch.nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2))), "wrapper"),
        (_vmapped, "no memory of its own"),
        (_freed, "freed"),
        (lambda: torch._efficientzerotensor(3), "no memory"),
        (lambda: torch.empty((1,) * 65), "64 dimensions"),
        (_many_channels, "1025 channels"),
        (_float_parameters, "float_qparams"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(sparse|nested|Sparse).*:UserWarning")
def test_tensors_that_are_not_plain_bytes_are_refused(
    make: Callable[[], torch.Tensor], why: str
) -> None:
    tensor = make()
    with pytest.raises(UnsupportedTensor, match=why) as refusal:
        describe(tensor)
    assert refusal.value.exit_code == 2


def test_plain_subclasses_move_as_tensors() -> None:
    class Named(torch.Tensor):
        pass

    assert describe(torch.ones(2).as_subclass(Named)) == describe(torch.ones(2))
    assert describe(torch.nn.Buffer(torch.ones(2))) == describe(torch.ones(2))


def test_the_description_can_be_hashed_and_is_frozen() -> None:
    meta = describe(torch.ones(2, 3))
    assert {meta: 1}[describe(torch.zeros(2, 3))] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        meta.shape = ()  # type: ignore[misc]
