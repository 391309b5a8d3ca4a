"""Streams of items, at the callee: a generator is run as far as its reader asks, and no further.

It may be `AHEAD` items ahead of what was asked for. An item with what takes room here until it is
read (large tensors, and references, whose shares lapse) waits until it is asked for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import anyio
import torch

from auth import MeshError
from mesh.rpc.answering.sources import Source, source_of
from mesh.rpc.encoding.exceptions import encode_exception
from mesh.rpc.errors import PickleRefused, RpcError, Unsendable
from mesh.rpc.links import current_context
from mesh.rpc.refs.passing import Outgoing
from mesh.rpc.tensors.carriage import Room, beside, together
from mesh.rpc.tensors.parts import Parts
from mesh.rpc.wire import SCOPE, STREAM_SERVICE, Answer, Beside, Request, Wanted
from transport import AppCode, Endpoint, Incoming, ProtocolError

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent
    from mesh.rpc.answering.service import RpcService

__all__ = ["AHEAD", "StreamService"]

AHEAD = 16
"""Items that a generator may be ahead of its reader: enough to hide the way between the two."""

MAX_WANTED_BYTES = 64
"""Longest message of a reader."""

END_SECONDS = 1.0
"""How long readers may take to hear that their streams are over."""

_log = logging.getLogger("quicmesh.rpc")


class _Reading:
    """A reader: how many items it has asked for so far, and what it has still to fetch."""

    def __init__(self, incoming: Incoming, parts: Parts) -> None:
        self.peer = incoming.peer.node_id
        self.has_left = False
        self.is_writing = False
        self.has_ended = False
        self.told = anyio.Event()
        """Set when it is to end, whatever it has read."""
        self._incoming = incoming
        self._stream = incoming.stream
        self._parts = parts
        self._keys: set[bytes] = set()
        self._count = 0
        self._more = anyio.Event()

    async def listen(self) -> None:
        """Take what the reader says, until it ends the stream.

        Raises:
            ProtocolError: it wants fewer than before.
        """
        while True:
            try:
                message = await self._stream.receive_message(MAX_WANTED_BYTES)
            except anyio.EndOfStream:
                self.has_left = True
                return
            count = Wanted.decode(message).count
            if count < self._count:
                raise ProtocolError("a stream of items", why="fewer are wanted than before")
            self._count = count
            event, self._more = self._more, anyio.Event()
            event.set()

    def covers(self, count: int) -> bool:
        """Return whether that many are asked for."""
        return self._count >= count

    async def until(self, count: int) -> None:
        """Wait until that many are asked for."""
        while self._count < count:
            await self._more.wait()

    async def send(self, answer: Answer) -> None:
        """Send an item, or the error that is the last."""
        self.is_writing = True  # and stays so, if that is cancelled
        await self._stream.send_message(answer.encode())
        self.is_writing = False

    def offer(self, tensors: Sequence[torch.Tensor], what: Beside) -> bytes:
        """Keep the large tensors of an item for the reader; return their key, if there are any."""
        if not what.apart:
            return b""
        key = self._parts.offer(self.peer, self._incoming.grant, tensors, what)
        self._keys = {each for each in self._keys if self._parts.is_offered(self.peer, each)} | {
            key
        }
        return key

    async def finish(self) -> None:
        """End the stream, and wait until the reader has fetched all, or does not any more."""
        self.has_ended = True
        await self._stream.send_eof()
        if any(self._parts.is_offered(self.peer, key) for key in self._keys):
            await anyio.sleep_forever()  # `listen` ends it, when the reader has ended its side

    def leave(self) -> None:
        """Forget what the reader has not fetched."""
        for key in self._keys:
            self._parts.leave(self.peer, key)


class StreamService:
    """What serves streams of items, beside the calls of `service`.

    Args:
        agent: whose generators.
        service: what finds and reads what a request names.
        room: what arguments take, for as long as the generator may use them.
        parts: those of requests, and of items.
    """

    def __init__(self, agent: Agent, service: RpcService, room: Room, parts: Parts) -> None:
        self._agent = agent
        self._service = service
        self._room = room
        self._parts = parts
        self.open = 0
        """Generators that are read from now."""
        self._readings: set[_Reading] = set()

    def register(self, endpoint: Endpoint) -> None:
        """Offer it to peers whose grant has the scope for it."""
        endpoint.register_service(STREAM_SERVICE, self._serve, scope=SCOPE)

    async def end(self) -> None:
        """Close all generators that peers read from, and tell these why; this waits a moment."""
        with anyio.move_on_after(END_SECONDS):
            while self._readings:
                for reading in self._readings:
                    reading.told.set()
                await anyio.sleep(0.01)

    async def here(self, request: Request, tensors: Sequence[torch.Tensor]) -> Source:
        """Return the items of a node's own generator, for itself: copies, as for any other."""
        found, args, kwargs = await self._service.found_by_self(request, tensors)
        me = self._agent.node_id
        return _Copying(source_of(found, args, kwargs, self._agent.workers, me), self._service)

    async def _serve(self, incoming: Incoming) -> None:
        request, stream = Request.decode(incoming.value), incoming.stream
        current_context.set(None)  # that of whoever made the connection, if it had one
        not_here = ("fetch", "operator", "gradients", "backward")
        if request.create is not None or request.target.kind in not_here:
            raise ProtocolError("a stream of items", why=f"a {request.target} gives none")
        stream.timeout = float("inf")  # a reader may think for hours
        reading = _Reading(incoming, self._parts)
        self._readings.add(reading)
        name = request.target.name or request.target.kind
        who = self._agent.label(incoming.peer.node_id)
        try:
            with self._agent.activity.answering(f"the stream of {name!r} to {who}"):
                with anyio.CancelScope() as scope:
                    stream.on_abandoned(scope.cancel)
                    await self._run(request, incoming, reading)
                stream.on_abandoned(None)
                if scope.cancelled_caught or reading.has_left:
                    stream.reset(AppCode.CANCELLED)
        finally:
            self._readings.discard(reading)
            reading.leave()

    async def _run(self, request: Request, incoming: Incoming, reading: _Reading) -> None:
        peer = incoming.peer
        failed: Exception | None = None
        with self._room.hold(peer.node_id, incoming.grant, request.beside.nbytes):
            if request.target.kind == "function":
                self._agent.exposures.callable(request.target.name)  # before tensors come in vain
            parts = await self._parts.receive(incoming.connection, request)
            what = request.beside
            tensors = await self._agent.placement.ordered(together(what, parts), what.devices)
            async with anyio.create_task_group() as tasks:

                async def listen() -> None:
                    nonlocal failed
                    try:
                        await reading.listen()
                    except MeshError as error:
                        failed = error
                    tasks.cancel_scope.cancel()

                async def end() -> None:
                    await reading.told.wait()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(listen)
                tasks.start_soon(end)
                try:
                    await self._produce(request, tensors, incoming, reading)
                    await reading.finish()
                except PickleRefused as error:
                    _log.warning("%s sent a pickle: %s", peer, error)
                    incoming.connection.abort(AppCode.PROTOCOL, str(error))
                    failed = error
                except Exception as error:
                    failed = error
                tasks.cancel_scope.cancel()
        if failed is not None:
            raise failed
        if reading.told.is_set() and not reading.has_left and not reading.has_ended:
            await self._part(request, incoming, reading)

    async def _part(self, request: Request, incoming: Incoming, reading: _Reading) -> None:
        """Tell a reader that its stream ends because this node's part in remote calls does."""
        if reading.is_writing:  # half an item is there already
            incoming.stream.reset(AppCode.CANCELLED)
            return
        error = RpcError(
            f"stream of {request.target.name or request.target.kind!r}",
            why="the worker that it came from has been shut down before its end",
            fix="Have it wait longer: rpc.shutdown(timeout=), or end the stream before.",
        )
        await reading.send(Answer(error=encode_exception(error)))
        await incoming.stream.send_eof()

    async def _produce(
        self,
        request: Request,
        tensors: Sequence[torch.Tensor],
        incoming: Incoming,
        reading: _Reading,
    ) -> None:
        found, args, kwargs = await self._service.found(
            request, tensors, incoming.peer, incoming.grant
        )
        index = 0
        source: Source | None = None
        self.open += 1
        try:
            while True:
                await reading.until(index + 1 - AHEAD)
                try:
                    source = source or source_of(
                        found, args, kwargs, self._agent.workers, incoming.peer.node_id
                    )
                    value = await source.next()
                except StopAsyncIteration:
                    return
                except Exception as error:
                    await reading.send(Answer(error=encode_exception(error)))
                    return
                index += 1
                if not await self._send(value, index, request, reading):
                    return
                del value
        finally:
            self.open -= 1
            if source is not None:
                await source.close()

    async def _send(self, value: Any, index: int, request: Request, reading: _Reading) -> bool:
        """Send the item that is number `index`, from 1 on; return False if it was an error."""
        service = self._service
        refs = Outgoing(self._agent, reading.peer)
        try:
            packed = await service.packed(value, refs)
            what = beside(packed.tensors)
            if (what.apart or refs.has_any) and not reading.covers(index):
                refs.undo()
                await reading.until(index)
                refs = Outgoing(self._agent, reading.peer)
                packed = await service.packed(value, refs)
                what = beside(packed.tensors)
            await refs.settle()
            answer = Answer(packed.items, what, reading.offer(packed.tensors, what))
        except Exception as error:
            refs.undo()
            if isinstance(error, Unsendable):
                error.what = f"sending of item {index} of {request.target}"
            answer = Answer(error=encode_exception(error))
        except BaseException:
            refs.undo()
            raise
        try:
            await reading.send(answer)
        except BaseException:
            refs.undo()
            raise
        return answer.error is None


class _Copying:
    """Items of a node's own, each copied."""

    def __init__(self, source: Source, service: RpcService) -> None:
        self._source = source
        self._service = service

    async def next(self) -> Any:
        return await self._service.copied(await self._source.next())

    async def close(self) -> None:
        await self._source.close()
