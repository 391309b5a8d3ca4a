"""Large tensors that belong to a call and travel apart from it, as the callee keeps them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import anyio
import torch

from auth import Grant, NodeId
from mesh.rpc.errors import RefLost
from mesh.rpc.refs.owned import new_id
from mesh.rpc.tensors.carriage import Room, serve_receive, serve_send
from mesh.rpc.wire import Beside, PartOpen, Request
from tensor_bridge import TensorMeta
from tensor_bridge.copying import copy_in_turns
from tensor_bridge.memory import tensor_bytes
from tensor_bridge.moves import Landing
from transport import Connection, Incoming, LimitExceeded, ProtocolError

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent

__all__ = ["Parts"]

EARLY_SECONDS = 5.0
"""How long a part waits for its request, which was sent before it on another stream."""

OFFER_SECONDS = 30.0
"""How long what is to be fetched of an answer waits for it to begin: its caller comes at once."""

MAX_OFFERS = 128
"""Answers of one peer that wait to be fetched: as many as it can have streams."""

_Key: TypeAlias = tuple[NodeId, bytes]


class _Expected:
    """A request that waits for its parts."""

    def __init__(self, request: Request) -> None:
        self.metas = {number: request.beside.metas[number] for number in request.on_streams}
        self.begun: set[int] = set()
        self.landed: dict[int, torch.Tensor] = {}
        self.all_landed = anyio.Event()


@dataclasses.dataclass(slots=True)
class _Offered:
    """The parts of an answer that are still to be fetched."""

    tensors: dict[int, torch.Tensor]
    sizes: dict[int, int]
    until: float


class Parts:
    """The parts of all calls to one node.

    Args:
        agent: whose they are.
        room: what answers take until they are fetched.
    """

    def __init__(self, agent: Agent, room: Room) -> None:
        self._agent = agent
        self._room = room
        self._expected: dict[_Key, _Expected] = {}
        self._offered: dict[_Key, _Offered] = {}
        self._registered = anyio.Event()

    async def receive(self, connection: Connection, request: Request) -> Mapping[int, torch.Tensor]:
        """Wait for the parts of a request that has come by a connection; return them by number.

        Raises:
            ProtocolError: another request has its key.
            RefLost: one of them does not lie where it says.
            ConnectionClosed: the peer breaks the protocol of shared memory.
        """
        if not request.key:
            return {}
        borrowed = {
            number: await self._borrowed(connection, *block, request.beside.metas[number])
            for number, block in request.lent.items()
        }
        if not request.on_streams:
            return borrowed
        key = (connection.peer.node_id, request.key)
        if key in self._expected:
            raise ProtocolError("a call", why="another has its key")
        expected = self._expected[key] = _Expected(request)
        event, self._registered = self._registered, anyio.Event()
        event.set()
        try:
            await expected.all_landed.wait()
        finally:
            del self._expected[key]
        return borrowed | expected.landed

    async def _borrowed(
        self, connection: Connection, block: int, lend: int, meta: TensorMeta
    ) -> torch.Tensor:
        """Return a copy of what lies in memory of the peer's, which it may write to on."""
        lanes = self._agent.lanes
        loan = await lanes.borrowed(connection, block, lend, meta)
        if loan is None:
            raise _unknown()
        landing = Landing(meta, lanes.memory)
        await copy_in_turns(landing.room, tensor_bytes(loan.raw), landing.advance)
        return landing.tensor

    def offer(
        self, peer: NodeId, grant: Grant, tensors: Sequence[torch.Tensor], what: Beside
    ) -> bytes:
        """Keep the large tensors of an answer for its caller; return the key to fetch them by.

        Raises:
            LimitExceeded, QuotaExceeded: the caller has left too much where it is.
        """
        if sum(owner == peer for owner, _ in self._offered) >= MAX_OFFERS:
            raise LimitExceeded(
                "answering a call",
                why=f"{MAX_OFFERS} large answers wait to be fetched by this peer already",
            )
        sizes = {number: what.metas[number].nbytes for number in what.apart}
        self._room.take(peer, grant, sum(sizes.values()))
        key = new_id()
        self._offered[peer, key] = _Offered(
            {number: tensors[number] for number in what.apart},
            sizes,
            anyio.current_time() + OFFER_SECONDS,
        )
        self._agent.watch()
        return key

    def is_offered(self, peer: NodeId, key: bytes) -> bool:
        """Return whether there is something of an answer that is still to be fetched."""
        return (peer, key) in self._offered

    def leave(self, peer: NodeId, key: bytes) -> None:
        """Forget what is left of an answer: its caller has said that it does not come for it."""
        if (peer, key) in self._offered:
            self._drop((peer, key))

    def lapse(self, now: float) -> float:
        """Forget what nobody has come for; return when to call this again."""
        while self._offered:  # the oldest is the first
            key, offered = next(iter(self._offered.items()))
            if offered.until > now:
                return offered.until
            self._drop(key)
        return math.inf

    def _drop(self, key: _Key) -> None:
        self._room.give(key[0], sum(self._offered.pop(key).sizes.values()))

    async def serve(self, incoming: Incoming) -> None:
        """Take one part from its caller, or give it one.

        Raises:
            RefLost: there is no such part.
        """
        order = PartOpen.decode(incoming.value)
        key = (incoming.peer.node_id, order.key)
        offer = self._agent.lanes.answer(incoming.connection, order.lanes)
        if order.is_fetched:
            offered = self._offered.get(key)
            if offered is None or order.number not in offered.tensors:
                raise _unknown()
            tensor = offered.tensors.pop(order.number)  # each is fetched once
            nbytes = offered.sizes.pop(order.number)
            if not offered.tensors:
                self._drop(key)
            try:
                await serve_send(incoming.stream, offer, tensor)
            finally:
                self._room.give(key[0], nbytes)  # however long its reader takes
            return
        expected = await self._wait_for(key)
        if order.number not in expected.metas or order.number in expected.begun:
            raise _unknown()
        expected.begun.add(order.number)
        landing = Landing(expected.metas[order.number], self._agent.lanes.memory)
        landing.allocate()
        await serve_receive(incoming.stream, offer, landing)
        expected.landed[order.number] = landing.tensor
        if len(expected.landed) == len(expected.metas):
            expected.all_landed.set()

    async def _wait_for(self, key: _Key) -> _Expected:
        with anyio.move_on_after(EARLY_SECONDS):
            while (expected := self._expected.get(key)) is None:
                await self._registered.wait()
            return expected
        raise _unknown()


def _unknown() -> RefLost:
    return RefLost("a part of a call", why="nobody waits for it, or has it, under that name")
