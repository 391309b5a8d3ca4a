"""A node's end of the socket to an executor on which it says what concerns groups of devices."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

import anyio

from auth import MeshError
from mesh.device.groups import wire
from mesh.device.server.nursery import Executor
from mesh.tasks import helpers
from transport import ProtocolError, cbor

__all__ = ["Line"]

Hear = Callable[[wire.Formed | wire.Broken], None]


class Line:
    """Orders to one executor, and its news."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._hear: dict[int, Hear] = {}
        self._orders: deque[tuple[bytes, list[socket.socket]]] = deque()
        self._ordered = anyio.Event()

    def form(self, order: wire.Form, sockets: list[socket.socket], hear: Hear) -> None:
        """Order the forming of a group.

        Args:
            order: the group.
            sockets: to the other members; the executor's from now on.
            hear: is given whatever the executor says about the group.
        """
        self._hear[order.number] = hear
        self._order(wire.frame(order.encode()), sockets)

    def leave(self, number: int) -> None:
        """Have the executor leave a group, if it was ordered to form it."""
        if self._hear.pop(number, None) is not None:
            self._order(wire.frame(wire.Leave(number).encode()), [])

    async def run(self) -> None:
        """Carry orders and news until the executor has ended."""
        try:
            async with helpers() as tasks:
                tasks.start_soon(self._listen, tasks.cancel_scope.cancel)
                tasks.start_soon(self._write, tasks.cancel_scope.cancel)
                await self.executor.ended.wait()
        finally:
            while self._orders:
                _close(self._orders.popleft()[1])
            for number, hear in self._hear.items():
                error = ProtocolError("a group of devices", why="its executor has ended")
                hear(wire.Broken(number, error))

    def _order(self, data: bytes, sockets: list[socket.socket]) -> None:
        self._orders.append((data, sockets))
        event, self._ordered = self._ordered, anyio.Event()
        event.set()

    async def _write(self, end: Callable[[], None]) -> None:
        try:
            while True:
                while self._orders:
                    data, sockets = self._orders.popleft()
                    try:
                        await _send(self.executor.beside, data, sockets)
                    finally:
                        _close(sockets)
                await self._ordered.wait()
        except (OSError, anyio.ClosedResourceError):
            end()

    async def _listen(self, end: Callable[[], None]) -> None:
        beside = self.executor.beside
        try:
            while True:
                (length,) = wire.LENGTH.unpack(await _receive(beside, wire.LENGTH.size))
                if length > wire.MAX_FRAME:
                    raise ProtocolError("news of a group of devices", why="they are too long")
                body = await _receive(beside, length)
                value = cbor.decode(bytes(body), max_size=wire.MAX_FRAME)
                news = wire.decode_news(value, None)
                hear = self._hear.get(news.number)
                if hear is not None:
                    hear(news)
        except (EOFError, OSError, MeshError, anyio.ClosedResourceError):
            end()


async def _send(beside: socket.socket, data: bytes, sockets: list[socket.socket]) -> None:
    descriptors = [each.fileno() for each in sockets]
    sent = 0
    while sent < len(data):
        try:
            if sent or not descriptors:
                sent += beside.send(data[sent:])
            else:
                sent += socket.send_fds(beside, [data], descriptors)
        except BlockingIOError:
            await anyio.wait_writable(beside)


async def _receive(beside: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        try:
            got = beside.recv_into(view)
        except BlockingIOError:
            await anyio.wait_readable(beside)
            continue
        if not got:
            raise EOFError
        view = view[got:]
    return data


def _close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()
