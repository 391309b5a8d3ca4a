"""How a node asks a peer: what a request says, the way there and back, what comes of the answer."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import torch

from auth import MeshError, NodeId
from mesh.rpc.encoding.exceptions import decode_exception
from mesh.rpc.encoding.pickled import has_pickle, may_unpickle, refuse_pickle
from mesh.rpc.encoding.values import Packed, Packer, Received, Unpacker
from mesh.rpc.errors import RefLost, RpcError, RpcTimeout, as_runtime_error
from mesh.rpc.limits import GRACE, PATIENCE, STREAMS_BACK, is_answering, limit
from mesh.rpc.names.exposed import exposed_name
from mesh.rpc.names.operators import operator_name
from mesh.rpc.names.targets import Target, target_of
from mesh.rpc.refs.holding import Held
from mesh.rpc.refs.owned import Owned, new_id
from mesh.rpc.refs.passing import Incoming, Outgoing
from mesh.rpc.refs.reference import RRef
from mesh.rpc.tensors.carriage import beside, fetch_part, lending, together, with_parts
from mesh.rpc.wire import CALL_SERVICE, REFS_SERVICE, Answer, Fork, RefNotes, Request
from transport import AppCode, CborValue, Connection, TransportError

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent

__all__ = ["Asking", "positional"]

_Ready: TypeAlias = tuple[Outgoing, Packed]

_LEAST = 0.001
"""Seconds that are left at least of a limit that has not passed: 0 would be none."""


class Asking:
    """What stands behind every call, method, fetch and stream of an agent.

    Args:
        agent: whose requests they are.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._under_way: Counter[Connection] = Counter()

    def seconds(self, timeout: float | None) -> float:
        """Return the limit of a call that is given `timeout`. Raises `RpcError` if it is none."""
        seconds = self._agent.timeout if timeout is None else timeout
        if not 0 <= seconds < 1e9:
            raise RpcError(
                "a remote call",
                why=f"timeout is {seconds}, not a number of seconds from 0 (no limit) on",
            )
        return float(seconds)

    def target(self, function: Callable[..., Any] | str) -> Target:
        """Return what a function is called by on the wire. Raises `RpcError` if it can't be."""
        if self._agent.pickles and callable(function) and operator_name(function) is None:
            name = exposed_name(function)
            if name is None or not self._agent.exposures.has(name):
                return Target("pickled")
        return target_of(function)

    async def at(
        self, ref: RRef[Any], kind: str, name: str = "", *, seconds: float
    ) -> tuple[Target, float]:
        """Return the target that is a reference's value, once that is known to come to be.

        Args:
            ref, kind, name: as `target_at`.
            seconds: how long that may take, 0 for no limit.

        Returns:
            The target, and the seconds that are left.

        Raises:
            RpcTimeout: it took longer.
            Exception: why the value never came to be.
        """
        target = self.target_at(ref, kind, name)
        return target, await self.created(ref, str(target), seconds)

    async def created(self, ref: RRef[Any], what: str, seconds: float) -> float:
        """Wait until a reference's owner is known to have it. As `at`; `what` waits for it."""
        if ref.created is None or ref.created.done():
            await self._done(ref)
            return seconds
        began = anyio.current_time()
        with limit(seconds, what, self._agent.label(ref.owner_id)):
            await self._done(ref)
        return max(seconds - (anyio.current_time() - began), _LEAST) if seconds else 0.0

    async def _done(self, ref: RRef[Any]) -> None:
        if ref.created is not None:
            await self._agent.bridge.until_done(ref.created)

    def target_at(self, ref: RRef[Any], kind: str, name: str = "") -> Target:
        """Return the target that is a reference's value, or a method of it."""
        state = ref.state
        key = self._agent.lend_to_self(state) if isinstance(state, Owned) else state.fork.ref
        return Target(kind, name, key)

    def pack(
        self,
        to: NodeId,
        target: Target,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        function: object,
    ) -> _Ready:
        """Return what a request says, and the references in it. Raises `Unsendable`."""
        outgoing = Outgoing(self._agent, to)
        try:
            return outgoing, self.packed(target, outgoing, args, kwargs, function)
        except BaseException:
            outgoing.undo()
            raise

    def packed(
        self,
        target: Target,
        outgoing: Outgoing,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        function: object,
    ) -> Packed:
        """Return what a request says beside its target. Raises `Unsendable`."""
        packer = Packer(self._agent.types, outgoing, pickles=self._agent.pickles)
        if target.kind == "pickled":
            packer.pack(function, "the function")
        packer.pack(positional(args), "args")
        packer.pack(dict(kwargs), "kwargs")
        return packer.packed

    async def value_of(
        self,
        items: list[CborValue],
        tensors: Sequence[torch.Tensor],
        connection: Connection,
        *,
        received: Received | None = None,
    ) -> Any:
        """Return the value of an answer. Raises as `Unpacker.unpack_all`."""
        if has_pickle(items) and not may_unpickle(connection.grant):
            refused = refuse_pickle()
            connection.abort(AppCode.PROTOCOL, str(refused))
            raise refused
        unpacker = Unpacker(
            items,
            tensors,
            self._agent.types,
            Incoming(self._agent, connection.peer),
            self._agent.exposures,
            pickles=may_unpickle(connection.grant),
            received=received,
        )
        return (await unpacker.unpack_all(1))[0]

    async def ask(
        self,
        to: NodeId,
        target: Target,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float | None,
        *,
        create: Fork | None = None,
        function: object = None,
        ready: _Ready | None = None,
        stays: bool = False,
    ) -> Any:
        """Ask a node, and return what it answers.

        Args:
            to, args, kwargs, timeout: as `Agent.call`.
            target: what is asked for.
            create: the reference that the result becomes, which stays there.
            function: of a pickled target.
            ready: the arguments, as `pack` has returned them, in place of `args` and `kwargs`.
            stays: at this node itself, return the result, and no copy of it.

        Raises:
            MeshError, Exception: as `Agent.call`.
        """
        seconds = self.seconds(timeout)
        outgoing, packed = ready or self.pack(to, target, args, kwargs, function)
        link = None
        try:
            with self._agent.activity.calling(), limit(seconds, str(target), self._agent.label(to)):
                await outgoing.settle()
                what = beside(packed.tensors, self._agent.placement.towards(to))
                key = new_id() if what.apart else b""
                link = self._agent.autograd.leaving(to, packed.differentiable)
                request = Request(target, packed.items, what, seconds, create, key, link)
                if to == self._agent.node_id:
                    return await self._agent.service.answer_self(
                        request, packed.tensors, stays=stays
                    )
                connection = await self._agent.connected(to)
                answer = await self._exchange(connection, request, packed.tensors)
                if answer.error is not None:
                    raise decode_exception(
                        answer.error, peer=self._agent.label(to), what=str(target)
                    )
                parts = await self.fetch_parts(connection, answer)
        except BaseException as error:
            outgoing.undo()
            self.name_in(error, str(target))
            if isinstance(error, MeshError) and not isinstance(error, RuntimeError):
                raise as_runtime_error(error) from error.__cause__
            raise
        tensors = await self._agent.placement.answered(
            together(answer.beside, parts), answer.beside.devices, to
        )
        return await self.value_of(
            answer.items,
            tensors,
            connection,
            received=self._agent.autograd.answered(to, link, answer.link),
        )

    def order(
        self,
        to: NodeId,
        target: Target,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float | None,
        *,
        function: object = None,
        after: RRef[Any] | None = None,
    ) -> tuple[RRef[Any], Callable[[], Coroutine[Any, Any, None]]]:
        """Return a reference to what a node will answer, and what has to be run once for that.

        Args:
            to, target, args, kwargs, timeout, function: as `ask`.
            after: a reference whose value has to be there before.
        """
        seconds = self.seconds(timeout)
        ready = self.pack(to, target, args, kwargs, function)

        async def ask(create: Fork | None) -> Any:
            left = seconds if after is None else await self.created(after, str(target), seconds)
            return await self.ask(to, target, (), {}, left, create=create, ready=ready, stays=True)

        if to == self._agent.node_id:
            owned = Owned(new_id(), self._agent.now())

            async def compute() -> None:
                try:
                    value = await ask(None)
                except Exception as error:
                    _settle(owned.outcome, error)
                except BaseException:
                    _settle(owned.outcome, _cancelled())
                    raise
                else:
                    owned.outcome.set_result(value)

            return RRef._of(self._agent, owned), compute
        state = Held(to, Fork(new_id(), new_id()), Future())

        async def begin() -> None:
            try:
                await ask(state.fork)
            except BaseException as error:
                if isinstance(error, RpcTimeout):
                    error.what = f"RRef creation by {target}"
                _settle(state.created, error if isinstance(error, Exception) else _cancelled())
                raise
            _settle(state.created, None)

        return RRef._of(self._agent, state), begin

    def name_in(self, error: BaseException, what: str) -> None:
        """Have an error of the connection say what it ended, and with whom as people call it."""
        if isinstance(error, MeshError) and not isinstance(error, RpcError):
            if isinstance(error, TransportError):
                error.what = what
            self._agent.name_peer_in(error)

    async def _exchange(
        self, connection: Connection, request: Request, tensors: Sequence[torch.Tensor]
    ) -> Answer:
        """Send a request and its parts; return the answer."""

        async def ask(request: Request) -> CborValue:
            return await connection.call(
                CALL_SERVICE,
                request.encode(),
                timeout=request.limit + GRACE,
                patience=PATIENCE if is_answering.get() else math.inf,
            )

        with self._open_to_calls_back(connection):
            if not request.key:
                return Answer.decode(await ask(request))
            lanes = self._agent.lanes
            async with lending(connection, lanes, request, tensors) as lent:
                asking = functools.partial(ask, lent)
                return Answer.decode(await with_parts(connection, lanes, lent, tensors, asking))

    @contextlib.contextmanager
    def _open_to_calls_back(self, connection: Connection) -> Iterator[None]:
        """Let the callee call back in the block, also if it is one of many calls that do.

        Unless its grant says how many streams it may have.
        """
        self._under_way[connection] += 1
        if connection.grant is not None and connection.grant.quotas.max_streams is None:
            back = min(self._under_way[connection], STREAMS_BACK)
            connection.allow_streams(self._agent.max_streams + back)
        try:
            yield
        finally:
            self._under_way[connection] -= 1
            if not self._under_way[connection]:
                del self._under_way[connection]

    async def fetch_parts(
        self, connection: Connection, answer: Answer
    ) -> Mapping[int, torch.Tensor]:
        """Return the large tensors of an answer by their numbers; what is left is given up."""
        parts: dict[int, torch.Tensor] = {}
        try:
            for number in answer.beside.apart:
                meta = answer.beside.metas[number]
                parts[number] = await fetch_part(
                    connection, self._agent.lanes, answer.key, number, meta
                )
        except BaseException:
            self._agent.start_soon(functools.partial(self._leave, connection, answer.key))
            raise
        return parts

    async def _leave(self, connection: Connection, key: bytes) -> None:
        """Tell a callee that nobody comes for an answer's tensors."""
        with contextlib.suppress(MeshError):  # then it finds out by itself
            await connection.call(REFS_SERVICE, RefNotes(left=(key,)).encode())


def positional(args: Sequence[Any] | None) -> tuple[Any, ...]:
    """Return the positional arguments of a call.

    Raises:
        TypeError: they are one argument, whose parts would each be taken for one.
    """
    if isinstance(args, torch.Tensor | str | bytes):
        raise TypeError(f"args must be a tuple of arguments, and is a {type(args).__name__}: (x,)")
    return () if args is None else tuple(args)


def _settle(future: Future[Any], error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _cancelled() -> RefLost:
    return RefLost("a remote reference", why="the call that was to create it was cancelled")
