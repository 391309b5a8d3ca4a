"""Which ranks of a group run on one host, and how those get the memory that they share.

All ranks take the same three steps, whatever each of them finds, over the connections that they
have proved themselves on:

1. Each tells the others where it runs, in marks that say nothing to anybody elsewhere, and are good
   for this group and this rank alone (see `tensor_bridge.lanes.shared.host`).
2. The first rank of each host makes the memory, and offers each other one there an address to
   connect to and a secret to show (see `mesh.distributed.hosting`).
3. Each tells whether it has got it. Unless all have, none uses it.
"""

from __future__ import annotations

import logging
import struct
import time

from anyio.from_thread import BlockingPortal

from auth import MeshError, NodeId
from mesh.collective import Hosts, Operation, Signature
from mesh.collective.exchange import Messages
from mesh.collective.host import MAX_PLACES
from mesh.distributed.hosting import OFFER_BYTES, Reception, join_memory
from tensor_bridge.lanes.shared.host import ASKER, FACTS, MARK_BYTES, apart, here, unavailable

__all__ = ["share_memory"]

MEETING_SECONDS = 5.0
"""For the processes of one host to get together; it takes milliseconds."""

_NOT_HERE = bytes(len(FACTS) * MARK_BYTES)
"""The marks of a rank that shares no memory."""

_VOTE = struct.Struct("<BI")
"""Whether a rank has what it needs, and which is the first of its host."""

_log = logging.getLogger("quicmesh.collective")


def share_memory(
    portal: BlockingPortal,
    exchange: Messages,
    nodes: tuple[NodeId, ...],
    nonce: bytes,
    *,
    is_off: bool,
    deadline: float,
) -> Hosts | None:
    """Return which ranks share memory, and this rank's; None if none do. All return alike.

    Args:
        portal: into the event loop of the node.
        exchange: of the group, connected.
        nodes: who each rank is, as proved on its connection.
        nonce: the group's.
        is_off: share none, though the others might: as if this rank were alone on its host.
        deadline: on the clock of ``time.monotonic``.

    Raises:
        CollectiveError: the group breaks meanwhile.
    """
    meeting = _Meeting(exchange, deadline)
    rank, size = exchange.rank, exchange.size
    if size == 1:
        return None
    why = "it is switched off" if is_off else unavailable()
    ranks = meeting.neighbours(nodes, nonce, is_here=why is None)
    if len(ranks) > MAX_PLACES:
        ranks, why = (rank,), f"more than {MAX_PLACES} ranks run on this host"
    first, reception, board = ranks[0], None, None
    offers = [bytes(OFFER_BYTES)] * size
    try:
        if len(ranks) > 1 and rank == first:
            try:
                reception = Reception(nodes, ranks)  # before anybody can know of it
                for other, offer in zip(ranks, reception.offers, strict=True):
                    offers[other] = offer
            except OSError as error:
                why = str(error)
        offered = meeting.swap("offer", offers)[first]
        if len(ranks) > 1 and why is None:
            # Whoever waits in vain is to have time to say so.
            patience = min(MEETING_SECONDS, max(0.0, deadline - time.monotonic()) / 2)
            try:
                if reception is not None:
                    board = portal.call(reception.host_memory, patience)
                else:
                    place = ranks.index(rank)
                    board = portal.call(join_memory, ranks, place, offered, patience)
            except (MeshError, OSError) as error:  # TimeoutError is an OSError
                why = str(error) or "the processes did not get together in time"
        is_ready = board is not None or len(ranks) == 1
        votes = meeting.swap("vote", [_VOTE.pack(is_ready, first)] * size)
    except BaseException:
        if board is not None:
            board.close()
        raise
    finally:
        if reception is not None:
            reception.close()
    leader_of = tuple(_VOTE.unpack(vote)[1] for vote in votes)
    if all(_VOTE.unpack(vote)[0] == 1 for vote in votes) and _agree(leader_of, ranks):
        if len(set(leader_of)) < size:
            return Hosts(board, leader_of)
        _log.info(
            "group '%s' on rank %d shares no memory: %s",
            exchange.group,
            rank,
            why or "each rank runs on a host of its own",
        )
        return None
    if board is not None:
        board.close()
    _log.warning(
        "group '%s' on rank %d shares no memory, though it could: %s",
        exchange.group,
        rank,
        why or "another rank has not got it",
    )
    return None


def _agree(leader_of: tuple[int, ...], ranks: tuple[int, ...]) -> bool:
    """Return whether leaders lead themselves, and the ranks of this host have the same one."""
    size = len(leader_of)
    return all(each < size and leader_of[each] == each for each in leader_of) and ranks == tuple(
        rank for rank in range(size) if leader_of[rank] == ranks[0]
    )


class _Meeting:
    """What ranks tell each other before the first operation."""

    def __init__(self, exchange: Messages, deadline: float) -> None:
        self._exchange = exchange
        self._deadline = deadline
        self._sequence = -1

    def neighbours(
        self, nodes: tuple[NodeId, ...], nonce: bytes, *, is_here: bool
    ) -> tuple[int, ...]:
        """Return the ranks on this host, this one included, in order."""
        rank, size = self._exchange.rank, self._exchange.size

        def marks(node: NodeId) -> tuple[bytes, ...]:
            return here().marks(ASKER, node, node, nonce)

        own = b"".join(marks(nodes[rank])) if is_here else _NOT_HERE
        found = self.swap("place", [own] * size)
        return tuple(
            other
            for other in range(size)
            if other == rank
            or (is_here and apart(marks(nodes[other]), _split(found[other])) is None)
        )

    def swap(self, name: str, payloads: list[bytes]) -> list[bytes]:
        """Send each rank its payload, all of one length, and return what all have sent."""
        signature = Signature("forming", detail=name)
        found = [bytearray(payload) for payload in payloads]
        with Operation(self._exchange, signature, self._sequence, self._deadline) as operation:
            for peer in operation.others:
                operation.receive(peer, memoryview(found[peer]))
                operation.send(peer, memoryview(payloads[peer]))
            operation.finish()
        self._sequence -= 1
        return [bytes(each) for each in found]


def _split(marks: bytes) -> tuple[bytes, ...]:
    return tuple(marks[at : at + MARK_BYTES] for at in range(0, len(marks), MARK_BYTES))
