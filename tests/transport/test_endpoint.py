"""Two endpoints on real sockets: connecting, identity, calls and streams of services, ALPN."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import anyio
import pytest

from auth import (
    AccessDenied,
    ConnectRequest,
    Delegation,
    Denial,
    Grant,
    MeshError,
    SecretKey,
    ServiceRequest,
    allow_any,
    deny_all,
)
from tests.transport.nodes import Events, Policy, at, config, endpoint, eventually, is_idle, pair
from transport import (
    AddressError,
    Connection,
    ConnectionClosed,
    DeadlineExceeded,
    Endpoint,
    EndpointConfig,
    Incoming,
    LimitExceeded,
    PeerJoined,
    PeerLeft,
    PeerRefused,
    ProtocolError,
    RemoteError,
    ServiceUnknown,
    TransportError,
    Unreachable,
)
from transport.cbor import CborValue
from transport.config import TIMES
from transport.renewal import RENEWAL_CALL

pytestmark = pytest.mark.anyio


# -- connecting


async def test_each_side_knows_the_others_proven_key() -> None:
    async with pair() as (dialer, listener, connection):
        assert connection.peer.node_id == listener.node_id
        assert connection.outbound
        back = listener.connection(dialer.node_id)
        assert back is not None
        assert back.peer.node_id == dialer.node_id
        assert not back.outbound
        assert connection.remote_boot == listener.boot
        assert back.remote_boot == dialer.boot
        assert connection.observed_address == f"127.0.0.1:{dialer.port}"


async def test_a_second_connect_returns_the_open_connection_in_both_directions() -> None:
    async with pair() as (dialer, listener, connection):
        assert await dialer.connect(at(listener)) is connection
        assert await listener.connect(dialer.node_id) is listener.connection(dialer.node_id)
        assert await listener.connect(dialer.node_id) is not connection


async def test_the_handler_sees_the_callers_key() -> None:
    seen: list[Incoming] = []

    async def handler(request: Incoming) -> CborValue:
        seen.append(request)
        return str(request.peer.node_id)

    async with pair() as (dialer, listener, connection):
        listener.register_call("whoami", handler, scope="x")
        assert await connection.call("whoami", {"a": [1, b"2"]}) == str(dialer.node_id)
        (request,) = seen
        assert request.peer.node_id == dialer.node_id
        assert request.value == {"a": [1, b"2"]}
        assert request.connection is listener.connection(dialer.node_id)


async def test_calls_work_in_both_directions_of_one_connection() -> None:
    async with pair() as (dialer, listener, connection):
        back = await listener.connect(dialer.node_id)
        assert await connection.call("echo", 1) == 1
        assert await back.call("echo", 2) == 2


async def test_a_program_is_known_by_its_machine() -> None:
    machine, program = SecretKey.generate(), SecretKey.generate()
    statement = Delegation.issue(machine, program.node_id, ("tensor",), 600.0, _now())
    async with (
        endpoint() as listener,
        Endpoint(program, allow_any(), config(), delegation=statement) as dialer,
    ):
        await dialer.connect(at(listener))
        back = listener.connection(program.node_id)
        assert back is not None
        assert back.peer.node_id == program.node_id
        assert back.peer.machine_id == machine.node_id


async def test_a_delegation_for_another_key_is_refused() -> None:
    machine, thief = SecretKey.generate(), SecretKey.generate()
    statement = Delegation.issue(machine, SecretKey.generate().node_id, ("x",), 600.0, _now())
    async with (
        endpoint() as listener,
        Endpoint(thief, allow_any(), config(), delegation=statement) as dialer,
    ):
        refused = Events(listener)
        with pytest.raises(MeshError):
            await dialer.connect(at(listener))
        await eventually(lambda: refused.of(PeerRefused))
        assert listener.connection(thief.node_id) is None


async def test_ping_measures_a_round_trip() -> None:
    async with pair() as (_, _, connection):
        assert 0 < await connection.ping() < 3.0
        assert connection.info.rtt is not None


async def test_info_counts_what_the_socket_carried() -> None:
    async with pair() as (_, listener, connection):
        before = connection.info
        await connection.call("echo", bytes(50_000))
        after = connection.info
        assert 50_000 < after.bytes_sent - before.bytes_sent < 75_000
        assert 50_000 < after.bytes_received - before.bytes_received < 75_000
        assert after.remote == f"127.0.0.1:{listener.port}"
        assert after.streams == 0
        assert after.age > 0


async def test_events_tell_who_joined_and_left() -> None:
    async with endpoint() as listener:
        events = Events(listener)
        async with endpoint() as dialer:
            await dialer.connect(at(listener))
            await eventually(lambda: events.of(PeerJoined))
            assert events.of(PeerJoined)[0].connection.peer.node_id == dialer.node_id
        await eventually(lambda: events.of(PeerLeft))
        assert isinstance(events.of(PeerLeft)[0].error, ConnectionClosed)


async def test_an_observer_that_fails_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError

    async with endpoint() as listener, endpoint() as dialer:
        listener.subscribe(broken)
        events = Events(listener)
        connection = await dialer.connect(at(listener))
        assert await connection.call("echo", 1) == 1
        assert events.of(PeerJoined)
    assert "an observer failed" in caplog.text


async def test_a_callback_that_fails_does_not_keep_others_from_hearing_of_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(_: Connection) -> None:
        raise ZeroDivisionError

    async with pair() as (dialer, listener, connection):
        heard: list[Connection] = []
        connection.on_close(broken)
        connection.on_close(heard.append)
        await connection.close()
        assert heard == [connection]
        connection.on_close(heard.append)  # already over: at once
        assert heard == [connection, connection]
        assert dialer.connection(listener.node_id) is None
    assert "a callback failed" in caplog.text


# -- refusals


async def test_a_denied_peer_gets_the_code_and_the_reason() -> None:
    policy = Policy(connect=Denial("not-on-list", "ask alice"))
    async with endpoint(policy) as listener, endpoint() as dialer:
        events = Events(listener)
        with pytest.raises(AccessDenied) as caught:
            await dialer.connect(at(listener))
        assert caught.value.why == "ask alice"
        assert caught.value.denial == Denial("not-on-list", "ask alice")
        await eventually(lambda: events.of(PeerRefused))
        assert events.of(PeerRefused)[0].node_id == dialer.node_id
        await eventually(lambda: is_idle(listener) and is_idle(dialer))


async def test_the_credential_reaches_the_authorizer_and_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = b"swordfish-0451"
    policy = Policy()
    async with endpoint(policy) as listener, endpoint() as dialer:
        await dialer.connect(at(listener), credential=secret)
        request = policy.asked[0]
        assert isinstance(request, ConnectRequest)
        assert request.credential.secret == secret
        policy.connect = Denial("no", "no")
        async with endpoint() as other:
            with pytest.raises(AccessDenied):
                await other.connect(at(listener), credential=secret)
    assert caplog.records, "logging was on"
    assert b"swordfish" not in caplog.text.encode()
    assert secret.hex() not in caplog.text


async def test_a_credential_shown_later_changes_the_grant_of_the_connection_there_is() -> None:
    class ByCredential:
        async def authorize(self, request: object) -> Grant | Denial:
            if isinstance(request, ConnectRequest):
                may = "*" if request.credential.secret == b"open sesame" else "nothing"
                return Grant(frozenset({may}))
            assert isinstance(request, ServiceRequest)
            return request.grant

    async with endpoint(ByCredential()) as listener, endpoint() as dialer:
        connection = await dialer.connect(at(listener))
        with pytest.raises(AccessDenied):
            await connection.call("echo", 1)
        assert await dialer.connect(at(listener), credential=b"open sesame") is connection
        assert await connection.call("echo", 1) == 1
        assert await dialer.connect(at(listener), credential=b"open sesame") is connection
        assert len(listener.connections) == 1


async def test_who_dials_out_may_serve_nobody() -> None:
    class OnlyInbound:
        async def authorize(self, request: object) -> Grant | Denial:
            if isinstance(request, ConnectRequest) and request.outbound:
                return Denial("no", "no")
            return Grant(frozenset({"*"}))

    async with endpoint() as listener, endpoint(OnlyInbound()) as dialer:
        connection = await dialer.connect(at(listener))
        assert connection.grant is None
        assert await connection.call("echo", 1) == 1
        back = await listener.connect(dialer.node_id)
        with pytest.raises(AccessDenied, match="serves nobody"):
            await back.call("echo", 1)


async def test_deny_all_admits_nobody_and_still_dials() -> None:
    async with endpoint() as listener, endpoint(deny_all()) as dialer:
        connection = await dialer.connect(at(listener))
        assert await connection.call("echo", 1) == 1
        with pytest.raises(AccessDenied, match="admits nobody"):
            async with endpoint() as third:
                await third.connect(at(dialer))


async def test_an_endpoint_that_does_not_listen_drops_strangers() -> None:
    async with endpoint(listen=False) as client, endpoint() as server:
        assert await (await client.connect(at(server))).call("echo", 1) == 1
        async with endpoint() as third:
            with pytest.raises(Unreachable):
                await third.connect(at(client), timeout=0.3)
        assert client.drops.get("in the kernel") or client.drops["not listening"]


async def test_a_scope_that_is_not_granted_is_refused_and_others_serve() -> None:
    async with endpoint(allow_any(("open",))) as listener, endpoint() as dialer:
        ran: list[str] = []

        async def handler(request: Incoming) -> CborValue:
            ran.append(request.service)
            return None

        listener.register_call("inside", handler, scope="closed:door")
        listener.register_call("outside", handler, scope="open:door")
        connection = await dialer.connect(at(listener))
        await connection.call("outside")
        with pytest.raises(AccessDenied) as caught:
            await connection.call("inside")
        assert "closed:door" in str(caught.value)
        assert caught.value.denial is not None
        assert caught.value.denial.code == "scope"
        assert ran == ["outside"]


async def test_the_authorizer_is_asked_for_every_stream() -> None:
    policy = Policy()
    async with endpoint(policy) as listener, endpoint() as dialer:
        connection = await dialer.connect(at(listener))
        await connection.call("echo", 1)
        policy.denied_services["echo"] = Denial("enough", "you had one")
        with pytest.raises(AccessDenied, match="you had one"):
            await connection.call("echo", 1)


async def test_a_service_that_does_not_exist_is_named() -> None:
    async with pair() as (_, _, connection):
        with pytest.raises(ServiceUnknown, match="nonsense"):
            await connection.call("nonsense")
        assert await connection.call("echo", 1) == 1


async def test_a_name_is_taken_once() -> None:
    async def handler(request: Incoming) -> None:
        return None

    async with endpoint() as node:
        with pytest.raises(TransportError, match="taken"):
            node.register_call("echo", handler, scope="x")
        with pytest.raises(TransportError, match="taken"):
            node.register_alpn("mesh/1", _never)
        node.register_alpn("app/1", _never)
        with pytest.raises(TransportError, match="taken"):
            node.register_alpn("app/1", _never)
        assert node.services == ("echo", RENEWAL_CALL)


# -- errors across the wire


class _Custom(MeshError):
    code: ClassVar[str] = "test-custom"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (_Custom("reading", stage="page 3", why="it is torn", fix="Mend it."), _Custom),
        (LimitExceeded("storing", why="full"), LimitExceeded),
        (AccessDenied("opening", why="no key"), AccessDenied),
    ],
)
async def test_a_handlers_own_error_arrives_whole(error: MeshError, kind: type[MeshError]) -> None:
    async def handler(request: Incoming) -> CborValue:
        raise error

    async with pair() as (_, listener, connection):
        listener.register_call("fail", handler, scope="x")
        with pytest.raises(kind) as caught:
            await connection.call("fail")
        got = caught.value
        assert (got.what, got.stage, got.why, got.fix) == (
            error.what,
            error.stage,
            error.why,
            error.fix,
        )
        assert got.peer is not None
        assert listener.node_id.short in got.peer


async def test_any_other_failure_is_logged_here_and_kept_from_the_peer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handler(request: Incoming) -> CborValue:
        raise KeyError("the secret of the house")

    async with pair() as (_, listener, connection):
        listener.register_call("fail", handler, scope="x")
        with pytest.raises(RemoteError) as caught:
            await connection.call("fail")
        assert "secret" not in str(caught.value)
        assert "KeyError" not in str(caught.value)
        assert "the secret of the house" in caplog.text
        assert await connection.call("echo", 1) == 1


async def test_an_answer_that_can_not_travel_is_the_handlers_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handler(request: Incoming) -> CborValue:
        return {1, 2}  # type: ignore[return-value]

    async with pair() as (_, listener, connection):
        listener.register_call("fail", handler, scope="x")
        with pytest.raises(RemoteError):
            await connection.call("fail")
        assert "the answer of 'fail' can't travel" in caplog.text


async def test_a_value_that_can_not_travel_opens_no_stream() -> None:
    async with pair() as (_, _, connection):
        with pytest.raises(ProtocolError, match="set"):
            await connection.call("echo", {1})  # type: ignore[arg-type]
        with pytest.raises(ProtocolError, match="at most"):
            await connection.open_stream("echo", bytes(2 << 20))
        assert connection.info.streams == 0


async def test_text_that_has_no_utf8_form_still_tells_the_error() -> None:
    async def handler(request: Incoming) -> CborValue:
        raise _Custom("opening \udcff", why="broken name \udc80")

    async with pair() as (_, listener, connection):
        listener.register_call("fail", handler, scope="x")
        with pytest.raises(_Custom, match="broken name"):
            await connection.call("fail")
        assert await connection.call("echo", 1) == 1


# -- calls and time


async def test_a_call_without_an_answer_ends_at_its_deadline_and_cancels_the_handler() -> None:
    cancelled = anyio.Event()

    async def handler(request: Incoming) -> CborValue:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()
        return None

    async with pair() as (_, listener, connection):
        listener.register_call("hang", handler, scope="x")
        with pytest.raises(DeadlineExceeded, match="'hang'") as caught:
            await connection.call("hang", timeout=0.1)
        assert caught.value.after == pytest.approx(0.1)
        with anyio.fail_after(3):
            await cancelled.wait()
        await eventually(lambda: connection.info.streams == 0)


async def test_a_cancelled_caller_cancels_the_handler() -> None:
    started, cancelled = anyio.Event(), anyio.Event()

    async def handler(request: Incoming) -> CborValue:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()
        return None

    async with pair() as (dialer, listener, connection):
        listener.register_call("hang", handler, scope="x")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.call, "hang")
            await started.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(3):
            await cancelled.wait()
        back = listener.connection(dialer.node_id)
        assert back is not None
        await eventually(lambda: back.info.streams == 0 and not back.core.streams)


async def test_more_calls_than_stream_slots_wait_for_their_turn() -> None:
    running = most = 0

    async def handler(request: Incoming) -> CborValue:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.sleep(0.001)
        running -= 1
        return request.value

    async with pair(max_streams=4) as (_, listener, connection):
        listener.register_call("work", handler, scope="x")
        answers: list[CborValue] = []

        async def one(number: int) -> None:
            answers.append(await connection.call("work", number))

        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(one, number)
        assert sorted(answers) == list(range(40))  # type: ignore[type-var]
        assert most <= 4


async def test_a_quota_of_streams_is_kept_and_named() -> None:
    from auth import Quotas

    grant = Grant(frozenset({"*"}), quotas=Quotas(max_streams=2))
    hold = anyio.Event()

    async def handler(request: Incoming) -> CborValue:
        await hold.wait()
        return None

    async with endpoint(Policy(connect=grant)) as listener, endpoint() as dialer:
        listener.register_call("hold", handler, scope="x")
        connection = await dialer.connect(at(listener))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.call, "hold")
            tasks.start_soon(connection.call, "hold")
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(LimitExceeded, match="no more streams"):
                await connection.call("echo", 1, timeout=0.2)
            hold.set()
        assert await connection.call("echo", 1) == 1


async def test_what_no_peer_could_ask_for_is_refused_where_it_is_registered() -> None:
    node: Any
    async with endpoint() as node:
        for alpn in ("", "x" * 256, "\u00e9", "a\n", 5, None):
            with pytest.raises(TransportError, match="printable ASCII"):
                node.register_alpn(alpn, _never)
            with pytest.raises(TransportError, match="printable ASCII"):
                await node.connect(SecretKey.generate().node_id, alpn=alpn)
        with pytest.raises(TransportError, match="can't be called"):
            node.register_alpn("app/1", None)
        for register in (node.register_call, node.register_service):
            for name in ("", "x" * 129, "x" * 70_000, 5, None):
                with pytest.raises(TransportError, match="1 to 128 characters") as caught:
                    register(name, _never, scope="x")
                assert len(str(caught.value)) < 256
            for scope in ("", "a b", 5, None, "x" * 129):
                with pytest.raises(TransportError, match="scope"):
                    register("app", _never, scope=scope)
            with pytest.raises(TransportError, match="can't be called"):
                register("app", "not a function", scope="x")
        assert node.services == ("echo", RENEWAL_CALL)
        node.register_alpn("x" * 255, _never)
        node.register_call("x" * 128, _never, scope="x:y")


# -- protocols of the app's own


async def test_an_apps_own_protocol_lives_beside_the_mesh() -> None:
    served = anyio.Event()

    async def greeter(connection: Connection) -> None:
        async with await connection.accept_raw_stream() as stream:
            name = await stream.receive()
            await stream.send(b"hello " + name)
            await stream.send_eof()
        served.set()
        await connection.wait_closed()

    async with pair() as (dialer, listener, mesh):
        listener.register_alpn("greet/1", greeter)
        own = await dialer.connect(at(listener), alpn="greet/1")
        assert own is not mesh
        assert own.alpn == "greet/1"
        async with await own.open_raw_stream() as stream:
            await stream.send(b"bob")
            assert await stream.receive_exactly(9) == b"hello bob"
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
        await served.wait()
        assert await mesh.call("echo", 1) == 1
        assert dialer.connections == (mesh,)
        await own.close()
        assert mesh.is_open


async def test_a_listener_can_open_raw_streams_too() -> None:
    async def pusher(connection: Connection) -> None:
        async with await connection.open_raw_stream() as stream:
            await stream.send(b"news")

    async with endpoint() as listener, endpoint() as dialer:
        listener.register_alpn("push/1", pusher)
        own = await dialer.connect(at(listener), alpn="push/1")
        stream = await own.accept_raw_stream()
        assert await stream.receive_exactly(4) == b"news"
        # The handler has returned: the connection is over.
        assert isinstance(await own.wait_closed(), ConnectionClosed)


async def test_a_peer_that_is_denied_an_own_protocol_reads_the_reason() -> None:
    ran = False

    async def handler(connection: Connection) -> None:
        nonlocal ran
        ran = True

    async with (
        endpoint(Policy(connect=Denial("members-only", "members only"))) as listener,
        endpoint() as dialer,
    ):
        listener.register_alpn("club/1", handler)
        own = await dialer.connect(at(listener), alpn="club/1")
        with pytest.raises(AccessDenied, match="members only"):
            await (await own.open_raw_stream()).receive()
        assert isinstance(own.closed, AccessDenied)
        assert not ran


async def test_a_protocol_the_peer_does_not_speak_fails_by_name() -> None:
    async with endpoint() as listener, endpoint() as dialer:
        with pytest.raises(MeshError, match="ALPN"):
            await dialer.connect(at(listener), alpn="klingon/1")


async def test_a_failing_protocol_handler_ends_its_connection_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(connection: Connection) -> None:
        raise ZeroDivisionError

    async with pair() as (dialer, listener, mesh):
        listener.register_alpn("broken/1", broken)
        own = await dialer.connect(at(listener), alpn="broken/1")
        with anyio.fail_after(3):
            assert isinstance(await own.wait_closed(), RemoteError)
        assert await mesh.call("echo", 1) == 1
    assert "broken/1" in caplog.text


async def test_waiting_for_a_stream_has_a_deadline() -> None:
    async def idle(connection: Connection) -> None:
        await connection.wait_closed()

    async with endpoint() as listener, endpoint() as dialer:
        listener.register_alpn("idle/1", idle)
        own = await dialer.connect(at(listener), alpn="idle/1")
        with pytest.raises(DeadlineExceeded, match="opened none"):
            await own.accept_raw_stream(timeout=0.05)


# -- addresses in use


async def test_a_busy_port_is_named_with_a_way_out() -> None:
    from transport import AddressInUse

    async with endpoint() as node:
        with pytest.raises(AddressInUse, match=str(node.port)) as caught:
            async with endpoint(bind=f"127.0.0.1:{node.port}"):
                pass
        assert "port 0" in str(caught.value)


async def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(AddressError, match=r"192\.0\.2\.1"):
        async with endpoint(bind="192.0.2.1:0"):
            pass


@pytest.mark.parametrize("bind", ["localhost:1", "1.2.3.4", "::1:5", "127.0.0.1:99999", "[::1]:x"])
async def test_a_malformed_address_is_refused(bind: str) -> None:
    with pytest.raises(AddressError):
        async with endpoint(bind=bind):
            pass


@pytest.mark.parametrize(
    ("bind", "host", "seen"),
    [
        ("[::]:0", "127.0.0.1", "127.0.0.1"),
        ("[::]:0", "::1", "::1"),
        ("[::]:0", "::ffff:127.0.0.1", "127.0.0.1"),
        ("[::]:0", "0:0:0:0:0:0:0:1", "::1"),
        ("[::1]:0", "::1", "::1"),
        (":0", "127.0.0.1", "127.0.0.1"),
    ],
)
async def test_both_families_on_one_port(bind: str, host: str, seen: str) -> None:
    async with endpoint(bind=bind) as listener, endpoint(bind=bind) as dialer:
        connection = await dialer.connect(at(listener, host=host))
        assert await connection.call("echo", 1) == 1
        assert connection.remote_address == (seen, listener.port)


async def test_twenty_endpoints_start_at_once_with_defaults() -> None:
    ports: list[int] = []

    async def one() -> None:
        async with endpoint(bind="[::]:0") as node:
            ports.append(node.port)
            await eventually(lambda: len(ports) == 20)

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(one)
    assert len(set(ports)) == 20


async def test_advertised_addresses_are_told_as_given() -> None:
    async with endpoint(advertise=("192.0.2.7:4433",)) as node:
        assert node.addresses == (("192.0.2.7", 4433),)
    with pytest.raises(AddressError, match="port 0"):
        config(advertise=("192.0.2.7:0",))


def _now() -> float:
    import time

    return time.time()


async def _never(connection: Connection) -> None:
    raise AssertionError("nobody connects")


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_time_that_is_none_is_refused_by_name(name: str, seconds: float) -> None:
    with pytest.raises(TransportError, match=name):
        EndpointConfig(**{name: seconds})
