"""A program's delegation, renewed on connections that stand.

A machine lets a program act under it for some days at most, and what a peer grants the program ends
with that. A run that takes longer is given a new statement by its machine, and shows it to its
peers: the call ``mesh.renew``, on each connection. Who asks again is asked for nothing but the
delegation; it must be of the machine that the peer has known all along.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import anyio

from auth import AccessDenied, Delegation, MeshError, PeerIdentity
from transport.admission import Admission
from transport.cbor import CborValue
from transport.connection import MESH_ALPN, Connection
from transport.errors import ProtocolError
from transport.services import Incoming

__all__ = ["RENEWAL_CALL", "RENEWAL_SCOPE", "Renewal", "parse_renewal"]

RENEWAL_CALL = "mesh.renew"

RENEWAL_SCOPE = "node:renew"
"""A part of what every program is granted by default. Without it, a program's connections end with
its first delegation; the next ones begin with the one it has then."""

ANSWER_SECONDS = 10.0

_log = logging.getLogger("quicmesh.transport")


class Renewal:
    """Both sides of the call.

    Args:
        admission: says who we are, and decides about others.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def present(self, delegation: Delegation, connections: Iterable[Connection]) -> None:
        """Act under `delegation` from now on, and show it on those connections.

        A peer that does not take it is logged, and is no error: what it grants ends when it would
        have ended.

        Raises:
            IdentityError: it is for another key, or not valid now.
        """
        delegation.verify(self._admission.node_id, time.time())
        self._admission.delegation = delegation
        async with anyio.create_task_group() as tasks:
            for connection in connections:
                if connection.alpn == MESH_ALPN and connection.is_admitted:
                    tasks.start_soon(self._show, connection, delegation)

    async def serve(self, incoming: Incoming) -> CborValue:
        """Take a peer's new delegation, and ask the authorizer again.

        Raises:
            AccessDenied: it is of another machine, or the authorizer refuses. Nothing has changed.
            IdentityError: it is for another key, not valid now, or not signed by the machine.
        """
        delegation, connection = parse_renewal(incoming.value), incoming.connection
        before = connection.peer
        delegation.verify(before.node_id, time.time())
        if before.delegation is None or before.delegation.machine != delegation.machine:
            raise AccessDenied(
                "renewal of a delegation",
                peer=before,
                why="it came without one of that machine",
                fix="Connect anew with it.",
            )
        connection.identify(
            PeerIdentity(before.node_id, delegation, before.address), connection.alpn
        )
        try:
            await self._admission.reconsider(connection)
        except BaseException:
            connection.identify(before, connection.alpn)
            raise
        return None

    async def _show(self, connection: Connection, delegation: Delegation) -> None:
        try:
            await connection.call(RENEWAL_CALL, delegation.encode(), timeout=ANSWER_SECONDS)
        except MeshError as error:
            _log.warning("%s does not take the renewed delegation: %s", connection.peer, error)


def parse_renewal(value: CborValue) -> Delegation:
    """Return the delegation that a peer shows.

    Raises:
        ProtocolError: the value is not bytes.
        IdentityError: the bytes are no delegation.
    """
    if not isinstance(value, bytes):
        raise ProtocolError("renewal of a delegation", why="it is not given as bytes")
    return Delegation.decode(value)
