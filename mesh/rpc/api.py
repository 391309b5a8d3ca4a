"""The blocking face of remote calls, by the names and rules of ``torch.distributed.rpc``.

One program is one worker: `init_rpc` opens it, `shutdown` ends it. What is called on a worker runs
in a thread there; threads that wait for another call let others run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import _create_store_from_options, rendezvous

import _quicmesh_autoload
from auth import MeshError, NodeId
from mesh import blocking
from mesh.rpc.agent import Agent
from mesh.rpc.calling.asking import positional
from mesh.rpc.calling.quick import call_quickly
from mesh.rpc.errors import RpcError
from mesh.rpc.futures import CallFuture
from mesh.rpc.job.backends import BackendType, backend_for, register_backend
from mesh.rpc.job.ending import end_together
from mesh.rpc.job.options import MeshRpcBackendOptions, RpcBackendOptions
from mesh.rpc.job.roster import Roster, WorkerInfo
from mesh.rpc.job.worker import FIND_SECONDS, Worker
from mesh.rpc.refs.owned import RefRow
from mesh.rpc.refs.reference import RRef
from mesh.rpc.workers import is_handler
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

_lock = threading.Lock()
_worker: Worker | None = None
_lives = 0


def is_available() -> bool:
    """Return whether remote calls can be made at all; they can."""
    return True


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Make this program a worker.

    Args:
        name: what others call it; unique in the job.
        backend: by default the one whose options are given, or ``BackendType.MESH``.
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
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if not isinstance(rpc_backend_options, RpcBackendOptions | None):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    options = rpc_backend_options or MeshRpcBackendOptions()
    backend = backend or backend_for(options)
    rank = int(os.environ.get("RANK", -1)) if rank < 0 else rank
    if world_size is None and "WORLD_SIZE" in os.environ:
        world_size = int(os.environ["WORLD_SIZE"])
    with _lock:
        if _worker is not None:
            raise RpcError("init_rpc", why="RPC is already initialized", fix="rpc.shutdown() first")
        life, _lives = _lives, _lives + 1
        worker = backend.init(
            store=PrefixStore(f"mesh-rpc-{life}", _store(options, rank, world_size)),
            name=name,
            rank=rank,
            world_size=world_size,
            rpc_backend_options=options,
        )
        _worker = worker
        try:
            worker.begin()
        except BaseException:
            _worker = None
            worker.close()
            raise


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """End this worker.

    Args:
        graceful: first let all that is under way end, at every worker of the job, so that nobody is
            called who is gone. In a job without a fixed size only what is under way here is waited
            for.
        timeout: seconds for that; 0 for as long as it takes. The loss of a worker ends it.

    Raises:
        RpcTimeout: names who was not there in time. The worker is ended all the same.
        RpcError: a worker was lost meanwhile, this program is none, or a peer has called this.
    """
    global _worker
    worker = _need()
    if (graceful and is_handler()) or worker.agent.bridge.is_here:
        raise RpcError(
            "rpc.shutdown",
            why="it would wait for the end of the function that it is called in",
            fix="Have the function tell a thread of the program's own, which calls it.",
        )
    with _lock:
        if worker.is_ending:
            raise RpcError("rpc.shutdown", why="it is under way already")
        worker.is_ending = True
    try:
        if graceful:  # handlers may call others meanwhile
            end_together(worker, timeout)
    finally:
        _worker = None
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
    agent, node_id = worker.agent, worker.node_of(to)
    seconds = agent.asking.seconds(_seconds(timeout))
    given = positional(args)
    result = call_quickly(
        agent, node_id, func, given, kwargs or {}, seconds, lambda: _worker is not worker
    )
    if not isinstance(result, NotNow):
        return result
    node_id = worker.find(to)
    return worker.wait_for(agent.prepare(node_id, func, given, kwargs, timeout=seconds))


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
    begin = worker.agent.prepare(
        worker.find(to), func, positional(args), kwargs, timeout=_seconds(timeout)
    )
    return worker.start(begin)


def remote(
    to: str | int | WorkerInfo | NodeId,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> RRef[Any]:
    """Call a function on a worker, let the result stay there, and return a reference to it at once.

    Tensors among the arguments must not be written to until it is `RRef.confirmed_by_owner`.

    Args:
        to, func, args, kwargs, timeout: as `rpc_sync`.
    """
    worker = _need()
    node_id = worker.find(to)
    ref, begin = worker.agent.order(
        node_id, func, positional(args), kwargs, timeout=_seconds(timeout)
    )
    worker.start(begin)
    return ref


def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Return who a worker is, by name or rank; by default this one.

    Raises:
        RpcError: there is none of that name.
    """
    worker = _need()
    return worker.me if worker_name is None else worker.info(worker_name)


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
    if _worker is None:
        raise RpcError(
            "Current RPC agent is not set! Did you initialize the RPC framework",
            why="this program is no worker",
            fix="Call mesh.rpc.init_rpc first.",
        )
    return _worker.agent


def wait_for(agent: Agent, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Return the result of a coroutine of an agent's; if that is the worker's, `shutdown` ends it.

    For threads. Raises as `Bridge.block_on`.
    """
    worker = _worker
    if worker is not None and worker.agent is agent:
        return worker.wait_for(call)
    return agent.bridge.block_on(call)


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
    begin = agent.prepare_method(ref, name, args, kwargs, timeout=_seconds(timeout))
    return wait_for(agent, begin)


def invoke_async(
    ref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float | None
) -> CallFuture[Any]:
    """Call a method of a reference's value and return a future of the result."""
    worker = _need()
    begin = worker.agent.prepare_method(ref, name, args, kwargs, timeout=_seconds(timeout))
    return worker.start(begin)


def invoke_remote(
    ref: RRef[Any], name: str, args: Any, kwargs: Any, timeout: float | None
) -> RRef[Any]:
    """Call a method of a reference's value and return a reference to the result.

    Waits for the value, and until the owner has found the method.
    """
    worker = _need()
    made, begin = worker.agent.order_method(ref, name, args, kwargs, timeout=_seconds(timeout))
    if ref.is_owner():
        worker.start(begin)
    else:
        worker.wait_for(begin)
    return made


def get_rpc_timeout() -> float:
    """Return the seconds that a call may take unless it is told otherwise."""
    return _need().agent.timeout


def _need() -> Worker:
    if _worker is None:
        raise RpcError(
            "RPC has not been initialized",
            why="this program is no worker, or none any more",
            fix="Call mesh.rpc.init_rpc first.",
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


def _init(
    *,
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
) -> Worker:
    """Make the worker of the backend ``MESH``."""
    options = rpc_backend_options
    if not isinstance(options, MeshRpcBackendOptions):
        raise TypeError("`rpc_backend_options` must be a `MeshRpcBackendOptions`")
    roster = Roster(store, name, rank, world_size)
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
        agent.autograd.worker_id = rank
        _show_daemon(node)
        devices: Any = options.devices
        agent.placement.devices = tuple(devices)
        me = WorkerInfo(name, rank, node.node_id)
        maps: Any = options.device_maps
        return Worker(node, agent, roster, me, device_maps=maps, owns_node=owns_node)
    except BaseException:
        if owns_node:
            node.close()
        raise


def _make_options(rpc_timeout: float, init_method: str, **kwargs: Any) -> MeshRpcBackendOptions:
    return MeshRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


register_backend("MESH", _make_options, _init)


def _store(options: RpcBackendOptions, rank: int, world_size: int | None) -> Store:
    store: Store
    if world_size is None:
        store = _create_store_from_options(options, rank)  # type: ignore[no-untyped-call]
    else:
        _quicmesh_autoload.register()  # where `mesh run` has said, and mesh://
        _rendezvous[:] = [rendezvous(options.init_method, rank=rank, world_size=world_size)]
        store = next(_rendezvous[0])[0]
    store.set_timeout(timedelta(seconds=max(options.rpc_timeout, FIND_SECONDS)))
    return store


_rendezvous: list[Any] = []
"""Kept, for some end the store with themselves."""
