"""Members of a group in one process: executors' exchanges over pairs of sockets, with threads."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from mesh.collective import CollectiveError, Operation, Signature
from mesh.device.groups.exchange import SocketExchange

__all__ = ["Members", "members"]

T = TypeVar("T")


class Members:
    """The exchanges of a group of so many members.

    Attributes:
        broken: what each has said about the group when it broke.
        sockets: for each member, its ends.
    """

    def __init__(self, size: int) -> None:
        self.sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for high in range(size):
            for low in range(high):
                self.sockets[low][high], self.sockets[high][low] = socket.socketpair()
        self.broken: list[list[CollectiveError]] = [[] for _ in range(size)]
        labels = [f"peer {index}" for index in range(size)]
        self.exchanges = [
            SocketExchange("g", index, labels, self.sockets[index], self.broken[index].append)
            for index in range(size)
        ]

    def run(self, work: Callable[[int, SocketExchange], T]) -> list[T | BaseException]:
        """Do `work` as each member at once; return what each has returned or raised."""
        found: list[T | BaseException] = [RuntimeError("it did not end")] * len(self.exchanges)

        def attempt(index: int) -> None:
            try:
                found[index] = work(index, self.exchanges[index])
            except Exception as error:
                found[index] = error

        threads = [
            threading.Thread(target=attempt, args=(index,), daemon=True)
            for index in range(len(self.exchanges))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        return found

    def kill(self, index: int) -> None:
        """Have a member be gone, as when its process is killed."""
        for sock in self.sockets[index].values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def members(size: int) -> Iterator[Members]:
    """Make a group for the block."""
    group = Members(size)
    try:
        yield group
    finally:
        for exchange in group.exchanges:
            exchange.close(1.0)


def operation(
    exchange: SocketExchange, signature: Signature, sequence: int = 0, seconds: float = 5.0
) -> Operation:
    """Return an operation of a group."""
    return Operation(exchange, signature, sequence, time.monotonic() + seconds)
