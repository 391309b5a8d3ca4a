from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auth import Delegation, IdentityError, NodeId, PeerIdentity, SecretKey
from auth.delegation import MAX_LIFETIME
from auth.encoding import cbor_encode

MACHINE = SecretKey.from_bytes(bytes(32))
PROGRAM = SecretKey.from_bytes(bytes([1]) * 32)
NOW = 1.8e9


def issue(scopes: tuple[str, ...] = ("tensor",), lifetime: float = 3600.0) -> Delegation:
    return Delegation.issue(MACHINE, PROGRAM.node_id, scopes, lifetime, NOW)


def signed(**changes: object) -> Delegation:
    """A delegation that the machine signed although it says ``changes``."""
    altered = dataclasses.replace(issue(), **changes)  # type: ignore[arg-type]
    return dataclasses.replace(altered, signature=MACHINE.sign(altered._message()))


@given(
    st.lists(st.from_regex(r"\A[a-z]{1,8}(:[a-z]{1,8})?\Z"), max_size=8),
    st.floats(1.0, MAX_LIFETIME),
    st.floats(0, 1e10),
)
def test_what_is_issued_survives_the_wire_and_verifies(
    scopes: list[str], lifetime: float, now: float
) -> None:
    delegation = Delegation.issue(MACHINE, PROGRAM.node_id, scopes, lifetime, now)
    again = Delegation.decode(delegation.encode())
    assert again == delegation
    assert set(again.scopes) == set(scopes)
    again.verify(PROGRAM.node_id, now)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(IdentityError):
        Delegation.decode(data)


@given(st.data())
def test_no_altered_byte_goes_unnoticed(data: st.DataObject) -> None:
    encoded = bytearray(issue().encode())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(IdentityError):
        Delegation.decode(bytes(encoded)).verify(PROGRAM.node_id, NOW)


@given(st.data())
def test_no_cut_goes_unnoticed(data: st.DataObject) -> None:
    encoded = issue().encode()
    with pytest.raises(IdentityError, match="cut short"):
        Delegation.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"version": 2}, "version 2"),
        ({"version": 1.0}, "not a delegation"),
        ({"machine": b"x" * 31}, "32 bytes"),
        ({"program": "text"}, "not a delegation"),
        ({"scopes": [b"tensor"]}, "text"),
        ({"scopes": ["tensor", "tensor"]}, "one form"),
        ({"scopes": ["tensor", "node"]}, "one form"),
        ({"scopes": ["a b"]}, "not a scope"),
        ({"scopes": "tensor"}, "not a delegation"),
        ({"issued_at": 5}, "not a delegation"),
        ({"expires_at": math.nan}, "impossible"),
        ({"expires_at": math.inf}, "impossible"),
        ({"signature": None}, "not a delegation"),
        ({"more": 1}, "not a delegation"),
    ],
)
def test_another_form_is_refused(fields: dict[str, int], why: str) -> None:
    good: dict[str, Any] = {
        "version": 1,
        "machine": MACHINE.node_id.raw,
        "program": PROGRAM.node_id.raw,
        "scopes": ["tensor"],
        "issued_at": NOW,
        "expires_at": NOW + 1.5,
        "signature": bytes(64),
    }
    Delegation.decode(cbor_encode(list(good.values())))
    with pytest.raises(IdentityError, match=why):
        Delegation.decode(cbor_encode(list((good | fields).values())))


def test_a_second_spelling_is_refused() -> None:
    encoded = issue().encode()
    assert encoded[0] == 0x87
    with pytest.raises(IdentityError, match="one form"):
        Delegation.decode(b"\x98\x07" + encoded[1:])


def test_it_is_refused_from_another_key() -> None:
    with pytest.raises(IdentityError, match="another key"):
        issue().verify(MACHINE.node_id, NOW)


def test_a_signature_by_another_machine_is_refused() -> None:
    impostor = dataclasses.replace(issue(), machine=PROGRAM.node_id)
    with pytest.raises(IdentityError, match="signature is wrong"):
        impostor.verify(PROGRAM.node_id, NOW)


def test_a_signature_for_another_purpose_is_refused() -> None:
    delegation = issue()
    bare = MACHINE.sign(cbor_encode(delegation._fields()))
    with pytest.raises(IdentityError, match="signature is wrong"):
        dataclasses.replace(delegation, signature=bare).verify(PROGRAM.node_id, NOW)


def test_clocks_may_differ_by_a_minute() -> None:
    delegation = issue(lifetime=100.0)
    delegation.verify(PROGRAM.node_id, NOW - 60)
    delegation.verify(PROGRAM.node_id, NOW + 159.9)
    with pytest.raises(IdentityError, match="issued 61 s in the future"):
        delegation.verify(PROGRAM.node_id, NOW - 61)
    with pytest.raises(IdentityError, match="expired 60 s ago"):
        delegation.verify(PROGRAM.node_id, NOW + 160)


@pytest.mark.parametrize("lifetime", [0.0, -1.0, MAX_LIFETIME + 1, math.nan, math.inf])
def test_a_lifetime_is_bounded_when_issued(lifetime: float) -> None:
    with pytest.raises(IdentityError, match="lifetime"):
        issue(lifetime=lifetime)


@pytest.mark.parametrize("expires_at", [NOW, NOW + MAX_LIFETIME + 10])
def test_a_lifetime_is_bounded_when_verified(expires_at: float) -> None:
    signed(expires_at=NOW + MAX_LIFETIME).verify(PROGRAM.node_id, NOW)
    with pytest.raises(IdentityError, match="lifetime"):
        signed(expires_at=expires_at).verify(PROGRAM.node_id, NOW)


def test_the_scopes_are_bounded_in_all() -> None:
    long = tuple(f"s{n}" + "x" * 60 for n in range(60))
    assert len(issue(long).encode()) <= 4096
    with pytest.raises(IdentityError, match="too long"):
        issue(tuple(f"s{n}" + "x" * 100 for n in range(60)))
    with pytest.raises(ValueError, match="not a scope"):
        issue(("a b",))


def test_a_peer_is_answered_for_by_its_machine() -> None:
    plain = PeerIdentity(PROGRAM.node_id, address="192.0.2.1:1")
    assert plain.machine_id == PROGRAM.node_id
    assert str(plain) == PROGRAM.node_id.short
    assert PeerIdentity(PROGRAM.node_id, issue()).machine_id == MACHINE.node_id


def test_the_signature_stays_out_of_repr() -> None:
    delegation = issue()
    assert "signature" not in repr(delegation)
    assert NodeId(delegation.program.raw) == PROGRAM.node_id
