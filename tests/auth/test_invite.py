from __future__ import annotations

import dataclasses
import math
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auth import IdentityError, Invite, InviteBook, SecretKey, Ticket
from auth.encoding import cbor_encode
from auth.invite import MAX_LIFETIME

MACHINE = SecretKey.from_bytes(bytes(32))
OTHER = SecretKey.from_bytes(bytes([1]) * 32)
NOW = 1.8e9
DAY = 86400.0


def issue(lifetime: float = 3600.0, petname: str | None = None) -> Invite:
    return Invite.issue(MACHINE, ("tensor", "node"), lifetime, NOW, petname)


def test_an_invite_survives_the_wire_and_verifies() -> None:
    for petname in (None, "laptop"):
        invite = issue(petname=petname)
        again = Invite.decode(invite.encode())
        assert again == invite
        assert again.petname == petname
        assert again.scopes == ("node", "tensor")
        again.verify(MACHINE.node_id, NOW)


def test_an_invite_fits_a_ticket() -> None:
    longest = Invite.issue(MACHINE, [f"s{n}" + "x" * 60 for n in range(12)], 60, NOW, "p" * 63)
    addresses = tuple((f"2001:db8:1:2:3:4:5:{n:x}", 65535) for n in range(1, 9))
    ticket = Ticket(MACHINE.node_id, addresses, longest.encode())
    assert Invite.decode(Ticket.decode(ticket.encode()).invite or b"") == longest


def test_each_invite_is_another() -> None:
    assert issue().nonce != issue().nonce


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(IdentityError):
        Invite.decode(data)


@given(st.data())
def test_no_altered_byte_goes_unnoticed(data: st.DataObject) -> None:
    encoded = bytearray(issue(petname="laptop").encode())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(IdentityError):
        Invite.decode(bytes(encoded)).verify(MACHINE.node_id, NOW)


@given(st.data())
def test_no_cut_goes_unnoticed(data: st.DataObject) -> None:
    encoded = issue().encode()
    with pytest.raises(IdentityError, match="cut short"):
        Invite.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"version": 2}, "version 2"),
        ({"issuer": b"x"}, "32 bytes"),
        ({"nonce": b"x" * 15}, "not an invite"),
        ({"scopes": ["b", "a"]}, "one form"),
        ({"scopes": [1]}, "text"),
        ({"expires_at": math.nan}, "impossible"),
        ({"petname": "a b"}, "petname"),
        ({"petname": b"a"}, "not an invite"),
        ({"signature": "x"}, "not an invite"),
    ],
)
def test_another_form_is_refused(fields: dict[str, int], why: str) -> None:
    good: dict[str, Any] = {
        "version": 1,
        "issuer": MACHINE.node_id.raw,
        "nonce": bytes(16),
        "scopes": ["tensor"],
        "expires_at": NOW,
        "petname": "a",
        "signature": bytes(64),
    }
    Invite.decode(cbor_encode(list(good.values())))
    with pytest.raises(IdentityError, match=why):
        Invite.decode(cbor_encode(list((good | fields).values())))


def test_an_invite_to_another_node_is_refused() -> None:
    with pytest.raises(IdentityError, match="another node"):
        issue().verify(OTHER.node_id, NOW)
    forged = dataclasses.replace(issue(), issuer=OTHER.node_id)
    with pytest.raises(IdentityError, match="signature is wrong"):
        forged.verify(OTHER.node_id, NOW)


def test_a_delegation_is_no_invite() -> None:
    invite = issue()
    bare = MACHINE.sign(cbor_encode(invite._fields()))
    with pytest.raises(IdentityError, match="signature is wrong"):
        dataclasses.replace(invite, signature=bare).verify(MACHINE.node_id, NOW)


def test_an_invite_expires() -> None:
    invite = issue(lifetime=100.0)
    invite.verify(MACHINE.node_id, NOW + 99.9)
    with pytest.raises(IdentityError, match="expired 0 s ago"):
        invite.verify(MACHINE.node_id, NOW + 100)


@pytest.mark.parametrize("lifetime", [0.0, -1.0, MAX_LIFETIME + 1, math.nan, math.inf])
def test_a_lifetime_is_bounded_when_issued(lifetime: float) -> None:
    with pytest.raises(IdentityError, match="lifetime"):
        issue(lifetime=lifetime)


def test_bad_contents_are_refused_when_issued() -> None:
    with pytest.raises(IdentityError, match="petname"):
        issue(petname="a b")
    with pytest.raises(IdentityError, match="too long"):
        Invite.issue(MACHINE, [f"s{n}" + "x" * 100 for n in range(20)], 60, NOW)


def test_what_could_be_used_stays_out_of_repr() -> None:
    invite = issue()
    assert invite.nonce.hex() not in repr(invite)
    assert "nonce" not in repr(invite)
    assert "signature" not in repr(invite)


def test_an_invite_is_spent_once(tmp_path: Path) -> None:
    book, invite = InviteBook(tmp_path / "spent"), issue()
    assert book.spend(invite, OTHER.node_id, NOW)
    assert not book.spend(invite, OTHER.node_id, NOW)
    assert book.spend(issue(), OTHER.node_id, NOW)


def test_what_is_spent_stays_so_after_a_restart(tmp_path: Path) -> None:
    invite = issue()
    assert InviteBook(tmp_path / "spent").spend(invite, OTHER.node_id, NOW)
    assert not InviteBook(tmp_path / "spent").spend(invite, OTHER.node_id, NOW)


def test_an_expired_invite_is_not_spent(tmp_path: Path) -> None:
    assert not InviteBook(tmp_path).spend(issue(lifetime=10.0), OTHER.node_id, NOW + 10)
    assert list(tmp_path.iterdir()) == []


def test_a_revoked_invite_can_not_be_spent(tmp_path: Path) -> None:
    book, invite, spent = InviteBook(tmp_path / "spent"), issue(), issue()
    assert book.revoke(invite.nonce)
    assert not book.spend(invite, OTHER.node_id, NOW)
    assert book.spend(spent, OTHER.node_id, NOW)
    assert not book.revoke(spent.nonce)
    with pytest.raises(ValueError, match="16 bytes"):
        book.revoke(b"../../etc/passwd"[:15])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permission bits")
def test_the_book_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        InviteBook(tmp_path / "spent").spend(issue(), OTHER.node_id, NOW)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "spent").stat().st_mode) == 0o700
    (record,) = (tmp_path / "spent").iterdir()
    assert stat.S_IMODE(record.stat().st_mode) == 0o600


def test_of_many_threads_one_spends(tmp_path: Path) -> None:
    book, invite = InviteBook(tmp_path / "spent"), issue()
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda _: book.spend(invite, OTHER.node_id, NOW), range(32)))
    assert won.count(True) == 1


def test_of_many_processes_one_spends(tmp_path: Path) -> None:
    invite = issue()
    code = """
import sys
from auth import Invite, InviteBook
invite = Invite.decode(bytes.fromhex(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
print(InviteBook(sys.argv[1]).spend(invite, invite.issuer, float(sys.argv[3])))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "spent"), invite.encode().hex(), str(NOW)]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=30)[0] for process in running]
    assert sorted(answers) == ["False\n"] * 3 + ["True\n"]


def test_records_are_kept_until_their_invite_is_long_gone(tmp_path: Path) -> None:
    book = InviteBook(tmp_path)
    short, long, revoked = issue(lifetime=100.0), issue(lifetime=10 * DAY), issue(lifetime=100.0)
    assert book.spend(short, OTHER.node_id, NOW)
    assert book.spend(long, OTHER.node_id, NOW)
    assert book.revoke(revoked.nonce)
    (tmp_path / ".half-written").write_bytes(b"")
    book.spend(short, OTHER.node_id, NOW + 100 + DAY)
    assert len(list(tmp_path.iterdir())) == 4
    book.spend(short, OTHER.node_id, NOW + 101 + DAY)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {long.nonce.hex(), revoked.nonce.hex(), ".half-written"}


def test_a_book_that_can_not_be_written_spends_nothing(tmp_path: Path) -> None:
    (tmp_path / "spent").write_bytes(b"")
    with pytest.raises(OSError, match=r"File exists|not a directory|Not a directory"):
        InviteBook(tmp_path / "spent").spend(issue(), OTHER.node_id, NOW)
