"""Bytes between an executor's socket and a stream to another node, both ways and as they are."""

from __future__ import annotations

import math
import socket

import anyio

from auth import MeshError
from mesh.tasks import helpers
from transport import Stream

__all__ = ["carry"]

CHUNK_BYTES = 1 << 18
"""Bytes taken at a time: much beside what taking costs, little in memory."""


async def carry(sock: socket.socket, stream: Stream) -> None:
    """Carry bytes until either side has ended in both directions, or one of them breaks.

    The socket is closed at the end, and the stream ended: whoever is left sees it.

    Args:
        sock: does not block.
        stream: past its opening.
    """
    stream.timeout = math.inf  # executors may compute for hours between two operations
    is_whole = False
    try:
        async with helpers() as tasks:
            done = anyio.Event()

            async def outward() -> None:
                try:
                    await _send_on(sock, stream)
                    await done.wait()
                except (MeshError, OSError):
                    tasks.cancel_scope.cancel()

            tasks.start_soon(outward)
            await _bring_in(stream, sock)
            done.set()
            is_whole = True
    except (MeshError, OSError):
        pass  # the executor, or the other node, sees the end and says who is lost
    finally:
        sock.close()
        if is_whole:
            with anyio.CancelScope(shield=True):
                await stream.aclose()
        else:
            stream.reset()


async def _send_on(sock: socket.socket, stream: Stream) -> None:
    room = memoryview(bytearray(CHUNK_BYTES))
    while True:
        try:
            got = sock.recv_into(room)
        except BlockingIOError:
            await anyio.wait_readable(sock)
            continue
        if not got:
            await stream.send_eof()
            return
        await stream.send(room[:got])


async def _bring_in(stream: Stream, sock: socket.socket) -> None:
    while True:
        try:
            data = memoryview(await stream.receive(CHUNK_BYTES))
        except anyio.EndOfStream:
            sock.shutdown(socket.SHUT_WR)
            return
        while data:
            try:
                data = data[sock.send(data) :]
            except BlockingIOError:
                await anyio.wait_writable(sock)
