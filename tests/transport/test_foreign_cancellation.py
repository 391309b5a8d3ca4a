"""What an app's code awaits may be cancelled by others: asyncio raises that like our own end."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from auth import (
    AccessDenied,
    AccessRequest,
    Authorizer,
    ConnectRequest,
    Denial,
    Grant,
    PeerIdentity,
    SecretKey,
    allow_any,
    decide,
)
from tests.transport.nodes import at, endpoint, pair
from transport import Incoming, RemoteError

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio"])
def anyio_backend() -> str:
    """Only there: trio raises nothing for what others have cancelled."""
    return "asyncio"


async def cancelled_elsewhere() -> None:
    waited_for = asyncio.get_running_loop().create_future()
    waited_for.cancel()
    await waited_for


class Fails:
    """An authorizer that awaits what was cancelled, at one stage."""

    def __init__(self, stage: type[AccessRequest]) -> None:
        self.stage: type[AccessRequest] | None = stage

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        if self.stage is not None and isinstance(request, self.stage):
            await cancelled_elsewhere()
        return Grant(frozenset({"*"}))


async def test_a_handler_fails_alone() -> None:
    async def fails(_: Incoming) -> None:
        await cancelled_elsewhere()

    async with pair() as (_, listener, connection):
        listener.register_call("fails", fails, scope="x")
        listener.register_service("fails too", fails, scope="x")
        with pytest.raises(RemoteError):
            await connection.call("fails")
        async with await connection.open_stream("fails too") as stream:
            with pytest.raises(RemoteError):
                await stream.reply()
        assert await connection.call("echo", 1) == 1


async def test_a_caller_who_gives_up_still_cancels_the_handler() -> None:
    began, ended = anyio.Event(), anyio.Event()

    async def waits(_: Incoming) -> None:
        began.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async with pair() as (_, listener, connection):
        listener.register_call("waits", waits, scope="x")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.call, "waits")
            await began.wait()
            tasks.cancel_scope.cancel()
        await ended.wait()
        assert await connection.call("echo", 1) == 1


async def test_an_authorizer_denies_and_may_grant_the_next() -> None:
    authorizer = Fails(ConnectRequest)
    async with endpoint(authorizer) as listener, endpoint(allow_any()) as dialer:
        with pytest.raises(AccessDenied, match="failed"):
            await dialer.connect(at(listener))
        authorizer.stage = None
        connection = await dialer.connect(at(listener))
        assert await connection.call("echo", 1) == 1


async def test_a_deadline_of_asyncio_holds_while_an_authorizer_waits() -> None:
    class Waits:
        async def authorize(self, _: AccessRequest) -> Grant | Denial:
            await anyio.sleep_forever()
            raise AssertionError

    waits: Authorizer = Waits()
    request = ConnectRequest(PeerIdentity(SecretKey.generate().node_id), "mesh/1")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await decide(waits, request)
