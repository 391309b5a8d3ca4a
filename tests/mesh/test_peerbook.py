"""The peers book: names and addresses, shared by processes, bounded, never half written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mesh.peerbook
from auth import IdentityError, NodeId, SecretKey
from mesh.errors import HomeError
from mesh.peerbook import KnownPeer, PeerBook, suggest_petname

HERE = ("192.0.2.1", 4433)
THERE = ("2001:db8::1", 4434)


@pytest.fixture
def book(tmp_path: Path) -> PeerBook:
    return PeerBook(tmp_path / "peers.json")


def some_id() -> NodeId:
    return SecretKey.generate().node_id


def test_empty(book: PeerBook) -> None:
    assert book.entries() == ()
    assert book.petnames() == {}
    assert book.get(some_id()) is None
    assert not book.path.exists()


def test_remember_adds_and_keeps(book: PeerBook) -> None:
    node_id = some_id()
    book.remember(node_id, petname="gpu-a")
    book.remember(node_id, addresses=[HERE, THERE, HERE])
    book.remember(node_id, seen=5.0)
    expected = KnownPeer(node_id, "gpu-a", (HERE, THERE), 5.0)
    assert book.entries() == (expected,)
    assert PeerBook(book.path).get(node_id) == expected
    book.remember(node_id, addresses=[THERE])
    assert book.get(node_id) == KnownPeer(node_id, "gpu-a", (THERE,), 5.0)
    book.remember(node_id, addresses=())
    assert book.get(node_id) == KnownPeer(node_id, "gpu-a", (), 5.0)


def test_named_peers_come_first(book: PeerBook) -> None:
    ids = [some_id() for _ in range(4)]
    for node_id, name in zip(ids, ("b", None, "a", None), strict=True):
        book.remember(node_id, petname=name)
    assert [peer.petname for peer in book.entries()] == ["a", "b", None, None]


def test_petname_of_another(book: PeerBook) -> None:
    first, second = some_id(), some_id()
    book.remember(first, petname="a")
    with pytest.raises(IdentityError, match=f"it already means {first.short}"):
        book.remember(second, petname="a")
    assert book.get(second) is None
    book.forget(first)
    assert book.remember(second, petname="a").petname == "a"


@pytest.mark.parametrize("name", ["", " a", "a b", "a/b", "é", "x" * 64, "k7f3-2q2m", "-a"])
def test_bad_petname(book: PeerBook, name: str) -> None:
    with pytest.raises(IdentityError, match="petname"):
        book.remember(some_id(), petname=name)


def test_forget(book: PeerBook) -> None:
    node_id = some_id()
    assert not book.forget(node_id)
    book.remember(node_id)
    assert book.forget(node_id)
    assert book.get(node_id) is None


def test_label() -> None:
    node_id = some_id()
    assert KnownPeer(node_id).label == node_id.short
    assert KnownPeer(node_id, "gpu-a").label == f"gpu-a ({node_id.short})"


def test_another_process_changes_it(book: PeerBook) -> None:
    node_id = some_id()
    book.remember(node_id, petname="a")
    code = (
        "from pathlib import Path; from mesh.peerbook import PeerBook; from auth import NodeId\n"
        f"PeerBook(Path({str(book.path)!r})).remember(NodeId.parse({str(node_id)!r}), petname='b')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
    assert book.petnames() == {node_id: "b"}


def test_no_change_writes_nothing(book: PeerBook) -> None:
    node_id = some_id()
    book.remember(node_id, petname="a")
    before = book.path.stat().st_mtime_ns
    book.remember(node_id, petname="a")
    assert book.path.stat().st_mtime_ns == before


def test_bounded(book: PeerBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh.peerbook, "MAX_PEERS", 3)
    named, old, new, newest = (some_id() for _ in range(4))
    book.remember(named, petname="a")
    book.remember(old, seen=1.0)
    book.remember(new, seen=2.0)
    book.remember(newest)
    assert set(book.petnames()) == {named, new, newest}
    for number, node_id in enumerate((new, newest)):
        book.remember(node_id, petname=f"n{number}")
    with pytest.raises(HomeError, match="mesh deny"):
        book.remember(some_id(), petname="one-more")
    book.remember(named, addresses=[(f"192.0.2.{n}", 1) for n in range(1, 100)])
    entry = book.get(named)
    assert entry is not None
    assert len(entry.addresses) == mesh.peerbook.MAX_ADDRESSES


GOOD = {"petname": None, "addresses": [["192.0.2.1", 4433]], "seen": None}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        GOOD | {"petname": 3},
        GOOD | {"petname": "a b"},
        GOOD | {"addresses": None},
        GOOD | {"addresses": [["host.example", 1]]},
        GOOD | {"addresses": [["192.0.2.1", 0]]},
        GOOD | {"addresses": [["192.0.2.1", 65536]]},
        GOOD | {"addresses": [["192.0.2.1", "4433"]]},
        GOOD | {"addresses": ["192.0.2.1:4433"]},
        GOOD | {"addresses": [[3221225985, 4433]]},
        GOOD | {"addresses": [["192.0.2.1", True]]},
        GOOD | {"seen": "today"},
        GOOD | {"seen": float("nan")},
        GOOD | {"seen": 10**400},
    ],
)
def test_broken_entry_names_the_file(book: PeerBook, entry: object) -> None:
    node_id = some_id()
    book.path.write_text(json.dumps({"version": 1, "peers": {str(node_id): GOOD}}))
    assert set(book.petnames()) == {node_id}  # positive control
    book.path.write_text(json.dumps({"version": 1, "peers": {str(node_id): entry}}))
    with pytest.raises(HomeError, match=f"peers book {book.path}: .*Mend the file"):
        book.entries()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 2, "peers": {}}', "{}"])
def test_not_a_book(book: PeerBook, text: str) -> None:
    book.path.write_text(text)
    with pytest.raises(HomeError, match="peers book"):
        book.remember(some_id())
    assert book.path.read_text() == text


@given(st.binary(max_size=300))
def test_any_bytes_are_a_book_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any-peers.json"
    path.write_bytes(data)
    with pytest.raises(HomeError):
        PeerBook(path).entries()


def test_suggestions() -> None:
    assert suggest_petname("gpu-a.example.org", []) == "gpu-a"
    assert suggest_petname("gpu-a", ["gpu-a", None]) == "gpu-a-2"
    assert suggest_petname("gpu a!", []) == "gpu-a"
    assert suggest_petname("", []) is None
    assert suggest_petname("\x1b[31m", []) == "31m"
    assert suggest_petname("k7f3-2q2m", []) == "k7f3-2q2m-2"
    assert suggest_petname("x" * 500, []) == "x" * 48
