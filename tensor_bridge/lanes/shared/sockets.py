"""The Unix sockets: addresses without a file, who is at the other end, one packet at a time.

An address is in Linux's abstract namespace (unix(7)): bound by one process of a network namespace
at a time, visible in no file system, gone with its socket. Anybody there may connect, so that the
other end is asked of the kernel.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
from collections.abc import Iterator

import anyio

from tensor_bridge.lanes.shared.protocol import MAX_MESSAGE
from transport import ProtocolError

__all__ = [
    "connect",
    "is_hung_up",
    "listen",
    "peer_user",
    "receive_packet",
    "send_packet",
    "take_packet",
]

BACKLOG = 8
"""Connections that wait to be accepted; further ones are refused."""

_CREDENTIALS = struct.Struct("=iII")
"""A process id, a user, a group (struct ucred)."""

_DESCRIPTOR = array.array("i").itemsize


def listen(address: bytes) -> socket.socket:
    """Listen at `address`.

    Raises:
        OSError: it is taken, or there are no sockets left.
    """
    sock = _socket()
    try:
        sock.bind(_name(address))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def connect(address: bytes) -> socket.socket:
    """Connect to whoever listens at `address`, at once.

    Raises:
        OSError: nobody does.
    """
    sock = _socket()
    try:
        sock.connect(_name(address))
    except BaseException:
        sock.close()
        raise
    return sock


def peer_user(sock: socket.socket) -> tuple[int, int]:
    """Return the user and the process at the other end, as they were when it connected."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(found)
    return user, process


def send_packet(sock: socket.socket, packet: bytes, descriptor: int | None = None) -> None:
    """Send one packet, and a descriptor with it.

    Raises:
        BlockingIOError: there is no room for it now.
        OSError: nobody is there any more.
    """
    ancillary = []
    if descriptor is not None:
        ancillary.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])))
    sock.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)


@contextlib.contextmanager
def take_packet(sock: socket.socket) -> Iterator[tuple[bytes, int | None]]:
    """Yield the next packet, empty at the end, and the descriptor that came with it.

    The descriptor is closed after the block.

    Raises:
        BlockingIOError: none has come.
        ProtocolError: it is too long, or more than one descriptor came with it.
        OSError: the connection is broken.
    """
    # Room for one descriptor and not a byte more: those in excess the kernel closes, and says so.
    room = socket.CMSG_LEN(_DESCRIPTOR)
    data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET, room, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) // _DESCRIPTOR * _DESCRIPTOR])
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ProtocolError("shared memory", why="a packet with more in it than any has")
        yield data, found[0] if found else None
    finally:
        for descriptor in found:
            os.close(descriptor)


MAX_PACKET = max(64, MAX_MESSAGE)
"""No packet is longer than this."""


async def receive_packet(sock: socket.socket) -> bytes:
    """Wait for the next packet, which comes without a descriptor; empty at the end.

    Raises:
        ProtocolError, OSError: as `take_packet`.
    """
    while True:
        await anyio.wait_readable(sock)
        with contextlib.suppress(BlockingIOError), take_packet(sock) as (data, descriptor):
            if descriptor is not None:
                raise ProtocolError("shared memory", why="a descriptor where none belongs")
            return data


def is_hung_up(sock: socket.socket) -> bool:
    """Return whether the other end is gone, though packets of its may still wait here."""
    watch = select.poll()
    watch.register(sock, select.POLLRDHUP)
    return bool(watch.poll(0))


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    return sock


def _name(address: bytes) -> bytes:
    # Of this form alone, so that no peer can send us to a socket of somebody else's.
    return b"\0quicmesh-" + address.hex().encode()
