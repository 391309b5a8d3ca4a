from __future__ import annotations

import math

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from auth.encoding import (
    CborItem,
    base32_decode,
    base32_encode,
    cbor_decode,
    cbor_encode,
    check_time,
)

scalars = (
    st.integers(-(2**64), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.binary(max_size=40)
    | st.text(max_size=40)
    | st.none()
)
items = st.lists(
    scalars | st.lists(scalars | st.lists(scalars, max_size=3), max_size=4), max_size=6
)


@given(items)
def test_what_was_encoded_is_decoded(item: list[CborItem]) -> None:
    assert cbor_decode(cbor_encode(item), max_bytes=1 << 16) == item


@given(items)
def test_the_encoding_is_that_of_the_standard_library_of_cbor(item: list[CborItem]) -> None:
    assert cbor2.loads(cbor_encode(item)) == item


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        cbor_decode(data, max_bytes=128)
    except ValueError:
        return
    assert len(data) <= 128


@given(items, st.data())
def test_every_cut_is_refused(item: list[CborItem], data: st.DataObject) -> None:
    encoded = cbor_encode(item)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(ValueError, match="cut short"):
        cbor_decode(encoded[:cut], max_bytes=1 << 16)


@given(items, st.binary(min_size=1, max_size=5))
def test_what_follows_the_end_is_refused(item: list[CborItem], more: bytes) -> None:
    with pytest.raises(ValueError, match=f"{len(more)} bytes follow"):
        cbor_decode(cbor_encode(item) + more, max_bytes=1 << 16)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (bytes.fromhex("9bffffffffffffffff"), "cut short"),
        (bytes.fromhex("5bffffffffffffffff"), "cut short"),
        (bytes.fromhex("9f01ff"), "indefinite"),
        (bytes.fromhex("5f4101ff"), "indefinite"),
        (bytes.fromhex("a10102"), "no place"),
        (bytes.fromhex("d82363612a62"), "no place"),  # a regular expression
        (bytes.fromhex("c2420100"), "no place"),  # a big number
        (bytes.fromhex("f5"), "no place"),  # true
        (bytes.fromhex("f7"), "no place"),  # undefined
        (bytes.fromhex("f818"), "no place"),
        (b"\x81" * 4000 + b"\x01", "nested"),
        (bytes.fromhex("61ff"), "utf-8"),
    ],
)
def test_what_statements_do_not_hold_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        cbor_decode(data, max_bytes=1 << 16)


def test_the_size_is_checked_first() -> None:
    data = cbor_encode([b"x" * 100])
    assert cbor_decode(data, max_bytes=len(data)) == [b"x" * 100]
    with pytest.raises(ValueError, match="limit"):
        cbor_decode(data, max_bytes=len(data) - 1)


@given(st.binary(max_size=100))
def test_base32_is_read_in_either_case(data: bytes) -> None:
    text = base32_encode(data)
    assert text == text.lower()
    assert "=" not in text
    assert base32_decode(text) == base32_decode(text.upper()) == data


@given(st.binary(min_size=1, max_size=60), st.data())
def test_a_cut_base32_text_gives_the_bytes_that_are_whole(data: bytes, draw: st.DataObject) -> None:
    text = base32_encode(data)
    cut = draw.draw(st.integers(0, len(text) - 1))
    read = base32_decode(text[:cut])
    assert len(read) == cut * 5 // 8 < len(data)
    assert data.startswith(read)


def test_base32_names_the_character_it_can_not_read() -> None:
    with pytest.raises(ValueError, match=r"character 3, '1'"):
        base32_decode("ab1d")


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, 1e12])
def test_impossible_times_are_refused(seconds: float) -> None:
    assert check_time(1.7e9) == 1.7e9
    with pytest.raises(ValueError, match="impossible"):
        check_time(seconds)
