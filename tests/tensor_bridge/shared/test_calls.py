"""Calls between processes of a host, by the link that they have: the same as on streams."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import anyio.to_thread
import pytest

from auth import AccessDenied, AccessRequest, Denial, Grant, ServiceRequest
from tensor_bridge import NoSuchTensor
from tensor_bridge.lanes.shared import calls
from tensor_bridge.lanes.shared.calls import Calls
from tensor_bridge.lanes.shared.host import unavailable
from tests.cancelling import process_holdings
from tests.tensor_bridge.nodes import LANES, Node, eventually, node, together
from tests.tensor_bridge.shared.test_broken import link
from transport import (
    NOT_NOW,
    CborValue,
    Connection,
    ConnectionClosed,
    DeadlineExceeded,
    Incoming,
    NotNow,
    ProtocolError,
    RemoteError,
    ServiceUnknown,
)
from transport.protocol import StreamCore

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]


class Scopes:
    """Grants everything, until a test takes it back."""

    def __init__(self) -> None:
        self.scopes = frozenset({"*"})
        self.refused: set[str] = set()
        self.asked: list[str] = []

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        if isinstance(request, ServiceRequest):
            self.asked.append(request.service)
            if request.service in self.refused:
                return Denial("no", "not today")
        return Grant(self.scopes)


class Pair:
    """Two nodes with a link, the second of which calls the first."""

    def __init__(self, server: Node, client: Node, rules: Scopes, connection: Connection) -> None:
        self.server, self.client, self.rules, self.connection = server, client, rules, connection
        self.begun, self.ended = anyio.Event(), anyio.Event()
        self.streams_opened = 0
        open_stream = connection.core.open_stream

        def counted() -> StreamCore:
            self.streams_opened += 1
            return open_stream()

        connection.core.open_stream = counted  # type: ignore[method-assign]

        async def sleep(request: Incoming) -> CborValue:
            self.begun.set()
            try:
                await anyio.sleep_forever()
            finally:
                self.ended.set()

        server.endpoint.register_call("sleep", sleep, scope="sleeping")

    @property
    def calls(self) -> Calls:
        found = link(self.client, self.server).calls
        assert found is not None
        return found

    @property
    def theirs(self) -> Calls:
        found = link(self.server, self.client).calls
        assert found is not None
        return found


async def echo(request: Incoming) -> CborValue:
    return request.value


async def fail(request: Incoming) -> CborValue:
    raise NoSuchTensor("a look-up", why="it is gone", fix="Look elsewhere.")


async def break_down(request: Incoming) -> CborValue:
    raise ZeroDivisionError("secret detail")


async def greet(request: Incoming) -> None:
    await request.stream.send_reply("hello")


async def answer_long(request: Incoming) -> CborValue:
    assert isinstance(request.value, int)
    return bytes(request.value)


@contextlib.asynccontextmanager
async def linked(*, by: str = "the caller") -> AsyncIterator[Pair]:
    rules, shared = Scopes(), LANES["shared-memory"]
    async with together(node(authorizer=rules, lanes=shared), node(lanes=shared)) as (a, client):
        for name, handler in (
            ("echo", echo),
            ("fail", fail),
            ("break", break_down),
            ("long", answer_long),
        ):
            a.endpoint.register_call(name, handler, scope=name)
        a.endpoint.register_service("greet", greet, scope="greet")
        connection = await client.connection(a)
        it = Pair(a, client, rules, connection)
        if by == "the caller":
            await client.lanes.meet(connection)
        else:
            await eventually(lambda: a.endpoint.connection(client.endpoint.node_id))
            back = a.endpoint.connection(client.endpoint.node_id)
            assert back is not None
            await a.lanes.meet(back)
        await eventually(lambda: _are_there(it))
        yield it
        await eventually(lambda: _are_over(it))


def _are_there(it: Pair) -> bool:
    with contextlib.suppress(AssertionError):
        return it.calls._tasks is not None and it.theirs._tasks is not None
    return False


def _are_over(it: Pair) -> bool:
    with contextlib.suppress(AssertionError):
        return it.calls.sizes == it.theirs.sizes == (0, 0, 0)
    return True  # the link has ended


@pytest.mark.parametrize("by", ["the caller", "the other"])
async def test_calls_take_no_stream(by: str) -> None:
    async with linked(by=by) as it:
        before = it.streams_opened
        for value in (None, 7, "text", b"x" * 64, [1, {"a": b"b"}], b"x" * 60_000):
            assert await it.connection.call("echo", value) == value
        assert it.streams_opened == before
        assert it.rules.asked.count("echo") == 6


@pytest.mark.parametrize("nbytes", [65_500, 200_000, 900_000])
async def test_long_replies_come_in_parts(nbytes: int) -> None:
    async with linked() as it:
        before = it.streams_opened
        assert await it.connection.call("long", nbytes) == bytes(nbytes)
        assert it.streams_opened == before


async def test_long_requests_and_services_take_streams() -> None:
    async with linked() as it:
        before = it.streams_opened
        assert await it.connection.call("echo", b"x" * 100_000) == b"x" * 100_000
        assert await it.connection.call("greet") == "hello"
        assert it.streams_opened == before + 2


async def test_errors_are_the_same(caplog: pytest.LogCaptureFixture) -> None:
    async with linked() as it:
        before = it.streams_opened
        with pytest.raises(NoSuchTensor, match=r"it is gone.*Look elsewhere") as caught:
            await it.connection.call("fail")
        assert it.server.endpoint.node_id.short in str(caught.value)
        with pytest.raises(RemoteError) as remote:
            await it.connection.call("break")
        assert "secret detail" not in str(remote.value)
        assert "secret detail" in caplog.text
        with pytest.raises(ServiceUnknown):
            await it.connection.call("nothing")
        assert it.streams_opened == before


@pytest.mark.attack
async def test_the_grant_and_the_authorizer_are_asked() -> None:
    async with linked() as it:
        before = it.streams_opened
        assert await it.connection.call("echo", 1) == 1
        it.rules.refused.add("echo")
        with pytest.raises(AccessDenied, match="not today"):
            await it.connection.call("echo", 1)
        it.rules.scopes = frozenset({"long"})
        await it.server.endpoint.reconsider(it.client.endpoint.node_id)
        with pytest.raises(AccessDenied):
            await it.connection.call("fail")
        assert await it.connection.call("long", 3) == bytes(3)
        assert it.streams_opened == before


async def test_a_scope_that_is_taken_back_ends_the_call() -> None:
    async with linked() as it, anyio.create_task_group() as tasks:

        async def call() -> None:
            with pytest.raises(AccessDenied):
                await it.connection.call("sleep")
            tasks.cancel_scope.cancel()

        tasks.start_soon(call)
        await it.begun.wait()
        it.rules.scopes = frozenset({"echo"})
        await it.server.endpoint.reconsider(it.client.endpoint.node_id)
        with anyio.fail_after(2):
            await it.ended.wait()
            await anyio.sleep_forever()


async def test_a_deadline_cancels_the_handler() -> None:
    async with linked() as it:
        with pytest.raises(DeadlineExceeded, match="has not answered") as caught:
            await it.connection.call("sleep", timeout=0.05)
        assert caught.value.after == 0.05
        with anyio.fail_after(2):
            await it.ended.wait()
        assert await it.connection.call("echo", 1) == 1


async def test_who_gives_up_cancels_the_handler_and_others_go_on() -> None:
    async with linked() as it:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(it.connection.call, "sleep")
            await it.begun.wait()
            assert await it.connection.call("echo", 1) == 1  # it waits for nobody
            tasks.cancel_scope.cancel()
        with anyio.fail_after(2):
            await it.ended.wait()


async def test_many_at_once_each_get_their_own() -> None:
    async with linked() as it:

        async def call(number: int) -> None:
            value = [number, b"x" * (number * 37 % 9000)]
            assert await it.connection.call("echo", value) == value

        async with anyio.create_task_group() as tasks:
            for number in range(300):
                tasks.start_soon(call, number)


async def test_more_than_are_served_at_a_time_take_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "MAX_RUNNING", 1)
    async with linked() as it, anyio.create_task_group() as tasks:
        tasks.start_soon(it.connection.call, "sleep")
        await it.begun.wait()
        before = it.streams_opened
        assert await it.connection.call("echo", 1) == 1
        assert it.streams_opened == before + 1
        tasks.cancel_scope.cancel()


@pytest.mark.attack
async def test_who_takes_no_replies_makes_us_hold_those_of_few_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "MAX_RUNNING", 8)
    nbytes, count = 300_000, 40
    got: list[int] = []
    async with linked() as it:

        async def call() -> None:
            got.append(len(await it.connection.call("long", nbytes)))  # type: ignore[arg-type]

        take, deaf = it.calls._inbox.take, True
        monkeypatch.setattr(it.calls._inbox, "take", lambda: None if deaf else take())
        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(call)
            most = calls.FEW_UNSENT + 8
            await eventually(lambda: len(it.theirs._unsent) >= calls.FEW_UNSENT)
            for _ in range(50):
                await anyio.sleep(0.001)
                assert sum(message.kind != calls.ELSEWHERE for message in it.theirs._unsent) <= most
                assert it.theirs.sizes[1] <= 8
            deaf = False
            it.calls._waiter.wake()
        assert got == [nbytes] * count  # the control


def end(it: Pair) -> None:
    link(it.server, it.client).end("the test ends it")


def garble_their_ring(it: Pair) -> None:
    it.theirs._words[0] = it.theirs._words[8] = (1 << 64) - 3
    it.calls._waiter.wake()


def say_nonsense(it: Pair) -> None:
    it.theirs._outbox.put(calls.Message(77, 0))


@pytest.mark.parametrize(
    "way", [end, garble_their_ring, say_nonsense], ids=lambda way: way.__name__
)
async def test_when_the_link_ends_the_call_does_and_the_next_takes_a_stream(
    way: Callable[[Pair], None],
) -> None:
    async with linked() as it:
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                with pytest.raises(ConnectionClosed, match="given up"):
                    await it.connection.call("sleep")

            tasks.start_soon(call)
            await it.begun.wait()
            way(it)
        with anyio.fail_after(2):
            await it.ended.wait()
        assert it.connection.carrier is None
        before = it.streams_opened
        assert await it.connection.call("echo", 1) == 1
        assert it.streams_opened == before + 1


async def test_what_was_answered_before_the_end_counts() -> None:
    async with linked() as it:
        answered = anyio.Event()
        theirs, ours = it.theirs, it.calls
        reply = theirs._post

        def answer_and_leave(message: calls.Message) -> None:
            reply(message)
            answered.set()
            link(it.server, it.client).end("it leaves")

        theirs._post = answer_and_leave  # type: ignore[method-assign]
        ours._turn = lambda: False  # type: ignore[method-assign]  # it is told of the end first
        with anyio.fail_after(2):
            assert await it.connection.call("echo", 5) == 5
        assert answered.is_set()


# -- threads that wait themselves


def in_thread(it: Pair, name: str, value: CborValue = None, timeout: float = 5.0) -> Awaitable[Any]:
    call = functools.partial(it.connection.call_in_thread, name, value, timeout=timeout)
    return anyio.to_thread.run_sync(call)


async def test_threads_and_tasks_call_at_once_and_each_gets_its_own() -> None:
    async with linked() as it:
        before = it.streams_opened

        async def call(number: int) -> None:
            for turn in range(20):
                value = [number, turn, b"x" * ((number * 37 + turn * 997) % 9000)]
                if number % 2:
                    assert await in_thread(it, "echo", value) == value
                else:
                    assert await it.connection.call("echo", value) == value

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(call, number)
        assert await in_thread(it, "long", 300_000) == bytes(300_000)  # in parts
        assert it.streams_opened == before
        assert it.calls._spinning == 0
        assert it.calls._waiter._words[it.calls._waiter._flag] == 1  # the loop is woken again


async def test_what_a_thread_can_not_call_so_is_not_begun() -> None:
    async with linked() as it:
        assert await in_thread(it, "echo", b"x" * 100_000) is NOT_NOW
        assert await in_thread(it, "greet") is NOT_NOW
        end(it)
        await eventually(lambda: it.connection.carrier is None)
        assert await in_thread(it, "echo") is NOT_NOW


async def test_errors_reach_threads_the_same() -> None:
    async with linked() as it:
        with pytest.raises(NoSuchTensor, match=r"it is gone.*Look elsewhere"):
            await in_thread(it, "fail")
        with pytest.raises(DeadlineExceeded, match="has not answered"):
            await in_thread(it, "sleep", timeout=0.05)
        with anyio.fail_after(2):
            await it.ended.wait()
        it.rules.refused.add("echo")
        with pytest.raises(AccessDenied, match="not today"):
            await in_thread(it, "echo")


@pytest.mark.parametrize(
    "way", [end, garble_their_ring, say_nonsense], ids=lambda way: way.__name__
)
async def test_when_the_link_ends_a_thread_is_told(way: Callable[[Pair], None]) -> None:
    async with linked() as it:
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                with pytest.raises(ConnectionClosed, match="given up"):
                    await in_thread(it, "sleep")

            tasks.start_soon(call)
            await it.begun.wait()
            way(it)
        with anyio.fail_after(2):
            await it.ended.wait()


async def test_what_can_be_answered_at_once_is_and_all_else_later() -> None:
    async with linked() as it:
        later: list[CborValue] = []

        async def answer(request: Incoming) -> CborValue:
            later.append(request.value)
            return request.value

        def answer_now(request: Incoming) -> CborValue | NotNow:
            match request.value:
                case int(number):
                    return number + 1
                case "fail":
                    raise NoSuchTensor("a look-up", why="it is gone")
                case "break":
                    raise ZeroDivisionError
            return NOT_NOW

        it.server.endpoint.register_call("prompt", answer, scope="echo", prompt=answer_now)
        assert await it.connection.call("prompt", 1) == 1  # its authorizer may wait
        it.rules.authorize.__func__.is_prompt = True  # type: ignore[attr-defined]
        try:
            assert await it.connection.call("prompt", 1) == 2
            assert await in_thread(it, "prompt", 2) == 3
            assert await it.connection.call("prompt", "x") == "x"
            assert later == [1, "x"]
            with pytest.raises(NoSuchTensor):
                await it.connection.call("prompt", "fail")
            with pytest.raises(RemoteError):
                await it.connection.call("prompt", "break")
            it.rules.refused.add("prompt")
            with pytest.raises(AccessDenied, match="not today"):
                await it.connection.call("prompt", 1)
        finally:
            del it.rules.authorize.__func__.is_prompt  # type: ignore[attr-defined]


async def test_nothing_is_left() -> None:
    async with linked() as it:
        await it.connection.call("echo", 1)
    before = process_holdings()["descriptors"]
    for _ in range(3):
        async with linked() as it:
            await it.connection.call("echo", 1)
    assert process_holdings()["descriptors"] == before


@pytest.mark.attack
async def test_rings_that_are_none_are_refused() -> None:
    import os

    from auth import PeerIdentity, SecretKey

    peer = PeerIdentity(SecretKey.generate().node_id)

    async def serve(_: bytes) -> bytes:
        return b""

    ours, descriptors = calls.make_rings(peer, serve)
    theirs = calls.take_rings(list(descriptors), peer, serve)  # the positive control
    pipe = os.pipe()
    for wrong in (
        [descriptors[1], descriptors[1], descriptors[2]],
        [descriptors[0], descriptors[0], descriptors[2]],
        [descriptors[0], descriptors[1], pipe[0]],
    ):
        with pytest.raises(ProtocolError):
            calls.take_rings(wrong, peer, serve)
    for descriptor in (*descriptors, *pipe):
        os.close(descriptor)
    for each in (ours, theirs):
        each.close()
