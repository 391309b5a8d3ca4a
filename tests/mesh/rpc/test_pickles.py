"""Pickles: refused with the connection, unless both sides have said that they want them."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from auth import Grant, allow_any
from mesh import rpc
from mesh.nn import RemoteModule
from mesh.rpc import Agent, PickleRefused, RpcError, Unsendable
from mesh.rpc.encoding.pickled import may_unpickle
from tensor_bridge import describe, encode_meta
from tests.mesh import nodes
from tests.mesh.rpc import exposures
from tests.mesh.rpc.nodes import agents
from transport import ProtocolError, cbor

pytestmark = [pytest.mark.anyio, pytest.mark.attack]

WITH = ("rpc:pickle", "rpc:call", "tensor", "node")


class Gadget:
    """What runs a function of its writer's choice where it is read."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


def private_sum(first: Any, second: Any) -> Any:
    """A function that nobody has exposed."""
    return first + second


def is_here(holder: exposures.Unregistered) -> bool:
    module: RemoteModule = holder.module  # type: ignore[attr-defined]
    return module.get_module_rref().is_owner() and (module.on, module.device) == ("b", "cpu")


async def pickling(a: Agent, b: Agent) -> None:
    a.pickles = b.pickles = True


@pytest.mark.parametrize("scopes", [("*",), ("rpc",), ("rpc:call",), ("rpc:*",)])
async def test_a_gadget_ends_the_connection_and_runs_nothing(
    scopes: tuple[str, ...], tmp_path: Path
) -> None:
    async with agents(2, last=allow_any(scopes)) as (a, b):
        a.pickles = True
        made = tmp_path / "made"
        for function, args in (
            (exposures.echo, (Gadget(os.mkdir, str(made)),)),
            (private_sum, (1, 2)),
        ):
            await a._node.dial(b.node_id)
            connection = a._node.endpoint.connections[0]
            with pytest.raises(Exception, match=r"pickle|protocol"):
                await a.call(b.node_id, function, args)
            await nodes.eventually(lambda connection=connection: connection.closed is not None)  # type: ignore[misc]
        assert not made.exists()


def hand_made(made: Path, kind: str, *, hidden: bool) -> Any:
    """A call whose bytes no packer has seen, with a pickle that makes a directory."""
    data = pickle.dumps(Gadget(os.mkdir, str(made)))
    target = {
        "argument": {"kind": "function", "name": "tests.mesh.rpc.exposures.echo"},
        "operator": {"kind": "operator", "name": "torch.add"},
        "function": {"kind": "pickled"},
    }[kind]
    items: list[Any] = [["t", 1], ["K", 0, [], []], ["d", 0]]
    if kind == "function":
        items = [["K", 0, [], []], ["t", 0], ["d", 0]]
    meta = encode_meta(describe(torch.frombuffer(bytearray(data), dtype=torch.uint8)))
    tensors = [[cbor.encode(meta, max_size=1024), True]]
    head = {"target": target, "seconds": 5, "tensors": tensors}
    frame = [*(cbor.encode(each, max_size=1024) for each in (head, items)), data]
    return [*frame, {"create": [bytes(16), bytes(range(16))]}] if hidden else frame


@pytest.mark.parametrize("hidden", [False, True], ids=["answered", "kept"])
@pytest.mark.parametrize("kind", ["argument", "operator", "function"])
async def test_a_hand_made_gadget_ends_the_connection_and_creates_nothing(
    kind: str, hidden: bool, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    async with agents(2, last=allow_any(("*",))) as (a, b):
        await a._node.dial(b.node_id)
        (connection,) = a._node.endpoint.connections
        with pytest.raises(ProtocolError):
            await connection.call("rpc.call", hand_made(made, kind, hidden=hidden))
        await nodes.eventually(lambda: connection.closed is not None)
        assert "pickle" in str(connection.closed)
        assert not made.exists()
        assert len(b.owned) == 0
        assert b.service._room.used == 0


@pytest.mark.parametrize("kind", ["argument", "function"])
async def test_the_hand_made_gadget_is_one(kind: str, tmp_path: Path) -> None:
    """The positive control: where the scope is granted by its name, the same bytes run."""
    made = tmp_path / "made"
    async with agents(2, last=allow_any(WITH)) as (a, b):
        await a._node.dial(b.node_id)
        (connection,) = a._node.endpoint.connections
        with contextlib.suppress(ProtocolError):  # what it leaves is no function
            await connection.call("rpc.call", hand_made(made, kind, hidden=False))
        assert made.exists()


async def test_the_same_gadget_runs_where_it_is_allowed(tmp_path: Path) -> None:
    """The positive control: with the scope by its name, and the option, it does run."""
    async with agents(2, last=allow_any(WITH)) as (a, b):
        await pickling(a, b)
        made = tmp_path / "made"
        await a.call(b.node_id, exposures.echo, (Gadget(os.mkdir, str(made)),))
        assert made.exists()


async def test_a_callees_pickle_is_refused_by_the_caller() -> None:
    async with agents(2) as (a, b):
        b.pickles = True
        await a._node.dial(b.node_id)
        (connection,) = a._node.endpoint.connections
        with pytest.raises(PickleRefused):
            await a.call(b.node_id, exposures.unsendable)
        await nodes.eventually(lambda: connection.closed is not None)


async def test_without_the_option_nothing_is_pickled() -> None:
    async with agents(2, last=allow_any(WITH)) as (a, b):
        with pytest.raises(Unsendable):
            await a.call(b.node_id, exposures.echo, (exposures.Unregistered(),))
        with pytest.raises(RpcError, match="exposes nothing"):
            await a.call(b.node_id, private_sum, (1, 2))


async def test_what_old_programs_do_works_where_it_is_allowed() -> None:
    async with agents(2, last=allow_any(WITH)) as (a, b):
        await pickling(a, b)
        assert await a.call(b.node_id, private_sum, (1, 2)) == 3
        tensor = await a.call(b.node_id, private_sum, (torch.ones(100_000), 1))
        assert torch.equal(tensor, torch.full((100_000,), 2.0))
        with pytest.raises(TypeError):
            await a.call(b.node_id, private_sum, (1, None))
        counted = collections.Counter("abca")
        assert await b.call(a.node_id, exposures.echo, (1,)) == 1
        ref = await a.remote(b.node_id, private_sum, (counted, counted))
        assert await a.invoke(ref, "most_common", (1,)) == [("a", 4)]
        nested = exposures.Counter(3)
        nested.secret = ref  # type: ignore[assignment]
        with pytest.raises(rpc.RpcError):
            await a.call(b.node_id, exposures.echo, (lambda: 1,))


async def test_a_remote_module_travels_within_a_pickle_and_in_no_other_way() -> None:
    async with agents(2, last=allow_any(WITH)) as (a, b):
        await pickling(a, b)
        holder: Any = exposures.Unregistered()
        ref = await a.remote(b.node_id, exposures.Counter, (3,))
        holder.module = RemoteModule._of("b", "cpu", ref)
        assert await a.call(b.node_id, is_here, (holder,)) is True
        with pytest.raises(RuntimeError, match="can only be pickled when using RPC"):
            pickle.dumps(holder)
        with pytest.raises(RuntimeError, match="Can not pickle rref"):
            pickle.dumps(ref)


async def test_grants_say_it_by_name() -> None:
    for scopes, allowed in (
        ({"rpc:pickle"}, True),
        ({"*"}, False),
        ({"rpc"}, False),
        ({"rpc:*"}, False),
    ):
        assert may_unpickle(Grant(frozenset(scopes))) is allowed
    assert not may_unpickle(None)
