"""Keeps a connection to every machine in the peers book, and tells each where to find this one.

That is how machines find each other again after a restart on other ports: whoever starts dials
those it knows, and both sides write down the addresses they learn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from auth import AccessDenied, MeshError, NodeId
from mesh.errors import HomeError, IdentityInUse
from mesh.node import Node
from mesh.peerbook import PeerBook
from mesh.services import announce
from transport import Backoff

__all__ = ["keep_links"]

MAX_LINKS = 256
"""Machines kept connected; those with petnames first. Others are dialled when they are used."""

MAX_DIALS = 8
"""Dials at a time: a start with a full book is no burst of handshakes."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
"""Seconds between two dials of one machine."""

POLL_SECONDS = 1.0
"""How often the book is looked at for machines that were added, as by ``mesh join``."""


async def keep_links(
    node: Node,
    book: PeerBook,
    refused: Callable[[NodeId, MeshError], None],
    *,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> None:
    """Serve until cancelled.

    Args:
        node: whose links.
        book: the machines to keep connected.
        refused: called when a machine refuses this node, once for each reason it gives.
        sleep: waits for some seconds.
    """
    kept: set[NodeId] = set()
    dials = anyio.CapacityLimiter(MAX_DIALS)

    async def keep(node_id: NodeId) -> None:
        try:
            await _keep(node, book, node_id, dials, refused, sleep)
        finally:
            kept.discard(node_id)

    async with anyio.create_task_group() as tasks:
        while True:
            for entry in _entries(book):
                if len(kept) < MAX_LINKS and entry not in kept and entry != node.node_id:
                    kept.add(entry)
                    tasks.start_soon(keep, entry)
            await sleep(POLL_SECONDS)


async def _keep(
    node: Node,
    book: PeerBook,
    node_id: NodeId,
    dials: anyio.CapacityLimiter,
    refused: Callable[[NodeId, MeshError], None],
    sleep: Callable[[float], Awaitable[None]],
) -> None:
    backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
    refusal: str | None = None
    while node_id in _entries(book):
        try:
            async with dials:
                connection = await node.dial(node_id, once=True)
                if connection.outbound:
                    await announce(node, connection)
        except MeshError as error:
            # `Node.peers` shows how far it got and why; the next try may do better.
            if isinstance(error, AccessDenied | IdentityInUse) and error.why != refusal:
                refusal = error.why
                refused(node_id, error)
        else:
            await connection.wait_closed()
            backoff.reset()
            refusal = None
        await sleep(backoff.pause())


def _entries(book: PeerBook) -> list[NodeId]:
    try:
        return [entry.node_id for entry in book.entries()]
    except HomeError:
        return []  # somebody is editing it; the command says what is wrong with it
