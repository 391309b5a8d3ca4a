"""One value, one encoding; everything else is refused, cheaply."""

from __future__ import annotations

import io
import math
import time
import tracemalloc
from typing import Any

import cbor2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transport.cbor import MAX_DEPTH, CborValue, decode, encode
from transport.errors import ProtocolError

MAX = 1 << 20

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 64), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.binary(max_size=20)
    | TEXT
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=20,
)


def same(a: object, b: object) -> bool:
    """Equal and of the same types, all through: 1, 1.0 and True are three values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, float) and isinstance(b, float):
        return math.copysign(1, a) == math.copysign(1, b) and a == b
    return a == b


@given(VALUES)
def test_what_is_encoded_is_decoded(value: CborValue) -> None:
    data = encode(value, max_size=MAX)
    assert same(decode(data, max_size=MAX), value)
    assert same(cbor2.loads(data), value)  # as any other implementation reads it


NEAR_KEYS = st.sampled_from(["", "a", "b", "aa", "ab", "é", "aé", "zz", "zzz", "a" * 24])
MAPS = st.recursive(
    st.integers(0, 1) | st.floats(allow_nan=False) | st.binary(max_size=1),
    lambda inner: st.dictionaries(NEAR_KEYS, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=8,
)


@given(VALUES | MAPS)
@example({"b": 0, "a": 0})
@example({"aa": 0, "b": 0})
@example({"é": 0, "ab": 0})
@example({"a": [{"b": 1.0}]})
def test_it_is_encoded_as_a_canonical_encoder_does(value: CborValue) -> None:
    assert encode(value, max_size=MAX) == cbor2.dumps(value, canonical=True)


def test_the_order_of_a_map_does_not_show() -> None:
    a: CborValue = {"b": 1, "aa": 2, "a": 3}
    b: CborValue = {"aa": 2, "a": 3, "b": 1}
    assert (
        encode(a, max_size=MAX)
        == encode(b, max_size=MAX)
        == bytes.fromhex("a361610361620162616102")
    )


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("1817", "not deterministic"),  # 23 in two bytes
        ("190001", "not deterministic"),
        ("fb3ff0000000000000", "not deterministic"),  # 1.0 in eight bytes
        ("5800", "not deterministic"),
        ("7803616263", "not deterministic"),
        ("980101", "not deterministic"),
        ("a2616201616102", "not deterministic"),  # keys out of order
        ("f97e01", "not deterministic"),  # a NaN with something to tell
        ("9fff", "not valid CBOR"),  # indefinite lengths
        ("5f4101ff", "not valid CBOR"),
        ("7f6161ff", "not valid CBOR"),
        ("bf616101ff", "not valid CBOR"),
        ("a2616101616102", "not valid CBOR"),  # the same key twice
        ("c074323031332d30332d32315432303a30343a30305a", "not valid CBOR"),  # a date
        ("c249010000000000000000", "not valid CBOR"),  # big numbers
        ("c349010000000000000000", "not valid CBOR"),
        ("d81c80", "not valid CBOR"),  # a shared value, and a reference
        ("d81c81d81d00", "not valid CBOR"),
        ("d8230a", "not valid CBOR"),  # a regular expression
        ("d9010280", "not valid CBOR"),  # a set
        ("d9d9f700", "not valid CBOR"),  # self-described
        ("f7", "don't travel"),  # undefined
        ("f0", "don't travel"),  # a simple value
        ("f8ff", "don't travel"),
        ("a10102", "key"),
        ("a1410102", "key"),
        ("0000", "bytes follow"),
        ("", "not valid CBOR"),
        ("61ff", "not valid CBOR"),  # not UTF-8
        ("63edA080", "not valid CBOR"),  # a surrogate
        ("ff", "not valid CBOR"),
        ("1c", "not valid CBOR"),
        ("8201", "not valid CBOR"),
    ],
)
def test_every_other_encoding_is_refused(data: str, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        decode(bytes.fromhex(data), max_size=MAX)


@pytest.mark.parametrize(
    "bits", ["f97c00", "f9fc00", "f97e00", "f98000", "00", "3bffffffffffffffff"]
)
def test_the_edges_of_what_travels(bits: str) -> None:
    """Infinities, NaN, minus zero, and the least integer of 65 bits."""
    data = bytes.fromhex(bits)
    assert encode(decode(data, max_size=9), max_size=9) == data


@pytest.mark.parametrize(
    "value",
    [
        1 << 64,
        -(1 << 64) - 1,
        {1: 2},
        {b"x": 2},
        {None: 1},
        (1, 2),
        {1, 2},
        bytearray(b"x"),
        memoryview(b"x"),
        object(),
        1j,
        "\ud800",
        {"\ud800": 1},
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
def test_a_value_that_does_not_travel_is_refused_here(value: Any) -> None:
    with pytest.raises(ProtocolError):
        encode(value, max_size=MAX)
    with pytest.raises(ProtocolError):
        encode([value], max_size=MAX)


def nested(depth: int) -> CborValue:
    value: CborValue = 0
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


def test_nesting_is_bounded_both_ways() -> None:
    deep = nested(MAX_DEPTH)
    data = encode(deep, max_size=MAX)
    assert same(decode(data, max_size=MAX), deep)
    with pytest.raises(ProtocolError, match="nested"):
        encode(nested(MAX_DEPTH + 1), max_size=MAX)
    with pytest.raises(ProtocolError):
        decode(cbor2.dumps(nested(MAX_DEPTH + 1), canonical=True), max_size=MAX)
    for data in (b"\x81" * 100_000 + b"\x00", b"\xa1\x61k" * 100_000 + b"\x00"):
        with pytest.raises(ProtocolError):
            decode(data, max_size=MAX)
    loop: list[CborValue] = []
    loop.append(loop)
    with pytest.raises(ProtocolError):
        encode(loop, max_size=MAX)


def test_sizes_are_bounded_both_ways() -> None:
    assert encode(b"x" * 10, max_size=11) == decode_able(b"x" * 10)
    with pytest.raises(ProtocolError, match="11 bytes, and at most 10"):
        encode(b"x" * 10, max_size=10)
    with pytest.raises(ProtocolError, match="11 bytes, and at most 10"):
        decode(decode_able(b"x" * 10), max_size=10)
    assert decode(decode_able(b"x" * 10), max_size=11) == b"x" * 10


def decode_able(data: bytes) -> bytes:
    stream = io.BytesIO()
    cbor2.dump(data, stream, canonical=True)
    return stream.getvalue()


@pytest.mark.attack
@pytest.mark.parametrize("major", ["5b", "7b", "9b", "bb"])
@pytest.mark.parametrize("length", ["0000000000000001", "0000000040000000", "ffffffffffffffff"])
def test_an_announced_length_costs_nothing(major: str, length: str) -> None:
    data = bytes.fromhex(major + length)
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(ProtocolError):
            decode(data, max_size=MAX)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        assert time.perf_counter() - began < 1
    finally:
        tracemalloc.stop()


@pytest.mark.attack
def test_the_values_in_a_message_are_bounded_by_its_size() -> None:
    count = 16_384
    data = bytes.fromhex("994000") + b"\x80" * count
    tracemalloc.start()
    try:
        value = decode(data, max_size=MAX)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert isinstance(value, list)
    assert len(value) == count
    assert held < 100 * len(data)
