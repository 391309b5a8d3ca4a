"""What a job's store does, and how much it takes."""

from __future__ import annotations

import pytest

from mesh.store import KeyValues, StoreLimits
from transport import LimitExceeded, ProtocolError


def test_values() -> None:
    store = KeyValues()
    assert store.get("a") is None
    store.set("a", b"\xff\x00")
    store.append("a", b"1")
    store.append("b", b"2")
    assert (store.get("a"), store.get("b"), store.keys(), len(store)) == (
        b"\xff\x001",
        b"2",
        ["a", "b"],
        2,
    )
    assert store.has("a", "b")
    assert not store.has("a", "c")
    assert store.delete("a")
    assert not store.delete("a")
    assert len(store) == 1


def test_numbers() -> None:
    store = KeyValues()
    assert [store.add("n", amount) for amount in (3, -5, 0)] == [3, -2, -2]
    assert store.get("n") == b"-2"
    store.set("n", b"no number")
    with pytest.raises(ProtocolError, match="is no number"):
        store.add("n", 1)
    store.set("n", b"%d" % ((1 << 63) - 1))
    with pytest.raises(ProtocolError, match="64 bits"):
        store.add("n", 1)


def test_compare_and_set() -> None:
    store = KeyValues()
    assert store.compare_set("k", b"x", b"y") == b"x"  # as torch's stores answer
    assert store.get("k") is None
    assert store.compare_set("k", b"", b"1") == b"1"
    assert store.compare_set("k", b"2", b"3") == b"1"
    assert store.compare_set("k", b"", b"3") == b"1"
    assert store.compare_set("k", b"1", b"3") == b"3"
    assert store.get("k") == b"3"


def test_queues() -> None:
    store = KeyValues()
    assert store.pop("q") is None
    for value in (b"1", b"2"):
        store.push("q", value)
    assert store.length("q") == 2
    assert [store.pop("q"), store.pop("q"), store.pop("q")] == [b"1", b"2", None]
    assert store.length("q") == len(store) == 0


def test_what_is_kept_is_bounded_and_counted_to_the_byte() -> None:
    store = KeyValues(StoreLimits(max_bytes=1000, max_value=600))
    with pytest.raises(LimitExceeded, match="601 bytes"):
        store.set("a", bytes(601))
    store.set("a", bytes(600))
    with pytest.raises(LimitExceeded, match="the most is 600"):
        store.append("a", b"x")
    with pytest.raises(LimitExceeded, match="keeps 729 bytes already"):
        store.push("q", bytes(200))
    store.set("a", b"")  # less is always let in
    store.push("q", bytes(200))
    store.pop("q")
    store.delete("a")
    assert store.used == 0
    for number in range(20):  # empty ones count, too
        try:
            store.set(str(number), b"")
        except LimitExceeded:
            break
    assert len(store) == 7
