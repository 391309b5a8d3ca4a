"""``init_method="mesh://TICKET"``: ranks meet at the store of the node that a ticket names.

::

    mesh://TICKET?job=NAME&rank=0&world_size=4

Rank and world size are taken from the environment where they are not given, as a launcher, Slurm
or an indexed Kubernetes job sets them; see `mesh.launch.places`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from auth import NodeId, Ticket
from mesh.collective import UnsupportedCollective
from mesh.distributed.options import Options, options_in_use
from mesh.distributed.program import admit, program_options
from mesh.distributed.store import DEFAULT_TIMEOUT, MeshStore
from mesh.launch.places import rank_and_size
from mesh.store import StoreClient, StoreService
from transport import Endpoint, PeerAddress, format_address

__all__ = ["keep_store", "meet"]

MAX_ADDRESSES = 16
"""Addresses that a rank tells."""


def meet(
    url: str, timeout: timedelta = DEFAULT_TIMEOUT, **settings: Any
) -> Iterator[tuple[MeshStore, int, int]]:
    """Yield store, rank and world size, once: a rendezvous handler of torch's.

    The node is that of the innermost `mesh.distributed.use` block, or else the program's own, which
    then admits the job's ranks as the node that keeps the store knows them.

    Args:
        url: ``mesh://TICKET?..``.
        timeout: for all ranks to come, and of the store afterwards.
        settings: torch's, without meaning here.

    Raises:
        UnsupportedCollective: rank or world size is not known, or can't be.
        TicketError: the ticket can't be used.
        DeadlineExceeded: names the ranks that did not come.
        AccessDenied: the node of the ticket refuses this one, or another has its rank.
        Unreachable: no address led to it.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = query.keys() - {"job", "rank", "world_size"}
    if unknown:
        raise UnsupportedCollective(f"init_method with {', '.join(sorted(unknown))}")
    rank, size = rank_and_size(query)
    ticket = Ticket.decode(parts.netloc or parts.path)
    options = options_in_use() or program_options(query.get("job"))
    if query.get("job", options.job) != options.job:
        raise UnsupportedCollective(
            f"init_method with job {query['job']!r}", why=f"the node is in use for {options.job!r}"
        )
    node = options.node
    where = PeerAddress(ticket.node_id, ticket.addresses)
    client, members = node.portal.call(
        partial(_enrolled, node.endpoint, where, options.job, rank, size, timeout.total_seconds())
    )
    admit(options, members)
    yield MeshStore(node, client, timeout), rank, size
    raise UnsupportedCollective("a second rendezvous", why="mesh:// meets once; form a new group")


def keep_store(options: Options) -> StoreService:
    """Return the stores that this node keeps, offered from the first call on.

    A rank can be the node that the job's ticket names: ``node.ticket()`` is what others need.
    """
    return options.node.portal.call(_service, options.node.endpoint)


async def _enrolled(
    endpoint: Endpoint, where: PeerAddress, job: str, rank: int, size: int, timeout: float
) -> tuple[StoreClient, Sequence[NodeId]]:
    own = where.node_id == endpoint.node_id
    client = StoreClient(endpoint, None if own else where, job, _service(endpoint) if own else None)
    addresses = [format_address(address) for address in endpoint.addresses[:MAX_ADDRESSES]]
    members = await client.enrol(rank, size, addresses, timeout)
    return client, [member.node_id for member in members]


def _service(endpoint: Endpoint) -> StoreService:
    if endpoint not in _services:
        _services[endpoint] = StoreService(endpoint)
    return _services[endpoint]


_services: weakref.WeakKeyDictionary[Endpoint, StoreService] = weakref.WeakKeyDictionary()
"""A service can be registered once."""
