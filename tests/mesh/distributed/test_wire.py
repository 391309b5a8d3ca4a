"""Messages between ranks: read back as written, and refused when they are anything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.collective import Header, RankFailed, RankLost, Signature
from mesh.distributed import wire
from transport import ProtocolError, cbor, decode_error, encode_error

HEADERS = st.builds(
    Header,
    st.builds(
        Signature,
        st.text(max_size=20),
        st.text(max_size=20),
        st.none() | st.integers(0, 2**62),
        st.text(max_size=20),
    ),
    st.integers(0, 2**62),
    st.integers(0, 2**31),
    st.integers(0, 2**62),
)


@given(HEADERS, st.integers(-1, 2**62), st.booleans())
def test_messages_are_read_as_written(header: Header, channel: int, eager: bool) -> None:
    encoded = wire.encode_message(channel, eager, header)
    assert int.from_bytes(encoded[:4], "big") == len(encoded) - 4
    value = cbor.decode(encoded[4:], max_size=wire.HEADER_BYTES)
    assert wire.parse_message(value) == (channel, eager, header)
    offer = [["offer", channel, 3, wire.header_value(header)]]
    assert wire.parse_control(offer) == [("offer", [channel, 3, header])]


@pytest.mark.parametrize(
    "value",
    [
        {"group": b"\0" * 15, "rank": 0, "stream": "data"},
        {"group": b"\0" * 16, "rank": -1, "stream": "data"},
        {"group": b"\0" * 16, "rank": 0, "stream": "other"},
        {"group": b"\0" * 16, "rank": 0, "stream": "data", "more": 1},
    ],
)
def test_requests_with_one_thing_wrong(value: dict[str, object]) -> None:
    good = {"group": b"\0" * 16, "rank": 0, "stream": "data"}
    assert wire.parse_request(good) == (b"\0" * 16, 0, "data")
    with pytest.raises(ProtocolError):
        wire.parse_request(value)


def test_reports_keep_class_and_ranks_and_drop_nonsense() -> None:
    error = RankLost("x", ranks=(1, 2), why="gone", fix="Go on.")
    found = wire.parse_failure(wire.failure_value(error), "group 'g'", 3)
    assert type(found) is RankLost
    assert (found.ranks, found.why, found.fix) == ((1, 2), "gone", "Go on.")
    odd = {"code": 7, "ranks": [0, 9, "1", -1, None], "why": "w" * 5000}
    found = wire.parse_failure(odd, "group 'g'", 3)
    assert type(found) is RankFailed
    assert found.ranks == (0,)
    assert len(found.why or "") == wire.MAX_TEXT
    forged = {"why": "so\x1b[2J", "fix": "line\nbreak", "ranks": [True, 1]}
    found = wire.parse_failure(forged, "group 'g'", 3)
    assert str(found) == "group 'g': so\ufffd[2J. line break"
    assert found.ranks == (1,)


def test_an_error_of_a_group_that_came_as_a_reply_can_be_told_on() -> None:
    found = decode_error(encode_error(RankLost("x", ranks=(1,), why="gone")), peer="them")
    assert type(found) is RankLost
    assert found.ranks == ()
    assert str(found.during("y")) == "y with them: gone"
