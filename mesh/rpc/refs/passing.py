"""References inside messages: who may have which, and who is told before they travel.

    ["R", "own", ref]                          the reader owns it
    ["R", "fork", owner, ref, fork, where]     the reader gets a fork of it, known to its owner

Whoever packs a fork of a third node's value has the owner told first (`Outgoing.settle`), so that
there is never a holder whom the owner does not know.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from auth import IdentityError, NodeId, PeerIdentity, SocketAddress
from mesh.rpc.errors import RpcError
from mesh.rpc.names.targets import ID_BYTES
from mesh.rpc.refs.holding import Held
from mesh.rpc.refs.owned import Owned, new_id
from mesh.rpc.refs.reference import RRef
from mesh.rpc.wire import Fork, RefNotes, Share
from transport import AddressError, CborValue, ProtocolError, format_address, parse_address

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent

__all__ = ["Incoming", "Outgoing", "held"]

MAX_ADDRESSES = 8


class Outgoing:
    """The references of a message to one peer.

    Args:
        agent: whose message it is.
        to: who gets it.
    """

    def __init__(self, agent: Agent, to: NodeId) -> None:
        self._agent = agent
        self._to = to
        self._refs: list[RRef[Any]] = []
        self._shares: list[tuple[NodeId, Share]] = []
        self._adopted: list[Fork] = []

    def pack(self, ref: Any) -> list[CborValue] | None:
        """Return the item for a reference, None if it is something else.

        Raises:
            RpcError: nobody here holds it any more.
        """
        if not isinstance(ref, RRef):
            return None
        if not ref.agent.bridge.is_open:
            raise RpcError(
                "passing on of a remote reference",
                why="the agent that it belongs to has been shut down, and holds nothing any more: "
                "Cannot call fork an UserRRef after deletion.",
            )
        self._refs.append(ref)  # kept until the message has gone: its own fork holds the value
        state, owner = ref.state, ref.owner_id
        if isinstance(state, Owned):
            if self._to == owner:
                return ["R", "own", self._agent.lend_to_self(state)]
            fork = self._agent.owned.adopt(state, self._to, self._agent.now())
            self._adopted.append(fork)
            self._agent.watch()
            return self._item(owner, fork)
        if owner == self._to:
            return ["R", "own", state.fork.ref]
        fork = Fork(state.fork.ref, new_id())
        self._shares.append((owner, Share(fork.ref, fork.fork, self._to)))
        return self._item(owner, fork)

    @property
    def has_any(self) -> bool:
        """Whether the message has references."""
        return bool(self._refs)

    async def settle(self) -> None:
        """Return once every owner knows of what this message gives away.

        Raises:
            RefLost: an owner has no such value any more.
            Exception: why a value of these never came to be.
        """
        for ref in self._refs:
            if ref.created is not None:
                await self._agent.bridge.until_done(ref.created)
        for owner, share in self._shares:
            await self._agent.tell(owner, RefNotes(shared=(share,)))

    def undo(self) -> None:
        """Take back what was given away in a message that did not go."""
        for fork in self._adopted:
            self._agent.owned.drop(fork, self._to)
        # Forks of third nodes' values lapse: their holder never confirms them.

    def _item(self, owner: NodeId, fork: Fork) -> list[CborValue]:
        where: list[CborValue] = [
            format_address(address) for address in self._agent.addresses_of(owner)[:MAX_ADDRESSES]
        ]
        return ["R", "fork", owner.raw, fork.ref, fork.fork, where]


class Incoming:
    """The references of a message from one peer.

    Args:
        agent: whose message it is.
        peer: who sent it.
    """

    def __init__(self, agent: Agent, peer: PeerIdentity) -> None:
        self._agent = agent
        self._peer = peer

    def unpack(self, item: list[CborValue]) -> RRef[Any]:
        """Return the reference that an item stands for.

        Raises:
            ProtocolError: it is malformed.
            RefLost: it is this node's own, and the peer does not hold it.
        """
        match item:
            case [_, "own", bytes(ref)] if len(ref) == ID_BYTES:
                by = self._peer.node_id
                is_own = by == self._agent.node_id
                owned = self._agent.own_value(ref) if is_own else self._agent.owned.held(ref, by)
                return RRef._of(self._agent, owned)
            case [_, "fork", bytes(raw), bytes(ref), bytes(fork), list(where)] if (
                len(ref) == len(fork) == ID_BYTES and len(where) <= MAX_ADDRESSES
            ):
                owner = _node(raw)
                if owner == self._agent.node_id:
                    raise ProtocolError("reading of a reference", why="a fork of the reader's own")
                return self._agent.take_fork(owner, Fork(ref, fork), _addresses(where), self._peer)
        raise ProtocolError("reading of a reference", why="it is malformed")


def held(owner: NodeId, fork: Fork) -> Held:
    """Return the state of a fork that has come from elsewhere: its owner has it already."""
    state = Held(owner, fork, created=Future())
    state.created.set_result(None)
    return state


def _node(raw: bytes) -> NodeId:
    try:
        return NodeId(raw)
    except IdentityError as error:
        raise ProtocolError("reading of a reference", why=str(error)) from error


def _addresses(where: list[CborValue]) -> tuple[SocketAddress, ...]:
    try:
        return tuple(parse_address(str(text)) for text in where)
    except AddressError as error:
        raise ProtocolError("reading of a reference", why=str(error)) from error
