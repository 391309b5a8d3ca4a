"""Remote calls between nodes: functions by name, values by kind, references to what stays there.

``mesh.rpc`` has the names and rules of ``torch.distributed.rpc``. What it does not have is pickle:
a peer can call what a program has exposed and nothing else, and what travels is data.

====================  ==================================================================
`api`                 `init_rpc` and what follows it: upstream's names, for threads
`agent`               a node's part in remote calls: it makes them, and answers its peers
`calling`             the caller's side
`answering`           the callee's side
`job`                 a program as a worker of a job of several
`names`               what a message may name: functions, operators, types
`encoding`            arguments, results and exceptions as they travel
`tensors`             the tensors of a message
`refs`                remote references
`wire`                the messages themselves
`modules`             modules at other workers: what `mesh.nn` is
`functions`           marks on functions: ``async_execution``
`futures`, `limits`   futures of calls, and the time that one may take
`workers`, `bridge`   threads for functions that block, and the way between them and the loop
`activity`            what is under way
`links`               what a message has to do with distributed autograd
====================  ==================================================================
"""

from __future__ import annotations

from mesh.rpc import functions
from mesh.rpc import modules as _modules  # noqa: F401 - for peers to find them
from mesh.rpc.agent import Agent
from mesh.rpc.api import (
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    references,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from mesh.rpc.calling.streams import RemoteIterator
from mesh.rpc.errors import (
    NotExposed,
    PickleRefused,
    RefLost,
    RemoteException,
    RpcError,
    RpcTimeout,
    Unsendable,
)
from mesh.rpc.job.backends import (
    BackendType,
    backend_registered,
    construct_rpc_backend_options,
    register_backend,
)
from mesh.rpc.job.options import MeshRpcBackendOptions, RpcBackendOptions
from mesh.rpc.job.roster import WorkerInfo
from mesh.rpc.names.exposed import Exposures, expose, exposed
from mesh.rpc.names.types import TypeTable, register_type
from mesh.rpc.refs.owned import RefLimits, RefRow
from mesh.rpc.refs.reference import RRef

__all__ = [
    # what peers may call, and what travels
    "expose",
    "exposed",
    "register_type",
    "Exposures",
    "TypeTable",
    "functions",
    # one program, one worker
    "init_rpc",
    "shutdown",
    "rpc_sync",
    "rpc_async",
    "remote",
    "get_worker_info",
    "get_rpc_timeout",
    "is_available",
    "references",
    "WorkerInfo",
    "RpcBackendOptions",
    "MeshRpcBackendOptions",
    "BackendType",
    "backend_registered",
    "construct_rpc_backend_options",
    "register_backend",
    # calls and references
    "Agent",
    "RRef",
    "RemoteIterator",
    "RefLimits",
    "RefRow",
    # errors
    "RpcError",
    "RpcTimeout",
    "RefLost",
    "RemoteException",
    "NotExposed",
    "PickleRefused",
    "Unsendable",
]
