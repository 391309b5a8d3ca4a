"""Recorded datagrams, hellos and credentials, sent again, by anybody and from anywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from auth import AuthorizedKeys, Delegation, Invite, InviteBook, SecretKey
from tests.attacks.raw import RawClient, hello, raw_client, request
from tests.transport.nodes import Events, Policy, endpoint, eventually, is_idle
from transport import Endpoint, Incoming, PeerJoined

pytestmark = [pytest.mark.anyio, pytest.mark.attack]


@dataclasses.dataclass
class Counting:
    """A node with a call that must not act twice."""

    node: Endpoint
    policy: Policy
    events: Events
    ran: int = 0

    async def count(self, _: Incoming) -> int:
        self.ran += 1
        return self.ran


@contextlib.asynccontextmanager
async def counting() -> AsyncIterator[Counting]:
    policy = Policy()
    async with endpoint(policy, handshake_timeout=1.0) as node:
        it = Counting(node, policy, Events(node))
        node.register_call("count", it.count, scope="x")
        yield it


class Recorder(RawClient):
    """A client that keeps every datagram it has sent."""

    def __init__(self, port: int, key: SecretKey) -> None:
        super().__init__(port, key, "mesh/1")
        self.recorded: list[bytes] = []

    def flush(self) -> None:
        for data, _ in self.quic.datagrams_to_send(time.monotonic()):
            self.recorded.append(data)
            self.socket.sendto(data, self.target)


async def session(client: Recorder) -> None:
    """Handshake, hello, one call."""
    client.start()
    await client.until(lambda: client.handshaken)
    client.send(hello(credential=b"a password"), fin=True)
    await client.until(lambda: client.reply())
    client.send(request("count"), 4, fin=True)
    await client.until(lambda: client.reply(4))


def bare_socket() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    sock.setblocking(False)
    return sock


def taken(sock: socket.socket) -> int:
    """How many bytes have come."""
    size = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            size += len(sock.recv(65536))
    return size


async def test_datagrams_sent_again_while_the_connection_lives_do_nothing_twice() -> None:
    async with counting() as it:
        client = Recorder(it.node.port, SecretKey.generate())
        other = bare_socket()
        try:
            await session(client)
            assert it.ran == 1
            for data in client.recorded * 20:
                client.socket.sendto(data, client.target)
                other.sendto(data, client.target)
            await client.run(0.3)
            assert it.ran == 1
            assert len(it.events.of(PeerJoined)) == 1
            (connection,) = it.node.connections
            assert connection.remote_address == client.socket.getsockname(), "nobody moved it"
            client.send(request("count"), 8, fin=True)  # the connection itself is unharmed
            await client.until(lambda: client.reply(8))
            assert it.ran == 2
        finally:
            client.socket.close()
            other.close()


@pytest.mark.parametrize("where", ["the same address", "another address"])
async def test_a_whole_session_sent_again_is_nobody(where: str) -> None:
    async with counting() as it:
        key = SecretKey.generate()
        client = Recorder(it.node.port, key)
        replayer = client.socket if where == "the same address" else bare_socket()
        try:
            await session(client)
            client.close()
            await eventually(lambda: is_idle(it.node))
            asked = len(it.policy.asked)
            taken(replayer)
            for _ in range(3):
                sent = 0
                for data in client.recorded:
                    replayer.sendto(data, client.target)
                    sent += len(data)
                    await anyio.sleep(0.01)
                assert taken(replayer) <= 3 * sent, "nothing is amplified"
            assert it.ran == 1
            assert len(it.policy.asked) == asked, "the authorizer saw nobody"
            assert len(it.events.of(PeerJoined)) == 1
            assert it.node.connections == ()
            await eventually(lambda: is_idle(it.node), timeout=8)
        finally:
            client.socket.close()
            replayer.close()
        # The positive control: the same words, said anew.
        again = Recorder(it.node.port, key)
        try:
            await session(again)
            assert it.ran == 2
        finally:
            again.socket.close()


class Intercepted(RawClient):
    """A client whose answer to a Retry does not get through."""

    def __init__(self, port: int) -> None:
        super().__init__(port, SecretKey.generate(), "mesh/1")
        self.kept: list[bytes] = []

    def flush(self) -> None:
        for data, _ in self.quic.datagrams_to_send(time.monotonic()):
            if self.quic._retry_source_connection_id is None:
                self.socket.sendto(data, self.target)
            else:
                self.kept.append(data)


async def test_a_token_of_a_retry_proves_one_address_only() -> None:
    async with (
        endpoint(retry_threshold=1, max_half_open_per_host=4) as node,
        raw_client(node.port, SecretKey.generate(), handshake=False),
    ):
        await eventually(lambda: node._engine.demux.half_open == 1)
        client, other = Intercepted(node.port), bare_socket()
        try:
            client.start()
            await client.until(lambda: client.kept)
            other.sendto(client.kept[0], client.target)
            await eventually(lambda: node.drops.get("bad Retry token"))
            assert node._engine.demux.half_open == 1
            assert taken(other) == 0
            client.socket.sendto(client.kept[0], client.target)  # the positive control
            await eventually(lambda: node._engine.demux.half_open == 2)
        finally:
            client.socket.close()
            other.close()


async def test_a_second_hello_on_a_connection_is_no_service() -> None:
    async with counting() as it, raw_client(it.node.port, SecretKey.generate()) as client:
        client.send(hello(), fin=True)
        await client.until(lambda: client.reply())
        asked = len(it.policy.asked)
        client.send(hello(credential=b"another"), 4, fin=True)
        await client.until(lambda: client.reply(4))
        assert client.reply(4)["err"]["code"] == "service-unknown"  # type: ignore[index]
        assert len(it.policy.asked) == asked
        client.send(request("count"), 8, fin=True)
        await client.until(lambda: client.reply(8))
        assert client.reply(8) == {"ok": 1}


async def answer_to(node: Endpoint, key: SecretKey, sent: bytes) -> dict[str, object]:
    async with raw_client(node.port, key) as client:
        client.send(sent, fin=True)
        await client.until(lambda: client.reply())
        reply = client.reply()
        assert isinstance(reply, dict)
        client.close()
    return reply


async def test_an_invite_is_good_for_the_first_who_brings_it(tmp_path: Path) -> None:
    machine, guest, thief = (SecretKey.generate() for _ in range(3))
    book = InviteBook(tmp_path / "spent")
    keys = AuthorizedKeys(tmp_path / "keys", machine=machine.node_id, invites=book)
    invite = Invite.issue(machine, ("x",), 600.0, time.time())
    recorded = hello(credential=invite.encode())
    async with endpoint(keys, machine) as node:
        assert "ok" in await answer_to(node, guest, recorded)  # the positive control
        await eventually(lambda: is_idle(node))
        assert "err" in await answer_to(node, thief, recorded)
        assert thief.node_id not in {entry.node_id for entry in keys.entries()}
        await eventually(lambda: is_idle(node))
        assert "ok" in await answer_to(node, guest, hello()), "the guest is known now"
    # Nor after a restart, by a node that has forgotten all but its files.
    keys = AuthorizedKeys(
        tmp_path / "keys", machine=machine.node_id, invites=InviteBook(tmp_path / "spent")
    )
    async with endpoint(keys, machine) as node:
        assert "err" in await answer_to(node, thief, recorded)


async def test_a_hello_with_a_delegation_is_of_use_to_its_program_alone(tmp_path: Path) -> None:
    machine, program, thief = (SecretKey.generate() for _ in range(3))
    keys = AuthorizedKeys(tmp_path / "keys")
    keys.add(machine.node_id)
    word = Delegation.issue(machine, program.node_id, ("x",), 600.0, time.time())
    recorded = hello(delegation=word.encode())
    async with endpoint(keys) as node:
        assert "ok" in await answer_to(node, program, recorded)  # the positive control
        await eventually(lambda: is_idle(node))
        assert "err" in await answer_to(node, thief, recorded)
        assert "err" in await answer_to(node, program, hello()), "without the machine's word"
