"""torch.distributed.rpc on TensorPipe: synchronous calls with a tensor for argument."""

from __future__ import annotations

import math
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from tests.benchmarks.harness import SMALL, Pipe, Site, obey

if TYPE_CHECKING:
    import torch

SERVER, CLIENT = "server", "client"


class TensorPipe:
    """One contender.

    Args:
        over_tcp: use TCP, as between two hosts, where on one it would take shared memory.
    """

    most = math.inf

    def __init__(self, *, over_tcp: bool) -> None:
        self._over_tcp = over_tcp
        self.spins = not over_tcp

    def missing(self) -> str | None:
        from torch.distributed import rpc

        return None if rpc.is_available() else "this torch has no rpc"

    def serve(self, pipe: Pipe, site: Site) -> None:
        with socket.create_server((site.address, 0)) as probe:
            where = probe.getsockname()[:2]
        pipe.send(where)
        self._join(site, where, SERVER, 0)
        time.sleep(1e9)

    def dial(self, pipe: Pipe, site: Site, where: Any) -> None:
        import torch
        from torch.distributed import rpc

        self._join(site, where, CLIENT, 1)
        small = torch.zeros(len(SMALL), dtype=torch.uint8)
        data = torch.zeros(0, dtype=torch.uint8)

        def call(function: Any, tensor: torch.Tensor) -> float:
            began = time.perf_counter()
            rpc.rpc_sync(SERVER, function, args=(tensor,))
            return time.perf_counter() - began

        def bulk(nbytes: int) -> float:
            nonlocal data
            if len(data) != nbytes:
                data = torch.ones(nbytes, dtype=torch.uint8)
            return call(sink, data)

        obey(pipe, lambda count: [call(echo, small) for _ in range(count)], bulk)

    def _join(self, site: Site, where: tuple[str, int], name: str, rank: int) -> None:
        import torch
        from torch.distributed import rpc

        torch.set_num_threads(1)
        os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = site.interface
        options: dict[str, Any] = {"init_method": f"tcp://{where[0]}:{where[1]}"}
        if self._over_tcp:
            options |= {"_transports": ["uv"], "_channels": ["basic"]}
        rpc.init_rpc(
            name,
            rank=rank,
            world_size=2,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(**options),
        )


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def sink(tensor: torch.Tensor) -> int:
    return len(tensor)
