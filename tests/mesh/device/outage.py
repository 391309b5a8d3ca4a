"""A way to a peer that can be cut: datagrams get through, or vanish."""

from __future__ import annotations

import select
import socket
import threading
from types import TracebackType
from typing import Self

from auth import SocketAddress, Ticket

__all__ = ["Line"]


class Line:
    """Passes datagrams between one dialer and one listener, in a thread of its own.

    Args:
        ticket: of the listener.

    Attributes:
        ticket: of the listener at this end of the line.
        is_cut: whether datagrams vanish, in both directions and without a word.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.is_cut = False
        self._listener = ticket.addresses[0]
        self._dialer: SocketAddress | None = None
        self._inside, self._outside = self._open(), self._open()
        self._wake, self._waker = socket.socketpair()
        self.ticket = Ticket(ticket.node_id, (self._inside.getsockname(),))
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._waker.close()
        self._thread.join()
        for each in (self._inside, self._outside, self._wake):
            each.close()

    @staticmethod
    def _open() -> socket.socket:
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 21)
        opened.bind(("127.0.0.1", 0))
        return opened

    def _run(self) -> None:
        while True:
            ready = select.select([self._inside, self._outside, self._wake], [], [])[0]
            if self._wake in ready:
                return
            if self._inside in ready:
                data, self._dialer = self._inside.recvfrom(1 << 16)
                self._pass(self._outside, data, self._listener)
            if self._outside in ready:
                data, _ = self._outside.recvfrom(1 << 16)
                self._pass(self._inside, data, self._dialer)

    def _pass(self, way: socket.socket, data: bytes, target: SocketAddress | None) -> None:
        if not self.is_cut and target is not None:
            way.sendto(data, target)
