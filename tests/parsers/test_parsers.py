"""Every parser that bytes from the network reach: it reads what was written, and refuses the rest.

Refusing has one form, the error that is documented, and costs no more than reading would.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.parsers.all import PARSERS
from tests.parsers.parser import (
    MAX_MESSAGE,
    Parser,
    arbitrary,
    bombs,
    mutated,
    to_bytes,
)
from tests.profiles import one_in
from transport import ProtocolError, cbor

each_parser = pytest.mark.parametrize("parser", PARSERS, ids=repr)

LARGE = 32 << 10
"""Bytes of a bomb: enough for whatever grows faster than its input to show."""

MEMORY_FACTOR = 128
"""A value takes at most so many times the memory of its bytes: an empty map takes 64 for one."""

MEMORY_SLACK = 1 << 20
SECONDS = 2.0
"""CPU time for a bomb: twenty times what the dearest takes, and a tenth of what n^2 would."""


def as_received(parser: Parser, raw: Any) -> Any:
    """Return a message as it comes off the wire; bytes and texts are what they are."""
    if parser.form != "message":
        return raw
    return cbor.decode(cbor.encode(raw, max_size=MAX_MESSAGE), max_size=MAX_MESSAGE)


def read_or_refuse(parser: Parser, raw: Any) -> None:
    try:
        value = parser.read(raw)
    except parser.refuses:
        return
    again = parser.write(value)
    if parser.is_canonical:
        assert to_bytes(parser, again) == to_bytes(parser, raw)
    assert parser.same(value, parser.read(as_received(parser, again)))


@pytest.mark.fuzz
@each_parser
@one_in(10)
@given(data=st.data())
def test_what_is_written_is_read(parser: Parser, data: st.DataObject) -> None:
    value = data.draw(parser.values)
    raw = parser.write(value)
    got = parser.read(as_received(parser, raw))
    assert parser.same(value, got)
    assert to_bytes(parser, parser.write(got)) == to_bytes(parser, raw)


@pytest.mark.fuzz
@each_parser
@one_in(10)
@given(data=st.data())
def test_anything_else_is_refused_or_is_what_it_says(parser: Parser, data: st.DataObject) -> None:
    raw = data.draw(mutated(parser) | arbitrary(parser))
    try:
        raw = as_received(parser, raw)
    except ProtocolError:  # what can't travel
        return
    read_or_refuse(parser, raw)


@each_parser
@settings(one_in(100), phases=[Phase.generate])  # a smaller sample wouldn't say more
@given(data=st.data())
def test_no_bomb_costs_more_than_its_bytes(parser: Parser, data: st.DataObject) -> None:
    sample = parser.write(data.draw(parser.values))
    for name, bomb in bombs(parser, sample, LARGE).items():
        size = LARGE if parser.form == "message" else len(to_bytes(parser, bomb))
        began = time.process_time()
        _read(parser, bomb)
        assert time.process_time() - began < SECONDS, name
        tracemalloc.start()
        try:
            value = _read(parser, bomb)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak <= MEMORY_FACTOR * size + MEMORY_SLACK, f"{name}: {peak} bytes of {size}"
        del value


def _read(parser: Parser, raw: Any) -> Any:
    try:
        return parser.read(raw)
    except parser.refuses as error:
        return str(error)
