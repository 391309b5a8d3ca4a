"""The proof of a shared secret over real endpoints, and who is asked at which stage."""

from __future__ import annotations

import logging

import anyio
import pytest

import transport.admission
from auth import (
    AccessDenied,
    AuthorizedKeys,
    Authorizer,
    ConnectRequest,
    Credential,
    Denial,
    Grant,
    NodeId,
    SecretKey,
    ServiceRequest,
    SharedSecret,
    all_of,
    allow_any,
    any_of,
    by_alpn,
    by_service,
    callback,
    deny_all,
)
from auth.proof import Proof
from tests.transport.nodes import Events, Policy, at, config, endpoint, eventually, is_idle
from transport import Connection, Endpoint, Incoming, PeerJoined, PeerRefused, Stream
from transport.cbor import CborValue, decode, encode
from transport.errors import ProtocolError
from transport.protocol.hello import (
    PROOF_MAX,
    challenge_value,
    parse_challenge,
    parse_proof,
    proof_value,
)

pytestmark = pytest.mark.anyio

WORDS = b"a secret of more than sixteen bytes"


def secret(words: bytes = WORDS) -> SharedSecret:
    return SharedSecret(words, scopes=["*"])


def client(shared: SharedSecret | None) -> Endpoint:
    return Endpoint(SecretKey.generate(), deny_all(), config(), secret=shared)


# -- the frames


def test_frames_are_read_as_they_are_written() -> None:
    nonce, tag = bytes(range(32)), bytes(range(32, 64))
    for value in (challenge_value(nonce), proof_value(nonce, tag)):
        assert len(encode(value, max_size=PROOF_MAX)) < PROOF_MAX
    assert (
        parse_challenge(decode(encode(challenge_value(nonce), max_size=99), max_size=99)) == nonce
    )
    assert parse_proof(proof_value(nonce, tag)) == (nonce, tag)
    assert parse_challenge({"ok": 1}) is None


@pytest.mark.parametrize("wrong", [None, b"", bytes(31), bytes(33), "x" * 32, [0] * 32])
def test_a_field_of_the_wrong_kind_is_refused_by_name(wrong: CborValue) -> None:
    with pytest.raises(ProtocolError, match="challenge"):
        parse_challenge({"challenge": wrong})
    with pytest.raises(ProtocolError, match="nonce"):
        parse_proof({"nonce": wrong, "proof": bytes(32)})
    with pytest.raises(ProtocolError, match="proof"):
        parse_proof({"nonce": bytes(32), "proof": wrong})


# -- both ends


async def test_each_side_learns_that_the_other_knows_the_secret() -> None:
    async with endpoint(secret()) as one, endpoint(secret()) as two:
        connection = await one.connect(at(two))
        back = two.connection(one.node_id)
        assert back is not None
        assert connection.grant == back.grant == Grant(frozenset({"*"}))
        assert await connection.call("echo", 1) == 1
        assert await back.call("echo", 2) == 2


async def test_a_client_that_serves_nobody_proves_it_too() -> None:
    async with endpoint(secret()) as node, client(secret()) as dialer:
        connection = await dialer.connect(at(node))
        assert await connection.call("echo", 1) == 1
        assert connection.grant is None


@pytest.mark.parametrize("shared", [None, SharedSecret(bytes(32))], ids=["none", "another"])
async def test_without_the_secret_there_is_one_clear_refusal(shared: SharedSecret | None) -> None:
    async with endpoint(secret()) as node, client(shared) as dialer:
        events = Events(node)
        with pytest.raises(AccessDenied, match="has not proved") as caught:
            await dialer.connect(at(node))
        assert caught.value.denial is not None
        assert caught.value.denial.code == "shared-secret"
        await eventually(lambda: events.of(PeerRefused) and is_idle(node) and is_idle(dialer))
        assert not events.of(PeerJoined)


async def test_a_node_that_asks_for_no_proof_gets_none() -> None:
    async with endpoint() as node, endpoint(secret()) as dialer:
        connection = await dialer.connect(at(node))
        assert await connection.call("echo", 1) == 1
        assert connection.grant is None, "it has proved nothing, and may open nothing here"
        back = node.connection(dialer.node_id)
        assert back is not None
        with pytest.raises(AccessDenied):
            await back.call("echo", 1)


async def test_who_has_proved_it_before_is_known_when_it_is_dialled() -> None:
    both = any_of(allow_any(), secret())  # lets everybody in, and asks nobody
    async with endpoint(both) as open_one, endpoint(secret()) as strict:
        await (await open_one.connect(at(strict))).close()
        await eventually(lambda: strict.connection(open_one.node_id) is None)
        connection = await strict.connect(at(open_one))
        assert connection.grant == Grant(frozenset({"*"}))


async def test_secrets_are_changed_by_admitting_both_for_a_while() -> None:
    old, new = secret(b"the old secret of this mesh"), secret(b"the new secret of this mesh")
    async with endpoint(any_of(new, old)) as node:
        for shared in (old, new):
            async with client(shared) as dialer:
                assert await (await dialer.connect(at(node))).call("echo", 1) == 1


async def test_two_that_dial_each_other_at_once_have_one_proved_connection() -> None:
    async with endpoint(secret()) as one, endpoint(secret()) as two:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.connect, at(two))
            tasks.start_soon(two.connect, at(one))
        for dialer, listener in ((one, two), (two, one)):
            connection = await dialer.connect(at(listener))
            assert await connection.call("echo", 1) == 1
        await eventually(lambda: len(one._connections) == len(two._connections) == 1)


async def test_only_who_offers_a_proof_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[NodeId] = []
    ask = transport.admission.ask

    async def counted(stream: Stream, *, dialer: NodeId, listener: NodeId) -> Proof | None:
        asked.append(dialer)
        return await ask(stream, dialer=dialer, listener=listener)

    monkeypatch.setattr(transport.admission, "ask", counted)
    async with endpoint(secret()) as node, client(None) as without, client(secret()) as with_one:
        with pytest.raises(AccessDenied):
            await without.connect(at(node))
        assert asked == []
        await with_one.connect(at(node))
        assert asked == [with_one.node_id]


async def test_a_listener_that_asks_must_know_the_secret_itself() -> None:
    async def curious(request: object) -> Grant | Denial:
        assert isinstance(request, ConnectRequest)
        assert request.challenge is not None
        assert await request.challenge.proof() is not None
        return Grant(frozenset({"*"}))

    async with endpoint(callback(curious)) as node, client(secret()) as dialer:
        with pytest.raises(AccessDenied, match="does not know it itself"):
            await dialer.connect(at(node))
        assert dialer.connection(node.node_id) is None
        await eventually(lambda: is_idle(dialer))


async def test_giving_up_within_the_exchange_leaves_nothing() -> None:
    reached = anyio.Event()

    async def pensive(request: object) -> Grant | Denial:
        reached.set()
        await anyio.sleep_forever()
        raise AssertionError

    async with endpoint(all_of(secret(), callback(pensive))) as node, client(secret()) as dialer:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(dialer.connect, at(node))
            await reached.wait()
            tasks.cancel_scope.cancel()
        await eventually(lambda: is_idle(dialer) and is_idle(node))


# -- the stages


async def test_the_credential_reaches_the_callback_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="quicmesh")

    def decision(request: object) -> Grant | Denial:
        assert isinstance(request, ConnectRequest | ServiceRequest)
        if isinstance(request, ServiceRequest):
            return request.grant
        if request.credential == Credential(b"open-sesame-4711"):
            return Grant(frozenset({"x"}))
        return Denial("password", "ask the porter")

    async with endpoint(callback(decision)) as node, endpoint() as dialer:
        for wrong in (b"", b"open-sesame"):
            with pytest.raises(AccessDenied, match="ask the porter"):
                await dialer.connect(at(node), credential=wrong)
        connection = await dialer.connect(at(node), credential=b"open-sesame-4711")
        assert await connection.call("echo", 1) == 1
        for thing in (connection, dialer, node, node.connection(dialer.node_id)):
            assert "sesame" not in repr(thing) + repr(getattr(thing, "__dict__", None))
    assert "sesame" not in caplog.text
    assert "password" in caplog.text


async def test_connect_and_service_are_asked_each_in_its_place() -> None:
    policy = Policy()
    async with endpoint(policy) as node, endpoint() as dialer:
        connection = await dialer.connect(at(node))
        await connection.call("echo", 1)
        await connection.call("echo", 2)
        kinds = [type(request) for request in policy.asked]
        assert kinds == [ConnectRequest, ServiceRequest, ServiceRequest]
        policy.denied_services["echo"] = Denial("closed", "not now")
        with pytest.raises(AccessDenied, match="not now"):
            await connection.call("echo", 3)


async def test_each_protocol_and_each_service_has_its_own_policy() -> None:
    served: list[str] = []

    async def chat(connection: Connection) -> None:
        served.append(connection.peer.node_id.short)
        await connection.wait_closed()

    async def work(request: Incoming) -> CborValue:
        return "done"

    friend = SecretKey.generate()

    def friends(request: object) -> Grant | Denial:
        is_friend = request.peer.node_id == friend.node_id  # type: ignore[attr-defined]
        return Grant(frozenset({"*"})) if is_friend else Denial("stranger", "not a friend")

    services = by_service({"echo": allow_any(), "work": callback(friends)})
    policy = by_alpn({"mesh/1": services, "chat/1": callback(friends)})
    async with endpoint(policy) as node:
        node.register_alpn("chat/1", chat)
        node.register_call("work", work, scope="work")
        async with endpoint() as stranger:
            connection = await stranger.connect(at(node))
            assert await connection.call("echo", 1) == 1
            with pytest.raises(AccessDenied, match="not a friend"):
                await connection.call("work", 1)
            refused = await stranger.connect(at(node), alpn="chat/1")
            assert isinstance(await refused.wait_closed(), AccessDenied)
            assert served == []
        async with endpoint(key=friend) as known:
            assert await (await known.connect(at(node))).call("work", 1) == "done"
            await known.connect(at(node), alpn="chat/1")
            await eventually(lambda: served == [friend.node_id.short])


async def test_an_own_protocol_is_for_those_who_have_proved_the_secret() -> None:
    served: list[Connection] = []

    async def chat(connection: Connection) -> None:
        served.append(connection)
        await connection.wait_closed()

    async with endpoint(secret()) as node, client(secret()) as dialer:
        node.register_alpn("chat/1", chat)
        with pytest.raises(AccessDenied):  # while it is dialled, or afterwards
            raise await (await dialer.connect(at(node), alpn="chat/1")).wait_closed()
        await dialer.connect(at(node))
        await dialer.connect(at(node), alpn="chat/1")
        await eventually(lambda: served)
        assert served[0].peer.node_id == dialer.node_id


@pytest.mark.parametrize("stage", ["connect", "service"])
@pytest.mark.parametrize("how", ["hangs", "raises"])
async def test_an_authorizer_that_fails_denies_at_each_stage(stage: str, how: str) -> None:
    async def decision(request: object) -> Grant | Denial:
        if isinstance(request, ConnectRequest) == (stage == "connect"):
            if how == "raises":
                raise RuntimeError("no database")
            await anyio.sleep_forever()
        return Grant(frozenset({"*"}))

    code = "authorizer-timeout" if how == "hangs" else "authorizer-failed"
    async with endpoint(callback(decision), authorizer_timeout=0.2) as node, endpoint() as dialer:
        with pytest.raises(AccessDenied) as caught:
            await (await dialer.connect(at(node))).call("echo", 1)
        assert caught.value.denial is not None
        assert caught.value.denial.code == code


async def test_all_of_needs_the_key_and_the_secret(tmp_path: object) -> None:
    keys = AuthorizedKeys(f"{tmp_path}/keys")
    both: Authorizer = all_of(keys, secret())
    async with endpoint(both) as node, client(secret()) as dialer, client(None) as keyless:
        with pytest.raises(AccessDenied, match="authorized keys"):
            await dialer.connect(at(node))
        keys.add(dialer.node_id, scopes=["x"])
        keys.add(keyless.node_id, scopes=["x"])
        connection = await dialer.connect(at(node))
        assert await connection.call("echo", 1) == 1
        back = node.connection(dialer.node_id)
        assert back is not None
        assert back.grant == Grant(frozenset({"x"}))
        with pytest.raises(AccessDenied, match="shared secret"):
            await keyless.connect(at(node))
