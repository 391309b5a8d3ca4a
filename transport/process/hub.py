"""The endpoint process of several programs: each comes by itself, and is served by itself.

What a program says and has is as in a process of its own (`Server`): its key, its socket, its
memory, its connections. What they share are a processor, an event loop in which the turn of each is
bounded, and the end of the process. A program that dies is parted with alone.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket

import anyio
from anyio.abc import TaskGroup

from transport.cbor import encode as encode_cbor
from transport.errors import ProtocolError
from transport.process.memory import map_memory
from transport.process.records import (
    MAX_PACKET,
    MAX_PAYLOAD,
    VERSION,
    Kind,
    Record,
    decode,
    encode,
    malformed,
    value_of,
)
from transport.process.server import Server
from transport.process.sharing import MAX_DESCRIPTORS, peer_of

__all__ = ["Hub"]

MAX_PROGRAMS = 64
"""At a time. Who comes after them starts a process of its own."""

MAX_NEWCOMERS = 16
"""That have come and are not served yet. Each may bring memory of any size, which is let go of when
it is not taken in. Further ones wait in the socket, as many as that has room for."""

SETUP_SECONDS = 2.0
"""How long a program may take to say what it wants, once it has come."""

ACCEPT_SECONDS = 0.1
"""How long to wait before one is taken that could not be."""

IDLE_SECONDS = 60.0
"""How long to stay without a program: the next one is served at once until then."""

_log = logging.getLogger("quicmesh.transport")


class _Refused(Exception):
    """Why a program is not served."""


class Hub:
    """Serves the programs that come to a Unix socket, of the user that this process has.

    Args:
        listener: the socket.
        life: at its other end is who wants this process, which ends with that.
    """

    def __init__(self, listener: socket.socket, life: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._life = life
        self._servers: set[Server] = set()
        self._programs = 0
        """Those that have come, whether or not they are served yet."""
        self._is_leaving = False
        self._changed = anyio.Event()

    async def run(self, parent: int | None) -> None:
        """Serve until nobody wants it any more, or no program has been there for a while.

        Args:
            parent: a descriptor that can be read once who wants it is gone, if there is one.
        """
        async with anyio.create_task_group() as programs:
            async with anyio.create_task_group() as own:
                own.start_soon(self._accept, programs)
                own.start_soon(self._watch, self._life, own.cancel_scope)
                if parent is not None:
                    own.start_soon(self._watch, parent, own.cancel_scope)
                own.start_soon(self._watch_idle, own.cancel_scope)
            self._is_leaving = True
            for server in self._servers:
                server.leave("it ends with the machine's daemon, which has ended")

    async def _watch(self, end: socket.socket | int, scope: anyio.CancelScope) -> None:
        await anyio.wait_readable(end)
        scope.cancel()

    async def _watch_idle(self, scope: anyio.CancelScope) -> None:
        while not scope.cancel_called:
            changed = self._changed
            if self._programs:
                await changed.wait()
                continue
            with anyio.move_on_after(IDLE_SECONDS) as idle:
                await changed.wait()
            if idle.cancelled_caught:
                scope.cancel()  # whoever comes now has another process started

    async def _accept(self, programs: TaskGroup) -> None:
        while True:
            while self._programs - len(self._servers) >= MAX_NEWCOMERS:
                await self._changed.wait()
            await anyio.wait_readable(self._listener)
            try:
                control, _ = self._listener.accept()
            except OSError:  # it is gone again, or there are too many descriptors
                await anyio.sleep(ACCEPT_SECONDS)
                continue
            self._programs += 1
            programs.start_soon(self._receive, control)

    async def _receive(self, control: socket.socket) -> None:
        given: list[int] = []
        try:
            await self._serve(control, given)
        except Exception:
            _log.exception("a program could not be served any more")
        finally:
            self._programs -= 1
            self._change()
            control.close()
            for descriptor in given:
                os.close(descriptor)
            gc.collect()  # its memory is the system's again with the last view of it

    async def _serve(self, control: socket.socket, given: list[int]) -> None:
        try:
            server, watch = await self._take_in(control, given)
        except _Refused as refused:
            why = encode_cbor(str(refused), max_size=MAX_PAYLOAD)
            with contextlib.suppress(OSError):
                control.send(encode(Kind.REFUSED, payload=why))
            return
        self._servers.add(server)
        self._change()
        try:
            control.send(encode(Kind.JOINED, number=os.getpid()))
            await server.run(watch)
        finally:
            self._servers.discard(server)
            await server.close()

    async def _take_in(self, control: socket.socket, given: list[int]) -> tuple[Server, int]:
        """Return what serves a program that has come, and what tells of the program's end."""
        control.setblocking(False)
        program, user = peer_of(control)
        try:
            setup = await _first_word(control, given)
            match value_of(setup):
                case {"version": int(version)} if version == VERSION:
                    pass
                case _:
                    raise _Refused("it is of another version")
        except (OSError, ProtocolError) as error:
            raise _Refused(f"nothing was said that begins it: {error}") from error
        if user != os.geteuid():
            raise _Refused(f"this process is of another user than {user}")
        if not program:
            raise _Refused("the program is in a process namespace that can't be seen from here")
        if len(self._servers) >= MAX_PROGRAMS:
            raise _Refused(f"it serves {MAX_PROGRAMS} programs already")
        if self._is_leaving:
            raise _Refused("it is about to end")
        try:
            number, _, *shared = given
            memory = map_memory(shared[0]) if shared else memoryview(b"")
            watch = os.pidfd_open(program)
            given.append(watch)
            endpoint = socket.socket(fileno=number)
            given.remove(number)
            with endpoint:  # detached once it is the server's
                if endpoint.type is not socket.SOCK_DGRAM:
                    raise malformed()
                server = Server(program, control, endpoint, memory)
                server.take(setup)
        except Exception as error:
            raise _Refused(f"what it was given is of no use: {error!r}") from error
        return server, watch

    def _change(self) -> None:
        event, self._changed = self._changed, anyio.Event()
        event.set()


async def _first_word(control: socket.socket, given: list[int]) -> Record:
    with anyio.move_on_after(SETUP_SECONDS):
        await anyio.wait_readable(control)
    packet, descriptors, _, _ = socket.recv_fds(
        control, MAX_PACKET, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    given += descriptors
    for record in decode(memoryview(packet)):
        if record.kind is Kind.SETUP:
            return record
    raise malformed()
