"""Joining by a list of peers: whoever of them is there will do, and who is not is named."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import anyio

from auth import MeshError, NodeId, Ticket
from transport import Unreachable

if TYPE_CHECKING:
    from mesh.node import Node

__all__ = ["join"]

_log = logging.getLogger("quicmesh.node")


async def join(node: Node, targets: Iterable[Ticket | NodeId | str]) -> None:
    """Connect to all of `targets` at once, this node aside: one list may go to every node of it.

    Where one of them at least is reached, the others are warned of, each with its reason.

    Args:
        node: who joins, open.
        targets: as for `Node.connect`.

    Raises:
        Unreachable: none of several was reached; the message has the reason for each.
        MeshError: as from `Node.connect`, of a single one; or of one that can't be used as written.
    """
    asked = [each for each in targets if node.directory.resolve(each)[0].node_id != node.node_id]
    failures: list[MeshError] = []

    async def connect(target: Ticket | NodeId | str) -> None:
        try:
            await node.connect(target)
        except MeshError as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        for target in asked:
            tasks.start_soon(partial(connect, target))
    if failures and len(failures) == len(asked):
        if len(asked) == 1:
            raise failures[0]
        raise Unreachable(
            f"joining through any of {len(asked)} peers",
            why="; ".join(map(str, failures)),
            fix="One that is up, and that lets this node in, is enough.",
        )
    for failure in failures:
        _log.warning("joined without one of the peers: %s", failure)
