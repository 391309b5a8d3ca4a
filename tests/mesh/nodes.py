"""Nodes of the mesh in one process, over real sockets on loopback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio

import tensor_bridge  # noqa: F401 - and with it torch, before the loop of a test runs
from auth import Authorizer, SecretKey, allow_any
from mesh import Home, Node
from tests.placements import placed
from transport import EndpointConfig

__all__ = ["LOOPBACK", "eventually", "machine", "node", "program"]

LOOPBACK = EndpointConfig(bind="127.0.0.1:0", liveness=1.0, linger=1.0, **placed())


def node(authorizer: Authorizer | None = None, *, tensors: bool = False) -> Node:
    """An application's node that admits everybody, unless told otherwise."""
    return Node.embedded(
        key=SecretKey.generate(),
        authorizer=authorizer or allow_any(),
        config=LOOPBACK,
        tensors=tensors,
    )


def machine(home: Path) -> Node:
    """A machine's node, without the tensors that `Node.peer` offers: torch takes seconds."""
    where = Home(home)
    key = where.create()
    return Node(key=key, authorizer=where.authorized_keys(key.node_id), home=where, config=LOOPBACK)


def program(*tickets: object, home: Path, key: SecretKey | None = None) -> Node:
    """A program's node."""
    return Node.client(*tickets, home=home, key=key, config=LOOPBACK)  # type: ignore[arg-type]


async def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until `condition` holds."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - the conditions are of all kinds
            await anyio.sleep(0.01)
