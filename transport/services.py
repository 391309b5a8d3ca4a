"""What an endpoint offers its peers: services on streams, calls, and protocols of the app's own."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import anyio

from auth import (
    AccessDenied,
    Authorizer,
    Grant,
    MeshError,
    PeerIdentity,
    ServiceRequest,
    decide,
    decide_now,
)
from auth.cancellation import is_cancelled
from auth.grant import check_scopes
from transport.carrier import NotNow
from transport.cbor import CborValue
from transport.codes import AppCode
from transport.errors import ServiceUnknown, TransportError
from transport.frames import LENGTH, MAX_FRAME, error_reply, ok_reply, parse_request
from transport.offers import check_offer
from transport.stream import Stream

if TYPE_CHECKING:
    from transport.connection import Connection

__all__ = [
    "AlpnHandler",
    "CallHandler",
    "Incoming",
    "PromptHandler",
    "ServiceTable",
    "StreamHandler",
]

_log = logging.getLogger("quicmesh.transport")


@dataclasses.dataclass(frozen=True, slots=True)
class Incoming:
    """A request by a peer that is authenticated and authorized for this service."""

    service: str
    value: CborValue
    """What the peer sent with the request; its shape is for the handler to check."""
    peer: PeerIdentity
    grant: Grant
    connection: Connection
    came_on: Stream | None = None
    """The stream it came on, if it did; see `stream`."""

    @property
    def stream(self) -> Stream:
        """The stream that a service serves. A call's handler leaves it alone.

        Raises:
            RuntimeError: this is a call, and came by a carrier.
        """
        if self.came_on is None:
            raise RuntimeError(f"the call of {self.service!r} has no stream")
        return self.came_on


StreamHandler = Callable[[Incoming], Awaitable[None]]
"""Serves one stream. Its first write, or its return, tells the peer that the stream was taken; an
error raised before goes to the peer whole, one raised later as a reset of that class."""

CallHandler = Callable[[Incoming], Awaitable[CborValue]]
"""Answers one call. Cancelled when the caller gives up."""

PromptHandler = Callable[[Incoming], CborValue | NotNow]
"""Answers at once, in some ten microseconds, such calls as it can, and does nothing for others, for
which it returns `NOT_NOW`: then the call's `CallHandler` answers."""

AlpnHandler = Callable[["Connection"], Awaitable[None]]
"""Serves one connection of the app's own protocol; the connection is closed when it returns."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Service:
    handler: Callable[[Incoming], Awaitable[CborValue]]
    scope: str
    is_call: bool
    prompt: PromptHandler | None = None

    async def handle(self, request: Incoming) -> CborValue:
        """Return the handler's answer.

        Raises:
            RuntimeError: it raised what would end the event loop of a thread, in which nobody has
                pressed Ctrl+C, and which no program ends with.
        """
        try:
            return await self.handler(request)
        except (KeyboardInterrupt, SystemExit) as error:
            if threading.current_thread() is threading.main_thread():
                raise
            raise RuntimeError(f"the handler raised {type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class _Running:
    """What is being served, and what it needs to go on."""

    connection: Connection
    needed: str
    handling: anyio.CancelScope
    stream: Stream | None


class ServiceTable:
    """Services by name.

    Args:
        authorizer: asked for every stream, beyond the scope that the connection's grant must cover.
        request_timeout: seconds a peer may take to write the first frame of a stream.
        authorizer_timeout: seconds the authorizer may take.
    """

    def __init__(
        self, authorizer: Authorizer, *, request_timeout: float, authorizer_timeout: float
    ) -> None:
        self._authorizer = authorizer
        self._request_timeout = request_timeout
        self._authorizer_timeout = authorizer_timeout
        self._services: dict[str, _Service] = {}
        self._families: dict[str, _Service] = {}
        self._running: dict[object, _Running] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The registered services and calls, sorted."""
        return tuple(sorted(self._services))

    def register(self, name: str, handler: StreamHandler, *, scope: str) -> None:
        """Offer a service on streams to peers whose grant covers `scope`.

        Raises:
            TransportError: the name is taken or can't be one, the scope is malformed, or `handler`
                can't be called.
        """
        check_offer("service", name, handler, scope)

        async def serve(request: Incoming) -> CborValue:
            await handler(request)
            return None

        self._add(name, _Service(serve, scope, is_call=False))

    def register_call(
        self, name: str, handler: CallHandler, *, scope: str, prompt: PromptHandler | None = None
    ) -> None:
        """Offer a call to peers whose grant covers `scope`. Raises as `register`.

        What comes by a carrier is shown to `prompt` first.
        """
        check_offer("call", name, handler, scope)
        self._add(name, _Service(handler, scope, is_call=True, prompt=prompt))

    def register_call_family(self, name: str, handler: CallHandler, *, scope: str) -> None:
        """Offer all calls ``NAME:WORD``, each to peers whose grant covers ``SCOPE:WORD``.

        Raises as `register`.
        """
        check_offer("calls", name, handler, scope)
        if name in self._families or ":" in name:
            raise TransportError(f"registering {name!r}", why="that name is taken, or has a colon")
        self._families[name] = _Service(handler, scope, is_call=True)

    async def serve(self, connection: Connection, stream: Stream) -> None:
        """Serve one stream of a peer's from its first frame to its end."""
        with anyio.CancelScope() as scope:
            try:
                await self._serve(connection, stream, scope)
            finally:
                self._running.pop(stream, None)

    def begin_answer(
        self, connection: Connection, body: bytes
    ) -> bytes | Coroutine[Any, Any, bytes | None]:
        """Serve a call that came by a carrier: the body of its request in, that of the reply out.

        Everything is asked as for a stream. What takes waiting is to be awaited, and is None for
        what is no call, and was not begun.
        """
        try:
            name, value = parse_request(body)
        except MeshError as error:
            return error_reply(error)[LENGTH.size :]
        service = self._services.get(name)
        if service is not None and service.prompt is not None:
            reply = self._answer_now(connection, name, value, service, service.prompt)
            if reply is not None:
                return reply
        return self._answer_awaited(connection, name, value)

    def _answer_now(
        self,
        connection: Connection,
        name: str,
        value: CborValue,
        service: _Service,
        prompt: PromptHandler,
    ) -> bytes | None:
        peer, grant = connection.peer, connection.grant
        if grant is None:
            return None
        try:
            request = ServiceRequest(peer, name, service.scope, grant)
            grant = decide_now(self._authorizer, request)
            if grant is None:
                return None
            incoming = Incoming(name, value, peer, grant, connection)
            found = prompt(incoming)
            return None if isinstance(found, NotNow) else _reply_to(incoming, found)[LENGTH.size :]
        except MeshError as error:
            return error_reply(error)[LENGTH.size :]
        except Exception as error:
            _log.exception("the handler of a call of %s failed", peer)
            return error_reply(error)[LENGTH.size :]

    async def _answer_awaited(
        self, connection: Connection, name: str, value: CborValue
    ) -> bytes | None:
        key = object()
        try:
            with anyio.CancelScope() as scope:
                try:
                    if (offered := self._services.get(name)) is not None and not offered.is_call:
                        return None
                    service, request = await self._authorize(connection, name, value, None)
                    self._running[key] = _Running(connection, service.scope, scope, None)
                    return _reply_to(request, await service.handle(request))[LENGTH.size :]
                finally:
                    self._running.pop(key, None)
            raise AccessDenied(f"call of {name!r}", why="its scope is not granted any more")
        except MeshError as error:
            return error_reply(error)[LENGTH.size :]
        except Exception as error:
            _log.exception("the handler of a call of %s failed", connection.peer)
            return error_reply(error)[LENGTH.size :]
        except anyio.get_cancelled_exc_class() as error:
            if await is_cancelled():
                raise
            _log.exception(
                "a handler awaited what was cancelled, for a call of %s", connection.peer
            )
            return error_reply(RuntimeError(str(error)))[LENGTH.size :]

    def enforce(self, connection: Connection) -> None:
        """End what is under way and whose scope is no longer granted on `connection`."""
        grant = connection.grant
        for running in tuple(self._running.values()):
            if running.connection is connection and (
                grant is None or not grant.permits(running.needed)
            ):
                if running.stream is not None:
                    running.stream.reset(AppCode.DENIED)
                running.handling.cancel()

    async def _serve(
        self, connection: Connection, stream: Stream, scope: anyio.CancelScope
    ) -> None:
        try:
            service, request = await self._admit(connection, stream)
            self._running[stream] = _Running(connection, service.scope, scope, stream)
            if service.is_call:
                await self._answer(service, request, scope)
            else:
                await service.handle(request)
                if not stream.is_closed:
                    await stream.send_eof()
                    await stream.aclose()
        except MeshError as error:
            await stream.fail(error)
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            stream.reset(error)  # the peer, or the handler itself, ended the stream early
        except Exception as error:
            _log.exception("a handler failed on a stream of %s", connection.peer)
            await stream.fail(error)
        except anyio.get_cancelled_exc_class() as error:
            try:
                if await is_cancelled():
                    raise
            except BaseException:
                stream.reset(error)
                raise
            _log.exception(
                "a handler awaited what was cancelled, on a stream of %s", connection.peer
            )
            await stream.fail(RuntimeError("what the handler waited for was cancelled"))
        except BaseException as error:
            stream.reset(error)
            raise

    def _add(self, name: str, service: _Service) -> None:
        if name in self._services:
            raise TransportError(f"registering {name!r}", why="that name is taken")
        self._services[name] = service

    async def _admit(self, connection: Connection, stream: Stream) -> tuple[_Service, Incoming]:
        stream.expire_at(
            time.monotonic() + self._request_timeout,
            lambda: TransportError("a request", why="it was not complete in time"),
        )
        name, value = parse_request(await stream.receive_request(MAX_FRAME))
        stream.never_expire()
        return await self._authorize(connection, name, value, stream)

    async def _authorize(
        self, connection: Connection, name: str, value: CborValue, stream: Stream | None
    ) -> tuple[_Service, Incoming]:
        grant = connection.grant
        if grant is None:
            raise AccessDenied(f"service {name!r}", why="this node dialled out and serves nobody")
        service = self._services.get(name) or self._of_family(name)
        if service is None:
            raise ServiceUnknown(f"service {name!r}", why="this node does not offer it")
        grant = await decide(
            self._authorizer,
            ServiceRequest(connection.peer, name, service.scope, grant),
            timeout=self._authorizer_timeout,
        )
        return service, Incoming(name, value, connection.peer, grant, connection, stream)

    def _of_family(self, name: str) -> _Service | None:
        family, _, word = name.partition(":")
        service = self._families.get(family)
        if service is None:
            return None
        try:
            (scope,) = check_scopes((f"{service.scope}:{word}",))
        except ValueError:
            return None
        # A star would ask for what covers more than one word, and "" for less.
        return dataclasses.replace(service, scope=scope) if word and "*" not in word else None

    async def _answer(self, service: _Service, request: Incoming, scope: anyio.CancelScope) -> None:
        """Answer a call; `scope` ends the task, should the caller give up."""
        stream = request.stream
        stream.on_abandoned(scope.cancel)
        value = await service.handle(request)
        stream.on_abandoned(None)
        await stream.write_answer(_reply_to(request, value))


def _reply_to(request: Incoming, value: CborValue) -> bytes:
    try:
        return ok_reply(value, max_size=request.connection.max_frame)
    except MeshError as error:
        raise TypeError(f"the answer of {request.service!r} can't travel") from error
