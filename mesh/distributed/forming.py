"""How ranks that share a c10d store become a group on the mesh.

The store tells who the members are and where; it proves nothing. Each rank insists, on the
connection itself, that the other side holds the key that the store named, and that its own
authorizer grants that key the job's scope: a forged entry is refused.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from auth import IdentityError, NodeId
from mesh.collective import CollectiveError, CollectiveTimeout
from mesh.distributed import wire
from mesh.distributed.exchange import QuicExchange
from mesh.distributed.neighbours import share_memory
from mesh.distributed.options import Options
from transport import (
    AddressError,
    CborValue,
    Endpoint,
    Incoming,
    PeerAddress,
    ProtocolError,
    cbor,
    format_address,
    parse_address,
)

__all__ = ["form_group"]

RECORD_BYTES = 4096
"""Longest record of a member in the store."""

MAX_ADDRESSES = 16
"""Most addresses in it."""

SHARE_SECONDS = 2.0
"""For connected ranks to find out whether they share memory, at least; it takes milliseconds."""

GIVE_UP_SECONDS = 1.0
"""For the others to be told that a group could not be formed after all."""


def form_group(
    options: Options, store: Store, *, group: str, rank: int, size: int, timeout: float
) -> QuicExchange:
    """Meet the other ranks and connect with all of them.

    Args:
        options: the node to run on, and the job.
        store: the group's own part of the c10d store.
        group: the group's name, for messages.
        rank: this rank.
        size: number of ranks.
        timeout: seconds for all of it.

    Raises:
        CollectiveTimeout: names the ranks that did not come.
        AccessDenied: a rank refuses this node, or this node's authorizer refuses a rank.
        CollectiveError: a rank can't be reached, or its record is no record.
    """
    meeting = _Meeting(store, group, rank, time.monotonic() + timeout)
    nonce = meeting.agree_on_nonce()
    portal, endpoint = options.node.portal, options.node.endpoint

    def begin() -> QuicExchange:
        exchange = QuicExchange(
            portal,
            endpoint,
            service=options.scope,
            group=group,
            nonce=nonce,
            rank=rank,
            size=size,
        )
        # Registered before anybody can know of this rank, and so before anybody can dial it.
        _reception(endpoint, options.scope).groups[nonce] = exchange
        return exchange

    exchange = portal.call(begin)
    try:
        meeting.publish(endpoint)
        members = meeting.members(size)
        portal.call(exchange.connect, members, meeting.left())
        portal.start_task(exchange.run)
    except BaseException:
        portal.call(exchange.dissolve)
        raise
    try:
        hosts = share_memory(
            portal,
            exchange,
            tuple(member.node_id for member in members),
            nonce,
            is_off=not getattr(options.node, "shared_memory", True),
            deadline=time.monotonic() + max(meeting.left(), SHARE_SECONDS),
        )
        if hosts is not None and len(hosts.leaders) > 1:
            exchange.hosts = hosts
        elif hosts is not None:
            exchange.board = hosts.board
    except BaseException:
        exchange.close(GIVE_UP_SECONDS)
        raise
    return exchange


class _Meeting:
    """What the ranks tell each other through the store."""

    def __init__(self, store: Store, group: str, rank: int, deadline: float) -> None:
        self._store = store
        self._group = group
        self._rank = rank
        self._deadline = deadline
        # Names of groups repeat in a store when a group is left and formed again, by all ranks.
        self._prefix = f"{store.add(f'mesh/life/{rank}', 1)}/"

    def left(self) -> float:
        """Return the seconds that are left."""
        return max(0.0, self._deadline - time.monotonic())

    def agree_on_nonce(self) -> bytes:
        """Return the number that rank 0 has drawn for this group."""
        if self._rank == 0:
            self._set("nonce", os.urandom(wire.NONCE_BYTES))
        nonce = self._get("nonce", 0)
        if len(nonce) != wire.NONCE_BYTES:
            raise self._wrong(0, "the number that names the group has another length")
        return nonce

    def publish(self, endpoint: Endpoint) -> None:
        """Tell the others who this rank is and where."""
        addresses: list[CborValue] = [
            format_address(address) for address in endpoint.addresses[:MAX_ADDRESSES]
        ]
        record: CborValue = {"node": str(endpoint.node_id), "addresses": addresses}
        self._set(f"rank/{self._rank}", cbor.encode(record, max_size=RECORD_BYTES))

    def members(self, size: int) -> list[PeerAddress]:
        """Return who each rank is and where, once all have told."""
        return [self._member(rank, size) for rank in range(size)]

    def _member(self, rank: int, size: int) -> PeerAddress:
        try:
            value = cbor.decode(self._get(f"rank/{rank}", rank, size), max_size=RECORD_BYTES)
            match value:
                case {"node": str(node), "addresses": [*texts]} if len(texts) <= MAX_ADDRESSES:
                    addresses = tuple(parse_address(str(text)) for text in texts)
                    return PeerAddress(NodeId.parse(node), addresses)
        except (ProtocolError, IdentityError, AddressError) as error:
            raise self._wrong(rank, str(error)) from error
        raise self._wrong(rank, "it does not name a node and addresses")

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)  # type: ignore[arg-type]  # bytes will do

    def _get(self, key: str, rank: int, size: int = 0) -> bytes:
        key = self._prefix + key
        began = time.monotonic()
        try:
            self._store.wait([key], timedelta(seconds=max(self.left(), 0.001)))
        except RuntimeError as error:
            others = [each for each in range(rank + 1, size) if self._is_absent(each)]
            absent = (rank, *others)
            have, of = ("have", "them") if others else ("has", "it")
            came = [each for each in range(size) if each not in absent and each != self._rank]
            raise CollectiveTimeout(
                f"forming of group '{self._group}' on rank {self._rank}",
                ranks=absent,
                after=time.monotonic() - began,
                why=f"{_ranks(absent)} {have} not come: the store has no entry of {of} ({error}). "
                f"Beside rank {self._rank} {_ranks(came) if came else 'nobody'} came",
                fix="Is it running, with the same init_method and world size?",
            ) from error
        return self._store.get(key)

    def _is_absent(self, rank: int) -> bool:
        """Return whether the store has no entry of a rank, as far as the store can tell."""
        try:
            return not self._store.check([f"{self._prefix}rank/{rank}"])
        except RuntimeError:
            return False

    def _wrong(self, rank: int, why: str) -> CollectiveError:
        return CollectiveError(
            f"forming of group '{self._group}' on rank {self._rank}",
            ranks=(rank,),
            why=f"the store's entry of rank {rank} can't be used: {why}",
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class _Reception:
    """Where streams of other ranks come in: one for each endpoint and job."""

    def __init__(self) -> None:
        self.groups: weakref.WeakValueDictionary[bytes, QuicExchange] = (
            weakref.WeakValueDictionary()
        )

    async def serve(self, request: Incoming) -> None:
        """Hand a stream to the group that it names."""
        nonce, rank, stream = wire.parse_request(request.value)
        exchange = self.groups.get(nonce)
        if exchange is None:
            raise ProtocolError(
                "joining a group", peer=request.peer, why="there is no such group here"
            )
        await exchange.accept(request, rank, stream)


_receptions: weakref.WeakKeyDictionary[Endpoint, dict[str, _Reception]] = (
    weakref.WeakKeyDictionary()
)
"""What each endpoint offers already: a service can be registered once."""

_receptions_lock = threading.Lock()


def _reception(endpoint: Endpoint, scope: str) -> _Reception:
    with _receptions_lock:
        offered = _receptions.setdefault(endpoint, {})
        if scope not in offered:
            offered[scope] = _Reception()
            endpoint.register_service(scope, offered[scope].serve, scope=scope)
        return offered[scope]
