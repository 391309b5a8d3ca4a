"""Every decision about a peer, cancelled at each await, leaves nothing behind."""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from auth import (
    AccessRequest,
    AuthorizedKeys,
    Authorizer,
    Challenge,
    ConnectRequest,
    Credential,
    Denial,
    Grant,
    Invite,
    InviteBook,
    PeerIdentity,
    SecretKey,
    ServiceRequest,
    SharedSecret,
    all_of,
    allow_any,
    any_of,
    by_alpn,
    by_service,
    callback,
    decide,
    deny_all,
)
from auth.proof import Proof, Side, Transcript
from auth.threads import MAX_THREADS, _places
from tests.cancelling import Operation, Scenarios, at_each_await, process_holdings

pytestmark = pytest.mark.anyio

SCENARIOS: Scenarios[None] = Scenarios()
covers = SCENARIOS.covers

EVERYTHING = Grant(frozenset({"*"}))
PEER, MACHINE = SecretKey.generate(), SecretKey.generate()
CONNECT = ConnectRequest(PeerIdentity(PEER.node_id), "mesh/1", Credential(b""))
SERVICE = ServiceRequest(PeerIdentity(PEER.node_id), "tensor.put", "tensor:put", EVERYTHING)


def held() -> dict[str, object]:
    return {**process_holdings(), "threads taken": MAX_THREADS - _places._value}


class Hesitant:
    """Admits everybody after a moment."""

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        return EVERYTHING


async def granted(authorizer: Authorizer, request: AccessRequest) -> None:
    grant = await authorizer.authorize(request)
    assert isinstance(grant, Grant)


@covers("auth.decide")
async def decided(_: None) -> AsyncIterator[Operation]:
    async def run() -> None:
        assert await decide(Hesitant(), CONNECT) == EVERYTHING

    yield run


@covers("auth.allow_any", "auth.any_of", "auth.all_of", "auth.by_alpn", "auth.by_service")
async def combined(_: None) -> AsyncIterator[Operation]:
    async def run() -> None:
        every = all_of(any_of(deny_all(), Hesitant()), allow_any(), Hesitant())
        policy = by_alpn({"mesh/1": by_service({"tensor": every}, default=every)})
        for request in (CONNECT, SERVICE):
            await granted(policy, request)

    yield run


@covers("auth.deny_all")
async def denied(_: None) -> AsyncIterator[Operation]:
    async def run() -> None:
        assert isinstance(await deny_all().authorize(CONNECT), Denial)

    yield run


@covers("auth.callback")
async def called_back_in_a_thread(_: None) -> AsyncIterator[Operation]:
    def decision(request: AccessRequest) -> Grant:
        time.sleep(0.002)
        return EVERYTHING

    async def run() -> None:
        await granted(callback(decision), CONNECT)

    yield run


@covers("auth.callback")
async def called_back_as_a_coroutine(_: None) -> AsyncIterator[Operation]:
    async def run() -> None:
        await granted(callback(Hesitant().authorize), CONNECT)

    yield run


@covers("auth.AuthorizedKeys.authorize")
async def keys_in_a_file(_: None) -> AsyncIterator[Operation]:
    with tempfile.TemporaryDirectory() as directory:
        keys = AuthorizedKeys(Path(directory) / "keys", machine=MACHINE.node_id)
        keys.add(PEER.node_id, scopes=["*"])

        async def run() -> None:
            for request in (CONNECT, SERVICE):
                await granted(keys, request)

        yield run


@covers("auth.AuthorizedKeys.authorize")
async def enrolment(_: None) -> AsyncIterator[Operation]:
    # Whenever it is cancelled, the invite is spent exactly if the peer is enrolled: what has begun
    # in a thread goes on there.
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        invite = Invite.issue(MACHINE, ["tensor"], 60, time.time())
        keys = AuthorizedKeys(
            here / "keys", machine=MACHINE.node_id, invites=InviteBook(here / "invites")
        )
        request = ConnectRequest(PeerIdentity(PEER.node_id), "mesh/1", Credential(invite.encode()))
        yield partial(granted, keys, request)
        with anyio.fail_after(5):
            while True:
                keys.poll()
                is_spent = any((here / "invites").glob("*"))
                if is_spent == any(entry.node_id == PEER.node_id for entry in keys.entries()):
                    break
                await anyio.sleep(0.001)


@covers("auth.SharedSecret.authorize", "auth.Challenge.proof")
async def a_shared_secret(_: None) -> AsyncIterator[Operation]:
    secret = SharedSecret(bytes(32))
    transcript = Transcript(PEER.node_id, MACHINE.node_id, bytes(32), bytes(range(32)))

    async def prove() -> Proof:
        await anyio.lowlevel.checkpoint()
        return Proof(transcript, Side.DIALER, secret.tag(transcript, Side.DIALER))

    async def run() -> None:
        request = ConnectRequest(
            CONNECT.peer, "mesh/1", Credential(b""), challenge=Challenge(prove)
        )
        await granted(secret, request)

    yield run


@pytest.mark.parametrize("name", SCENARIOS.all)
async def test_at_each_await(name: str) -> None:
    scenario = SCENARIOS.all[name]
    await at_each_await(partial(scenario.prepare, None), held)
