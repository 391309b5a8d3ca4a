"""What a node knows of others: names, addresses, and how far the last dial got.

It joins what the home has on disk (peers book, authorized keys) with what this process learned. A
node without a home keeps all of it in memory.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Mapping
from typing import TypeVar

from auth import (
    AuthorizedKeys,
    IdentityError,
    MeshError,
    NodeId,
    SocketAddress,
    Ticket,
    match_node,
)
from mesh.errors import UnknownPeer
from mesh.peerbook import MAX_ADDRESSES, KnownPeer, PeerBook, suggest_petname
from mesh.status import PeerState, state_after
from transport import PeerAddress

__all__ = ["Directory"]

MAX_REMEMBERED = 4096
"""Peers of which this process keeps addresses and the last dial; the oldest make room."""

SEEN_RESOLUTION = 300.0
"""Seconds between two notes in the peers book when nothing but the time has changed."""

_TICKET = re.compile(r"mesh(1|[2-9][a-z2-7]{32})", re.IGNORECASE)
"""How a ticket begins; one of another version is told from a name by its length."""

MAX_SHOWN = 64
"""Characters of an unusable name that an error shows: the longest name has as many."""

_Value = TypeVar("_Value")


class Directory:
    """The peers a node knows.

    Args:
        book: the peers book of the home, if there is one.
        keys: the authorizer, if it is a file of keys: its petnames count too.
    """

    def __init__(self, book: PeerBook | None = None, keys: AuthorizedKeys | None = None) -> None:
        self._book = book
        self._keys = keys
        self._addresses: dict[NodeId, tuple[SocketAddress, ...]] = {}
        self._heard: dict[NodeId, tuple[SocketAddress, ...]] = {}
        self._dials: dict[NodeId, tuple[PeerState, str | None]] = {}

    def names(self) -> Mapping[NodeId, str | None]:
        """Return every peer that is known, each with its petname if it has one."""
        names: dict[NodeId, str | None] = dict.fromkeys((*self._addresses, *self._dials))
        if self._keys is not None:
            names |= {entry.node_id: entry.petname for entry in self._keys.entries()}
        if self._book is not None:
            for node_id, petname in self._book.petnames().items():
                names[node_id] = petname or names.get(node_id)
        return names

    def label(self, node_id: NodeId) -> str:
        """Return the name of a peer for messages: the petname with the short id, or that alone."""
        return KnownPeer(node_id, self.names().get(node_id)).label

    def name_in(self, error: MeshError) -> None:
        """Put the petname beside the short id of the peer that `error` is about, if it has one."""
        who, _, where = (error.peer or "").partition(" ")
        with contextlib.suppress(MeshError):  # a broken peers book is another story
            for node_id, petname in self.names().items():
                if petname is not None and who == node_id.short:
                    error.peer = f"{KnownPeer(node_id, petname).label} {where}".rstrip()

    def resolve(self, target: Ticket | NodeId | str) -> tuple[PeerAddress, bytes]:
        """Return whom `target` means, where it may be, and the invite if a ticket brought one.

        Raises:
            TicketError: it begins like a ticket and is none.
            IdentityError: a name that could mean several peers.
            UnknownPeer: a name that means none.
        """
        if isinstance(target, str):
            text = target.strip()
            names = self.names()
            if _TICKET.match(text) and text not in names.values():
                target = Ticket.decode(text)
            else:
                target = _match(text, names)
        if isinstance(target, NodeId):
            return PeerAddress(target, self.addresses(target)), b""
        known = self.addresses(target.node_id)
        addresses = tuple(dict.fromkeys((*target.addresses, *known)))
        return PeerAddress(target.node_id, addresses), target.invite or b""

    def addresses(self, node_id: NodeId) -> tuple[SocketAddress, ...]:
        """Return where a peer may be, the likeliest first."""
        entry = None if self._book is None else self._book.get(node_id)
        kept = () if entry is None else entry.addresses
        heard, known = self._heard.get(node_id, ()), self._addresses.get(node_id, ())
        return tuple(dict.fromkeys((*heard, *known, *kept)))[:MAX_ADDRESSES]

    def no_address(self, node_id: NodeId) -> UnknownPeer:
        """Return the error for a peer that can't be dialled since nobody said where it is."""
        names = self.names()
        if node_id in names:
            why = "its key is known, but no address of it"
        else:
            why = "neither this key nor an address of it is known here"
        looked = ["open connections", "addresses from tickets"]
        if self._book is not None:
            looked.append(f"the peers book {self._book.path}")
        return UnknownPeer(
            f"connection to {self.label(node_id)}",
            why=f"{why} (looked in {', '.join(looked)})",
            fix="Give a ticket, which carries addresses: `mesh invite` on that machine prints one, "
            "for `mesh join mesh1...` here.",
        )

    def last_dial(self, node_id: NodeId) -> tuple[PeerState, str | None]:
        """Return how far the last dial of this process got, and what went wrong after that."""
        return self._dials.get(node_id, (PeerState.DISCOVERED, None))

    def failed(self, node_id: NodeId, error: MeshError) -> None:
        """Note that a dial, or the connection it led to, failed."""
        _put(self._dials, node_id, state_after(error))

    def reached(self, node_id: NodeId, addresses: Iterable[SocketAddress]) -> None:
        """Note that a peer proved its key, and where it can be dialled, the best address first."""
        self._heard.pop(node_id, None)
        _put(self._dials, node_id, (PeerState.AUTHENTICATED, None))
        known = tuple(dict.fromkeys((*addresses, *self._addresses.get(node_id, ()))))
        _put(self._addresses, node_id, known[:MAX_ADDRESSES])

    def heard(self, node_id: NodeId, addresses: Iterable[SocketAddress]) -> None:
        """Note where others say that a peer is, until it is reached; the book is to know better."""
        _put(self._heard, node_id, tuple(addresses))

    def told(self, node_id: NodeId, addresses: tuple[SocketAddress, ...], host: str = "") -> None:
        """Note where a peer says that it is, in place of all that was known; save it in the book.

        Args:
            node_id: which peer.
            addresses: where it says that it is.
            host: what it calls its host: a peer without a petname is called like that from now
                on, or as similarly as is free.

        Raises:
            HomeError: the book can't be written.
        """
        _put(self._addresses, node_id, addresses[:MAX_ADDRESSES])
        if self._book is None:
            return
        now = time.time()
        old = self._book.get(node_id)
        names = self.names()
        # The name from an invite stands in the authorized keys, which programs don't read.
        petname = names.get(node_id) or suggest_petname(host, names.values())
        if petname in self._book.petnames().values():
            petname = None
        if (
            old is None
            or old.addresses != addresses
            or petname is not None
            or now - (old.seen or 0) > SEEN_RESOLUTION
        ):
            self._book.remember(node_id, petname=petname, addresses=addresses, seen=now)


def _match(text: str, names: Mapping[NodeId, str | None]) -> NodeId:
    try:
        return match_node(text, names)
    except IdentityError as error:
        # A whole key is somebody, known or not; of a name that means nobody nothing can be said.
        try:
            return NodeId.parse(text)
        except IdentityError:
            typed = text.lower()
            if any(str(n).startswith(typed) or n.short.startswith(typed) for n in names):
                raise error from None
            if len(text) > MAX_SHOWN:
                raise UnknownPeer(
                    f"connection to '{text[:MAX_SHOWN]}...'",
                    why=f"{len(text)} characters are too many for a name or a node id",
                    fix="Use a ticket, which begins with mesh1, or see `mesh peers`.",
                ) from None
            raise UnknownPeer(
                f"connection to '{text}'",
                why=error.why,
                fix="Use a ticket (`mesh invite` on that machine prints one), or see `mesh peers`.",
            ) from None


def _put(table: dict[NodeId, _Value], node_id: NodeId, value: _Value) -> None:
    table.pop(node_id, None)
    table[node_id] = value
    if len(table) > MAX_REMEMBERED:
        del table[next(iter(table))]
