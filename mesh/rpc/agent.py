"""A node's part in remote calls: it makes them, and answers those of its peers."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import anyio
import torch

from auth import AccessDenied, FetchRequest, MeshError, NodeId, PeerIdentity, SocketAddress, decide
from mesh.rpc.activity import Activity
from mesh.rpc.answering.service import RpcService
from mesh.rpc.answering.sources import Source
from mesh.rpc.bridge import Bridge
from mesh.rpc.calling.asking import Asking
from mesh.rpc.calling.streams import RemoteIterator
from mesh.rpc.errors import RefLost
from mesh.rpc.limits import limit
from mesh.rpc.names.exposed import Exposures, exposures
from mesh.rpc.names.targets import Target
from mesh.rpc.names.types import TypeTable, registered_types
from mesh.rpc.refs.holding import FLUSH_SECONDS, Holdings
from mesh.rpc.refs.listing import register_listing
from mesh.rpc.refs.owned import Owned, OwnerTable, RefLimits, RefRow, new_id
from mesh.rpc.refs.passing import held
from mesh.rpc.refs.reference import RRef
from mesh.rpc.tensors.placement import Placement
from mesh.rpc.wire import REFS_SERVICE, Fork, RefNotes, Request
from mesh.rpc.workers import Workers
from transport import (
    Connection,
    EndpointEvent,
    LimitExceeded,
    PeerJoined,
    PeerLeft,
    PeerRevoked,
    ProtocolError,
)

if TYPE_CHECKING:
    from mesh.node import Node

__all__ = ["DEFAULT_TIMEOUT", "DEFAULT_WORKERS", "Agent"]

DEFAULT_TIMEOUT = 60.0
"""Seconds that a call may take unless it is told otherwise; upstream's default."""

DEFAULT_WORKERS = 16
"""Functions that block which run at a time; upstream's default."""

MAX_HINTS = 1024
"""Owners of whom only another peer has said where they are."""

MAX_STRANGERS = 256
"""Owners that are not connected, and that one peer has given references of: for each of them a task
tries for a minute to tell it."""


class Agent:
    """Calls between a node and its peers.

    Used in the node's event loop, but for `order`, `order_method` and `own`, which are for threads
    as well, as is its `bridge`. `Node.rpc` makes it, and runs it until the node is closed.

    Args:
        node: open, for as long as this is.
        exposures: what peers may call; by default what the program exposes.
        types: types that travel by value; by default those that the program has registered.
        workers: functions that block which run at a time.
        timeout: seconds that a call may take unless it is told otherwise; 0 for no limit.
        limits: how many references peers may have here, and how long without a word.

    Attributes:
        timeout: seconds that a call may take unless it is told otherwise; 0 for no limit.
        pickles: whether it writes pickles where nothing else will do; see
            `mesh.rpc.encoding.pickled`.
        ready: set once it answers.
        abandoned: what gives up streams of items that nobody reads any more.
        lost: how the connection with a peer that is not there any more ended, of the latest ones.
        activity: what is under way.
        placement: which devices tensors are put on.
        asking: what stands behind each of its requests.
    """

    def __init__(
        self,
        node: Node,
        *,
        exposures: Exposures = exposures,
        types: TypeTable = registered_types,
        workers: int = DEFAULT_WORKERS,
        timeout: float = DEFAULT_TIMEOUT,
        limits: RefLimits | None = None,
    ) -> None:
        from mesh.autograd.participant import Autograd  # which stands on calls

        self.timeout = timeout
        self.pickles = False
        self.exposures = exposures
        self.types = types
        self.owned = OwnerTable(limits or RefLimits())
        self.holdings = Holdings(self.tell)
        self.bridge = Bridge()
        self.activity = Activity()
        self.placement = Placement()
        self.workers = Workers(workers, self.bridge.call_soon)
        self._node = node
        self.service = RpcService(self)
        self.asking = Asking(self)
        self.autograd = Autograd(self, (limits or RefLimits()).lease)
        self.lost: dict[NodeId, MeshError] = {}
        self._boots: dict[NodeId, bytes] = {}
        self._hints: dict[NodeId, tuple[PeerIdentity, tuple[SocketAddress, ...]]] = {}
        self._strangers: dict[NodeId, set[NodeId]] = {}
        self.abandoned: deque[Callable[[], object]] = deque()
        self._met: WeakValueDictionary[NodeId, Connection] = WeakValueDictionary()
        self._own: WeakValueDictionary[bytes, Owned] = WeakValueDictionary()
        self._wake_lapse = anyio.Event()
        self._clock = 0.0
        self.ready = anyio.Event()

    async def run(self) -> None:
        """Answer peers, and see to the references between them and this node, until cancelled."""
        endpoint = self._node.endpoint
        self.lanes = self._node.lanes
        self._clock = anyio.current_time() - time.monotonic()
        self.service.register(endpoint)
        register_listing(self, endpoint)
        self.autograd.register(endpoint)
        endpoint.subscribe(self._observe)
        try:
            async with self.bridge.open(), anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self.holdings.run)
                self._tasks.start_soon(self._lapse)
                self._tasks.start_soon(self._give_up)
                self._tasks.start_soon(self.autograd.run)
                self.ready.set()
                await anyio.sleep_forever()
        finally:
            for each in self.owned.close():
                each.outcome.cancel()

    # -- facts

    @property
    def node_id(self) -> NodeId:
        """Who this is."""
        return self._node.node_id

    @property
    def max_streams(self) -> int:
        """Streams that a peer may have open here, but for calls that it answers."""
        return self._node.endpoint.config.max_streams

    def label(self, node_id: NodeId) -> str:
        """Return the name of a node for messages."""
        return self._node.label(node_id)

    def name_peer_in(self, error: MeshError) -> None:
        """Have an error name its peer as people call it."""
        self._node.directory.name_in(error)

    def references(self) -> tuple[RefRow, ...]:
        """Return every value of this node's that others have references to. For threads too."""
        return self.owned.rows(self.now())

    # -- calls

    async def call(
        self,
        to: NodeId,
        function: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Call a function at a peer and return its result.

        Args:
            to: whose function.
            function: one that the peer exposes, itself or by name, or one of torch's operators.
            args, kwargs: see `mesh.rpc.encoding.values` for what travels.
            timeout: seconds for all of it; 0 for no limit. The peer's loss ends the wait anyway.

        Raises:
            Unsendable: an argument does not travel; nothing was sent.
            NotExposed: the peer offers no such function.
            RpcTimeout: no answer in time. The function may have run.
            Exception: what the function raised, of the same class if that is known here.
            MeshError: the peer can't be reached, refuses, or was lost meanwhile.
        """
        target = self.asking.target(function)
        return await self.asking.ask(to, target, args, kwargs or {}, timeout, function=function)

    def prepare(
        self,
        to: NodeId,
        function: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> Callable[[], Coroutine[Any, Any, Any]]:
        """Return what makes a `call`, once, of arguments that are taken as they are now.

        For threads too.

        Raises:
            Unsendable: as `call`.
        """
        target, seconds = self.asking.target(function), self.asking.seconds(timeout)
        ready = self.asking.pack(to, target, args, kwargs or {}, function)
        return lambda: self.asking.ask(to, target, (), {}, seconds, ready=ready)

    def prepare_method(
        self,
        ref: RRef[Any],
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> Callable[[], Coroutine[Any, Any, Any]]:
        """Return the same of `invoke`. For threads too."""
        target, seconds = self.asking.target_at(ref, "method", method), self.asking.seconds(timeout)
        ready = self.asking.pack(ref.owner_id, target, args, kwargs or {}, None)

        async def ask() -> Any:
            left = await self.asking.created(ref, str(target), seconds)
            return await self.asking.ask(ref.owner_id, target, (), {}, left, ready=ready)

        return ask

    async def remote(
        self,
        to: NodeId,
        function: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> RRef[Any]:
        """Call a function at a peer, let the result stay there, and return a reference to it.

        Returns once the peer has begun; what the function raises shows where the reference is used.

        Args:
            to, function, args, kwargs: as `call`.
            timeout: seconds for the function; a result that comes later is not kept, and every copy
                of the reference fails.

        Raises:
            MeshError: as `call`, if the peer did not begin.
        """
        ref, begin = self.order(to, function, args, kwargs, timeout=timeout)
        try:
            await begin()
        except BaseException:
            del ref  # which the traceback of an error that it holds would hold
            raise
        return ref

    def order(
        self,
        to: NodeId,
        function: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[RRef[Any], Callable[[], Coroutine[Any, Any, None]]]:
        """Return a reference to a result, and what has to be run once for it to come to be.

        For threads too: the reference can be used at once, and waits for the rest.
        """
        target = self.asking.target(function)
        return self.asking.order(to, target, args, kwargs or {}, timeout, function=function)

    def order_method(
        self,
        ref: RRef[Any],
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[RRef[Any], Callable[[], Coroutine[Any, Any, None]]]:
        """Return the same as `order`, of a method of a reference's value, at its owner."""
        target = self.asking.target_at(ref, "method", method)
        return self.asking.order(ref.owner_id, target, args, kwargs or {}, timeout, after=ref)

    async def invoke(
        self,
        ref: RRef[Any],
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Call a public method of a reference's value, at its owner, and return the result.

        Raises:
            NotExposed: the owner does not expose the value's class.
            MeshError, Exception: as `call`.
        """
        seconds = self.asking.seconds(timeout)
        target, left = await self.asking.at(ref, "method", method, seconds=seconds)
        return await self.asking.ask(ref.owner_id, target, args, kwargs or {}, left)

    def stream(
        self,
        to: NodeId,
        function: Callable[..., Any] | str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> RemoteIterator:
        """Call a generator function at a peer, and return its items as they come.

        Args:
            to, function, args, kwargs: as `call`; it may be an async generator as well.
            timeout: seconds for each item, the first with all that goes before it; 0 for no limit.
                The peer's loss ends the wait anyway.
        """
        target = self.asking.target(function)

        async def found() -> Target:
            return target

        seconds = self.asking.seconds(timeout)
        return RemoteIterator(self, to, found, args, kwargs or {}, seconds, function)

    def stream_method(
        self,
        ref: RRef[Any],
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> RemoteIterator:
        """Return the same as `stream`, of a method of a reference's value, at its owner."""
        seconds = self.asking.seconds(timeout)

        async def found() -> Target:
            return (await self.asking.at(ref, "method", method, seconds=seconds))[0]

        return RemoteIterator(self, ref.owner_id, found, args, kwargs or {}, seconds)

    async def fetch(self, ref: RRef[Any], timeout: float | None = None) -> Any:
        """Return a copy of a reference's value; what `RRef.fetch` is."""
        seconds = self.asking.seconds(timeout)
        if isinstance(ref.state, Owned):
            with limit(seconds, "fetch of a reference", self.label(self.node_id)):
                return await self.bridge.until_done(ref.state.outcome)
        target, left = await self.asking.at(ref, "fetch", seconds=seconds)
        return await self.asking.ask(ref.owner_id, target, (), {}, left)

    def own(self, value: Any) -> RRef[Any]:
        """Return a reference to a value of this node's own. For threads too."""
        owned = Owned(new_id(), self.now())
        owned.outcome.set_result(value)
        return RRef._of(self, owned)

    # -- for references

    async def tell(self, owner: NodeId, notes: RefNotes) -> None:
        """Tell an owner about references of its own.

        Raises:
            RefLost: what was to be shared is gone there.
            MeshError: it may not have heard.
        """
        connection = await self.connected(owner)
        match await connection.call(REFS_SERVICE, notes.encode()):
            case {"unknown": list(unknown)}:
                pass
            case _:
                raise ProtocolError("notes about references", peer=connection.peer, why="no answer")
        if any(share.fork in unknown for share in notes.shared):
            raise RefLost(
                "sharing of a remote reference",
                peer=self.label(owner),
                why="its owner does not know that this node holds it",
            )

    def take_fork(
        self, owner: NodeId, fork: Fork, where: tuple[SocketAddress, ...], giver: PeerIdentity
    ) -> RRef[Any]:
        """Return a reference that has come from elsewhere, and tell its owner.

        Where the owner is, `giver` says; it is dialled there only if this node's authorizer lets
        `giver` order that, as it would have to for a tensor.

        Raises:
            LimitExceeded: it has given too many of owners that are not heard of.
        """
        if self._node.endpoint.connection(owner) is None:
            self._note_stranger(owner, giver.node_id)
        state = held(owner, fork)
        ref: RRef[Any] = RRef._of(self, state)
        if not self._node.endpoint.known_addresses(owner) and len(self._hints) < MAX_HINTS:
            self._hints[owner] = (giver, where)
        self.holdings.arrived(state)
        return ref

    def lend_to_self(self, owned: Owned) -> bytes:
        """Return the name by which this node's own message to itself finds a value of its own."""
        self._own[owned.ref] = owned
        return owned.ref

    def own_value(self, ref: bytes) -> Owned:
        """Return what `lend_to_self` has named.

        Raises:
            RefLost: nobody has it any more.
        """
        owned = self._own.get(ref)
        if owned is None:
            raise RefLost("use of a remote reference", why="there is no such value here")
        return owned

    async def send_gradients(self, to: NodeId, what: tuple[Any, ...]) -> None:
        """Send gradients to a participant of a backward; see `mesh.autograd`. Raises as `call`."""
        await self.asking.ask(to, Target("gradients"), what, {}, None)

    async def backward_at(self, ref: RRef[Any], context: int, retain_graph: bool) -> None:
        """Have the owner of a reference go backward from its value. Raises as `invoke`."""
        seconds = self.asking.seconds(None)
        target, left = await self.asking.at(ref, "backward", seconds=seconds)
        await self.asking.ask(ref.owner_id, target, (context, retain_graph), {}, left)

    def addresses_of(self, node_id: NodeId) -> tuple[SocketAddress, ...]:
        """Return where a node may be reached, as far as this one knows."""
        endpoint = self._node.endpoint
        return endpoint.addresses if node_id == self.node_id else endpoint.known_addresses(node_id)

    def start_soon(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a task until the agent is over."""
        self._tasks.start_soon(function)

    def watch(self) -> None:
        """Have it looked again when something here is over: something new may be. For threads."""
        self.bridge.call_soon(lambda: self._wake_lapse.set())

    def now(self) -> float:
        """Return the time on the loop's clock. For threads too."""
        return time.monotonic() + self._clock

    # -- for streams of items

    async def stream_here(self, request: Request, tensors: Sequence[torch.Tensor]) -> Source:
        """Return the items of a generator of this node's own."""
        return await self.service.streams.here(request, tensors)

    async def connected(self, to: NodeId) -> Connection:
        """Return the connection with a node, made if need be and if it may be. Raises as `call`."""
        endpoint = self._node.endpoint
        connection = endpoint.connection(to)
        if connection is not None:
            if self._met.get(to) is not connection:
                self._met[to] = connection
                self._tasks.start_soon(self._meet, connection)
            return connection
        if to in self._hints:
            giver, where = self._hints.pop(to)
            known = endpoint.connection(giver.node_id)
            if known is None or known.grant is None:
                raise AccessDenied(
                    "use of a remote reference",
                    peer=self.label(to),
                    why="where its owner is, a peer has said that may order nothing here",
                )
            await decide(self._node.authorizer, FetchRequest(giver, known.grant, to, 0))
            endpoint.add_addresses(to, where)
        return await self._node.dial(to)

    def short_way(self, to: NodeId) -> Connection | None:
        """Return the connection with a node by which threads can call it; None if there is none."""
        connection = self._node.endpoint.connection(to)
        is_there = connection is not None and connection.carrier is not None
        return connection if is_there and not self.pickles and not self.bridge.is_here else None

    async def _meet(self, connection: Connection) -> None:
        """Have the shared memory of a peer on this host be there before a large tensor needs it."""
        with contextlib.suppress(MeshError):  # then calls take streams, and tensors QUIC
            await self.lanes.meet(connection)

    def _note_stranger(self, owner: NodeId, giver: NodeId) -> None:
        """Bound the owners whom this node tries to reach at a peer's word."""
        strangers = self._strangers.setdefault(giver, set())
        if owner not in strangers and len(strangers) >= MAX_STRANGERS:
            strangers &= {each for each in strangers if self.holdings.is_telling(each)}
            if len(strangers) >= MAX_STRANGERS:
                raise LimitExceeded(
                    "a remote reference",
                    why=f"{len(strangers)} owners of references that {giver.short} has given can't "
                    "be reached",
                )
        strangers.add(owner)

    def _observe(self, event: EndpointEvent) -> None:
        match event:
            case PeerJoined(connection):
                node_id, boot = connection.peer.node_id, connection.remote_boot
                if self._boots.get(node_id, boot) != boot:
                    self.owned.forget(node_id)  # what it held, went with what it was
                self._boots[node_id] = boot
                self.lost.pop(node_id, None)
                self.owned.returned(node_id)
            case PeerLeft(connection, error):
                if len(self.lost) >= MAX_HINTS:
                    del self.lost[next(iter(self.lost))]
                self.lost[connection.peer.node_id] = error
                self.owned.left(connection.peer.node_id, anyio.current_time())
                self.watch()
            case PeerRevoked(node_id, _):
                self.owned.forget(node_id)
            case _:
                pass

    async def _give_up(self) -> None:
        while True:
            await anyio.sleep(FLUSH_SECONDS)
            while self.abandoned:
                self.abandoned.popleft()()

    async def _lapse(self) -> None:
        while True:
            now = anyio.current_time()
            until = min(self.owned.lapse(now), self.service.lapse(now))
            with anyio.move_on_after(max(0.0, min(until - anyio.current_time(), 60.0))):
                await self._wake_lapse.wait()
                self._wake_lapse = anyio.Event()
