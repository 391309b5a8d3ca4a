"""The endpoint process that programs of one user share: who starts it, and how they come to it.

A machine's daemon has a Unix socket with a name. The first program that comes to it has the process
started, which takes the program in, and those that follow: see `transport.process.hub`. What a
program brings is what it would have an endpoint process of its own inherit: its key, its bound
socket, its shared memory. Nothing but the process is shared.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio

from transport.errors import EndpointLost, ProtocolError
from transport.process.records import MAX_PACKET, Kind, decode, value_of
from transport.process.spawn import spawn_shared

__all__ = ["MAX_DESCRIPTORS", "SharedProcess", "join", "listening", "peer_of", "share"]

JOIN_SECONDS = 5.0
"""How long a program waits to be taken in: half a second where it is the first. It starts a process
of its own after that, so that a daemon that is stopped holds nobody up."""

BACKLOG = 64
"""Programs that may wait for the process to start."""

STOP_SECONDS = 2.0
"""How long the process may take to part with its programs."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before it is started again, if it has failed."""

MAX_DESCRIPTORS = 3
"""That a program brings: its UDP socket, the pipe that tells it of the end, and its memory."""

_CREDENTIALS = struct.Struct("=iII")

_log = logging.getLogger("quicmesh.transport")


class SharedProcess:
    """The process, as a program that it has taken in knows it."""

    def __init__(self, pid: int, keeper: int, life: int) -> None:
        self.pid = pid
        self._keeper = keeper
        self._keeper_watch: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._keeper_watch = os.pidfd_open(keeper)
        self._life: int | None = life

    async def ended(self) -> None:
        """Wait until it has let go of all that is the program's, or has ended."""
        if self._life is not None:
            await anyio.wait_readable(self._life)

    def cause(self) -> str:
        """How it has ended, for an error."""
        if not _is_running(self._keeper_watch):
            return f"it ends with the machine's daemon, process {self._keeper}, which has ended"
        return "it has ended, or was killed; it is shared by programs of the machine's daemon"

    def kill(self) -> None:
        """Leave it to the others that share it."""

    def reap(self) -> None:
        """Let go of it."""
        for descriptor in (self._life, self._keeper_watch):
            if descriptor is not None:
                os.close(descriptor)
        self._life = self._keeper_watch = None

    forget = reap


async def join(
    path: str, setup: bytes, endpoint: socket.socket, memory: int | None
) -> tuple[SharedProcess, socket.socket] | None:
    """Have the process behind `path` serve this program; None where that can't be.

    Args:
        path: of the Unix socket.
        setup: the record that begins it.
        endpoint: the bound UDP socket.
        memory: a descriptor of the shared memory, if there is any.
    """
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.setblocking(False)
    life: int | None = None
    try:
        with _reachable(Path(path)) as name:
            control.connect(name)
        keeper, user = peer_of(control)
        if user != os.geteuid():
            _log.warning("the endpoint process at %s is of user %d; it is not used", path, user)
            return None
        life, theirs = os.pipe()
        try:
            brought = [endpoint.fileno(), theirs, *([] if memory is None else [memory])]
            socket.send_fds(control, [setup], brought)
        finally:
            os.close(theirs)
        with anyio.move_on_after(JOIN_SECONDS):
            await anyio.wait_readable(control)
        pid = _taken_in(control.recv(MAX_PACKET))
        process, life = SharedProcess(pid, keeper, life), None
        taken, control = control, None  # type: ignore[assignment]
        return process, taken
    except (OSError, ProtocolError) as error:
        _log.info("no place in the endpoint process at %s: %s", path, error)
        return None
    finally:
        if control is not None:
            control.close()
        if life is not None:
            os.close(life)


def _taken_in(packet: bytes) -> int:
    for record in decode(memoryview(packet)):
        if record.kind is Kind.JOINED:
            return record.number
        if record.kind is Kind.REFUSED:
            raise ProtocolError("the endpoint process", why=str(value_of(record)))
    raise ProtocolError("the endpoint process", why="it has ended before it said anything")


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a Unix socket, as the kernel knows them.

    For who has connected, that is who listened.

    Raises:
        OSError: the system can't say.
    """
    size = _CREDENTIALS.size
    if not hasattr(socket, "SO_PEERCRED"):
        raise OSError(errno.EOPNOTSUPP, "this system can't say who is at the other end of a socket")
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listen for programs at `path`, for `share`, during the block.

    Raises:
        OSError: nothing can be made there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        with _reachable(path) as name:
            listener.bind(name)
        try:
            path.chmod(0o600)
            listener.setblocking(False)
            listener.listen(BACKLOG)
            yield listener
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
    finally:
        listener.close()


async def share(listener: socket.socket) -> None:
    """Have a process serve the programs that come to `listener`, until cancelled.

    It is started when the first comes, and again when one comes after it has ended. It parts with
    its programs, which are told why, when this ends or its process does.
    """
    pause = FIRST_PAUSE
    while True:
        await anyio.wait_readable(listener)
        try:
            child, life = spawn_shared(listener)
        except EndpointLost as error:
            _log.error("%s", error)
        else:
            try:
                await child.ended()
            finally:
                life.close()
                try:
                    with anyio.move_on_after(STOP_SECONDS, shield=True):
                        await child.ended()
                finally:
                    child.kill()
                    child.reap()
            if child.is_well:
                pause = FIRST_PAUSE
                continue
            _log.warning("the endpoint process that programs share was lost: %s", child.cause())
        await anyio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


@contextmanager
def _reachable(path: Path) -> Iterator[str]:
    """Name a socket by its directory's descriptor: its address has room for 107 bytes."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _is_running(watch: int | None) -> bool:
    if watch is None:
        return True
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    return not poll.poll(0)
