"""The Unix sockets on which the processes of one host hand out the memory of a group.

The first rank listens at an address for each other one. Who connects shows the secret that this
rank was told on its own connection. Then packets go, each with one descriptor::

    member to first    b  what wakes it (an eventfd)
                       p  what tells of its end (a pidfd)
    first to member    m  the memory
                       b  and p of each other place, its own included
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self

import anyio

from auth import NodeId, PeerIdentity
from mesh.collective.host import Board, Layout
from tensor_bridge.lanes.shared.doorbell import check_eventfd, make_eventfd
from tensor_bridge.lanes.shared.meeting import ADDRESS_BYTES, SECRET_BYTES
from tensor_bridge.lanes.shared.rendezvous import admit, introduce
from tensor_bridge.lanes.shared.segment import make_segment, map_segment
from tensor_bridge.lanes.shared.sockets import listen, send_packet, take_packet
from transport import ProtocolError

__all__ = ["OFFER_BYTES", "Reception", "join_memory"]

OFFER_BYTES = ADDRESS_BYTES + SECRET_BYTES
"""What a rank is offered: where to connect, and what to show there."""

_PACKET = struct.Struct("<cH")
_MEMORY, _BELL, _PROCESS = b"m", b"b", b"p"


class Reception:
    """Where the first rank of a host waits for the others. It listens at once.

    Args:
        nodes: for each rank of the group who it is.
        ranks: those of this host; the first is this one.

    Raises:
        OSError: there are no sockets left.

    Attributes:
        offers: for each place what is to be told to it, and to nobody else.
    """

    def __init__(self, nodes: tuple[NodeId, ...], ranks: tuple[int, ...]) -> None:
        self.offers = [os.urandom(OFFER_BYTES) for _ in ranks]
        self._nodes = [nodes[rank] for rank in ranks]
        self._ranks = ranks
        self._others = range(1, len(ranks))
        self._listeners: dict[int, socket.socket] = {}
        try:
            for each in self._others:
                self._listeners[each] = listen(self.offers[each][:ADDRESS_BYTES])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait for nobody any more."""
        for listener in self._listeners.values():
            listener.close()

    async def host_memory(self, timeout: float) -> Board:
        """Make the memory of the group, and hand it to the others.

        Args:
            timeout: seconds for all of it.

        Raises:
            TimeoutError: some did not come.
            ProtocolError: one hands over something else.
            OSError: there is no memory, or are no descriptors, left.
        """
        size = len(self._nodes)
        layout = Layout.of(size)
        socks: dict[int, socket.socket] = {}
        with _Descriptors(0) as held, contextlib.ExitStack() as stack:
            memory, descriptor = make_segment(layout.nbytes)
            stack.callback(os.close, descriptor)

            async def welcome(each: int) -> None:
                peer, secret = PeerIdentity(self._nodes[each]), self.offers[each][ADDRESS_BYTES:]
                found = await admit(self._listeners[each], secret, peer)
                if found is None:
                    raise ProtocolError("shared memory", peer=peer, why="too many others came")
                socks[each] = stack.enter_context(found.sock)
                for kind in (_BELL, _PROCESS):
                    held.take(await _receive(found.sock), kind, each)

            async def hand_over(each: int) -> None:
                await _send(socks[each], _MEMORY, 0, descriptor)
                for other in range(size):
                    await _send(socks[each], _BELL, other, held.bells[other])
                    await _send(socks[each], _PROCESS, other, held.processes[other])

            with anyio.fail_after(timeout):
                await _all(welcome, self._others)
                check_eventfd(list(held.bells.values()))
                await _all(hand_over, self._others)
            return held.board(memory, layout, self._ranks)


async def join_memory(ranks: tuple[int, ...], place: int, offered: bytes, timeout: float) -> Board:
    """Get the memory of a group from the first rank of this host.

    Args:
        ranks: those of this host.
        place: this rank's place among them.
        offered: what this rank was told.
        timeout: seconds for all of it.

    Raises:
        TimeoutError: it did not answer.
        ProtocolError: it hands over something else.
        OSError: it is not there, or there are no descriptors left.
    """
    size = len(ranks)
    layout = Layout.of(size)
    with _Descriptors(place) as held, anyio.fail_after(timeout):
        found = await introduce(offered[:ADDRESS_BYTES], offered[ADDRESS_BYTES:])
        with found.sock as sock:
            await _send(sock, _BELL, place, held.bells[place])
            await _send(sock, _PROCESS, place, held.processes[place])
            kind, _, descriptor = await _receive(sock)
            try:
                if kind != _MEMORY:
                    raise _wrong()
                memory = map_segment(descriptor, layout.nbytes)
            finally:
                os.close(descriptor)
            for other in range(size):
                for kind in (_BELL, _PROCESS):
                    held.take(await _receive(sock), kind, other)
        check_eventfd(list(held.bells.values()))
        return held.board(memory, layout, ranks)


class _Descriptors:
    """What wakes each rank, and what tells of its end, until a board has them."""

    def __init__(self, place: int) -> None:
        self.bells: dict[int, int] = {}
        self.processes: dict[int, int] = {}
        self._place = place

    def __enter__(self) -> Self:
        self.bells[self._place] = make_eventfd()
        try:
            self.processes[self._place] = os.pidfd_open(os.getpid())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def take(self, packet: tuple[bytes, int, int], kind: bytes, place: int) -> None:
        """Keep the descriptor of a packet, which is of this kind and place; this rank's own not."""
        found, at, descriptor = packet
        table = self.bells if kind == _BELL else self.processes
        if place in table:
            os.close(descriptor)
        else:
            table[place] = descriptor
        if (found, at) != (kind, place):
            raise _wrong()

    def board(self, memory: mmap.mmap, layout: Layout, ranks: tuple[int, ...]) -> Board:
        """Return the board that has them from now on."""
        place = self._place
        own = self.bells.pop(place)
        os.close(self.processes.pop(place))
        bells, self.bells = self.bells, {}
        processes, self.processes = self.processes, {}
        return Board(
            memory,
            layout,
            ranks,
            place,
            own=own,
            eventfds=bells,
            pidfds=processes,
        )

    def _close(self) -> None:
        for descriptor in (*self.bells.values(), *self.processes.values()):
            os.close(descriptor)
        self.bells.clear()
        self.processes.clear()


async def _all(work: Callable[[int], Awaitable[None]], places: Iterable[int]) -> None:
    """Do the work for all places at once; raise the first error as it is."""
    failed: list[Exception] = []

    async def attempt(place: int) -> None:
        try:
            await work(place)
        except Exception as error:
            failed.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for place in places:
            tasks.start_soon(attempt, place)
    if failed:
        raise failed[0]


async def _send(sock: socket.socket, kind: bytes, place: int, descriptor: int) -> None:
    while True:
        try:
            send_packet(sock, _PACKET.pack(kind, place), descriptor)
            return
        except BlockingIOError:
            await anyio.wait_writable(sock)


async def _receive(sock: socket.socket) -> tuple[bytes, int, int]:
    """Return kind, place and descriptor of the next packet; the descriptor is the caller's."""
    while True:
        await anyio.wait_readable(sock)
        with contextlib.suppress(BlockingIOError), take_packet(sock) as (data, descriptor):
            if descriptor is None or len(data) != _PACKET.size:
                raise _wrong()
            kind, place = _PACKET.unpack(data)
            return kind, place, os.dup(descriptor)


def _wrong() -> ProtocolError:
    return ProtocolError("shared memory", why="a packet that does not belong there")
