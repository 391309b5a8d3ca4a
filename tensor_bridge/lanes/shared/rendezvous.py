"""The first packets on a Unix socket: who connects shows that it is the peer that was asked."""

from __future__ import annotations

import hmac
import logging
import os
import socket
from typing import NamedTuple

import anyio

from auth import PeerIdentity
from tensor_bridge.lanes.shared.host import ANSWERER, ASKER
from tensor_bridge.lanes.shared.meeting import proof
from tensor_bridge.lanes.shared.sockets import connect, peer_user, receive_packet, send_packet
from transport import ProtocolError

__all__ = ["Found", "admit", "introduce"]

MAX_CALLERS = 8
"""Connections looked at for one meeting. Nobody but the peer knows the address; whoever finds it in
the system's table of sockets can spoil this meeting, and no more."""

_log = logging.getLogger("quicmesh.tensors")


class Found(NamedTuple):
    """A connected socket, and the process at its other end."""

    sock: socket.socket
    process: int


async def admit(listener: socket.socket, secret: bytes, peer: PeerIdentity) -> Found | None:
    """Return the first who connects and proves to be `peer`; None when too many others came.

    Everybody else is turned away, and logged. The listener stays the caller's to close; nobody gets
    in twice, for the secret is good until then.
    """
    found: Found | None = None
    callers: list[socket.socket] = []

    async def look_at(sock: socket.socket) -> None:
        nonlocal found
        why = "another was there first"
        try:
            user, process = peer_user(sock)
            if user != os.geteuid():
                why = f"it is of user {user}"
            elif not hmac.compare_digest(await receive_packet(sock), proof(secret, ASKER)):
                why = "it does not prove to be the peer"
            elif found is None:
                send_packet(sock, proof(secret, ANSWERER))
                found = Found(sock, process)
                tasks.cancel_scope.cancel()
                return
        except (OSError, ProtocolError) as error:
            why = str(error)
        sock.close()
        _log.warning("a process that is not %s came for its shared memory: %s", peer, why)

    admitted: Found | None = None
    try:
        async with anyio.create_task_group() as tasks:
            while len(callers) < MAX_CALLERS:
                callers.append(await _accept(listener))
                tasks.start_soon(look_at, callers[-1])
        admitted = found
    finally:
        for sock in callers:
            if admitted is None or sock is not admitted.sock:
                sock.close()
    return admitted


async def introduce(address: bytes, secret: bytes) -> Found:
    """Connect to the peer's listener, prove to be who was offered it, and have it prove itself.

    Raises:
        OSError: nobody listens there, or whoever does has hung up.
        ProtocolError: it is of another user, or does not prove to be the peer.
    """
    sock = connect(address)
    try:
        user, process = peer_user(sock)
        if user != os.geteuid():
            raise ProtocolError("shared memory", why="another user's process listens there")
        send_packet(sock, proof(secret, ASKER))
        if not hmac.compare_digest(await receive_packet(sock), proof(secret, ANSWERER)):
            raise ProtocolError("shared memory", why="who listens there is not the peer")
    except BaseException:
        sock.close()
        raise
    return Found(sock, process)


async def _accept(listener: socket.socket) -> socket.socket:
    while True:
        await anyio.wait_readable(listener)
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            continue
        sock.setblocking(False)
        return sock
