"""Ways to be taken for one who knows the shared secret, each beside the honest way."""

from __future__ import annotations

import logging
import statistics
import struct
import time
from collections.abc import Callable

import anyio.lowlevel
import cbor2
import pytest

from auth import (
    AccessDenied,
    AuthorizedKeys,
    MeshError,
    NodeId,
    SecretKey,
    SharedSecret,
    any_of,
    deny_all,
)
from auth.proof import Proof, Side, Transcript
from tests.attacks.raw import RawClient, framed, hello, raw_client, request
from tests.transport.nodes import at, config, endpoint, eventually
from transport import Endpoint

pytestmark = [pytest.mark.anyio, pytest.mark.attack]

WORDS = b"correct-horse-battery-staple-4711"
DENIED = "it has not proved that it knows this node's shared secret"


def secret(words: bytes = WORDS) -> SharedSecret:
    return SharedSecret(words, scopes=["*"])


def frames(client: RawClient) -> list[dict[str, object]]:
    """What the listener has sent on the stream of the hello."""
    data, found = client.data(), []
    while len(data) >= 4:
        (length,) = struct.unpack_from(">I", data)
        if len(data) < 4 + length:
            break
        found.append(cbor2.loads(data[4 : 4 + length]))
        data = data[4 + length :]
    return found


def answer(nonce: bytes, tag: bytes) -> bytes:
    return framed(cbor2.dumps({"nonce": nonce, "proof": tag}, canonical=True))


async def challenged(client: RawClient) -> bytes:
    """Say hello as one who can prove a secret; return the listener's nonce."""
    client.send(hello(features=["proof"]))
    await client.until(lambda: frames(client))
    (first,) = frames(client)
    nonce = first["challenge"]
    assert isinstance(nonce, bytes)
    assert len(nonce) == 32
    return nonce


async def verdict(client: RawClient, sent: bytes) -> dict[str, object]:
    """Answer the challenge with `sent`; return what the listener says to it."""
    client.send(sent, fin=True)
    await client.until(lambda: len(frames(client)) == 2)
    return frames(client)[1]


def honest(client_id: NodeId, node_id: NodeId, theirs: bytes, words: bytes = WORDS) -> bytes:
    mine = bytes(range(32))
    transcript = Transcript(client_id, node_id, mine, theirs)
    return answer(mine, secret(words).tag(transcript, Side.DIALER))


async def test_the_honest_way_works() -> None:
    """The positive control of this file: the same raw client, with the secret."""
    key = SecretKey.generate()
    async with endpoint(secret()) as node, raw_client(node.port, key) as client:
        theirs = await challenged(client)
        reply = await verdict(client, honest(key.node_id, node.node_id, theirs))
        welcome = reply["ok"]
        assert isinstance(welcome, dict)
        transcript = Transcript(key.node_id, node.node_id, bytes(range(32)), theirs)
        assert welcome["proof"] == secret().tag(transcript, Side.LISTENER)
        client.send(request("echo", 5), stream_id=4, fin=True)
        await client.until(lambda: client.reply(4))
        assert client.reply(4) == {"ok": 5}


async def refused(client: RawClient, sent: bytes) -> None:
    """Be refused with the one text that there is, and with nothing to test guesses against."""
    reply = await verdict(client, sent)
    assert set(reply) == {"err"}
    error = reply["err"]
    assert isinstance(error, dict)
    assert (error["code"], error["denial"], error["why"]) == ("denied", "shared-secret", DENIED)
    client.quic._remote_max_streams_bidi = 100
    client.send(request("echo", 5), stream_id=4, fin=True)
    await client.until(lambda: client.ended)
    assert client.data(4) == b""


async def test_a_proof_is_good_once() -> None:
    key = SecretKey.generate()
    async with endpoint(secret()) as node:
        async with raw_client(node.port, key) as client:
            recorded = honest(key.node_id, node.node_id, await challenged(client))
            assert "ok" in await verdict(client, recorded)
            client.close()
        await eventually(lambda: not node.connections)
        async with raw_client(node.port, key) as client:  # the same key, and the same node
            await challenged(client)
            await refused(client, recorded)


async def test_a_proof_made_for_one_node_is_none_at_another() -> None:
    """Somebody who is dialled passes the challenge on, and the answer back."""
    victim, thief = SecretKey.generate(), SecretKey.generate()
    async with endpoint(secret()) as node:
        # The victim, who has dialled the thief, answers with the ids that TLS showed it; no other
        # pair of ids helps either, but the one that it would take to be asked for itself.
        for dialer, listener in (
            (victim.node_id, thief.node_id),
            (victim.node_id, node.node_id),
            (thief.node_id, thief.node_id),
        ):
            async with raw_client(node.port, thief) as client:
                await refused(client, honest(dialer, listener, await challenged(client)))
                client.close()


async def test_a_proof_of_another_connection_at_the_same_time_is_none_on_this_one() -> None:
    key, other = SecretKey.generate(), SecretKey.generate()
    async with (
        endpoint(secret()) as node,
        raw_client(node.port, key) as one,
        raw_client(node.port, other) as two,
    ):
        first, second = await challenged(one), await challenged(two)
        assert first != second
        await refused(two, honest(other.node_id, node.node_id, first))
        assert "ok" in await verdict(one, honest(key.node_id, node.node_id, first))


async def test_what_the_listener_proves_is_no_proof_of_the_dialers() -> None:
    """A reflected tag: of the other side, or of the same exchange with the ids exchanged."""
    key = SecretKey.generate()
    async with endpoint(secret()) as node:
        for side, swapped in ((Side.LISTENER, False), (Side.DIALER, True), (Side.LISTENER, True)):
            async with raw_client(node.port, key) as client:
                theirs = await challenged(client)
                ids = (node.node_id, key.node_id) if swapped else (key.node_id, node.node_id)
                nonces = (theirs, theirs) if swapped else (bytes(32), theirs)
                tag = secret().tag(Transcript(*ids, *nonces), side)
                await refused(client, answer(nonces[0], tag))


async def test_the_listener_tells_nothing_before_it_is_convinced() -> None:
    """No tag of its own leaves it, against which a stranger could test guesses of a passphrase."""
    async with endpoint(secret()) as node, raw_client(node.port, SecretKey.generate()) as client:
        await challenged(client)
        assert set(frames(client)[0]) == {"challenge"}
        await refused(client, answer(bytes(32), bytes(32)))


@pytest.mark.parametrize(
    "features", [[], ["Proof"], ["proof2"], ["bulk"]], ids=lambda names: str(names)
)
async def test_not_to_know_of_challenges_is_no_way_around_one(features: list[str]) -> None:
    async with endpoint(secret()) as node, raw_client(node.port, SecretKey.generate()) as client:
        client.send(hello(features=features), fin=True)
        await client.until(lambda: frames(client))
        (reply,) = frames(client)
        assert reply["err"]["denial"] == "shared-secret"  # type: ignore[index]
        assert reply["err"]["why"] == DENIED  # type: ignore[index]


class Impostor(SharedSecret):
    """Believes every proof, and answers with a tag that a test makes of it."""

    def __init__(self, forge: Callable[[bytes], bytes]) -> None:
        super().__init__(b"whatever the impostor has", scopes=["*"])
        self.forge = forge
        self.seen = b""

    def verify(self, proof: Proof) -> bool:
        self.seen = proof.tag
        return True

    def tag(self, transcript: Transcript, side: Side) -> bytes:
        return self.forge(self.seen)


@pytest.mark.parametrize("what", ["no tag", "garbage", "reflected", "right"])
async def test_a_listener_that_does_not_know_the_secret_convinces_no_dialer(what: str) -> None:
    listener, dialer_key = SecretKey.generate(), SecretKey.generate()
    forge: dict[str, Callable[[bytes], bytes]] = {
        "garbage": lambda tag: bytes(32),
        "reflected": lambda tag: tag,
    }
    authorizer = secret() if what == "right" else Impostor(forge.get(what, lambda tag: b""))
    async with (
        endpoint(authorizer, listener) as impostor,
        Endpoint(dialer_key, deny_all(), config(), secret=secret()) as dialer,
    ):
        if what == "right":  # the positive control
            await dialer.connect(at(impostor))
            return
        with pytest.raises(MeshError, match=r"does not know it itself|'proof' is"):
            await dialer.connect(at(impostor))
        assert dialer.connections == ()


SILENCES = ["nothing", "half a frame", "a long frame", "noise", "end"]


@pytest.mark.parametrize("what", SILENCES)
async def test_no_answer_costs_the_listener_a_bounded_time(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.challenge.PROOF_SECONDS", 0.3)
    async with endpoint(secret()) as node, endpoint(secret()) as friend:
        connection = await friend.connect(at(node))
        async with raw_client(node.port, SecretKey.generate()) as client:
            await challenged(client)
            sent = {
                "nothing": b"",
                "half a frame": answer(bytes(32), bytes(32))[:20],
                "a long frame": struct.pack(">I", 1 << 30) + b"x",
                "noise": framed(bytes(range(70))),
                "end": b"",
            }[what]
            began = time.monotonic()
            if sent or what == "end":
                client.send(sent, fin=what in ("end", "noise"))
            await client.until(lambda: len(frames(client)) == 2 or client.ended)
            assert time.monotonic() - began < 2
            assert frames(client)[1]["err"]["denial"] == "shared-secret"  # type: ignore[index]
        assert await connection.call("echo", 1) == 1
        await eventually(lambda: len(node._connections) == 1)


async def test_a_guess_a_connection_is_all_there_is() -> None:
    key = SecretKey.generate()
    async with endpoint(secret()) as node, raw_client(node.port, key) as client:
        theirs = await challenged(client)
        wrong = honest(key.node_id, node.node_id, theirs, b"another guess altogether")
        right = honest(key.node_id, node.node_id, theirs)
        await refused(client, wrong + right)


# -- what refusals tell


@pytest.mark.alone
async def test_the_time_of_a_refusal_tells_nothing() -> None:
    """Garbage, another secret, and a tag with half of it right are refused equally fast."""
    key = SecretKey.generate()
    kinds: dict[str, Callable[[bytes, NodeId], bytes]] = {
        "garbage": lambda theirs, node_id: answer(bytes(32), bytes(32)),
        "another secret": lambda theirs, node_id: honest(
            key.node_id, node_id, theirs, b"another guess altogether"
        ),
        "half right": lambda theirs, node_id: (
            honest(key.node_id, node_id, theirs)[:-16] + bytes(16)
        ),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    async with endpoint(secret()) as node:
        for _ in range(12):
            for kind, make in kinds.items():  # in turn, so that the machine's moods hit all alike
                async with raw_client(node.port, key) as client:
                    theirs = await challenged(client)
                    sent = make(theirs, node.node_id)
                    began = time.perf_counter()
                    reply = await verdict(client, sent)
                    times[kind].append(time.perf_counter() - began)
                    assert reply["err"]["why"] == DENIED  # type: ignore[index]
                    client.close()
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    everything = sorted(value for values in times.values() for value in values)
    noise = everything[3 * len(everything) // 4] - everything[len(everything) // 4]
    spread = max(medians.values()) - min(medians.values())
    assert spread < max(2 * noise, 0.005), (medians, noise)


@pytest.mark.alone
async def test_comparing_takes_as_long_wherever_the_first_difference_is() -> None:
    """The comparison itself, without a network around it."""
    shared = secret()
    ids = [SecretKey.generate().node_id for _ in range(2)]
    transcript = Transcript(*ids, bytes(32), bytes(32))
    good = shared.tag(transcript, Side.DIALER)
    wrong = {
        "first": Proof(transcript, Side.DIALER, bytes([good[0] ^ 1]) + good[1:]),
        "last": Proof(transcript, Side.DIALER, good[:-1] + bytes([good[-1] ^ 1])),
        "none": Proof(transcript, Side.DIALER, good),
    }
    best = dict.fromkeys(wrong, 1.0)
    for _ in range(30):
        for kind, proof in wrong.items():
            began = time.perf_counter()
            for _ in range(200):
                shared.verify(proof)
            best[kind] = min(best[kind], time.perf_counter() - began)
        await anyio.lowlevel.checkpoint()
    assert max(best.values()) < 1.25 * min(best.values()), best


async def test_an_unknown_key_and_a_wrong_secret_are_refused_alike(tmp_path: object) -> None:
    """Beside a file of keys, a stranger does not learn which of the two it lacks."""
    keys = AuthorizedKeys(f"{tmp_path}/keys")
    known, stranger = SecretKey.generate(), SecretKey.generate()
    keys.add(known.node_id, expires=1.0)  # known, and expired
    replies = []
    async with endpoint(any_of(secret(), keys)) as node:
        for key in (known, stranger):
            async with raw_client(node.port, key) as client:
                theirs = await challenged(client)
                sent = honest(key.node_id, node.node_id, theirs, b"another guess altogether")
                replies.append(await verdict(client, sent))
        assert replies[0] == replies[1]
        async with raw_client(node.port, known) as client:  # the positive control
            theirs = await challenged(client)
            assert "ok" in await verdict(client, honest(known.node_id, node.node_id, theirs))


async def test_the_secret_and_its_proofs_are_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seen: list[bytes] = []
    async with endpoint(secret()) as node:
        for words in (WORDS, b"another guess altogether"):
            key = SecretKey.generate()
            async with raw_client(node.port, key) as client:
                theirs = await challenged(client)
                sent = honest(key.node_id, node.node_id, theirs, words)
                seen += [sent[-32:], words]
                await verdict(client, sent)
                client.close()
        async with endpoint(secret(b"another guess altogether")) as dialer:
            with pytest.raises(AccessDenied):
                await dialer.connect(at(node))
    assert "denied (shared-secret" in caplog.text, "the logs were on"
    everything = caplog.text + repr([record.__dict__ for record in caplog.records])
    for value in seen:
        assert value.hex() not in everything
        assert repr(value)[2:-1] not in everything
