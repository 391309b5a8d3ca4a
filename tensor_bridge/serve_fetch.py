"""The service by which a client has this node fetch a tensor straight from where it is."""

from __future__ import annotations

import contextlib

import anyio

from auth import (
    AccessRequest,
    Authorizer,
    ConnectRequest,
    FetchRequest,
    MeshError,
    PeerIdentity,
    TokenRefused,
    decide,
)
from tensor_bridge.arrivals import Arrivals
from tensor_bridge.lanes import Lanes
from tensor_bridge.moves import Landing, MoveLimits, deadline, persist, settle
from tensor_bridge.reading import read_into
from tensor_bridge.wire import FetchOpen, Moved, encode_fetch_failure
from transport import (
    MESH_ALPN,
    Endpoint,
    Incoming,
    PeerAddress,
    ProtocolError,
    Stream,
    StreamReset,
    Unreachable,
)

__all__ = ["FetchService"]

BEAT_SECONDS = 0.25
"""Between two messages of progress: some 40 bytes, and often enough for a smooth progress bar."""

REDIAL_SECONDS = 2.0
"""For dialling the source again after the link broke: it was reached before."""


class FetchService:
    """Serves ``tensor.fetch``: `FetchOpen` in, `Moved` out while it lasts, `Stored` or an error."""

    name = "tensor.fetch"
    scope = "tensor:fetch"

    def __init__(
        self,
        endpoint: Endpoint,
        arrivals: Arrivals,
        authorizer: Authorizer,
        limits: MoveLimits,
        lanes: Lanes,
    ) -> None:
        self._endpoint = endpoint
        self._arrivals = arrivals
        self._authorizer = authorizer
        self._limits = limits
        self._lanes = lanes

    async def serve(self, incoming: Incoming) -> None:
        """Fetch one tensor for the peer; the copy becomes the peer's own.

        Raises:
            AccessDenied: this node's authorizer does not admit that source, or that order. Nobody
                was dialled.
            QuotaExceeded: before anything is allocated or anybody dialled.
        """
        order = FetchOpen.decode(incoming.value)
        owner, stream = incoming.peer.node_id, incoming.stream
        if order.source == self._endpoint.node_id:
            raise ProtocolError("fetch of a tensor", why="its source is this node itself")
        await self._authorize(incoming, order)
        async with self._arrivals.hold(
            owner, order.upload, order.meta, name=order.name, quotas=incoming.grant.quotas
        ) as arrival:
            if arrival.landing is not None:
                arrival.landing.allocate()  # before anybody is dialled
            await stream.send_reply(Moved(arrival.moved).encode())
            failure = None
            if arrival.landing is not None:
                failure = await self._fetch(order, arrival.landing, stream)
            if failure is None:
                await stream.send_message(arrival.keep().encode())
                await settle(stream)
            else:
                arrival.failed(failure)
                await stream.send_message(encode_fetch_failure(failure, order.source))

    async def _authorize(self, incoming: Incoming, order: FetchOpen) -> None:
        """Ask about the order, and whether the source is a node that is admitted here at all."""
        connection = self._endpoint.connection(order.source)
        source = order.source if connection is None else connection.peer
        questions: list[AccessRequest] = [
            FetchRequest(incoming.peer, incoming.grant, source, order.meta.nbytes)
        ]
        if connection is None or connection.grant is None:
            peer = PeerIdentity(order.source) if connection is None else connection.peer
            questions.append(ConnectRequest(peer, MESH_ALPN, outbound=True))
        for question in questions:
            timeout = self._endpoint.config.authorizer_timeout
            await decide(self._authorizer, question, timeout=timeout)

    async def _fetch(self, order: FetchOpen, landing: Landing, client: Stream) -> MeshError | None:
        """Read from the source while the client is there; return what went wrong at the source.

        Raises:
            MeshError: the client has gone, or has given up.
        """
        finished, failure = anyio.Event(), None
        async with anyio.create_task_group() as tasks:
            client.on_abandoned(tasks.cancel_scope.cancel)
            tasks.start_soon(_report, client, landing, finished)
            try:
                await self._read(order, landing)
            except MeshError as error:
                failure = error
            finally:
                finished.set()
                client.on_abandoned(None)
        if tasks.cancel_scope.cancelled_caught:
            client.connection.raise_if_closed("fetch of a tensor", "progress")
            raise StreamReset("fetch of a tensor", peer=client.peer, why="the client gave up")
        return failure

    async def _read(self, order: FetchOpen, landing: Landing) -> None:
        source = PeerAddress(order.source, order.addresses)

        async def attempt() -> None:
            again = landing.version is not None
            connection = await self._endpoint.connect(
                source, timeout=REDIAL_SECONDS if again else None
            )
            await read_into(
                landing,
                connection,
                token=order.token,
                lanes=self._lanes,
                stall_seconds=self._limits.stall,
            )

        with deadline(self._limits.total, "fetch of a tensor", peer=source, why="it is too slow"):
            # Until the source has noticed the broken link, the token counts as claimed there.
            await persist(
                attempt, landed=lambda: landing.moved, aftermath=(TokenRefused, Unreachable)
            )


async def _report(client: Stream, landing: Landing, finished: anyio.Event) -> None:
    """Tell the client about progress until the fetch has ended one way or another."""
    with contextlib.suppress(MeshError, anyio.BrokenResourceError):  # it has left, and is noticed
        while not finished.is_set():
            await client.send_message(Moved(landing.moved).encode())
            with anyio.move_on_after(BEAT_SECONDS):
                await finished.wait()
