"""The service from which a tensor is read: by its owner, or by whoever has a token for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import anyio

from auth import Claim, MeshError, TokenBook, TokenRefused, TokenState
from tensor_bridge.errors import NoSuchTensor, TensorChanged
from tensor_bridge.lanes import Lanes, SealedLane, choose_lane, sealed_memory
from tensor_bridge.memory import Payload
from tensor_bridge.moves import INTERRUPTED, MoveLimits, deadline, receive_message
from tensor_bridge.store import StoredTensor, TensorStore
from tensor_bridge.wire import ReadAccepted, ReadOpen, Received, Sent
from transport import AppCode, Incoming, ProtocolError

__all__ = ["READ", "ReadService"]

READ = "read"
"""The one action that tokens of this package permit."""

GUESSING_SECONDS = 1.0
"""How long who has guessed too often waits for the end of its connection: it comes back at once,
and each time costs this side a handshake."""


class ReadService:
    """Serves ``tensor.read``: `ReadOpen` in; `ReadAccepted`, bytes, `Sent` out; `Received` in."""

    name = "tensor.read"
    scope = "tensor:read"

    def __init__(
        self, store: TensorStore, tokens: TokenBook, limits: MoveLimits, lanes: Lanes
    ) -> None:
        self._store = store
        self._tokens = tokens
        self._limits = limits
        self._lanes = lanes

    async def serve(self, incoming: Incoming) -> None:
        """Send one tensor from the offset asked for.

        A token is claimed before the answer and spent on the receiver's acknowledgement. If the
        link breaks in between, its audience may claim it again; if the receiver gives up, it is
        over.

        Raises:
            TokenRefused: whatever is wrong with the token or has become of the object.
            NoSuchTensor: without a token, an object that is not the peer's.
            TensorChanged: other content than an earlier try of this read has got.
        """
        order = ReadOpen.decode(incoming.value)
        if order.token is None:
            assert order.object_id is not None
            stored = self._store.owned(order.object_id, incoming.peer.node_id)
            await self._send(incoming, stored, order, None)
            return
        async with self._claimed(incoming, order.token) as claim:
            await self._send(incoming, self._store.get(claim.facts.object_id), order, claim)
            claim.delivered()

    async def _send(
        self, incoming: Incoming, stored: StoredTensor, order: ReadOpen, claim: Claim | None
    ) -> None:
        stream, meta, version = incoming.stream, stored.meta, stored.version
        if order.version not in (None, version):
            raise TensorChanged("read of a tensor", why="it was written to since the first part")
        if order.offset > meta.nbytes:
            raise ProtocolError("read of a tensor", why="the offset is beyond its end")
        payload = Payload(stored.raw, meta, order.offset)
        offer = self._lanes.answer(
            incoming.connection,
            order.lanes,
            sealed=SealedLane.name in order.lanes and payload.sealed_by(sealed_memory) is not None,
        )
        with deadline(
            self._limits.total, "read of a tensor", peer=incoming.peer, why="it is too slow"
        ):
            await stream.send_reply(ReadAccepted(meta, version, offer.best).encode())
            lane = choose_lane(stream, offer, offer.best, stall_seconds=self._limits.stall)
            moved = claim.progress if claim is not None else _ignore
            await lane.send(payload, moved)
            await stream.send_message(Sent(stored.version).encode())
            received = Received.decode(await receive_message(stream))
        if received.nbytes != meta.nbytes:
            raise ProtocolError("read of a tensor", why="the receiver acknowledged another size")

    @contextlib.asynccontextmanager
    async def _claimed(self, incoming: Incoming, token: bytes) -> AsyncIterator[Claim]:
        """Claim `token` for the block, which is cancelled when the token is revoked or expires."""
        peer = incoming.peer.node_id
        try:
            claim = self._tokens.claim(
                token, audience=peer, action=READ, version_of=self._version_of
            )
        except TokenRefused:
            if self._tokens.too_many_failures(peer):
                await anyio.sleep(GUESSING_SECONDS)
                incoming.connection.abort(AppCode.DENIED, "too many bad tokens")
            raise
        with anyio.CancelScope() as scope:

            def ended(state: TokenState) -> None:
                if state in (TokenState.REVOKED, TokenState.EXPIRED):
                    scope.cancel()

            claim.on_end(ended)
            try:
                yield claim
            except MeshError as error:
                if not isinstance(error, INTERRUPTED):
                    claim.failed(str(error))
                raise
            finally:
                claim.interrupted()
        if scope.cancelled_caught:
            raise TokenRefused("use of a capability token", why="it was revoked or has expired")

    def _version_of(self, object_id: str) -> int | None:
        try:
            return self._store.get(object_id).version
        except NoSuchTensor:
            return None


def _ignore(_: int) -> None:
    """Progress that nobody waits for."""
