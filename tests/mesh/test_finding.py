"""Peers that lost each other's addresses find each other by somebody who knows both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from auth import AccessDenied, AuthorizedKeys, MeshError, NodeId, SecretKey, allow_any
from mesh import Node, finding
from mesh.daemon.links import keep_links
from mesh.errors import ProtocolError, UnknownPeer, Unreachable
from mesh.services import MAX_FOUND
from tests.mesh.nodes import eventually, machine, node

pytestmark = pytest.mark.anyio

NOWHERE = ("127.0.0.1", 9)
"""Where nothing listens."""


def quietly(_: NodeId, error: MeshError) -> None:
    raise AssertionError(f"nobody is to be refused: {error}")


@asynccontextmanager
async def up(home: Path) -> AsyncIterator[Node]:
    """A machine that keeps its links, as the daemon does."""
    async with machine(home) as it:
        assert it.home is not None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_links, it, it.home.peers, quietly)
            yield it
            tasks.cancel_scope.cancel()


async def introduce(homes: list[Path]) -> None:
    """Have machines know each other's keys and addresses, all of them running at one time."""
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(machine(home)) for home in homes]
        for here in nodes:
            keys = here.authorizer
            assert isinstance(keys, AuthorizedKeys)
            assert here.home is not None
            for there in nodes:
                if there is not here:
                    keys.add(there.node_id)
                    here.home.peers.remember(there.node_id, addresses=there.addresses)


def are_linked(one: Node, other: Node) -> bool:
    return one.endpoint.connection(other.node_id) is not None


async def start_two_anew(paths: list[Path], third: Node) -> bool:
    """Start two machines on new ports, which know the third; return whether they meet."""
    for path in paths:
        home = machine(path).home
        assert home is not None
        home.peers.remember(third.node_id, addresses=third.addresses)
    async with up(paths[0]) as one, up(paths[1]) as other:
        await eventually(lambda: are_linked(one, third) and are_linked(other, third), 20.0)
        try:
            await eventually(lambda: are_linked(one, other), 6.0)
        except TimeoutError:
            return False
        return True


async def test_two_machines_that_both_move_find_each_other_by_a_third(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "other", "third")]
    await introduce(paths)
    async with up(paths[2]) as third:
        assert await start_two_anew(paths[:2], third)


async def test_without_it_they_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the addresses that they have lead nowhere, and the third dials nobody else."""

    async def ask_nobody(*_: object) -> bool:
        return False

    monkeypatch.setattr("mesh.node.ask_around", ask_nobody)
    paths = [tmp_path / name for name in ("one", "other", "third")]
    await introduce(paths)
    async with up(paths[2]) as third:
        assert not await start_two_anew(paths[:2], third)


async def test_a_dial_asks_and_tries_once_more() -> None:
    async with node() as here, node() as there, node() as third:
        await there.connect(third.ticket())
        await here.connect(third.ticket())
        here.directory.told(there.node_id, (NOWHERE,))
        peer = await here.connect(there.node_id)
        connection = await peer.connection()
        assert connection.remote_address == ("127.0.0.1", there.endpoint.port)


async def test_a_key_alone_is_enough_where_somebody_knows_more() -> None:
    async with node() as here, node() as there, node() as third:
        await there.connect(third.ticket())
        with pytest.raises(UnknownPeer):
            await here.connect(there.node_id)
        await here.connect(third.ticket())
        await here.connect(there.node_id)


async def test_nobody_is_believed() -> None:
    """A wrong address costs a dial: who is there has another key."""
    async with node() as here, node() as impostor, node() as third:
        sought = SecretKey.generate().node_id
        await here.connect(third.ticket())

        async def lie(_: object) -> dict[str, list[str]]:
            return {"addresses": [f"127.0.0.1:{impostor.endpoint.port}"]}

        third.endpoint._services._services.pop("node.find")
        third.endpoint.register_call("node.find", lie, scope="node")  # type: ignore[arg-type]
        here.directory.told(sought, (NOWHERE,))
        with pytest.raises(Unreachable, match="the node there is"):
            await here.connect(sought)
        assert len(here.directory.addresses(sought)) == 2


def answer(node: Node, addresses: list[str], after: float = 0.0) -> None:
    """Have `node` say of everybody that it is there, after so many seconds."""

    async def say(_: object) -> dict[str, list[str]]:
        await anyio.sleep(after)
        return {"addresses": addresses}

    node.endpoint._services._services.pop("node.find")
    node.endpoint.register_call("node.find", say, scope="node")  # type: ignore[arg-type]


async def test_who_lies_first_shuts_nobody_else_out() -> None:
    async with node() as here, node() as there, node() as liar, node() as third:
        await here.connect(liar.ticket())
        await here.connect(third.ticket())
        answer(liar, [f"127.0.0.1:{port}" for port in range(1, 100)])
        answer(third, [f"127.0.0.1:{there.endpoint.port}"], after=0.2)
        here.directory.told(there.node_id, (NOWHERE,))
        await here.connect(there.node_id)


async def test_what_is_heard_of_whom_is_there_by_now_is_not_noted() -> None:
    async with node() as here, node() as there, node() as liar:
        await here.connect(liar.ticket())
        await here.connect(there.ticket())
        answer(liar, ["192.0.2.1:1"])
        assert await finding._ask(here, there.node_id)
        assert ("192.0.2.1", 1) not in here.directory.addresses(there.node_id)


async def test_only_of_whom_is_there_and_only_to_whom_may_ask() -> None:
    async with node() as here, node() as there, node() as third, node(allow_any(("x",))) as strict:
        connection = await (await here.connect(third.ticket())).connection()
        known = SecretKey.generate().node_id
        third.directory.told(known, (("192.0.2.1", 1),))
        assert await connection.call("node.find", str(known)) == {"addresses": []}
        await there.connect(third.ticket())
        third.directory.told(there.node_id, tuple(("192.0.2.1", port) for port in range(1, 17)))
        answer = await connection.call("node.find", str(there.node_id))
        assert isinstance(answer, dict)
        found = answer["addresses"]
        assert isinstance(found, list)
        assert found[0] == f"127.0.0.1:{there.endpoint.port}"
        assert len(found) == MAX_FOUND
        for wrong in (None, 1, "", "gpu-a", str(known)[:10]):
            with pytest.raises(ProtocolError):
                await connection.call("node.find", wrong)
        refused = await (await here.connect(strict.ticket())).connection()
        with pytest.raises(AccessDenied):
            await refused.call("node.find", str(known))


async def test_who_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "ASK_SECONDS", 0.2)
    async with node() as here, node() as third:
        await here.connect(third.ticket())

        async def hang(_: object) -> None:
            await anyio.sleep_forever()

        third.endpoint._services._services.pop("node.find")
        third.endpoint.register_call("node.find", hang, scope="node")  # type: ignore[arg-type]
        sought = SecretKey.generate().node_id
        here.directory.told(sought, (NOWHERE,))
        with anyio.fail_after(3), pytest.raises(Unreachable):
            await here.connect(sought)
