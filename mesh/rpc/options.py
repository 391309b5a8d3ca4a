"""What ``init_rpc`` can be told beside names."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mesh.rpc.agent import DEFAULT_TIMEOUT, DEFAULT_WORKERS
from mesh.rpc.errors import RpcError

if TYPE_CHECKING:
    from mesh.blocking import Node

__all__ = ["MeshRpcBackendOptions"]


@dataclasses.dataclass(kw_only=True)
class MeshRpcBackendOptions:
    """Options of ``init_rpc``, with the names and defaults of ``TensorPipeRpcBackendOptions``.

    Attributes:
        num_worker_threads: functions that block which run at a time, beside those that wait for
            another call.
        rpc_timeout: seconds that a call may take unless it is told otherwise; 0 for no limit.
        init_method: where workers find each other: a URL of ``torch.distributed.rendezvous``.
        pickles: write pickles where nothing else will do, as upstream does; each peer reads them if
            it grants this program the scope ``rpc:pickle`` by that name. Whoever has it can run any
            code there.
        node: this worker's node, open; by default a new one of this machine, `mesh.Node.worker`.
    """

    num_worker_threads: int = DEFAULT_WORKERS
    rpc_timeout: float = DEFAULT_TIMEOUT
    init_method: str = "env://"
    pickles: bool = False
    node: Node | None = None

    def __post_init__(self) -> None:
        if self.num_worker_threads < 1:
            raise RpcError(
                "options of remote calls",
                why=f"num_worker_threads is {self.num_worker_threads}, and must be 1 at least",
            )
        if not 0 <= self.rpc_timeout < 1e9:
            raise RpcError(
                "options of remote calls",
                why=f"rpc_timeout is {self.rpc_timeout}, not a number of seconds from 0 on",
            )
