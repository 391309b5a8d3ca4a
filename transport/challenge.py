"""The round trip within a hello by which both ends prove that they know a secret.

It takes place only where the listener's authorizer asks for it, see `auth.proof`.
"""

from __future__ import annotations

import logging
import os

import anyio

from auth import AccessDenied, Challenge, MeshError, NodeId
from auth.proof import NONCE_BYTES, Proof, Prover, Side, Transcript
from transport.cbor import CborValue, decode, encode
from transport.errors import ProtocolError
from transport.frames import MAX_FRAME, frame, parse_reply
from transport.protocol.hello import (
    PROOF_MAX,
    Welcome,
    challenge_value,
    parse_challenge,
    parse_proof,
    proof_value,
)
from transport.stream import Stream

__all__ = ["ask", "prove_if_asked"]

PROOF_SECONDS = 3.0
"""How long a dialer may take to answer. Less than an authorizer has, so that the peer is named as
the one who was late."""

_log = logging.getLogger("quicmesh.transport")


async def ask(stream: Stream, *, dialer: NodeId, listener: NodeId) -> Proof | None:
    """Challenge the dialer on the stream of its hello; None if what it answers is no answer."""
    nonce = os.urandom(NONCE_BYTES)
    try:
        with anyio.fail_after(PROOF_SECONDS):
            await _send(stream, challenge_value(nonce), fin=False)
            body = await stream.receive_request(PROOF_MAX)
        theirs, tag = parse_proof(decode(body, max_size=PROOF_MAX))
    except (MeshError, TimeoutError, anyio.EndOfStream, anyio.ClosedResourceError) as error:
        _log.info("%s has not answered a challenge: %r", dialer.short, error)
        return None
    return Proof(Transcript(dialer, listener, theirs, nonce), Side.DIALER, tag)


async def prove_if_asked(
    stream: Stream, prover: Prover, *, dialer: NodeId, listener: NodeId
) -> tuple[Welcome, Challenge | None]:
    """Return the listener's welcome and, if it asked for a proof, the one it gave in its turn.

    Raises:
        AccessDenied: it asked, but does not know the secret itself; or it refuses us.
        MeshError: the exchange failed.
    """
    body = await _receive(stream)
    nonce = parse_challenge(decode(body, max_size=MAX_FRAME))
    transcript: Transcript | None = None
    if nonce is not None:
        transcript = Transcript(dialer, listener, os.urandom(NONCE_BYTES), nonce)
        tag = prover.tag(transcript, Side.DIALER)
        await _send(stream, proof_value(transcript.dialer_nonce, tag), fin=True)
        body = await _receive(stream)
    reply = parse_reply(body, peer=stream.peer)
    if isinstance(reply, MeshError):
        raise reply
    welcome = Welcome.from_value(reply)
    if transcript is None:
        return welcome, None
    theirs = Proof(transcript, Side.LISTENER, welcome.proof or b"")
    if not prover.verify(theirs):
        raise AccessDenied(
            "connection",
            peer=stream.peer,
            stage="hello",
            why="the peer asked for a proof of the shared secret, and does not know it itself",
            fix="Give both nodes the same secret.",
        )

    async def proved() -> Proof:
        return theirs

    return welcome, Challenge(proved)


async def _send(stream: Stream, value: CborValue, *, fin: bool) -> None:
    await stream.write_request(frame(encode(value, max_size=PROOF_MAX)), fin=fin)


async def _receive(stream: Stream) -> bytes:
    try:
        return await stream.receive_request(MAX_FRAME)
    except anyio.EndOfStream:
        raise ProtocolError("hello", peer=stream.peer, why="it ended without a reply") from None
