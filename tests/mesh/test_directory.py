"""Who is meant by a name, and what is said when nobody is."""

from __future__ import annotations

from pathlib import Path

import pytest

import mesh.directory
from auth import (
    AccessDenied,
    AuthorizedKeys,
    IdentityError,
    NodeId,
    SecretKey,
    Ticket,
    TicketError,
)
from mesh.directory import Directory
from mesh.errors import PeerLost, ProtocolError, UnknownPeer, Unreachable
from mesh.peerbook import PeerBook
from mesh.status import PeerState

HERE = ("192.0.2.1", 4433)
THERE = ("192.0.2.2", 4433)


def some_id() -> NodeId:
    return SecretKey.generate().node_id


@pytest.fixture
def book(tmp_path: Path) -> PeerBook:
    return PeerBook(tmp_path / "peers.json")


def test_ticket_brings_its_addresses_and_invite(book: PeerBook) -> None:
    node_id = some_id()
    book.remember(node_id, addresses=[THERE])
    directory = Directory(book)
    ticket = Ticket(node_id, (HERE,), b"invite")
    for form in (ticket, ticket.encode(), f"  {ticket.encode().upper()}\n"):
        where, invite = directory.resolve(form)
        assert (where.node_id, where.addresses, invite) == (node_id, (HERE, THERE), b"invite")


def test_a_ticket_of_another_version_is_called_so(book: PeerBook) -> None:
    text = Ticket(some_id(), (HERE,)).encode().replace("mesh1", "mesh2", 1)
    for form in (text, text.upper()):
        with pytest.raises(TicketError, match="version 2"):
            Directory(book).resolve(form)
    with pytest.raises(UnknownPeer):
        Directory(book).resolve("mesh2-gpu")


def test_what_is_far_too_long_is_not_repeated(book: PeerBook) -> None:
    with pytest.raises(UnknownPeer, match="5000 characters") as caught:
        Directory(book).resolve("x" * 5000)
    assert len(str(caught.value)) < 256


def test_names_come_from_book_and_authorized_keys(book: PeerBook, tmp_path: Path) -> None:
    keys = AuthorizedKeys(tmp_path / "authorized_keys")
    both, only_keys, only_book = some_id(), some_id(), some_id()
    keys.add(both, "theirs")
    keys.add(only_keys, "cpu")
    book.remember(both, petname="gpu")
    book.remember(only_book, addresses=[HERE])
    directory = Directory(book, keys)
    assert directory.names() == {both: "gpu", only_keys: "cpu", only_book: None}
    for name, node_id in {"gpu": both, "cpu": only_keys, str(only_book): only_book}.items():
        assert directory.resolve(name)[0].node_id == node_id
    assert directory.resolve(only_book.short)[0].addresses == (HERE,)
    assert directory.resolve(str(only_book)[:12])[0].node_id == only_book
    assert directory.label(both) == f"gpu ({both.short})"


def test_whole_id_of_a_stranger_is_somebody() -> None:
    node_id = some_id()
    where, invite = Directory().resolve(str(node_id))
    assert (where.node_id, where.addresses, invite) == (node_id, (), b"")


def test_name_of_nobody(book: PeerBook) -> None:
    book.remember(some_id(), petname="gpu-a")
    with pytest.raises(UnknownPeer, match=r"'gpu-b'.*none of the known ones: gpu-a.*mesh invite"):
        Directory(book).resolve("gpu-b")


def test_ambiguous_prefix(book: PeerBook) -> None:
    ids = [NodeId(bytes([1, 2, 3]) + bytes([n]) * 29) for n in (1, 2)]
    for node_id in ids:
        book.remember(node_id)
    with pytest.raises(IdentityError, match="it could be any of"):
        Directory(book).resolve(str(ids[0])[:4])


def test_damaged_ticket_is_not_taken_for_a_name() -> None:
    with pytest.raises(TicketError, match="truncated"):
        Directory().resolve(Ticket(some_id(), (HERE,)).encode()[:-4])


def test_petname_like_a_ticket_prefix(book: PeerBook) -> None:
    node_id = some_id()
    book.remember(node_id, petname="mesh1")
    assert Directory(book).resolve("mesh1")[0].node_id == node_id


def test_no_address_says_what_is_known_and_how_to_go_on(book: PeerBook) -> None:
    known, unknown = some_id(), some_id()
    book.remember(known, petname="gpu-a")
    directory = Directory(book)
    error = directory.no_address(known)
    assert f"gpu-a ({known.short}): its key is known, but no address" in str(error)
    assert str(book.path) in str(error)
    assert "mesh join mesh1..." in str(error)  # no ticket that looks as if it were to be pasted
    assert "neither this key nor an address" in str(directory.no_address(unknown))
    assert error.exit_code == 3


def test_dials_are_remembered_by_how_far_they_got() -> None:
    directory = Directory()
    node_id = some_id()
    assert directory.last_dial(node_id) == (PeerState.DISCOVERED, None)
    for error, state in (
        (Unreachable("x", why="no answer"), PeerState.DISCOVERED),
        (ProtocolError("x", why="garbage"), PeerState.REACHABLE),
        (IdentityError("x", why="another key"), PeerState.REACHABLE),
        (AccessDenied("x", why="not in authorized keys"), PeerState.REFUSED),
        (PeerLost("x", why="silent for 3 s"), PeerState.AUTHENTICATED),
    ):
        directory.failed(node_id, error)
        assert directory.last_dial(node_id) == (state, error.why)
    directory.reached(node_id, (HERE,))
    assert directory.last_dial(node_id) == (PeerState.AUTHENTICATED, None)
    assert directory.addresses(node_id) == (HERE,)


def test_what_a_peer_tells_replaces_what_was_known(book: PeerBook) -> None:
    node_id = some_id()
    directory = Directory(book)
    directory.reached(node_id, (HERE,))
    directory.told(node_id, (THERE,))
    assert directory.addresses(node_id) == (THERE,)
    entry = book.get(node_id)
    assert entry is not None
    assert entry.addresses == (THERE,)
    assert entry.seen is not None


def test_a_peer_without_a_name_is_called_like_its_host(book: PeerBook, tmp_path: Path) -> None:
    keys = AuthorizedKeys(tmp_path / "authorized_keys")
    directory = Directory(book, keys)
    first, second, named, silent = (some_id() for _ in range(4))
    book.remember(named, petname="mine")
    keys.add(first)
    for node_id, host in ((first, "gpu.lan"), (second, "gpu.lan"), (named, "gpu"), (silent, "")):
        directory.told(node_id, (HERE,), host)
    assert book.petnames() == {first: "gpu", second: "gpu-2", named: "mine", silent: None}
    directory.told(first, (HERE,), "other")  # no peer changes what it is called here
    assert book.petnames()[first] == "gpu"


def test_errors_name_peers(book: PeerBook) -> None:
    node_id, nameless = some_id(), some_id()
    book.remember(node_id, petname="gpu-a")
    book.remember(nameless)
    label = f"gpu-a ({node_id.short})"
    for peer, said in {
        node_id.short: label,
        f"{node_id.short} at 192.0.2.1:1": f"{label} at 192.0.2.1:1",
        nameless.short: nameless.short,
        label: label,
        None: None,
    }.items():
        error = PeerLost("x", peer=peer)
        Directory(book).name_in(error)
        assert error.peer == said


def test_telling_the_same_again_writes_nothing(book: PeerBook) -> None:
    node_id = some_id()
    directory = Directory(book)
    directory.told(node_id, (HERE,))
    before = book.path.stat().st_mtime_ns
    directory.told(node_id, (HERE,))
    assert book.path.stat().st_mtime_ns == before


def test_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh.directory, "MAX_REMEMBERED", 3)
    directory = Directory()
    ids = [some_id() for _ in range(5)]
    for node_id in ids:
        directory.reached(node_id, (HERE,))
    directory.reached(ids[2], [(f"192.0.2.{n}", 1) for n in range(1, 100)])
    assert set(directory.names()) == set(ids[2:])
    assert len(directory.addresses(ids[2])) == mesh.directory.MAX_ADDRESSES
