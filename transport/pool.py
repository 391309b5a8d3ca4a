"""The open ``mesh/1`` connections of an endpoint: one for each peer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from auth import MeshError, NodeId
from transport.codes import AppCode
from transport.connection import Connection
from transport.errors import IdentityInUse

__all__ = ["Pool"]

ALIVE_SECONDS = 1.0
"""How long the connection that has a newcomer's place may take to show that it is alive."""


class Pool:
    """Connections by the peer's node id.

    Two nodes keep one connection, and whoever is dialled decides which: a listener that has a
    living one refuses a second as `Superseded`, and the dialer uses the first. Of two nodes that
    dial each other at the same moment, the one with the smaller node id waits for its own dial and
    then refuses the other's. So a connection that was handed out is not taken away for one that is
    no better. A peer that has restarted (same key, another boot id) takes the place of its former
    self.
    """

    def __init__(self, node_id: NodeId) -> None:
        self._node_id = node_id
        self._open: dict[NodeId, Connection] = {}
        self._hellos: Counter[NodeId] = Counter()
        self._changed = anyio.Event()

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The open connections."""
        return tuple(connection for connection in self._open.values() if connection.is_open)

    def get(self, node_id: NodeId) -> Connection | None:
        """Return the open connection with `node_id`, if there is one."""
        connection = self._open.get(node_id)
        return connection if connection is not None and connection.is_open else None

    async def wait(self, node_id: NodeId) -> Connection:
        """Wait until there is a connection with `node_id`, however long that is; return it."""
        while (connection := self.get(node_id)) is None:
            await self._changed.wait()
        return connection

    @contextmanager
    def hello(self, node_id: NodeId) -> Iterator[None]:
        """Mark the time between our hello to `node_id` and its answer."""
        self._hellos[node_id] += 1
        try:
            yield
        finally:
            self._hellos[node_id] -= 1
            if not self._hellos[node_id]:
                del self._hellos[node_id]
            self._wake()

    async def check_identity(self, newcomer: Connection) -> None:
        """Refuse `newcomer` if its key is alive at another node than the one that presents it.

        Raises:
            IdentityInUse: the holder of the key answered a ping.
        """
        holder = self.get(newcomer.peer.node_id)
        if (
            holder is None
            or holder.remote_boot == newcomer.remote_boot
            or holder.remote_address == newcomer.remote_address  # one port has one process
            or not await _is_alive(holder)
        ):
            return
        raise IdentityInUse(
            "connection",
            peer=newcomer.peer.node_id.short,
            why=f"identity in use at {holder.info.remote}",
            fix="Each running node needs a key of its own: give one of them another home.",
        )

    async def claim(self, newcomer: Connection) -> Connection:
        """Return the connection to keep with a peer that dialled `newcomer`, perhaps an older one.

        Where our own hello to it is on its way and goes first, that is waited for.
        """
        node_id = newcomer.peer.node_id
        while True:
            holder = self.get(node_id)
            if holder is not None and holder.remote_boot == newcomer.remote_boot:
                if await _is_alive(holder):
                    return holder
            elif self._hellos[node_id] and self._node_id < node_id:
                with anyio.move_on_after(ALIVE_SECONDS) as waiting:
                    await self._changed.wait()
                if not waiting.cancelled_caught:
                    continue
            if self.get(node_id) is holder:
                newcomer.raise_if_closed("connection", "authorize")
                self.add(newcomer)
                return newcomer

    def add(self, connection: Connection) -> None:
        """Make `connection` the one with its peer; another one is over."""
        node_id = connection.peer.node_id
        other = self._open.get(node_id)
        self._open[node_id] = connection
        connection.on_close(self._remove)
        if other is not None and other is not connection and other.is_open:
            other.abort(AppCode.SUPERSEDED, "the peer has made another connection")
        self._wake()

    def _wake(self) -> None:
        event, self._changed = self._changed, anyio.Event()
        event.set()

    def _remove(self, connection: Connection) -> None:
        if self._open.get(connection.peer.node_id) is connection:
            del self._open[connection.peer.node_id]


async def _is_alive(connection: Connection) -> bool:
    try:
        await connection.ping(ALIVE_SECONDS)
    except MeshError:
        return False
    return True
