"""What torch's suites ask of upstream that the mesh says in other words.

Each is a few lines on what ``mesh.rpc`` shows; none does what a user's program would miss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.rpc import api as upstream

import mesh.blocking
from auth import SecretKey, allow_any
from mesh import rpc
from mesh.rpc import api
from mesh.rpc.job.worker import Worker
from mesh.rpc.refs.passing import Outgoing
from tests.mesh.distributed.nodes import LOOPBACK

__all__ = [
    "AgentView",
    "Fixture",
    "current_agent",
    "init_rpc",
    "init_rpc_backend",
    "is_agent_set",
    "options",
    "prepare",
    "reference_counts",
    "rpc_async",
    "set_rpc_timeout",
    "worker_info",
]

GRANTED = ("*", "rpc:pickle")
"""What workers may do at each other: all of it, and have pickles read."""


def prepare() -> None:
    """Have workers be nodes on loopback that admit each other, once the tests are loaded."""
    from torch.testing._internal.distributed.nn.api import remote_module_test
    from torch.testing._internal.distributed.rpc import rpc_test

    def worker() -> mesh.blocking.Node:
        return mesh.blocking.Node.embedded(
            key=SecretKey.generate(), authorizer=allow_any(GRANTED), config=LOOPBACK
        )

    mesh.blocking.Node.worker = staticmethod(worker)  # type: ignore[method-assign, assignment]
    if not rpc.backend_registered("TENSORPIPE"):
        rpc.register_backend("TENSORPIPE", *_mesh_handlers())
    rpc_test.FooBackendOptions = type(  # made of a class in C++ that is replaced
        "FooBackendOptions",
        (rpc.RpcBackendOptions,),
        {"__init__": rpc_test.FooBackendOptions.__init__},
    )
    rpc_test.StubRpcAgent.begin = lambda self: None
    rpc.RRef._get_type = _get_type  # type: ignore[attr-defined]
    rpc.RRef._serialize = _serialize  # type: ignore[attr-defined]
    rpc.RRef._get_future = _get_future  # type: ignore[attr-defined]
    plain = [remote_module_test.ModuleCreationMode.MODULE_CTOR]  # the others are TorchScript
    every = remote_module_test.CommonRemoteModuleTest._create_remote_module_iter
    remote_module_test.CommonRemoteModuleTest._create_remote_module_iter = staticmethod(
        lambda remote_device, modes=plain: every(remote_device, modes)
    )


class Fixture:
    """What tests ask about the implementation that they run on."""

    rpc_backend: Any = property(lambda self: rpc.BackendType.TENSORPIPE)
    rpc_backend_options: Any = property(lambda self: options(init_method=self.init_method))

    def get_shutdown_error_regex(self) -> str:
        """Return what errors of calls to a worker that has gone look like, as TensorPipe's do."""
        return ".*"

    def get_timeout_error_regex(self) -> str:
        """Return what is in the text of every timeout."""
        return "RPC ran for more than"


def options(*, _transports: object = None, _channels: object = None, **given: Any) -> Any:
    """Return options with which whatever can be pickled travels."""
    return rpc.MeshRpcBackendOptions(pickles=True, **given)


def init_rpc(*args: Any, **kwargs: Any) -> None:
    """Become a worker, and let upstream's helpers in Python know of all workers."""
    rpc.init_rpc(*args, **kwargs)
    if isinstance(api._worker, Worker):  # and not a stub
        upstream._ALL_WORKER_NAMES = {info.name for info in current_agent().get_worker_infos()}


def init_rpc_backend(*, store: object, **kwargs: Any) -> None:
    """Become a worker; of a store of one's own making, which has to be the options'."""
    init_rpc(**kwargs)


def rpc_async(*args: Any, **kwargs: Any) -> Any:
    """Call, and add the future to those that upstream's ``_wait_all`` waits for."""
    future = rpc.rpc_async(*args, **kwargs)
    if hasattr(upstream._thread_local_var, "future_list"):
        upstream._thread_local_var.future_list.append(future)
    return future


def worker_info(name: str, id: int) -> rpc.WorkerInfo:
    """Return the description of a worker that is nowhere."""
    return rpc.WorkerInfo(name, id, SecretKey.generate().node_id)


def set_rpc_timeout(seconds: float) -> None:
    """Change what calls of this worker may take by default."""
    api.current_agent().timeout = seconds


class AgentView:
    """What upstream's agent shows."""

    is_static_group = True

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def get_worker_infos(self) -> Sequence[rpc.WorkerInfo]:
        """Return all workers that this one knows."""
        return [*{self._worker.me, *self._worker.roster.known()}]

    def get_worker_info(self, name: str | None = None) -> rpc.WorkerInfo:
        """Return one worker, by default this one."""
        return rpc.get_worker_info(name)

    def get_debug_info(self) -> dict[str, str]:
        """Return numbers about its inside, by names of upstream's."""
        return {"agent.thread_pool_size": str(self._worker.agent.workers.limit)}


def current_agent() -> AgentView:
    """Return a view of this worker."""
    return AgentView(api._need())


def is_agent_set() -> bool:
    """Return whether this program is a worker."""
    return api._worker is not None


def reference_counts() -> dict[str, str]:
    """Return the sizes of the agent's tables of references, by names of upstream's."""
    agent = api.current_agent()
    rows = agent.references()
    return {
        "num_owner_rrefs": str(len(rows)),
        "num_forks": str(sum(len(row.holders) for row in rows)),
        "num_pending_users": "0",
        "num_pending_futures": "0",
    }


def _get_type(ref: Any, timeout: float = -1, blocking: bool = True) -> Any:
    """Return the type of a reference's value, which is asked for once."""
    found = getattr(ref, "_type", None)
    if found is None:
        found = ref._type = rpc_async(ref.owner(), _type_of, (ref,), timeout=timeout)
    return found.wait() if blocking else found


def _type_of(ref: Any) -> type:
    return type(ref.local_value())


def _get_future(ref: Any) -> Any:
    """Return a future of a reference's value, which does not bring it here."""
    return rpc_async(ref.owner(), _type_of, (ref,), timeout=0)


def _serialize(ref: Any) -> Any:
    """Return what a reference travels as."""
    return Outgoing(ref.agent, ref.agent.node_id).pack(ref)


def _mesh_handlers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    backend = rpc.BackendType.MESH
    return functools.partial(_options_of, backend), backend.init


def _options_of(backend: Any, rpc_timeout: float, init_method: str, **given: Any) -> Any:
    return options(rpc_timeout=rpc_timeout, init_method=init_method, **given)
