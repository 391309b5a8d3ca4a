"""Answering calls: what is asked for is found, given room, run, and its result sent back."""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import torch

from auth import Grant, NodeId, PeerIdentity
from mesh.rpc import wire
from mesh.rpc.answering.prompt import Prompt
from mesh.rpc.answering.serve_stream import StreamService
from mesh.rpc.answering.sources import is_generator
from mesh.rpc.encoding.exceptions import encode_exception
from mesh.rpc.encoding.pickled import PICKLE_SCOPE, may_unpickle, refuse_pickle
from mesh.rpc.encoding.values import Packed, Packer, Received, Unpacker
from mesh.rpc.errors import (
    NotExposed,
    RefLost,
    RpcError,
    RpcTimeout,
    Unsendable,
)
from mesh.rpc.functions import is_async_execution
from mesh.rpc.limits import is_answering, timed_out
from mesh.rpc.links import Link
from mesh.rpc.names.operators import call_operator, check_operator, is_prompt, result_bound
from mesh.rpc.names.targets import Target
from mesh.rpc.refs.owned import Owned
from mesh.rpc.refs.passing import Incoming as IncomingRefs
from mesh.rpc.refs.passing import Outgoing
from mesh.rpc.tensors.carriage import Room, beside, together
from mesh.rpc.tensors.parts import Parts
from mesh.rpc.tensors.placement import own_device
from mesh.rpc.tensors.sizes import nbytes_of
from mesh.rpc.wire import Answer, RefNotes, Request
from mesh.rpc.workers import aside
from tensor_bridge import QuotaExceeded
from transport import AppCode, CborValue, Endpoint, Incoming, ProtocolError

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent

__all__ = ["Found", "RpcService"]

_Function = Callable[[], Any]

Found: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""What a request names, and the arguments for it."""

_log = logging.getLogger("quicmesh.rpc")


class RpcService:
    """The callee's side of `Agent`, whose it is."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._room = Room()
        self._parts = Parts(agent, self._room)
        self._prompt = Prompt(agent, self._parts)
        self.streams = StreamService(agent, self, self._room, self._parts)

    def register(self, endpoint: Endpoint) -> None:
        """Offer the services to peers whose grant has the scope for it."""
        endpoint.register_call(
            wire.CALL_SERVICE, self._answer_call, scope=wire.SCOPE, prompt=self._prompt.answer
        )
        endpoint.register_service(wire.PART_SERVICE, self._parts.serve, scope=wire.SCOPE)
        endpoint.register_call(wire.REFS_SERVICE, self._answer_notes, scope=wire.SCOPE)
        self.streams.register(endpoint)

    async def answer_self(
        self, request: Request, tensors: Sequence[torch.Tensor], *, stays: bool = False
    ) -> Any:
        """Return the result of a node's call to itself.

        What it is given and what it returns are copies, as of any other node's call; the result
        itself, if it `stays`, to be referred to.
        """
        me, mine = self._self()
        try:
            copies = await self._agent.placement.ordered(_copies(tensors), request.beside.devices)
            value = await self._run(request, copies, me, mine)
        except _Raised as raised:
            raise raised.error from None
        if stays:
            return value
        return await self.copied(value, request.link)

    async def copied(self, value: Any, asked: Link | None = None) -> Any:
        """Return a result of a node's own as another node would get it. Raises `Unsendable`."""
        me, mine = self._self()
        packed = await self.packed(value, Outgoing(self._agent, me.node_id))
        received = None
        if asked is not None:
            link = self._agent.autograd.leaving(me.node_id, packed.differentiable)
            received = self._agent.autograd.answered(me.node_id, asked, link)
        results = await self._agent.placement.answered(
            _copies(packed.tensors),
            [own_device(each.device) for each in packed.tensors],
            me.node_id,
        )
        values = await self._unpacked(packed.items, results, me, mine, count=1, received=received)
        return values[0]

    async def found_by_self(self, request: Request, tensors: Sequence[torch.Tensor]) -> Found:
        """Return the same as `found` for a node's request to itself."""
        return await self.found(request, _copies(tensors), *self._self())

    def lapse(self, now: float) -> float:
        """Forget what nobody has come for; return when to call this again."""
        return self._parts.lapse(now)

    # -- the three services

    async def _answer_call(self, incoming: Incoming) -> CborValue:
        is_answering.set(True)
        with self._agent.activity.answering():
            return await self._answer(incoming)

    async def _answer(self, incoming: Incoming) -> CborValue:
        request, peer = Request.decode(incoming.value), incoming.peer
        if request.has_pickle and not may_unpickle(incoming.grant):
            refused = refuse_pickle()
            _log.warning("%s sent a pickle: %s", peer, refused)
            incoming.connection.abort(AppCode.PROTOCOL, str(refused))
            raise refused
        nbytes = request.beside.nbytes
        self._room.take(peer.node_id, incoming.grant, nbytes)
        with contextlib.ExitStack() as kept:
            kept.callback(self._room.give, peer.node_id, nbytes)
            if request.target.kind in ("function", "operator"):
                self._check(request.target)  # before large tensors are sent in vain
            parts = await self._parts.receive(incoming.connection, request)
            tensors = await self._agent.placement.ordered(
                together(request.beside, parts), request.beside.devices
            )
            is_recorded = request.link is not None and request.link.message > 0
            if is_recorded or request.target.kind == "gradients":
                # A graph may need them for as long as its context lasts; they may wait for a run.
                kept.pop_all()
                for meta, tensor in zip(request.beside.metas, tensors, strict=True):
                    self._give_after(tensor, peer.node_id, meta.nbytes)
            with self._agent.autograd.joined(request.link, peer.node_id):
                ended, link = await self._ended(request, tensors, incoming, kept)
            del tensors
            del parts
        if isinstance(ended, Answer):
            return ended.encode()
        what = beside(ended.tensors)
        key = b""
        if what.apart:
            key = self._parts.offer(peer.node_id, incoming.grant, ended.tensors, what)
        return Answer(ended.items, what, key, link=link).encode()

    async def _answer_notes(self, incoming: Incoming) -> CborValue:
        notes, owned, by = RefNotes.decode(incoming.value), self._agent.owned, incoming.peer.node_id
        now = anyio.current_time()
        unknown: list[CborValue] = []
        for share in notes.shared:
            fork = wire.Fork(share.ref, share.fork)
            if not owned.share(fork, share.holder, by, now):
                unknown.append(share.fork)
        unknown.extend(fork.fork for fork in notes.confirmed if not owned.confirm(fork, by))
        for fork in notes.dropped:
            owned.drop(fork, by)
        for key in notes.left:
            self._parts.leave(by, key)
        if notes.shared:
            self._agent.watch()
        return {"unknown": unknown}

    # -- a call

    async def _ended(
        self,
        request: Request,
        tensors: Sequence[torch.Tensor],
        incoming: Incoming,
        kept: contextlib.ExitStack,
    ) -> tuple[Packed | Answer, Link | None]:
        """Return a call's result, or what its function raised, ready to travel."""
        peer = incoming.peer
        try:
            if request.create is not None:
                await self._begin(request, tensors, incoming, request.create, kept)
                return await self.packed(None, Outgoing(self._agent, peer.node_id)), None
            value = await self._run(request, tensors, peer, incoming.grant)
        except _Raised as raised:
            return Answer(error=encode_exception(raised.error)), None
        refs = Outgoing(self._agent, peer.node_id)
        try:
            packed = await self.packed(value, refs)
            await refs.settle()
        except Exception as error:
            refs.undo()
            if isinstance(error, Unsendable):
                error.what = f"sending of the result of {request.target}"
            return Answer(error=encode_exception(error)), None
        return packed, self._agent.autograd.leaving(peer.node_id, packed.differentiable)

    async def _begin(
        self,
        request: Request,
        tensors: Sequence[torch.Tensor],
        incoming: Incoming,
        create: wire.Fork,
        kept: contextlib.ExitStack,
    ) -> None:
        """Begin a call whose result stays here, for its caller to refer to.

        Its arguments take the room that is `kept` for them until it has ended.
        """
        peer, grant = incoming.peer, incoming.grant
        if request.target.kind in ("fetch", "gradients", "backward"):
            raise NotExposed(str(request.target), why="its result can't become a reference")
        if request.target.kind == "method":  # which is not there, is said at once
            await self._method(request, peer, grant)
        owned = self._agent.owned.create(create, peer.node_id, anyio.current_time())

        room = kept.pop_all()

        async def counted() -> None:
            with self._agent.activity.answering():
                await compute()

        async def compute() -> None:
            try:
                with room:
                    value = await self._run(request, tensors, peer, grant)
                self._keep(owned, value, peer.node_id, grant)
            except _Raised as raised:
                if isinstance(raised.error, RpcTimeout):
                    raised.error.what = f"RRef creation by {request.target}"
                _fail(owned, raised.error)
            except Exception as error:
                _fail(owned, error)
            except BaseException:
                _fail(owned, RefLost("a remote reference", why="its owner has been shut down"))
                raise

        self._agent.start_soon(counted)

    def _keep(self, owned: Owned, value: Any, peer: NodeId, grant: Grant) -> None:
        """Keep a value for as long as anybody refers to it, if its orderer has room for it."""
        nbytes = nbytes_of(value)
        try:
            self._room.take(peer, grant, nbytes)
        except QuotaExceeded as error:
            _fail(owned, error)
            return
        self._give_after(owned, peer, nbytes)
        if not owned.outcome.done():
            owned.outcome.set_result(value)

    def _give_after(self, what: object, peer: NodeId, nbytes: int) -> None:
        """Give room back as soon as nobody has `what` any more."""
        weakref.finalize(what, self._room.give, peer, nbytes).atexit = False

    async def _run(
        self,
        request: Request,
        tensors: Sequence[torch.Tensor],
        peer: PeerIdentity,
        grant: Grant | None,
    ) -> Any:
        """Return what a call's target returns.

        Raises:
            _Raised: what it raised, a timeout included.
            MeshError: it is not to be called like this.
        """
        target = request.target
        if target.kind == "fetch":
            owned = self._owned(target.key, peer)
            return await self._within(request, lambda: self._agent.bridge.until_done(owned.outcome))
        values = await self._arguments(request, tensors, peer, grant)
        args, kwargs = values[-2:]
        if target.kind == "operator":
            function: _Function = lambda: call_operator(  # noqa: E731
                target.name,
                args,
                kwargs,
                max_bytes=result_bound(grant),
                place=self._agent.placement.device,
            )
            if is_prompt(target.name, args, kwargs):
                try:
                    # Whatever a coroutine of the program's has switched off in this thread.
                    with torch.enable_grad():
                        return function()
                except Exception as error:
                    raise _Raised(error) from error
            return await self._within(
                request, lambda: self._agent.workers.run(peer.node_id, function)
            )
        if target.kind == "gradients":
            self._agent.autograd.take(peer.node_id, args)
            return None
        if target.kind == "backward":
            outcome = self._owned(target.key, peer).outcome
            return await self._within(
                request, lambda: self._agent.autograd.backward_from(outcome, peer.node_id, args)
            )
        found = await self._callee(request, values, peer, grant)
        return await self._within(request, lambda: self._called(request, found, args, kwargs, peer))

    async def found(
        self,
        request: Request,
        tensors: Sequence[torch.Tensor],
        peer: PeerIdentity,
        grant: Grant | None,
    ) -> Found:
        """Return what a request that is for no operator names, and its arguments.

        Raises:
            MeshError: there is no such thing, or not for this peer.
            Exception: why the value whose method it is never came to be.
        """
        values = await self._arguments(request, tensors, peer, grant)
        try:
            found = await self._callee(request, values, peer, grant)
        except _Raised as raised:
            raise raised.error from None
        return found, values[-2], values[-1]

    async def _arguments(
        self,
        request: Request,
        tensors: Sequence[torch.Tensor],
        peer: PeerIdentity,
        grant: Grant | None,
    ) -> list[Any]:
        """Return the arguments of a request, a tuple and a dict; before them what is pickled."""
        count = 3 if request.target.kind == "pickled" else 2
        received = self._agent.autograd.arriving(peer.node_id, request.link)
        values = await self._unpacked(
            request.items, tensors, peer, grant, count=count, received=received
        )
        return _checked(values)

    async def _callee(
        self, request: Request, values: list[Any], peer: PeerIdentity, grant: Grant | None
    ) -> Callable[..., Any]:
        """Return the function or method that a request names."""
        target = request.target
        if target.kind == "method":
            return await self._method(request, peer, grant)
        if target.kind == "pickled":
            function = values[0]
            if not callable(function) or not may_unpickle(grant):
                raise ProtocolError("a call", why="what is to be called is no pickled function")
            found: Callable[..., Any] = function
            return found
        return self._agent.exposures.callable(target.name)

    async def _called(
        self,
        request: Request,
        found: Callable[..., Any],
        args: Any,
        kwargs: Any,
        peer: PeerIdentity,
    ) -> Any:
        try:
            if inspect.iscoroutinefunction(found):
                try:
                    return await found(*args, **kwargs)
                except SystemExit as error:  # which would end this loop
                    raise RuntimeError(f"the function raised SystemExit: {error}") from error
            if is_generator(found):
                raise RpcError(
                    f"call of {found.__qualname__!r:.80}",
                    why="it is a generator function, and has no one result",
                    fix="Read its items as they come: async for item in peer.stream(...).",
                )
            result = await self._agent.workers.run(peer.node_id, lambda: found(*args, **kwargs))
            if is_async_execution(found):
                return await _completed(self._agent, result)
            return result
        except Exception as error:
            who = self._agent.label(peer.node_id)
            _log.warning("%s by %s: %s", request.target, who, f"{error!r:.200}")
            raise

    async def _within(self, request: Request, work: Callable[[], Awaitable[Any]]) -> Any:
        with anyio.move_on_after(request.limit):
            try:
                return await work()
            except Exception as error:
                raise _Raised(error) from error
        raise _Raised(timed_out(str(request.target), None, request.seconds))

    # -- inside

    def _check(self, target: Target) -> None:
        """Refuse what can't be called."""
        if target.kind == "function":
            self._agent.exposures.callable(target.name)
        else:
            check_operator(target.name)

    def _self(self) -> tuple[PeerIdentity, Grant]:
        """Return who this node is to itself, and what it lets itself do."""
        return PeerIdentity(self._agent.node_id), Grant(frozenset({PICKLE_SCOPE}))

    async def _method(
        self, request: Request, peer: PeerIdentity, grant: Grant | None
    ) -> Callable[..., Any]:
        """Wait for a reference's value, and return a method of it."""
        owned, name = self._owned(request.target.key, peer), request.target.name
        value = await self._within(request, lambda: self._agent.bridge.until_done(owned.outcome))
        if not may_unpickle(grant):
            return self._agent.exposures.method(value, name)
        try:  # who may run anything may call this, too
            found: Callable[..., Any] = getattr(value, name)
        except AttributeError as error:
            raise _Raised(error) from error
        return found

    def _owned(self, ref: bytes, peer: PeerIdentity) -> Owned:
        if peer.node_id == self._agent.node_id:
            return self._agent.own_value(ref)
        return self._agent.owned.held(ref, peer.node_id)

    async def packed(self, value: Any, refs: Outgoing) -> Packed:
        """Return a result as it travels. Raises `Unsendable`."""
        packer = Packer(self._agent.types, refs, pickles=self._agent.pickles)
        if self._agent.pickles:
            await aside(lambda: packer.pack(value, "the result"))
        else:
            packer.pack(value, "the result")
        return packer.packed

    async def _unpacked(
        self,
        items: list[CborValue],
        tensors: Sequence[torch.Tensor],
        peer: PeerIdentity,
        grant: Grant | None,
        *,
        count: int,
        received: Received | None = None,
    ) -> list[Any]:
        agent, refs = self._agent, IncomingRefs(self._agent, peer)
        unpacker = Unpacker(
            items,
            tensors,
            agent.types,
            refs,
            agent.exposures,
            pickles=may_unpickle(grant),
            received=received,
        )
        return await unpacker.unpack_all(count)


class _Raised(Exception):
    """What a function raised, apart from what goes wrong around it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def _checked(values: list[Any]) -> list[Any]:
    """Return what a request holds, the last two of which must be a tuple and a dict."""
    args, kwargs = values[-2:]
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise ProtocolError("a call", why="its arguments are no tuple and dict")
    if any(not isinstance(name, str) for name in kwargs):
        raise ProtocolError("a call", why="the name of an argument is no text")
    return values


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]


def _fail(owned: Owned, error: BaseException) -> None:
    if not owned.outcome.done():
        owned.outcome.set_exception(error)


async def _completed(agent: Agent, future: Any) -> Any:
    if not isinstance(future, torch._C.Future):  # which is what its then() returns
        raise RpcError(
            "call of an async_execution function",
            why="Functions decorated with @rpc.async_function must return a torch.futures.Future "
            f"object, but got {type(future).__name__}",
        )
    done = anyio.Event()
    future.add_done_callback(lambda _: agent.bridge.call_soon(done.set))
    await done.wait()
    return future.value()
