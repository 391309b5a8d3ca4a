"""Nobody is made to dial, or to read, for a stranger."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from auth import (
    AccessDenied,
    AccessRequest,
    AuthorizedKeys,
    Authorizer,
    ConnectRequest,
    Denial,
    FetchRequest,
    Grant,
    NodeId,
    SecretKey,
    SharedSecret,
    allow_any,
    callback,
    deny_all,
)
from tensor_bridge import NoSuchTensor
from tensor_bridge.serve_create import dense_meta
from tensor_bridge.wire import FetchOpen
from tests.tensor_bridge.nodes import Node, eventually, node
from transport import Endpoint

pytestmark = [pytest.mark.anyio, pytest.mark.attack]

META = dense_meta(torch.float32, (10,))
ALL = Grant(frozenset({"*"}))


class Trap:
    """A UDP port that counts what comes."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.address: tuple[str, int] = self.socket.getsockname()

    def caught(self) -> int:
        count = 0
        with contextlib.suppress(BlockingIOError):
            while self.socket.recv(65536):
                count += 1
        return count


@pytest.fixture
def trap() -> Iterator[Trap]:
    it = Trap()
    yield it
    it.socket.close()


async def order(orderer: Endpoint, target: Node, source: NodeId, trap: Trap) -> str:
    """Have `target` fetch from `source` at the trap; return how it refuses."""
    connection = await orderer.connect(target.address)
    wish = FetchOpen("ab" * 16, source, (trap.address,), bytes(32), META, None)
    stream = await connection.open_stream("tensor.fetch", wish.encode(), timeout=1)
    async with stream:
        with pytest.raises(AccessDenied) as caught:
            await stream.reply()
    assert caught.value.denial is not None
    return caught.value.denial.code


def by_friends(friend: NodeId) -> Authorizer:
    """As an application might write it: it looks at who asks, and forgets the source."""

    def decision(request: AccessRequest) -> Grant | Denial:
        return ALL if request.peer.node_id == friend else Denial("stranger", "not a friend")

    return callback(decision)


def by_keys(path: Path) -> Callable[[NodeId], Authorizer]:
    def make(friend: NodeId) -> Authorizer:
        keys = AuthorizedKeys(path / "keys")
        keys.add(friend)
        return keys

    return make


@pytest.mark.parametrize("kind", ["keys", "secret", "a naive function", "a function"])
async def test_a_source_that_would_not_be_admitted_is_not_even_dialled(
    kind: str, tmp_path: Path, trap: Trap
) -> None:
    key, stranger = SecretKey.generate(), SecretKey.generate().node_id
    words = b"a secret of more than sixteen bytes"

    def no_fetches(request: AccessRequest) -> Grant | Denial:
        return Denial("fetch", "no") if isinstance(request, FetchRequest) else ALL

    authorizer: Authorizer = {
        "keys": by_keys(tmp_path),
        "secret": lambda _: SharedSecret(words),
        "a naive function": by_friends,
        "a function": lambda _: callback(no_fetches),
    }[kind](key.node_id)
    secret = SharedSecret(words) if kind == "secret" else None
    async with (
        node(authorizer=authorizer) as target,
        Endpoint(key, allow_any(), target.endpoint.config, secret=secret) as orderer,
    ):
        code = await order(orderer, target, stranger, trap)
        expected = {"keys": "source", "secret": "source", "a naive function": "stranger"}
        assert code == expected.get(kind, "fetch")
        assert trap.caught() == 0
        assert target.store.used() == (0, 0)
        assert target.is_empty


async def test_a_source_that_is_admitted_is_dialled(trap: Trap) -> None:
    """The positive control: the trap would have caught it."""
    async with node(authorizer=allow_any()) as target, node() as orderer:
        connection = await orderer.connection(target)
        wish = FetchOpen(
            "ab" * 16, SecretKey.generate().node_id, (trap.address,), bytes(32), META, None
        )
        stream = await connection.open_stream("tensor.fetch", wish.encode())
        await stream.reply()
        await eventually(lambda: trap.caught() > 0)
        stream.reset()


async def test_who_may_not_order_a_fetch_makes_nobody_dial(tmp_path: Path, trap: Trap) -> None:
    keys = AuthorizedKeys(tmp_path / "keys")
    async with node(authorizer=keys) as target, node() as orderer:
        keys.add(orderer.endpoint.node_id, scopes=["tensor:put", "tensor:get"])
        friend = SecretKey.generate().node_id
        keys.add(friend)
        assert await order(orderer.endpoint, target, friend, trap) == "scope"
        assert trap.caught() == 0


async def test_nobody_reads_another_peers_tensor_through_a_third(tmp_path: Path) -> None:
    """A mint is only for one's own: the token that a fetch needs can't be had for others'."""
    async with node() as source, node() as target, node() as owner, node() as thief:
        mine = await (await owner.client(source)).put(torch.arange(5))
        at_source, at_target = await thief.client(source), await thief.client(target)
        with pytest.raises(NoSuchTensor):
            await at_source.copy_to(mine, at_target)
        for token in (bytes(32), b"x" * 32):
            connection = await thief.connection(target)
            addresses = (("127.0.0.1", source.endpoint.port),)
            wish = FetchOpen("cd" * 16, source.endpoint.node_id, addresses, token, mine.meta, None)
            stream = await connection.open_stream("tensor.fetch", wish.encode())
            await stream.reply()
            message = None
            while not (isinstance(message, dict) and "failed" in message):
                message = await stream.receive_message()
            assert message["failed"]["code"] == "token-refused"  # type: ignore[index, call-overload]
            stream.reset()
        assert target.store.used() == (0, 0)
        # The positive control: the owner may have it copied.
        ours, theirs = await owner.client(source), await owner.client(target)
        assert torch.equal(await theirs.get(await ours.copy_to(mine, theirs)), torch.arange(5))


async def test_a_source_is_asked_about_before_it_is_dialled_as_an_outbound_peer() -> None:
    asked: list[AccessRequest] = []

    class Watching:
        async def authorize(self, request: AccessRequest) -> Grant | Denial:
            asked.append(request)
            return ALL

    async with node(authorizer=Watching()) as target, node() as source, node() as client:
        at_source, at_target = await client.client(source), await client.client(target)
        ref = await at_source.put(torch.arange(5))
        asked.clear()
        await at_source.copy_to(ref, at_target)
        kinds = [type(request) for request in asked[:3]]
        assert kinds[1:] == [FetchRequest, ConnectRequest]
        about = asked[2]
        assert isinstance(about, ConnectRequest)
        assert about.outbound
        assert about.peer.node_id == source.endpoint.node_id


async def test_a_node_that_admits_nobody_fetches_from_nobody(trap: Trap) -> None:
    class Serving:
        """Lets itself be ordered about, but admits no source."""

        async def authorize(self, request: AccessRequest) -> Grant | Denial:
            if isinstance(request, ConnectRequest) and request.outbound:
                answer = await deny_all().authorize(request)
                assert isinstance(answer, Denial)
                return answer
            return ALL

    async with node(authorizer=Serving()) as target, node() as orderer:
        code = await order(orderer.endpoint, target, SecretKey.generate().node_id, trap)
        assert code == "not-authorized"
        assert trap.caught() == 0
