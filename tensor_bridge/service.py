"""The serving side: everything that peers may ask of a node's tensors, under one roof."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import TracebackType

import anyio

from auth import Authorizer, MeshError, MintRequest, NodeId, TokenBook, decide
from tensor_bridge.arrivals import Arrivals
from tensor_bridge.lanes import NO_LANES, Lanes
from tensor_bridge.memory import Payload
from tensor_bridge.moves import INTERRUPTED, MoveLimits, settle
from tensor_bridge.serve_create import CREATE_CALL, serve_create
from tensor_bridge.serve_fetch import FetchService
from tensor_bridge.serve_keep import offer_blocks
from tensor_bridge.serve_put import PutService
from tensor_bridge.serve_read import READ, ReadService
from tensor_bridge.store import TensorStore
from tensor_bridge.wire import (
    PAGE,
    ListCall,
    Listed,
    Listing,
    MapCall,
    MintCall,
    Minted,
    ObjectCall,
)
from transport import (
    CborValue,
    Endpoint,
    EndpointEvent,
    Incoming,
    PeerJoined,
    PeerLeft,
    PeerRevoked,
)

__all__ = ["DELETE_CALL", "INFO_CALL", "LIST_CALL", "MAP_CALL", "MINT_CALL", "TensorService"]

MINT_CALL = "tensor.mint"
DELETE_CALL = "tensor.delete"
LIST_CALL = "tensor.list"
INFO_CALL = "tensor.info"
MAP_CALL = "tensor.map"

SWEEP_SECONDS = 1.0
"""Between two looks for what has expired. Deadlines are of tens of seconds."""


class TensorService:
    """Offers a store's tensors on an endpoint: put, read, fetch, and the calls around them.

    Constructing it registers the services; while it is entered as an async context manager, what
    expires is also cleared away: tokens, interrupted arrivals, and the tensors and tokens of peers
    that have left and not come back within ``limits.linger``.

    Args:
        endpoint: where peers come in.
        store: the tensors.
        tokens: the book of tokens minted here.
        authorizer: asked before a token is minted and before anything is fetched.
        limits: how long things may take.
        lanes: the ways for bytes beside QUIC; the endpoint's own, shared with its clients.
        clock: monotonic time in seconds, the same as the token book's.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        store: TensorStore,
        tokens: TokenBook,
        authorizer: Authorizer,
        *,
        limits: MoveLimits | None = None,
        lanes: Lanes = NO_LANES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.tokens = tokens
        self.limits = limits or MoveLimits()
        self.arrivals = Arrivals(
            store, resume_seconds=self.limits.resume, memory=lanes.memory, clock=clock
        )
        self._endpoint = endpoint
        self._lanes = lanes
        self._authorizer = authorizer
        self._clock = clock
        self._left_at: dict[NodeId, float] = {}
        self._machines: dict[NodeId, NodeId] = {}
        for service in (
            PutService(self.arrivals, self.limits, lanes),
            ReadService(store, tokens, self.limits, lanes),
            FetchService(endpoint, self.arrivals, authorizer, self.limits, lanes),
        ):
            endpoint.register_service(service.name, service.serve, scope=service.scope)
        endpoint.register_service(MINT_CALL, self._mint, scope=MintRequest.scope)
        endpoint.register_service(
            CREATE_CALL, partial(serve_create, self.arrivals), scope="tensor:put"
        )
        offer_blocks(endpoint, store, self.arrivals, lanes)
        endpoint.register_call(DELETE_CALL, self._delete, scope="tensor:delete")
        endpoint.register_call(LIST_CALL, self._list, scope="tensor:list")
        endpoint.register_call(INFO_CALL, self._info, scope="tensor:list")
        endpoint.register_call(MAP_CALL, self._map, scope=ReadService.scope, prompt=self._map_now)
        endpoint.subscribe(self._observe)

    async def __aenter__(self) -> TensorService:
        self._sweeping = anyio.CancelScope()
        self._endpoint.start_soon(self._keep_sweeping)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.arrivals.close()
        self._sweeping.cancel()

    def sweep(self) -> None:
        """Clear away what has expired by now."""
        now = self._clock()
        self.tokens.expire(now)
        self.arrivals.expire(now)
        # Who has live tokens may be waiting elsewhere for the end of a copy from here.
        busy = self.tokens.counts().live_by_peer
        for peer, left_at in tuple(self._left_at.items()):
            if now - left_at >= self.limits.linger and peer not in busy:
                self.forget(peer)

    def forget(self, owner: NodeId) -> None:
        """Let go of everything that belongs to `owner`: tensors, arrivals, tokens."""
        self._left_at.pop(owner, None)
        self._machines.pop(owner, None)
        self.tokens.revoke(owner=owner)
        self.arrivals.drop_owner(owner)
        self.store.delete_owner(owner)

    async def _keep_sweeping(self) -> None:
        with self._sweeping:
            while True:
                await anyio.sleep(SWEEP_SECONDS)
                self.sweep()

    def _observe(self, event: EndpointEvent) -> None:
        match event:
            case PeerJoined(connection):
                peer = connection.peer
                self._left_at.pop(peer.node_id, None)
                self._machines[peer.node_id] = peer.machine_id
            case PeerLeft(connection):
                if self._endpoint.connection(connection.peer.node_id) is None:
                    self._left_at[connection.peer.node_id] = self._clock()
            case PeerRevoked(node_id):
                self._revoke(node_id)

    def _revoke(self, node_id: NodeId) -> None:
        """Let go of everything of a node and of its programs, and of what others let them read."""
        programs = [peer for peer, machine in self._machines.items() if machine == node_id]
        for peer in {node_id, *programs}:
            self.tokens.revoke(audience=peer)
            self.forget(peer)
            # A handler that is just being cancelled may still finish something.
            self._left_at[peer] = self._clock()

    async def _mint(self, incoming: Incoming) -> None:
        """Answer a token, and withdraw it if the peer gives the stream up before it ends it."""
        call, peer, stream = MintCall.decode(incoming.value), incoming.peer, incoming.stream
        stored = self.store.owned(call.object_id, peer.node_id)
        request = MintRequest(
            peer, incoming.grant, READ, stored.object_id, stored.meta.nbytes, call.audience
        )
        timeout = self._endpoint.config.authorizer_timeout
        await decide(self._authorizer, request, timeout=timeout)
        capability = self.tokens.mint(
            issuer=self._endpoint.node_id,
            audience=call.audience,
            action=READ,
            object_id=stored.object_id,
            version=stored.version,
            meta_digest=stored.meta.digest(),
            nbytes=stored.meta.nbytes,
            session=incoming.connection.remote_boot.hex(),
            owner=peer.node_id,
        )
        facts = capability.facts
        answer = Minted(capability.encode(), stored.meta, self._endpoint.addresses).encode()
        del capability  # its secret is for the peer
        stream.timeout = self.limits.total
        try:
            await stream.send_reply(answer)
            await settle(stream)
        except MeshError as error:
            if not isinstance(error, INTERRUPTED):
                self.tokens.revoke(facts=facts)
            raise

    async def _delete(self, incoming: Incoming) -> CborValue:
        call = ObjectCall.decode(incoming.value)
        stored = self.store.owned(call.object_id, incoming.peer.node_id)
        self.store.delete(stored.object_id)
        self.tokens.revoke(object_id=stored.object_id)
        return None

    async def _info(self, incoming: Incoming) -> CborValue:
        call = ObjectCall.decode(incoming.value)
        return Listed.of(self.store.owned(call.object_id, incoming.peer.node_id)).encode()

    async def _map(self, incoming: Incoming) -> CborValue:
        return self._map_now(incoming)

    def _map_now(self, incoming: Incoming) -> CborValue:
        """Hand over the memory of an object, before the answer; nothing is answered without."""
        call = MapCall.decode(incoming.value)
        stored = self.store.owned(call.object_id, incoming.peer.node_id)
        is_handed = self._lanes.hand_over(
            incoming.connection, Payload(stored.raw, stored.meta), call.move
        )
        return Listed.of(stored).encode() if is_handed else None

    async def _list(self, incoming: Incoming) -> CborValue:
        after = ListCall.decode(incoming.value).after or ""
        owned = self.store.by_owner(incoming.peer.node_id)
        rest = sorted(
            (stored for stored in owned if stored.object_id > after), key=lambda it: it.object_id
        )
        return Listing(tuple(map(Listed.of, rest[:PAGE])), more=len(rest) > PAGE).encode()
