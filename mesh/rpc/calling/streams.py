"""Streams of items, at the caller: what a peer's generator yields, one after another."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio

from auth import MeshError, NodeId
from mesh.rpc.answering.sources import Source
from mesh.rpc.bridge import ended
from mesh.rpc.encoding.exceptions import decode_exception
from mesh.rpc.errors import RpcError
from mesh.rpc.limits import limit
from mesh.rpc.names.targets import Target
from mesh.rpc.refs.owned import new_id
from mesh.rpc.refs.passing import Outgoing
from mesh.rpc.tensors.carriage import beside, together, with_parts
from mesh.rpc.wire import STREAM_SERVICE, Answer, Request, Wanted
from transport import AppCode, CborValue, Connection, Stream, TransportError

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent

__all__ = ["RemoteIterator"]

MAX_ITEM = 1 << 20
"""Longest message about an item, that of a frame; larger tensors travel apart."""


class RemoteIterator:
    """The items of a peer's generator, as an async iterator for one task; `Agent.stream` makes it.

    The generator begins with the first item that is asked for, and is never more than a few items
    ahead of its reader. It is closed at the peer as soon as this is: at the end of ``async with``,
    by `aclose`, when waiting for an item is cancelled or takes too long, or, with a short delay,
    when nobody has the iterator any more.

    Raises, from the wait for an item:
        RpcTimeout: it was not there in time.
        Exception: what the generator raised, and what `Agent.call` raises.
    """

    def __init__(
        self,
        agent: Agent,
        to: NodeId,
        find: Callable[[], Awaitable[Target]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        seconds: float,
        function: object = None,
    ) -> None:
        self._agent = agent
        self._to = to
        self._find = find
        self._args, self._kwargs = args, kwargs
        self._seconds = seconds
        self._function = function
        self._what = "a stream of items"
        self._guard = anyio.ResourceGuard("waiting for an item of this stream")
        self._stream: Stream | None = None
        self._here: Source | None = None
        self._count = 0
        self._why_over: str | None = None
        self._counted = ""
        """What it is called among what is under way, while it is."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        with self._guard:
            if self._why_over == _ENDED:
                raise StopAsyncIteration
            if self._why_over is not None:
                raise RpcError(self._what, peer=self._label, why=self._why_over)
            try:
                with limit(self._seconds, self._what, self._label):
                    return await self._next()
            except StopAsyncIteration:
                await self._end(_ENDED)
                raise
            except BaseException as error:
                await self._end("an earlier item of it was not got", error)
                if isinstance(error, MeshError) and not self._agent.bridge.is_open:
                    raise ended() from error
                self._agent.asking.name_in(error, self._what)
                raise

    async def aclose(self) -> None:
        """Have the generator closed; there are no more items."""
        with self._guard:
            await self._end(_ENDED)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # Amid anything, in any thread: all that can be done is to leave a note.
        if self._counted:
            give_up = functools.partial(_give_up, self._agent, self._counted, self._stream)
            self._agent.abandoned.append(give_up)

    # -- inside

    @property
    def _label(self) -> str:
        return self._agent.label(self._to)

    async def _next(self) -> Any:
        if self._stream is None and self._here is None:
            await self._open()
        elif self._stream is not None:
            await self._ask(self._stream)
        if self._here is not None:
            return await self._here.next()
        assert self._stream is not None
        try:
            answer = Answer.decode(await self._stream.receive_message(MAX_ITEM))
        except anyio.EndOfStream:
            raise StopAsyncIteration from None
        if answer.error is not None:
            raise decode_exception(answer.error, peer=self._label, what=self._what)
        connection = self._stream.connection
        parts = await self._agent.asking.fetch_parts(connection, answer)
        what = answer.beside
        tensors = await self._agent.placement.answered(
            together(what, parts), what.devices, self._to
        )
        return await self._agent.asking.value_of(answer.items, tensors, connection)

    async def _ask(self, stream: Stream) -> None:
        self._count += 1
        with contextlib.suppress(MeshError):  # it has ended, in whichever way: reading will tell
            await stream.send_message(Wanted(self._count).encode())

    async def _open(self) -> None:
        agent = self._agent
        await agent.ready.wait()
        target = await self._find()
        self._what = f"stream of {target.name or target.kind!r}"
        self._counted = f"the {self._what} from {self._label}"
        agent.activity.begin(self._counted)
        outgoing = Outgoing(agent, self._to)
        packed = agent.asking.packed(target, outgoing, self._args, self._kwargs, self._function)
        try:
            await outgoing.settle()
            what = beside(packed.tensors, self._agent.placement.towards(self._to))
            key = new_id() if what.apart else b""
            request = Request(target, packed.items, what, self._seconds, key=key)
            if self._to == agent.node_id:
                self._here = await agent.stream_here(request, packed.tensors)
                return
            connection = await agent.connected(self._to)
            await self._request(connection, request, packed.tensors)
        except BaseException:
            outgoing.undo()
            raise

    async def _request(
        self, connection: Connection, request: Request, tensors: Sequence[Any]
    ) -> None:
        stream = await connection.open_stream(STREAM_SERVICE, request.encode())
        self._stream = stream
        stream.timeout = float("inf")  # whoever waits has a limit of its own
        await self._ask(stream)
        if request.key:

            async def ask() -> CborValue:
                return await stream.reply()

            await with_parts(connection, self._agent.lanes, request, tensors, ask)

    async def _end(self, why: str, error: BaseException | None = None) -> None:
        """Give up what there is, and tell the peer."""
        self._why_over = self._why_over or why
        stream, self._stream = self._stream, None
        here, self._here = self._here, None
        self._args, self._kwargs = (), {}
        counted, self._counted = self._counted, ""
        if counted:
            self._agent.activity.end(counted)
        if stream is not None and not stream.is_closed:
            if error is None:
                with contextlib.suppress(TransportError, anyio.ClosedResourceError):
                    await stream.aclose()
            else:
                stream.reset(AppCode.CANCELLED)
        if here is not None:
            await here.close()


_ENDED = "it has ended"


def _give_up(agent: Agent, counted: str, stream: Stream | None) -> None:
    """End a stream whose reader nobody has any more."""
    agent.activity.end(counted)
    if stream is not None:
        stream.reset()
