"""The shared secret by itself: what a proof is bound to, and when the authorizer says yes."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import hmac
import logging
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auth import (
    Challenge,
    ConnectRequest,
    Denial,
    FetchRequest,
    Grant,
    IdentityError,
    MintRequest,
    NodeId,
    PeerIdentity,
    Quotas,
    SecretKey,
    ServiceRequest,
    SharedSecret,
    allow_any,
    any_of,
    deny_all,
)
from auth import shared_secret as module
from auth.proof import Proof, Side, Transcript
from auth.shared_secret import secret_of

pytestmark = pytest.mark.anyio

SECRET = b"sixteen bytes or more of a secret"
A, B, C = (SecretKey.from_bytes(bytes([n]) * 32).node_id for n in range(3))
TRANSCRIPT = Transcript(A, B, bytes(32), bytes([1]) * 32)
ALL = Grant(frozenset({"*"}))


def challenge(proof: Proof | None) -> Challenge:
    async def ask() -> Proof | None:
        return proof

    return Challenge(ask)


def connect(proof: Proof | None, peer: NodeId = A, *, outbound: bool = False) -> ConnectRequest:
    return ConnectRequest(
        PeerIdentity(peer), "mesh/1", outbound=outbound, challenge=challenge(proof)
    )


def proof_by(secret: SharedSecret, side: Side = Side.DIALER) -> Proof:
    return Proof(TRANSCRIPT, side, secret.tag(TRANSCRIPT, side))


# -- the tag


def test_a_tag_is_the_hmac_that_the_wire_description_says() -> None:
    key = hmac.digest(b"quicmesh shared secret 1", SECRET, "sha256")
    message = b"quicmesh proof of a shared secret 1\0" + b"D" + A.raw + B.raw
    message += TRANSCRIPT.dialer_nonce + TRANSCRIPT.listener_nonce
    expected = hmac.new(key, message, hashlib.sha256).digest()
    assert SharedSecret(SECRET).tag(TRANSCRIPT, Side.DIALER) == expected


NONCES = st.binary(min_size=32, max_size=32)
IDS = st.sampled_from([A, B, C])
TRANSCRIPTS = st.builds(Transcript, IDS, IDS, NONCES, NONCES)


@pytest.mark.fuzz
@given(TRANSCRIPTS, TRANSCRIPTS, st.sampled_from(Side), st.sampled_from(Side))
def test_a_tag_holds_for_its_own_transcript_and_side_alone(
    one: Transcript, other: Transcript, side: Side, other_side: Side
) -> None:
    secret = SharedSecret(SECRET)
    tag = secret.tag(one, side)
    assert secret.verify(Proof(one, side, tag))
    assert secret.verify(Proof(other, other_side, tag)) == ((one, side) == (other, other_side))
    assert not SharedSecret(SECRET + b"!").verify(Proof(one, side, tag))


@pytest.mark.parametrize("part", ["dialer", "listener", "dialer_nonce", "listener_nonce"])
def test_every_part_of_the_transcript_counts(part: str) -> None:
    secret = SharedSecret(SECRET)
    other = C if part in ("dialer", "listener") else bytes([7]) * 32
    changed = dataclasses.replace(TRANSCRIPT, **{part: other})
    assert secret.tag(changed, Side.DIALER) != secret.tag(TRANSCRIPT, Side.DIALER)


@pytest.mark.fuzz
@given(st.binary(max_size=40))
def test_other_bytes_are_no_proof(tag: bytes) -> None:
    assert not SharedSecret(SECRET).verify(Proof(TRANSCRIPT, Side.DIALER, tag))


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_nonce_has_one_length(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Transcript(A, B, bytes(length), bytes(32))
    with pytest.raises(ValueError, match="32 bytes"):
        Transcript(A, B, bytes(32), bytes(length))


# -- the secret


def test_a_secret_is_long_enough_or_refused() -> None:
    SharedSecret(bytes(16))
    with pytest.raises(IdentityError, match="token_bytes"):
        SharedSecret(bytes(15))


def test_a_passphrase_is_derived_slowly_and_the_same_everywhere() -> None:
    words = "caf\u00e9 au lait for two"
    one = SharedSecret.from_passphrase(words, mesh="lab")
    expected = hashlib.scrypt(
        words.encode(),
        salt=b"quicmesh shared secret 1 passphrase\0lab",
        n=32768,
        r=8,
        p=3,
        maxmem=64 << 20,
        dklen=32,
    )
    assert SharedSecret(expected).verify(proof_by(one))
    composed = SharedSecret.from_passphrase("cafe\u0301 au lait for two", mesh="lab")
    assert composed.verify(proof_by(one)), "the same words, typed on another keyboard"
    assert not SharedSecret.from_passphrase(words).verify(proof_by(one)), "of another mesh"
    with pytest.raises(IdentityError, match="fewer than 12"):
        SharedSecret.from_passphrase("short words")


def test_it_can_not_be_seen_or_copied() -> None:
    secret = SharedSecret(SECRET)
    for text in (repr(secret), str(secret), repr(proof_by(secret))):
        assert SECRET.decode() not in text
        assert secret._key.hex() not in text
        assert repr(secret._key) not in text
        assert repr(secret.tag(TRANSCRIPT, Side.DIALER)) not in text
    for copies in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="can't be pickled or copied"):
            copies(secret)
    with pytest.raises(AttributeError):
        secret.__dict__  # noqa: B018 - a dict would show in a debugger's listing


# -- the authorizer


async def test_who_proves_it_is_granted_and_answered() -> None:
    secret = SharedSecret(SECRET, scopes=["tensor:get"], quotas=Quotas(max_bytes=5))
    request = connect(proof_by(secret))
    assert await secret.authorize(request) == Grant(
        frozenset({"tensor:get"}), quotas=Quotas(max_bytes=5)
    )
    assert request.challenge is not None
    assert request.challenge.answer == secret.tag(TRANSCRIPT, Side.LISTENER)


@pytest.mark.parametrize("what", ["nothing", "another secret", "reflected", "cut"])
async def test_all_who_do_not_are_told_the_same(what: str) -> None:
    secret = SharedSecret(SECRET)
    good = proof_by(secret)
    proofs = {
        "nothing": None,
        "another secret": proof_by(SharedSecret(bytes(32))),
        "reflected": dataclasses.replace(good, side=Side.LISTENER),
        "cut": dataclasses.replace(good, tag=good.tag[:-1]),
    }
    request = connect(proofs[what])
    answer = await secret.authorize(request)
    assert isinstance(answer, Denial)
    assert (answer.code, answer.reason) == (module._NOT_PROVED.code, module._NOT_PROVED.reason)
    assert request.challenge is not None
    assert request.challenge.answer is None, "nothing is given to test guesses against"
    assert isinstance(await secret.authorize(service(A)), Denial)
    assert isinstance(await secret.authorize(connect(good)), Grant)  # the positive control


def service(peer: NodeId, grant: Grant = ALL) -> ServiceRequest:
    return ServiceRequest(PeerIdentity(peer), "tensor.put", "tensor:put", grant)


async def test_later_stages_and_own_protocols_stand_by_who_has_proved_it() -> None:
    secret = SharedSecret(SECRET)
    own_protocol = ConnectRequest(PeerIdentity(A), "chat/1")
    mint = MintRequest(PeerIdentity(A), ALL, "read", "o", 1, B)
    for request in (service(A), own_protocol, mint):
        assert isinstance(await secret.authorize(request), Denial)
    await secret.authorize(connect(proof_by(secret)))
    for request in (service(A), own_protocol, mint):
        assert isinstance(await secret.authorize(request), Grant)
    assert isinstance(await secret.authorize(service(C)), Denial)
    assert isinstance(await secret.authorize(service(A, Grant(frozenset({"node"})))), Denial)


async def test_who_proved_it_once_proves_it_again_on_the_next_connection() -> None:
    secret = SharedSecret(SECRET)
    await secret.authorize(connect(proof_by(secret)))
    assert isinstance(await secret.authorize(connect(None)), Denial)


async def test_a_fetch_is_from_a_source_that_has_proved_it() -> None:
    secret = SharedSecret(SECRET)
    await secret.authorize(connect(proof_by(secret)))
    for source in (B, PeerIdentity(B)):
        answer = await secret.authorize(FetchRequest(PeerIdentity(A), ALL, source, 1))
        assert isinstance(answer, Denial)
        assert answer.code == "source"
    await secret.authorize(connect(proof_by(secret, Side.LISTENER), B, outbound=True))
    for source in (B, PeerIdentity(B)):
        request = FetchRequest(PeerIdentity(A), ALL, source, 1)
        assert isinstance(await secret.authorize(request), Grant)


async def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PROVED", 2)
    secret = SharedSecret(SECRET)
    for peer in (A, B):
        await secret.authorize(connect(proof_by(secret), peer))
    await secret.authorize(service(A))  # A was heard of later than B
    await secret.authorize(connect(proof_by(secret), C))
    standing = [isinstance(await secret.authorize(service(peer)), Grant) for peer in (A, B, C)]
    assert standing == [True, False, True]


async def test_a_peer_is_asked_once_for_all_who_want_to_know() -> None:
    asked = 0
    old, new = SharedSecret(bytes(32)), SharedSecret(SECRET)

    async def ask() -> Proof | None:
        nonlocal asked
        asked += 1
        return proof_by(old)

    request = ConnectRequest(PeerIdentity(A), "mesh/1", challenge=Challenge(ask))
    assert isinstance(await any_of(new, old).authorize(request), Grant)
    assert asked == 1
    assert request.challenge is not None
    assert request.challenge.answer == old.tag(TRANSCRIPT, Side.LISTENER)


async def test_who_is_known_otherwise_is_not_asked() -> None:
    async def ask() -> Proof | None:
        raise AssertionError

    request = ConnectRequest(PeerIdentity(A), "mesh/1", challenge=Challenge(ask))
    assert isinstance(await any_of(allow_any(), SharedSecret(SECRET)).authorize(request), Grant)


def test_the_secret_of_a_combination_is_found() -> None:
    one, two = SharedSecret(SECRET), SharedSecret(bytes(32))
    assert secret_of(one) is one
    assert secret_of(any_of(deny_all(), any_of(one), two)) is one
    assert secret_of(deny_all()) is None


async def test_nothing_of_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = SharedSecret(SECRET)
    for proof in (None, proof_by(secret), proof_by(SharedSecret(bytes(32)))):
        logging.getLogger("quicmesh.auth").info("asked %r", connect(proof))
        await secret.authorize(connect(proof))
    assert "mesh/1" in caplog.text
    for value in (SECRET, secret._key, secret.tag(TRANSCRIPT, Side.DIALER)):
        assert value.hex() not in caplog.text
        assert repr(value)[2:-1] not in caplog.text
