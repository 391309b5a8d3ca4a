"""The hello exchange and the authorizer's first question, on both sides of a connection.

Until a listener has welcomed a peer, that peer can open one stream and make us hold `HELLO_MAX`
bytes. A dialer serves nobody until the peer it dialled has welcomed it.
"""

from __future__ import annotations

import dataclasses
import time

import anyio

from auth import (
    AccessDenied,
    Authorizer,
    Challenge,
    ConnectRequest,
    Credential,
    Delegation,
    Grant,
    MeshError,
    NodeId,
    PeerIdentity,
    decide,
)
from auth.proof import Proof, Prover
from transport.cbor import CborValue
from transport.challenge import ask, prove_if_asked
from transport.codes import code_of
from transport.config import EndpointConfig
from transport.connection import MESH_ALPN, Connection
from transport.errors import DeadlineExceeded, ProtocolError, Superseded
from transport.frames import MAX_FRAME, ok_reply, parse_request
from transport.pool import Pool
from transport.protocol.hello import HELLO_MAX, HELLO_SERVICE, PROOF, Hello, Welcome, negotiate
from transport.stream import Stream

__all__ = ["Admission"]

DENIAL_LINGER = 1.0
"""How long a refused peer may take to read why, in seconds."""


@dataclasses.dataclass(slots=True)
class Admission:
    """Who we are, and who decides about others. The delegation may be renewed."""

    node_id: NodeId
    boot: bytes
    delegation: Delegation | None
    secret: Prover | None
    authorizer: Authorizer
    config: EndpointConfig
    pool: Pool

    async def introduce(self, connection: Connection, credential: bytes) -> None:
        """Say hello on an outbound connection; return when the peer has welcomed us.

        Raises:
            AccessDenied: the peer refuses us; ``why`` is its reason.
            Superseded: there is another connection with the peer, or is about to be.
            MeshError: the handshake or the exchange failed.
        """
        await connection.handshaken.wait()
        connection.raise_if_closed("connection", "handshake")
        peer = self._identify(connection, None)
        if connection.alpn != MESH_ALPN:
            await self._admit_dialled(connection)
            return
        if not credential and self.pool.get(peer.node_id) is not None:
            raise Superseded("connection", peer=peer, why="the peer was faster to dial us")
        with self.pool.hello(peer.node_id):
            welcome, challenge = await self._say_hello(connection, credential)
            connection.remote_boot = welcome.boot
            connection.max_frame = min(welcome.max_frame, MAX_FRAME)
            connection.observed_address = welcome.observed
            self._identify(connection, self._verify(connection, welcome.delegation))
            await self._admit_dialled(connection, challenge)
            connection.raise_if_closed("connection", "hello")
            self.pool.add(connection)

    async def receive_introduction(self, connection: Connection) -> None:
        """Take an inbound connection through handshake, hello and authorizer.

        Raises:
            MeshError: the peer is refused, and has been told why as far as it may know.
        """
        stream: Stream | None = None
        hello: Hello | None = None
        try:
            with anyio.move_on_after(self.config.handshake_timeout) as scope:
                await connection.handshaken.wait()
                connection.raise_if_closed("connection", "handshake")
                self._identify(connection, None)
                if connection.alpn == MESH_ALPN:
                    stream = await connection.next_stream(framed=True)
                    hello = await _receive_hello(stream)
            if scope.cancelled_caught:
                raise DeadlineExceeded(
                    "connection",
                    peer=connection.info.remote,
                    stage="hello" if connection.handshaken.is_set() else "handshake",
                    after=self.config.handshake_timeout,
                )
            if stream is None or hello is None:
                self._admit(connection, await self._decide(connection, b""))
            else:
                await self._answer(connection, stream, hello)
        except MeshError as error:
            await self._refuse(connection, stream, error)
            raise

    async def reconsider(self, connection: Connection) -> None:
        """Put what the authorizer grants the peer now in the place of what it granted before.

        Raises:
            AccessDenied: nothing. Not where we have dialled: we may go on using the peer.
        """
        if connection.outbound:
            await self._admit_dialled(connection)
        else:
            self._admit(connection, await self._decide(connection, b""))

    # -- inside

    async def _answer(self, connection: Connection, stream: Stream, hello: Hello) -> None:
        version = negotiate(hello.versions)
        connection.remote_boot = hello.boot
        connection.max_frame = min(hello.max_frame, MAX_FRAME)
        self._identify(connection, self._verify(connection, hello.delegation))
        await self.pool.check_identity(connection)
        challenge = self._challenge(connection, stream, hello)
        grant = await self._decide(connection, hello.credential, challenge=challenge)
        kept = await self.pool.claim(connection)
        self._admit(kept, grant)
        if kept is not connection:
            raise Superseded("connection", why="there is another one already")
        await stream.write_answer(ok_reply(self._welcome(connection, version, challenge.answer)))

    async def _decide(
        self,
        connection: Connection,
        credential: bytes,
        *,
        outbound: bool = False,
        challenge: Challenge | None = None,
    ) -> Grant:
        request = ConnectRequest(
            connection.peer,
            connection.alpn,
            Credential(credential),
            outbound=outbound,
            challenge=challenge,
        )
        grant = await decide(self.authorizer, request, timeout=self.config.authorizer_timeout)
        connection.raise_if_closed("connection", "authorize")
        return grant

    def _challenge(self, connection: Connection, stream: Stream, hello: Hello) -> Challenge:
        async def proof() -> Proof | None:
            if PROOF not in hello.features:
                return None
            return await ask(stream, dialer=connection.peer.node_id, listener=self.node_id)

        return Challenge(proof)

    async def _admit_dialled(
        self, connection: Connection, challenge: Challenge | None = None
    ) -> None:
        grant: Grant | None = None
        try:
            grant = await self._decide(connection, b"", outbound=True, challenge=challenge)
        except AccessDenied:
            pass  # we may use the peer; it may not use us
        self._admit(connection, grant)

    async def _say_hello(
        self, connection: Connection, credential: bytes
    ) -> tuple[Welcome, Challenge | None]:
        hello = Hello(
            boot=self.boot,
            delegation=None if self.delegation is None else self.delegation.encode(),
            credential=credential,
            features=frozenset() if self.secret is None else frozenset({PROOF}),
        ).to_value()
        timeout = self.config.connect_timeout
        challenge: Challenge | None = None
        if self.secret is None:
            value = await connection.call(HELLO_SERVICE, hello, timeout=timeout)
            welcome = Welcome.from_value(value)
        else:
            async with await connection.open_stream(
                HELLO_SERVICE, hello, timeout=timeout
            ) as stream:
                welcome, challenge = await prove_if_asked(
                    stream, self.secret, dialer=self.node_id, listener=connection.peer.node_id
                )
        negotiate((welcome.version, welcome.version))
        return welcome, challenge

    def _welcome(self, connection: Connection, version: int, proof: bytes | None) -> CborValue:
        return Welcome(
            version=version,
            boot=self.boot,
            delegation=None if self.delegation is None else self.delegation.encode(),
            observed=connection.info.remote,
            proof=proof,
        ).to_value()

    def _verify(self, connection: Connection, encoded: bytes | None) -> Delegation | None:
        if encoded is None:
            return None
        assert connection.core.peer is not None
        delegation = Delegation.decode(encoded)
        delegation.verify(connection.core.peer, time.time())
        return delegation

    def _identify(self, connection: Connection, delegation: Delegation | None) -> PeerIdentity:
        node_id = connection.core.peer
        assert node_id is not None, "the handshake is over"
        peer = PeerIdentity(node_id, delegation, connection.info.remote)
        connection.identify(peer, connection.alpn)
        return peer

    def _admit(self, connection: Connection, grant: Grant | None) -> None:
        config = self.config
        limit = config.max_streams
        if grant is not None and grant.quotas.max_streams is not None:
            limit = min(limit, max(1, grant.quotas.max_streams))
        connection.admit(
            grant,
            max_streams=limit,
            window=config.connection_window,
            stream_timeout=config.idle_timeout,
        )

    async def _refuse(self, connection: Connection, hello: Stream | None, error: MeshError) -> None:
        """Tell the peer why, reliably if it said hello, and let it close; then close ourselves."""
        with anyio.move_on_after(DENIAL_LINGER, shield=True):
            if hello is not None and connection.closed is None:
                await hello.fail(error)
                await connection.wait_closed()
        connection.abort(code_of(error), error.why or error.what)


async def _receive_hello(stream: Stream) -> Hello:
    try:
        service, value = parse_request(await stream.receive_request(HELLO_MAX))
    except anyio.EndOfStream:
        raise ProtocolError("a connection's first stream", why="it ended before a hello") from None
    if service != HELLO_SERVICE:
        raise ProtocolError("a connection's first stream", why=f"{service!r} came before hello")
    return Hello.from_value(value)
