"""Nodes for tests: an endpoint on loopback, in the event loop of a thread of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch.distributed as dist
from anyio.from_thread import BlockingPortal, start_blocking_portal

from auth import Authorizer, SecretKey, allow_any
from mesh.distributed import Options, ProcessGroupMesh
from mesh.distributed.forming import form_group
from tests.placements import placed
from transport import Endpoint, EndpointConfig

LOOPBACK = EndpointConfig(bind="127.0.0.1:0", **placed())


class LoopbackNode:
    """What `mesh.distributed.Options` needs."""

    def __init__(
        self, portal: BlockingPortal, endpoint: Endpoint, *, shared_memory: bool = True
    ) -> None:
        self.portal = portal
        self.endpoint = endpoint
        self.shared_memory = shared_memory


@contextlib.contextmanager
def loopback_node(
    *,
    backend: str = "asyncio",
    authorizer: Authorizer | None = None,
    config: EndpointConfig = LOOPBACK,
    key: SecretKey | None = None,
    shared_memory: bool = True,
) -> Iterator[LoopbackNode]:
    endpoint = Endpoint(key or SecretKey.generate(), authorizer or allow_any(), config)
    with (
        start_blocking_portal(backend) as portal,
        portal.wrap_async_context_manager(endpoint) as opened,
    ):
        yield LoopbackNode(portal, opened, shared_memory=shared_memory)


def process_group(
    node: LoopbackNode,
    store: dist.Store,
    rank: int,
    size: int,
    *,
    timeout: float = 10.0,
    job: str = "test",
    name: str = "g",
    inside: Mapping[str, str] | None = None,
) -> ProcessGroupMesh:
    """Form a group as the registered backend does, without torch's global state."""
    options = Options(node, job, inside=inside or {})
    exchange = form_group(options, store, group=name, rank=rank, size=size, timeout=timeout)
    return ProcessGroupMesh(exchange, store, timedelta(seconds=timeout), options)
