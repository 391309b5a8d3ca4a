"""A node's part in distributed autograd, as its agent for calls sees it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import torch

from auth import MeshError, NodeId
from mesh.autograd.contexts import MAX_WORKERS, Context, Contexts, gone
from mesh.autograd.errors import BackwardError
from mesh.autograd.passes import Passes
from mesh.autograd.recording import Recorder
from mesh.autograd.wire import RELEASE_SERVICE, Gradients
from mesh.rpc.errors import RpcError
from mesh.rpc.links import ContextId, Link
from mesh.rpc.wire import SCOPE
from transport import (
    Backoff,
    CborValue,
    Endpoint,
    EndpointEvent,
    Incoming,
    PeerJoined,
    PeerLeft,
    PeerRevoked,
    ProtocolError,
)

if TYPE_CHECKING:
    from mesh.rpc.agent import Agent

__all__ = ["Autograd"]

RELEASE_SECONDS = 1.0
"""How long leaving a context waits until it is freed everywhere. Who is lost, is told later on."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two tries to tell a peer that a context has ended."""

PATIENCE = 60.0
"""Seconds for which it is tried; by then its lease is over."""

_log = logging.getLogger("quicmesh.autograd")


class Autograd:
    """Contexts and backwards of one node.

    Used in the node's event loop, but for `begin`, `end`, `backward` and `gradients`, which are for
    threads.

    Args:
        agent: what it talks to others by.
        lease: seconds for which a context outlives the connection with its last caller.
    """

    def __init__(self, agent: Agent, lease: float) -> None:
        self._agent = agent
        self.contexts = Contexts(agent.node_id, lease)
        self._recorder = Recorder(self.contexts)
        self._passes = Passes(agent, self.contexts)
        self._boots: dict[NodeId, bytes] = {}
        self._wake = anyio.Event()

    def register(self, endpoint: Endpoint) -> None:
        """Offer the services to peers that may call this node."""
        from mesh.optim import LocalOptimizer  # which stands on this

        self._agent.exposures.add(LocalOptimizer)
        self._passes.register(endpoint)
        endpoint.register_call(RELEASE_SERVICE, self._answer_release, scope=SCOPE)
        endpoint.subscribe(self._observe)

    async def run(self) -> None:
        """End contexts whose callers have vanished, until cancelled; then end all."""
        try:
            while True:
                orphans, until = self.contexts.lapse(anyio.current_time())
                self._orphaned(orphans)
                with anyio.move_on_after(max(0.0, min(until - anyio.current_time(), 60.0))):
                    await self._wake.wait()
                    self._wake = anyio.Event()
        finally:
            for context in self.contexts:
                self._free(context)

    # -- facts

    @property
    def worker_id(self) -> int | None:
        """This program's rank, if it has one; its contexts' ids begin with it."""
        return self.contexts.worker_id

    @worker_id.setter
    def worker_id(self, rank: int) -> None:
        if rank >= MAX_WORKERS:
            raise RpcError("init_rpc", why=f"rank {rank} is not below {MAX_WORKERS}")
        self.contexts.worker_id = rank

    @property
    def running(self) -> int:
        """How many runs are under way here for others."""
        return self._passes.running

    # -- for programs, in threads

    def begin(self) -> Context:
        """Begin a context."""
        return self.contexts.begin()

    def end(self, context: Context) -> None:
        """End a context, and wait a moment until it has ended everywhere."""
        peers = self._free(context)
        if not peers:
            return
        tell = partial(self._tell_all, context.id, peers)
        if self._agent.bridge.is_here:
            self._agent.start_soon(tell)
            return
        with contextlib.suppress(RpcError):  # it is over
            self._agent.bridge.block_on(tell)

    def backward(
        self,
        context_id: int,
        losses: Sequence[torch.Tensor],
        *,
        retain_graph: bool = False,
        fast: bool = False,
        atomic: bool = False,
    ) -> None:
        """Go backward from losses; see `mesh.autograd.backward`."""
        context = self.contexts.find(context_id)
        self._passes.backward(context, losses, retain_graph=retain_graph, fast=fast, atomic=atomic)

    def gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients of the leaves here; see `mesh.autograd.get_gradients`."""
        context = self.contexts.find(context_id)
        with context.gradients_lock:
            return dict(context.gradients)

    # -- for calls

    def leaving(self, to: NodeId, tensors: Sequence[torch.Tensor]) -> Link | None:
        """Record a message that leaves. See `Recorder.leaving`, as for the next three."""
        return self._recorder.leaving(to, tensors)

    def joined(self, link: Link | None, caller: NodeId) -> AbstractContextManager[None]:
        """Be in the context of a caller."""
        return self._recorder.joined(link, caller)

    def arriving(self, by: NodeId, link: Link | None) -> _Received | None:
        """Record a request that has come."""
        return self._recorder.arriving(by, link)

    def answered(self, by: NodeId, asked: Link | None, link: Link | None) -> _Received | None:
        """Record an answer that has come."""
        return self._recorder.answered(by, asked, link)

    def take(self, by: NodeId, arguments: tuple[Any, ...]) -> None:
        """Take gradients of a message. See `Passes.take`."""
        self._passes.take(by, Gradients.of_arguments(arguments))

    async def backward_from(
        self, outcome: Future[Any], by: NodeId, arguments: tuple[Any, ...]
    ) -> None:
        """Go backward from a value of this node's, for one who has a reference to it."""
        match arguments:
            case [int(context_id), bool(retain_graph)]:
                value = await self._agent.bridge.until_done(outcome)
                work = partial(backward_of, self, value, context_id, retain_graph)
                await self._agent.workers.run(by, work)
            case _:
                raise ProtocolError("a backward", why="it names no context")

    # -- inside

    def _free(self, context: Context) -> frozenset[NodeId]:
        """End a context here; return who else takes part in it."""
        self.contexts.end(context.id)
        with context.lock:
            peers = frozenset(context.peers - {self._agent.node_id})
            context.peers.clear()
        self._passes.end(context.clear(), gone(context.id.number))
        return peers

    async def _tell_all(self, context_id: ContextId, peers: frozenset[NodeId]) -> None:
        """Tell peers that a context has ended; who is not there, is told in the background."""

        async def tell(peer: NodeId) -> None:
            if not await self._tell(context_id, peer, RELEASE_SECONDS):
                self._agent.start_soon(partial(self._keep_telling, context_id, peer))

        async with anyio.create_task_group() as tasks:
            for peer in peers:
                tasks.start_soon(tell, peer)

    async def _tell(self, context_id: ContextId, peer: NodeId, seconds: float) -> bool:
        try:
            with anyio.move_on_after(seconds):
                connection = await self._agent.connected(peer)
                value: CborValue = {"context": context_id.encode()}
                await connection.call(RELEASE_SERVICE, value, timeout=seconds)
                return True
        except MeshError as error:
            _log.debug("%s was not told that a context has ended: %s", peer.short, error)
        return False

    async def _keep_telling(self, context_id: ContextId, peer: NodeId) -> None:
        backoff, end = Backoff(FIRST_PAUSE, LONGEST_PAUSE), anyio.current_time() + PATIENCE
        while anyio.current_time() < end:
            await anyio.sleep(backoff.pause())
            if await self._tell(context_id, peer, LONGEST_PAUSE):
                return

    async def _answer_release(self, incoming: Incoming) -> CborValue:
        match incoming.value:
            case {"context": value}:
                context_id = ContextId.decode(value)
            case _:
                raise ProtocolError("release of a context", why="it names none")
        context, by = self.contexts.live(context_id), incoming.peer.node_id
        if context is None:
            if context_id.owner != self._agent.node_id:
                self.contexts.end(context_id)  # what is still on its way is late
            return None
        if by not in context.peers or context_id.owner == self._agent.node_id:
            raise ProtocolError("release of a context", why="who asks may not end it")
        if not self.contexts.leave(context, by):
            return None  # others have called in it, too, and will end it
        peers = self._free(context) - {by}
        if peers:
            await self._tell_all(context_id, peers)
        return None

    def _orphaned(self, orphans: Sequence[ContextId]) -> None:
        for context_id in orphans:
            context = self.contexts.live(context_id)
            if context is not None and (peers := self._free(context)):
                self._agent.start_soon(partial(self._tell_all, context_id, peers))

    def _observe(self, event: EndpointEvent) -> None:
        match event:
            case PeerJoined(connection):
                node_id, boot = connection.peer.node_id, connection.remote_boot
                if self._boots.get(node_id, boot) != boot:
                    self._orphaned(self.contexts.forget(node_id))
                self._boots[node_id] = boot
                self.contexts.returned(node_id)
            case PeerLeft(connection, _):
                self.contexts.left(connection.peer.node_id, anyio.current_time())
                self._wake.set()
            case PeerRevoked(node_id, _):
                self._orphaned(self.contexts.forget(node_id))
            case _:
                pass


_Received = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def backward_of(autograd: Autograd, value: Any, context_id: int, retain_graph: bool) -> None:
    """Go backward from a value that a reference leads to, at its owner.

    Raises:
        RpcError: it is no tensor.
        Exception: what the backward raises.
    """
    if not isinstance(value, torch.Tensor):
        raise RpcError(
            "RRef.backward()",
            why="RRef should contain a tensor for .backward(), and this is a "
            f"{type(value).__qualname__}",
        )
    if context_id == -1:
        torch.autograd.backward([value], retain_graph=retain_graph)
    else:
        autograd.backward(context_id, check_losses([value]), retain_graph=retain_graph)


def check_losses(losses: object) -> list[torch.Tensor]:
    """Return what a backward is to begin from, if it can; with upstream's words if not."""
    if not isinstance(losses, list | tuple) or any(
        not isinstance(each, torch.Tensor) for each in losses
    ):
        raise TypeError(
            "backward(): incompatible function arguments: the losses must be a list of tensors"
        )
    if not losses:
        raise BackwardError("backward", why="No tensors provided for gradient computation.")
    for loss in losses:
        if not loss.requires_grad:
            raise BackwardError("backward", why="requires_grad not set on root")
        if loss.numel() != 1:
            raise BackwardError(
                "backward", why=f"{tuple(loss.shape)} is not a scalar, all roots need to be scalar"
            )
        if loss.grad_fn is None:
            raise BackwardError("backward", why="root does not have a valid gradient function.")
    return list(losses)
