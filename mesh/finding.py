"""Asks peers that are there where another one is, to whom no address leads that is known here.

Two machines that start anew on other ports know only each other's old ones. Whoever both dial, as
machines do that know each other, knows the new ones: each has just come from there and said where
else it is. An answer is a hint of where to dial, and the key is proved as always.
"""

from __future__ import annotations

import logging
from itertools import zip_longest
from typing import TYPE_CHECKING

import anyio

from auth import MeshError, NodeId, SocketAddress
from mesh.services import MAX_FOUND, parse_announcement
from transport import Connection

if TYPE_CHECKING:
    from mesh.node import Node

__all__ = ["ASK_SECONDS", "ask_around"]

ASK_SECONDS = 1.0
"""How long all answers may take: they come from peers that are there, within a round trip."""

MAX_ASKED = 8
"""Peers asked at a time, machines first; and addresses noted, so that each of them has one."""

_log = logging.getLogger("quicmesh.node")


async def ask_around(node: Node, sought: NodeId, deadline: float) -> bool:
    """Ask where `sought` is, for at most `ASK_SECONDS`; note what is heard in the directory.

    Args:
        node: who asks its peers.
        sought: whom no address has led to.
        deadline: when the dial is to be over, by the event loop's clock. Where that leaves no time
            for answers, they are waited for beside it, and the next dial is to know.

    Returns:
        Whether somebody has given an address that was not known.
    """
    if not node.endpoint.connections:
        return False
    if anyio.current_time() + ASK_SECONDS >= deadline:
        node.endpoint.start_soon(_ask, node, sought)
        return False
    return await _ask(node, sought)


async def _ask(node: Node, sought: NodeId) -> bool:
    known = set(node.directory.addresses(sought))
    heard: list[list[SocketAddress]] = []

    async def ask(connection: Connection) -> None:
        try:
            reply = await connection.call(
                "node.find", str(sought), timeout=ASK_SECONDS, patience=0.0
            )
            told = parse_announcement(reply)[0][:MAX_FOUND]
            heard.append([address for address in told if address not in known])
        except MeshError as error:
            _log.debug("%s does not say where %s is: %s", connection.peer, sought.short, error)

    # Programs of other machines have no reason to know more than the machines.
    around = sorted(node.endpoint.connections, key=lambda each: each.peer.delegation is not None)
    asked = [each for each in around if each.peer.node_id != sought][:MAX_ASKED]
    with anyio.move_on_after(ASK_SECONDS):
        async with anyio.create_task_group() as tasks:
            for connection in asked:
                tasks.start_soon(ask, connection)
    # In turns, so that who answers first with nonsense is no reason not to hear the others.
    fresh = dict.fromkeys(
        address for turn in zip_longest(*heard) for address in turn if address is not None
    )
    if fresh and node.endpoint.connection(sought) is None:
        node.directory.heard(sought, list(fresh)[:MAX_ASKED])
    return bool(fresh)
