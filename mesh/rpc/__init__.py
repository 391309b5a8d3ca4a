"""Remote calls between nodes: functions by name, values by kind, references to what stays there.

``mesh.rpc`` has the names and rules of ``torch.distributed.rpc``. What it does not have is pickle:
a peer can call what a program has exposed and nothing else, and what travels is data.

=================  ===========================================================================
values, types      what travels, and how it is written
exposed            what peers may call
operators          torch's operators, which they may call anyhow
pickled            what old programs send, where both sides allow it
exceptions         how what was raised comes back
targets, heads     what is called, and what messages say that is the same from call to call
wire, patterns     the messages, and the short way to write and read most of them
owned, holding     the two sides of a reference: its owner's, and its holder's
reference, passing `RRef`, and how one travels
modules            modules elsewhere: what `mesh.nn` is
carriage           tensors on their way
placement          which device they are put on
workers, bridge    threads for functions that block, and the way between them and the loop
service, prompt    answering calls, and those that are answered at once
agent, asking      making them, and `quick`, the short way for threads
streams            what a peer's generator yields, at its reader
serve_stream       the same at the callee, and `sources`, the generators
listing            what there is of references, for people
api, worker        `init_rpc` and what follows it, and what it makes of a program
roster, ending     who takes part, and how all of them end together
backends, options  what `init_rpc` can be told
activity           what is under way
=================  ===========================================================================
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
from mesh.rpc.backends import (
    BackendType,
    backend_registered,
    construct_rpc_backend_options,
    register_backend,
)
from mesh.rpc.errors import (
    NotExposed,
    PickleRefused,
    RefLost,
    RemoteException,
    RpcError,
    RpcTimeout,
    Unsendable,
)
from mesh.rpc.exposed import Exposures, expose, exposed
from mesh.rpc.options import MeshRpcBackendOptions, RpcBackendOptions
from mesh.rpc.owned import RefLimits, RefRow
from mesh.rpc.reference import RRef
from mesh.rpc.roster import WorkerInfo
from mesh.rpc.streams import RemoteIterator
from mesh.rpc.types import TypeTable, register_type

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
