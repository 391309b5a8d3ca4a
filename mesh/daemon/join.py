"""Enrolment: the machine of a ticket lets this one in, and this one lets it in."""

from __future__ import annotations

import dataclasses

import anyio
import anyio.to_thread

from auth import AuthorizedKeys, IdentityError, NodeId, Ticket
from mesh.errors import NodeError
from mesh.home import Home
from mesh.node import Node
from mesh.peerbook import check_free, suggest_petname
from mesh.services import announce
from transport import CborValue

__all__ = ["Joined", "join", "join_without_daemon"]


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """Who was joined. `petname` is what this machine calls it from now on, if anything."""

    node_id: NodeId
    petname: str | None

    def as_message(self) -> dict[str, CborValue]:
        """Return the form for the wire and for ``--json``."""
        return {
            "node_id": str(self.node_id),
            "short": self.node_id.short,
            "petname": self.petname,
        }


async def join(
    node: Node, ticket: Ticket, petname: str | None = None, *, stays: bool = True
) -> Joined:
    """Enrol the machine of `node` with the machine of `ticket`, both ways.

    It dials with the ticket's invite, tells where this machine listens, remembers what the other
    told, and authorizes its key here. Joining twice does no harm.

    Args:
        node: this machine's node, with its home and its file of authorized keys.
        ticket: of the machine to join; without an invite it must know this machine already.
        petname: what to call it; by default what it calls its own host, if that is free.
        stays: whether `node` can still be dialled after this program.

    Raises:
        AccessDenied: the machine refused; the invite is spent, expired, or of another machine.
        Unreachable: no address of the ticket led there.
        IdentityError: the petname can't be one, or belongs to another peer.
        NodeError: `node` is not a machine's node.
    """
    keys, home = node.authorizer, node.home
    if home is None or not isinstance(keys, AuthorizedKeys):
        raise NodeError("joining", why="only a machine with a state directory can join another")
    if ticket.node_id == node.node_id:
        raise IdentityError("joining", why="the ticket is of this very machine")
    if petname is not None:
        check_free(petname, ticket.node_id, node.directory.names())
    # Trusted before it is dialled: a connection keeps what the peer could do here when it was made.
    is_new = ticket.node_id not in {entry.node_id for entry in keys.entries()}
    try:
        if is_new:
            await anyio.to_thread.run_sync(keys.add, ticket.node_id)
        peer = await node.connect(ticket)
        host = await announce(node, await peer.connection(), stays=stays)
        known = home.peers.get(ticket.node_id)
        if petname is None and (known is None or known.petname is None):
            petname = suggest_petname(host, node.directory.names().values())
        return await anyio.to_thread.run_sync(_name, home, keys, ticket.node_id, petname)
    except BaseException:
        if is_new:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(keys.remove, ticket.node_id)
        raise


async def join_without_daemon(home: Home, ticket: Ticket, petname: str | None = None) -> Joined:
    """Do the same where no daemon runs: open the machine's node for as long as it takes.

    Raises:
        HomeError, KeyFileError: the home or its key can't be used.
    """
    key = await anyio.to_thread.run_sync(home.create)
    node = Node(key=key, authorizer=home.authorized_keys(key.node_id), home=home)
    async with node:
        return await join(node, ticket, petname, stays=False)


def _name(home: Home, keys: AuthorizedKeys, node_id: NodeId, petname: str | None) -> Joined:
    entry = home.peers.remember(node_id, petname=petname)
    held = next((key for key in keys.entries() if key.node_id == node_id), None)
    if held is not None and held.petname is None and entry.petname is not None:
        keys.add(node_id, entry.petname, held.scopes, held.expires_at)
    return Joined(node_id, entry.petname)
