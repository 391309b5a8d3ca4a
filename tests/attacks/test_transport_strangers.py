"""What a stranger can reach and make us hold: nothing, and next to nothing."""

from __future__ import annotations

import logging

import anyio
import cbor2
import pytest

from auth import AccessDenied, Denial, Grant, SecretKey
from tests.attacks.raw import framed, hello, raw_client, request
from tests.transport.nodes import Events, Policy, at, endpoint, eventually, is_idle
from transport import Connection, Incoming, PeerAddress, PeerRefused, Unreachable
from transport.cbor import CborValue
from transport.loop_engine import STRANGER_WINDOW

pytestmark = [pytest.mark.anyio, pytest.mark.attack]

MIB = 1 << 20


class Watched:
    """An endpoint's authorizer and handlers, which count every touch."""

    def __init__(self, answer: Grant | Denial | None = None) -> None:
        self.policy = Policy(connect=answer)
        self.calls: list[object] = []

    @property
    def untouched(self) -> bool:
        return not (self.policy.asked or self.calls)

    async def call(self, request: Incoming) -> CborValue:
        self.calls.append(request.value)
        return "done"

    async def protocol(self, connection: Connection) -> None:
        self.calls.append(connection)
        async with await connection.accept_raw_stream() as stream:
            self.calls.append(await stream.receive())


async def test_a_known_way_in_works() -> None:
    """The positive control of this file: the raw client, well behaved, gets its answer."""
    watched = Watched()
    key = SecretKey.generate()
    async with endpoint(watched.policy) as node:
        node.register_call("work", watched.call, scope="x")
        async with raw_client(node.port, key) as client:
            client.send(hello(), fin=True)
            await client.until(lambda: client.reply())
            answer = client.reply()
            assert isinstance(answer, dict)
            assert answer["ok"]["version"] == 1
            client.send(request("work", 5), stream_id=4, fin=True)
            await client.until(lambda: client.reply(4))
            assert client.reply(4) == {"ok": "done"}
        assert watched.calls == [5]
        assert watched.policy.asked[0].peer.node_id == key.node_id


@pytest.mark.parametrize("alpn", ["mesh/1", "own/1"])
async def test_without_a_certificate_nothing_is_reachable(alpn: str) -> None:
    # py-libp2p issue 1345: a client that sent no certificate was taken for authenticated.
    watched = Watched()
    async with endpoint(watched.policy) as node:
        node.register_call("work", watched.call, scope="x")
        node.register_alpn("own/1", watched.protocol)
        async with raw_client(node.port, key=None, alpn=alpn) as client:
            client.send(hello() if alpn == "mesh/1" else b"hello", fin=True)
            await client.until(lambda: client.ended)
            assert client.ended is not None
            assert client.ended.error_code == 0x100 + 116, "certificate_required"
            assert "certificate" in client.ended.reason_phrase
            assert client.data() == b""
        await eventually(lambda: is_idle(node))
        assert watched.untouched
        if alpn == "own/1":  # the positive control for the app's own protocol
            async with raw_client(node.port, SecretKey.generate(), alpn=alpn) as client:
                client.send(b"hello", fin=True)
                await client.until(lambda: len(watched.calls) == 2)


async def test_another_key_than_the_one_dialled_is_refused_before_anything_is_said() -> None:
    watched = Watched()
    async with endpoint(watched.policy) as impostor, endpoint() as dialer:
        expected = SecretKey.generate().node_id
        with pytest.raises(Unreachable) as caught:
            await dialer.connect(
                PeerAddress(expected, (("127.0.0.1", impostor.port),)), credential=b"my password"
            )
        assert impostor.node_id.short in str(caught.value)
        assert expected.short in str(caught.value)
        await eventually(lambda: is_idle(impostor) and is_idle(dialer))
        assert watched.untouched, "the credential was not shown"
        await dialer.connect(at(impostor))  # under its own name it is reached


GARBAGE = {
    "noise": bytes(range(256)) * 8,
    "an empty frame": framed(b""),
    "text": framed(cbor2.dumps("hello")),
    "another service": request("work", 1),
    "no boot": framed(cbor2.dumps({"s": "mesh.hello", "v": {"versions": [1, 1]}}, canonical=True)),
    "a short boot": hello(boot=b"x"),
    "wrong versions": hello(versions=[7, 9]),
    "a huge version": hello(versions=[1, 1 << 70]),
    "a credential too long": hello(credential=bytes(4097)),
    "a false delegation": hello(delegation=b"\xa0"),
    "a tag": framed(b"\xc1\x00"),
    "deep nesting": framed(b"\x81" * 5000 + b"\x00"),
    "an endless string": framed(b"\x7f" + b"\x61a" * 10),
    "not canonical": framed(b"\xa2\x61v\x00\x61s\x69mesh.hello"),
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_garbage_in_place_of_a_hello_is_refused_and_harms_nobody(what: str) -> None:
    watched = Watched()
    async with endpoint(watched.policy) as node, endpoint() as friend:
        node.register_call("work", watched.call, scope="x")
        connection = await friend.connect(at(node))
        watched.policy.asked.clear()
        events = Events(node)
        async with raw_client(node.port, SecretKey.generate()) as client:
            client.send(GARBAGE[what], fin=True)
            await client.until(lambda: client.ended or client.reply())
            if (answer := client.reply()) is not None:
                assert isinstance(answer, dict)
                assert "err" in answer
            client.close()
        await eventually(lambda: events.of(PeerRefused))
        await eventually(lambda: len(node._connections) == 1)
        assert watched.untouched
        assert await connection.call("echo", 1) == 1


@pytest.mark.parametrize("ending", ["fin", "reset"])
async def test_a_first_stream_that_ends_before_a_hello(ending: str) -> None:
    async with endpoint() as node, endpoint() as friend:
        connection = await friend.connect(at(node))
        events = Events(node)
        async with raw_client(node.port, SecretKey.generate()) as client:
            if ending == "fin":
                client.send(b"", fin=True)
            else:
                client.send(b"\x00")
                client.quic.reset_stream(0, 1)
                client.flush()
            await client.until(lambda: client.reply())
            assert "err" in client.reply()  # type: ignore[operator]
            client.close()
        await eventually(lambda: events.of(PeerRefused))
        assert await connection.call("echo", 1) == 1


async def test_before_the_hello_there_is_one_stream() -> None:
    watched = Watched()
    async with endpoint(watched.policy, handshake_timeout=1.0) as node:
        node.register_call("work", watched.call, scope="x")
        async with raw_client(node.port, SecretKey.generate()) as client:
            # The well-behaved way is closed by the limit ...
            client.send(request("work", 1), stream_id=4, fin=True)
            await client.run(0.2)
            assert client.data(4) == b""
        async with raw_client(node.port, SecretKey.generate()) as client:
            # ... and ignoring the limit ends the connection (RFC 9000 section 4.6).
            client.quic._remote_max_streams_bidi = 100
            client.send(request("work", 1), stream_id=4, fin=True)
            await client.until(lambda: client.ended)
            assert client.ended is not None
            assert client.ended.error_code == 0x4, "STREAM_LIMIT_ERROR"
        assert watched.untouched


async def test_before_the_hello_is_answered_there_are_a_few_kilobytes() -> None:
    waiting = anyio.Event()

    class Pensive(Policy):
        async def authorize(self, request: object) -> Grant | Denial:
            waiting.set()
            await anyio.sleep_forever()
            raise AssertionError

    async with endpoint(Pensive(), authorizer_timeout=1.0) as node:
        async with raw_client(node.port, SecretKey.generate()) as client:
            client.send(hello())
            client.send(bytes(MIB))  # more of the same stream, while we are being decided about
            await client.run(0.5)
            assert waiting.is_set()
            (core,) = node._connections
            held = sum(stream.buffered for stream in core.streams.values())
            assert 0 < held <= STRANGER_WINDOW
        async with raw_client(node.port, SecretKey.generate()) as client:
            client.quic._remote_max_data = 1 << 40  # the limit ignored
            client.quic._remote_max_stream_data_bidi_remote = 1 << 40
            client.send(hello() + bytes(100_000))
            await client.until(lambda: client.ended)
            assert client.ended is not None
            assert client.ended.error_code == 0x3, "FLOW_CONTROL_ERROR"


async def test_an_unauthorized_peer_learns_code_and_reason_and_nothing_else() -> None:
    watched = Watched(Denial("not-invited", "ask for an invite"))
    async with endpoint(watched.policy) as node, endpoint() as dialer:
        node.register_call("secret-service", watched.call, scope="x")
        with pytest.raises(AccessDenied) as caught:
            await dialer.connect(at(node))
        assert caught.value.denial == Denial("not-invited", "ask for an invite")
        async with raw_client(node.port, SecretKey.generate()) as client:
            client.quic._remote_max_streams_bidi = 1
            client.send(hello(), fin=True)
            await client.until(lambda: client.reply())
            answer = client.reply()
            assert isinstance(answer, dict)
            assert set(answer) == {"err"}
            assert set(answer["err"]) <= {"code", "what", "why", "stage", "denial", "fix"}
            assert "secret-service" not in repr(answer)
            # It is not let further for trying.
            client.quic._remote_max_streams_bidi = 100
            client.send(request("secret-service", 1), stream_id=4, fin=True)
            await client.until(lambda: client.ended)
            assert client.data(4) == b""
        assert not watched.calls
        # The positive control: invited, it gets in.
        watched.policy.connect = Grant(frozenset({"*"}))
        connection = await dialer.connect(at(node))
        assert await connection.call("secret-service", 1) == "done"


async def test_a_peer_without_the_scope_reaches_no_handler() -> None:
    watched = Watched(Grant(frozenset({"other"})))
    async with endpoint(watched.policy) as node:
        node.register_call("work", watched.call, scope="x")
        async with raw_client(node.port, SecretKey.generate()) as client:
            client.send(hello(), fin=True)
            await client.until(lambda: client.reply())
            client.send(request("work", 1), stream_id=4, fin=True)
            await client.until(lambda: client.reply(4))
            assert client.reply(4)["err"]["code"] == "denied"  # type: ignore[index]
        assert not watched.calls


async def test_a_credential_is_in_no_log_whatever_becomes_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = b"correct-horse-battery"

    class Broken(Policy):
        async def authorize(self, request: object) -> Grant | Denial:
            raise ValueError(f"cannot decide about {request!r}")

    policies = [Policy(), Policy(connect=Denial("no", "no")), Broken()]
    for policy in policies:
        async with endpoint(policy) as node:
            for changes in ({}, {"versions": [9, 9]}):
                async with raw_client(node.port, SecretKey.generate()) as client:
                    client.send(hello(credential=secret, **changes), fin=True)
                    await client.until(lambda: client.reply())
                    client.close()
    assert "cannot decide about" in caplog.text, "the logs were on"
    everything = caplog.text + repr([record.__dict__ for record in caplog.records])
    assert secret.decode() not in everything
    assert secret.hex() not in everything
