"""A peer that may no longer be here: what is kept for it goes with it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import torch

from auth import (
    AccessDenied,
    AuthorizedKeys,
    Delegation,
    SecretKey,
    TokenBook,
    TokenRefused,
    allow_any,
)
from tensor_bridge import TensorClient, TensorService, TensorStore
from tests.tensor_bridge.nodes import Node, eventually, node
from transport import Endpoint, EndpointConfig, PeerAddress

pytestmark = pytest.mark.anyio

CONFIG = EndpointConfig(bind="127.0.0.1:0", linger=0.5, liveness=1.0)


@asynccontextmanager
async def program(machine: SecretKey) -> AsyncIterator[Endpoint]:
    """A program of `machine`'s, with a key of its own."""
    key = SecretKey.generate()
    word = Delegation.issue(machine, key.node_id, ["tensor"], 600, time.time())
    async with Endpoint(key, allow_any(), CONFIG, delegation=word) as endpoint:
        yield endpoint


def at(endpoint: Endpoint) -> PeerAddress:
    return PeerAddress(endpoint.node_id, (("127.0.0.1", endpoint.port),))


async def mint(client: TensorClient, object_id: str, audience: Node) -> bytes:
    ref = await client.info(object_id)
    async with client._minted(ref, audience.endpoint.node_id) as (minted, _):
        return minted.token


def counts(service: TensorService) -> tuple[int, int, int]:
    tokens = service.tokens.counts()
    return len(service.store), tokens.live, tokens.exposed_bytes


async def test_tensors_and_tokens_of_a_removed_peer_die_at_once() -> None:
    async with node() as a, node() as gone, node() as stays, node() as reader:
        at_a, others = await gone.client(a), await stays.client(a)
        ref = await at_a.put(torch.arange(10))
        kept = await others.put(torch.arange(3))
        token = await mint(at_a, ref.object_id, reader)
        other_token = await mint(others, kept.object_id, reader)
        assert counts(a.service) == (2, 2, 80 + 24)
        a.endpoint.revoke(gone.endpoint.node_id, "removed")
        assert counts(a.service) == (1, 1, 24)
        stream = await reader.read(a, token=token)
        with pytest.raises(TokenRefused):
            await stream.reply()
        stream.reset()
        good = await reader.read(a, token=other_token)  # the positive control
        await good.reply()
        good.reset()
        assert torch.equal(await others.get(kept), torch.arange(3))


async def test_what_others_let_it_read_is_not_its_any_more() -> None:
    async with node() as a, node() as owner, node() as gone:
        client = await owner.client(a)
        ref = await client.put(torch.arange(10))
        await mint(client, ref.object_id, gone)
        assert counts(a.service)[1] == 1
        a.endpoint.revoke(gone.endpoint.node_id, "removed")
        assert counts(a.service)[1] == 0


async def test_a_machine_takes_its_programs_with_it_also_those_that_have_left() -> None:
    machine = SecretKey.generate()
    async with node() as a, program(machine) as here:
        async with program(machine) as left:
            await TensorClient(await left.connect(at(a.endpoint))).put(torch.arange(4))
        await TensorClient(await here.connect(at(a.endpoint))).put(torch.arange(4))
        await eventually(lambda: a.endpoint.connection(left.node_id) is None)
        assert counts(a.service)[0] == 2
        a.endpoint.revoke(machine.node_id, "removed")
        assert counts(a.service)[0] == 0
        await eventually(lambda: not a.endpoint.connections)


async def test_a_grant_that_expires_takes_everything_with_it(tmp_path: Path) -> None:
    keys = AuthorizedKeys(tmp_path / "keys")
    async with node(authorizer=keys) as a, node() as guest:
        keys.add(guest.endpoint.node_id, expires=time.time() + 60)
        client = await guest.client(a)
        await client.put(torch.arange(4))
        keys.add(guest.endpoint.node_id, expires=time.time() + 0.3)
        await a.endpoint.reconsider(guest.endpoint.node_id)
        assert counts(a.service)[0] == 1
        await eventually(lambda: counts(a.service)[0] == 0)
        assert a.endpoint.connections == ()


async def test_a_put_under_way_ends_and_leaves_nothing(tmp_path: Path) -> None:
    keys = AuthorizedKeys(tmp_path / "keys")
    async with node(authorizer=keys) as a, node() as guest:
        keys.add(guest.endpoint.node_id)
        client = await guest.client(a)
        reached = anyio.Event()
        failed: list[AccessDenied] = []

        async def put() -> None:
            try:
                await client.put(
                    torch.zeros(64 << 20, dtype=torch.uint8), progress=lambda _: reached.set()
                )
            except AccessDenied as error:
                failed.append(error)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(put)
                await reached.wait()
                keys.add(guest.endpoint.node_id, scopes=["tensor:get"])
                await a.endpoint.reconsider(guest.endpoint.node_id)
        assert failed
        assert (await guest.connection(a)).is_open
        await eventually(lambda: not a.endpoint._services._running)


async def test_a_source_that_is_connected_is_known_with_its_machine(tmp_path: Path) -> None:
    """A program can't be in the file by its own key; its machine is, and so it may be a source."""
    machine = SecretKey.generate()
    keys = AuthorizedKeys(tmp_path / "keys")
    keys.add(machine.node_id)
    async with node(authorizer=keys) as target, node() as orderer, program(machine) as source:
        keys.add(orderer.endpoint.node_id)
        service = TensorService(source, TensorStore(), TokenBook(), allow_any())
        async with service:
            connection = await orderer.endpoint.connect(at(source))
            at_source = TensorClient(connection)
            ref = await at_source.put(torch.arange(5))
            at_target = await orderer.client(target)
            with pytest.raises(AccessDenied, match="source"):
                await at_source.copy_to(ref, at_target)
            await source.connect(target.address)
            copied = await at_source.copy_to(ref, at_target)
            assert torch.equal(await at_target.get(copied), torch.arange(5))
