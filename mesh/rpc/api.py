"""The blocking face of remote calls, by the names and rules of ``torch.distributed.rpc``.

One program is one worker: `init_rpc` opens it, `shutdown` ends it. What is called on a worker runs
in a thread there; threads that wait for another call let others run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import _create_store_from_options, rendezvous

from auth import MeshError, NodeId
from mesh import blocking
from mesh.rpc.agent import Agent
from mesh.rpc.errors import RpcError, RpcTimeout
from mesh.rpc.futures import CallFuture
from mesh.rpc.options import MeshRpcBackendOptions
from mesh.rpc.owned import RefRow
from mesh.rpc.quick import call_quickly
from mesh.rpc.reference import RRef
from mesh.rpc.roster import Roster, WorkerInfo
from mesh.threads import Completer
from transport import NotNow

if TYPE_CHECKING:
    from mesh.node import Node

__all__ = [
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "references",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

FIND_SECONDS = 60.0
"""How long a worker that is called for the first time may take to come."""

CLOSE_SECONDS = 2.0


class _Worker:
    """This program's worker."""

    def __init__(
        self, node: blocking.Node, agent: Agent, roster: Roster, me: WorkerInfo, *, owns_node: bool
    ) -> None:
        self.node = node
        self.agent = agent
        self.roster = roster
        self.me = me
        self.owns_node = owns_node
        self.completer = Completer(f"mesh-rpc-{me.name}")
        self._pending: set[Future[Any]] = set()
        self._idle = threading.Condition()

    def start(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> CallFuture[Any]:
        """Run a coroutine in the node's loop; return a future that callbacks may be added to."""
        future: CallFuture[Any] = CallFuture()
        begun = self.node.portal.start_task_soon(call)
        with self._idle:
            self._pending.add(begun)

        def ended(done: Future[Any]) -> None:
            compute = functools.partial(self.agent.bridge.wait, done)
            self.completer.submit(lambda: future.complete(compute))
            with self._idle:
                self._pending.discard(done)
                self._idle.notify_all()

        begun.add_done_callback(ended)
        return future

    def find(self, to: str | int | WorkerInfo | NodeId) -> NodeId:
        """Return the node of a worker."""
        if isinstance(to, NodeId):
            return to
        if to in (self.me, self.me.name, self.me.id):
            return self.me.node_id
        info = to if isinstance(to, WorkerInfo) else self.roster.find(to, FIND_SECONDS)
        where = self.roster.addresses(info.node_id)
        endpoint = self.node.endpoint
        if not endpoint.known_addresses(info.node_id):
            self.node.portal.call(endpoint.add_addresses, info.node_id, where)
        return info.node_id

    def meet(self, workers: Iterable[WorkerInfo]) -> None:
        """Connect with workers that were found, so that the loss of one is noticed from now on."""

        async def dial(node_id: NodeId) -> None:
            await self.node.node.dial(node_id)

        for info in workers:
            if info.node_id != self.me.node_id:
                self.find(info)
                self.node.run(functools.partial(dial, info.node_id))

    def until_idle(self, end: float) -> bool:
        """Wait until no call of this worker's is under way."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._pending, max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """End what is under way, and close the node if it was made for this."""
        with self._idle:
            pending = tuple(self._pending)
        for future in pending:
            future.cancel()
        if self.owns_node:
            self.node.close()  # another's own goes on to answer
        self.completer.close(CLOSE_SECONDS)


_lock = threading.Lock()
_worker: _Worker | None = None
_lives = 0


def is_available() -> bool:
    """Return whether remote calls can be made at all; they can."""
    return True


def init_rpc(
    name: str,
    backend: object | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: MeshRpcBackendOptions | None = None,
) -> None:
    """Make this program a worker.

    Args:
        name: what others call it; unique in the job.
        backend: taken for programs that name one; there is this one.
        rank: its number; by default that of the environment, ``RANK``.
        world_size: how many workers there are, all of which are waited for; None, with no
            ``WORLD_SIZE`` in the environment either, for a job that others join as they come.
        rpc_backend_options: everything else.

    Raises:
        RpcError: it is a worker already, or its name or rank is taken.
        RpcTimeout: not all workers came.
        HomeError, KeyFileError: the machine's key can't be used.
    """
    global _worker, _lives
    options = rpc_backend_options or MeshRpcBackendOptions()
    if not isinstance(options, MeshRpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    rank = int(os.environ.get("RANK", -1)) if rank < 0 else rank
    if world_size is None and "WORLD_SIZE" in os.environ:
        world_size = int(os.environ["WORLD_SIZE"])
    with _lock:
        if _worker is not None:
            raise RpcError("init_rpc", why="RPC is already initialized", fix="rpc.shutdown() first")
        life, _lives = _lives, _lives + 1
        limit = options.rpc_timeout or FIND_SECONDS
        store = _store(options.init_method, rank, world_size, limit)
        roster = Roster(PrefixStore(f"mesh-rpc-{life}", store), name, rank, world_size)
        node = options.node or blocking.Node.worker()
        owns_node = options.node is None
        if owns_node:
            node.open()
        try:
            agent = node.run(
                functools.partial(
                    node.node.rpc, workers=options.num_worker_threads, timeout=options.rpc_timeout
                )
            )
            agent.pickles = options.pickles
            roster.publish(node.node_id, node.addresses)
            _show_daemon(node)
            me = WorkerInfo(name, rank, node.node_id)
            worker = _Worker(node, agent, roster, me, owns_node=owns_node)
            _current.append(agent)
            if world_size is not None:
                worker.meet(roster.everybody(limit))
        except BaseException:
            _current.clear()
            if owns_node:
                node.close()
            raise
        _worker = worker


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End this worker.

    Args:
        graceful: first let all that is under way end here, and wait until every worker of the job
            is here as well, so that nobody is called who is gone. In a job without a fixed size
            only what is under way here is waited for.
        timeout: seconds for that; 0 for as long as it takes. The loss of a worker ends it.

    Raises:
        RpcTimeout: names who was not there in time. The worker is ended all the same.
        RpcError: a worker was lost meanwhile, or this program is none.
    """
    global _worker
    with _lock:
        worker, _worker = _need(), None
    try:
        if graceful:
            _wait_for_all(worker, time.monotonic() + timeout if timeout else float("inf"), timeout)
    finally:
        _current.clear()
        _rendezvous.clear()  # a store that an interpreter's end finds may keep that from ending
        worker.close()


def rpc_sync(
    to: str | int | WorkerInfo | NodeId,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> Any:
    """Call a function on a worker and return its result; see `Agent.call` for what may be called.

    Args:
        to: the worker: its name, its rank, its `WorkerInfo` or its node id.
        func, args, kwargs: what to call, and with what.
        timeout: seconds; by default ``rpc_timeout``, 0 for no limit.

    Raises:
        Exception: what the function raised, and what `Agent.call` raises.
    """
    worker = _need()
    agent, node_id = worker.agent, worker.find(to)
    seconds = agent.seconds(_seconds(timeout))
    result = call_quickly(agent, node_id, func, args or (), kwargs or {}, seconds)
    if not isinstance(result, NotNow):
        return result
    return agent.bridge.block_on(
        lambda: agent.call(node_id, func, args or (), kwargs, timeout=seconds)
    )


def rpc_async(
    to: str | int | WorkerInfo | NodeId,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> CallFuture[Any]:
    """Call a function on a worker and return a ``torch.futures.Future`` of its result.

    Tensors among the arguments must not be written to until it is complete.

    Args:
        to, func, args, kwargs, timeout: as `rpc_sync`.
    """
    worker = _need()
    call = worker.agent.call
    node_id = worker.find(to)
    return worker.start(lambda: call(node_id, func, args or (), kwargs, timeout=_seconds(timeout)))


def remote(
    to: str | int | WorkerInfo | NodeId,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> RRef[Any]:
    """Call a function on a worker, let the result stay there, and return a reference to it at once.

    Args:
        to, func, args, kwargs, timeout: as `rpc_sync`.
    """
    worker = _need()
    node_id = worker.find(to)
    ref, begin = worker.agent.order(node_id, func, args or (), kwargs, timeout=_seconds(timeout))
    worker.start(begin)
    return ref


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return who a worker is; by default this one.

    Raises:
        RpcTimeout: there is none of that name.
    """
    worker = _need()
    if worker_name is None or worker_name == worker.me.name:
        return worker.me
    return worker.roster.find(worker_name, FIND_SECONDS)


def references() -> tuple[RefRow, ...]:
    """Return every value of this worker's that others have references to, with its holders."""
    worker = _need()

    async def look() -> tuple[RefRow, ...]:
        return worker.agent.references()

    return worker.node.run(look)


def current_agent() -> Agent:
    """Return what `RRef` stands on.

    Raises:
        RpcError: this program is no worker.
    """
    if not _current:
        _need()
    return _current[0]


def worker_of(node_id: NodeId) -> WorkerInfo:
    """Return the worker that is a node."""
    worker = _need()
    if node_id == worker.me.node_id:
        return worker.me
    info = worker.roster.of_node(node_id)
    if info is None:
        raise RpcError(f"looking for node {node_id.short}", why="it is no worker of this job")
    return info


def invoke_sync(ref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float | None) -> Any:
    """Call a method of a reference's value and return the result."""
    agent = current_agent()
    return agent.bridge.block_on(
        lambda: agent.invoke(ref, name, args, kwargs, timeout=_seconds(timeout))
    )


def invoke_async(
    ref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float | None
) -> CallFuture[Any]:
    """Call a method of a reference's value and return a future of the result."""
    worker = _need()
    return worker.start(
        lambda: worker.agent.invoke(ref, name, args, kwargs, timeout=_seconds(timeout))
    )


def invoke_remote(
    ref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float | None
) -> RRef[Any]:
    """Call a method of a reference's value and return a reference to the result."""
    worker = _need()
    made, begin = worker.agent.order_method(ref, name, args, kwargs, timeout=_seconds(timeout))
    worker.start(begin)
    return made


def get_rpc_timeout() -> float:
    """Return the seconds that a call may take unless it is told otherwise."""
    return _need().agent.timeout


_current: list[Agent] = []
"""The agent of `RRef(value)`."""


def _need() -> _Worker:
    if _worker is None:
        raise RpcError(
            "a remote call",
            why="RPC has not been initialized. Call mesh.rpc.init_rpc first",
        )
    return _worker


def _show_daemon(node: blocking.Node) -> None:
    """Connect with the daemon of this program's machine, if one runs, for ``mesh refs`` to ask."""
    with contextlib.suppress(MeshError):
        running = None if node.node.home is None else node.node.home.running()
        if running is not None:
            node.portal.start_task_soon(_dial_quietly, node.node, running.node_id)


async def _dial_quietly(node: Node, node_id: NodeId) -> None:
    with contextlib.suppress(MeshError):
        await node.dial(node_id, once=True)


def _seconds(timeout: float | None) -> float | None:
    # Upstream's own "not given", which programs pass on.
    return None if timeout is None or timeout < 0 else timeout


def _store(init_method: str, rank: int, world_size: int | None, limit: float) -> Store:
    if world_size is None:
        return _dynamic_store(init_method, rank, limit)
    _rendezvous[:] = [rendezvous(init_method, rank=rank, world_size=world_size)]
    store: Store = next(_rendezvous[0])[0]
    store.set_timeout(timedelta(seconds=limit))
    return store


_rendezvous: list[Any] = []
"""Kept, for some end the store with themselves."""


def _dynamic_store(init_method: str, rank: int, limit: float) -> Store:
    class Given:
        """What torch wants to know."""

    given = Given()
    given.init_method = init_method  # type: ignore[attr-defined]
    store: Store = _create_store_from_options(given, rank)  # type: ignore[no-untyped-call]
    store.set_timeout(timedelta(seconds=limit))
    return store


def _wait_for_all(worker: _Worker, end: float, timeout: float) -> None:
    if not worker.until_idle(end if end < float("inf") else time.monotonic() + 1e6):
        raise _late(["this worker's own calls"], timeout)
    for what in ("done", "told"):
        worker.roster.say(what)
        missing = set(range(worker.roster.size or 0)) - {worker.me.id}
        while missing:
            missing = {rank for rank in missing if not worker.roster.has_said(what, rank)}
            _check_alive(worker, missing)
            if missing and time.monotonic() > end:
                names = [worker.roster.find(rank, 0.001).name for rank in sorted(missing)]
                raise _late(names, timeout)
        # Nobody calls any more; what was held of others is theirs alone from now on.
        worker.node.run(worker.agent.holdings.settle)


def _check_alive(worker: _Worker, missing: Iterable[int]) -> None:
    for rank in missing:
        info = worker.roster.find(rank, 0.001)
        error = worker.agent.lost.get(info.node_id)
        if error is not None:
            raise RpcError(
                "shutdown of remote calls",
                peer=f"{info.name} ({info.node_id.short})",
                why=f"it was lost before it was done: {error}",
            ) from error


def _late(names: Iterable[str], timeout: float) -> RpcTimeout:
    return RpcTimeout(
        "shutdown of remote calls",
        after=timeout,
        why=f"still busy: {', '.join(names)}",
        fix="Give it more time: timeout=, or shutdown(graceful=False) to leave at once.",
    )
