"""The first exchange: what it says, what it refuses, what it ignores."""

from __future__ import annotations

from typing import Any

import pytest

from transport.cbor import CborValue, decode, encode
from transport.errors import ProtocolError
from transport.frames import MAX_FRAME, MIN_FRAME, request_frame
from transport.protocol.hello import HELLO_MAX, HELLO_SERVICE, Hello, Welcome, negotiate

BOOT = bytes(range(16))

HELLO: dict[str, CborValue] = {
    "versions": [1, 1],
    "features": [],
    "max_frame": MAX_FRAME,
    "boot": BOOT,
    "credential": b"",
}
WELCOME: dict[str, CborValue] = {
    "version": 1,
    "features": [],
    "max_frame": MAX_FRAME,
    "boot": BOOT,
    "observed": "192.0.2.1:4433",
}


def across(value: CborValue) -> CborValue:
    return decode(encode(value, max_size=HELLO_MAX), max_size=HELLO_MAX)


def test_what_is_said_is_understood() -> None:
    hello = Hello(
        boot=BOOT,
        delegation=b"signed",
        credential=b"secret",
        versions=(1, 7),
        features=frozenset({"bulk", "paths"}),
        max_frame=MIN_FRAME,
    )
    assert Hello.from_value(across(hello.to_value())) == hello
    welcome = Welcome(1, BOOT, b"signed", frozenset({"bulk"}), MIN_FRAME, "[2001:db8::1]:4433")
    assert Welcome.from_value(across(welcome.to_value())) == welcome


def test_the_wire_form_is_what_it_was() -> None:
    assert Hello(boot=BOOT).to_value() == HELLO
    assert Welcome(1, BOOT, observed="192.0.2.1:4433").to_value() == WELCOME


def test_the_longest_hello_fits_its_frame() -> None:
    hello = Hello(boot=BOOT, delegation=bytes(4096), credential=bytes(4096))
    assert len(request_frame(HELLO_SERVICE, hello.to_value())) < HELLO_MAX


def test_a_newer_node_may_say_more() -> None:
    assert Hello.from_value({**HELLO, "hobby": "chess"}) == Hello(boot=BOOT)
    assert Welcome.from_value({**WELCOME, "hobby": [1]}).boot == BOOT


def test_the_credential_stays_out_of_the_log() -> None:
    assert "hunter2" not in repr(Hello(boot=BOOT, credential=b"hunter2"))


WRONG: dict[str, list[Any]] = {
    "versions": [None, 1, [], [1], [1, 2, 3], [0, 1], [2, 1], [1.0, 1], [True, 1], ["1", "1"]],
    "features": [None, "bulk", {}, [1], ["a", "a"], ["f"] * 65, [str(i) for i in range(65)], [[]]],
    "max_frame": [None, 0, -1, 1.5, True, "65536"],
    "boot": [None, b"", bytes(15), bytes(17), "0123456789abcdef"],
    "credential": [None, "text", bytes(4097), [1]],
    "delegation": [None, "text", bytes(4097)],
    "version": [None, 0, "1", True],
    "observed": [None, b"192.0.2.1:1", "x" * 129, "192.0.2.1:1\n", "\x1b[2J"],
}


@pytest.mark.parametrize(
    ("kind", "good", "name"),
    [(Hello, HELLO, name) for name in (*HELLO, "delegation")]
    + [(Welcome, WELCOME, name) for name in (*WELCOME, "delegation")],
)
def test_a_field_of_the_wrong_kind_is_refused_by_name(
    kind: type[Hello] | type[Welcome], good: dict[str, CborValue], name: str
) -> None:
    for value in WRONG[name]:
        with pytest.raises(ProtocolError, match=name):
            kind.from_value({**good, name: value})
    if name != "delegation":
        with pytest.raises(ProtocolError, match=name):
            kind.from_value({key: value for key, value in good.items() if key != name})


def test_who_accepts_too_little_to_be_told_an_error_is_refused() -> None:
    for kind, good in ((Hello, HELLO), (Welcome, WELCOME)):
        assert kind.from_value({**good, "max_frame": MIN_FRAME}).max_frame == MIN_FRAME
        with pytest.raises(ProtocolError, match=f"{MIN_FRAME} is the least"):
            kind.from_value({**good, "max_frame": MIN_FRAME - 1})


@pytest.mark.parametrize("value", [None, 1, "hello", [], b"hello", True])
def test_what_is_not_a_map_is_refused(value: CborValue) -> None:
    with pytest.raises(ProtocolError, match="not a map"):
        Hello.from_value(value)
    with pytest.raises(ProtocolError, match="not a map"):
        Welcome.from_value(value)


@pytest.mark.parametrize(
    ("theirs", "ours", "chosen"),
    [((1, 1), (1, 1), 1), ((1, 5), (2, 3), 3), ((2, 3), (1, 5), 3), ((3, 9), (1, 3), 3)],
)
def test_the_newest_version_that_both_speak_is_chosen(
    theirs: tuple[int, int], ours: tuple[int, int], chosen: int
) -> None:
    assert negotiate(theirs, ours) == chosen


@pytest.mark.parametrize(("theirs", "ours"), [((2, 3), (1, 1)), ((1, 1), (2, 3))])
def test_ranges_that_do_not_meet_are_both_named(
    theirs: tuple[int, int], ours: tuple[int, int]
) -> None:
    with pytest.raises(ProtocolError, match=f"they speak {theirs[0]} to {theirs[1]}") as caught:
        negotiate(theirs, ours)
    assert f"we speak {ours[0]} to {ours[1]}" in str(caught.value)
    assert "Upgrade" in str(caught.value)
