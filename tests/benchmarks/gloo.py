"""torch.distributed's gloo: unauthenticated and unencrypted TCP, for scale."""

from __future__ import annotations

import math
import os
import socket
import time
from typing import Any

from tests.benchmarks.harness import SMALL, Pipe, Site, obey


class Gloo:
    """One contender: send and recv between two ranks, with a small answer."""

    most = math.inf
    spins = False

    def missing(self) -> str | None:
        return None

    def serve(self, pipe: Pipe, site: Site) -> None:
        import torch
        import torch.distributed as dist

        with socket.create_server((site.address, 0)) as probe:
            where = probe.getsockname()[:2]
        pipe.send(where)
        _join(site, where, rank=0)
        order = torch.zeros(2, dtype=torch.int64)
        answer = torch.zeros(len(SMALL), dtype=torch.uint8)
        room = torch.zeros(0, dtype=torch.uint8)
        while True:
            try:
                dist.recv(order, 1)
            except RuntimeError:
                return  # the other has left
            count, nbytes = order.tolist()
            if len(room) != nbytes:
                room = torch.ones(nbytes, dtype=torch.uint8)
            for _ in range(count):
                dist.recv(room, 1)
                dist.send(answer, 1)

    def dial(self, pipe: Pipe, site: Site, where: Any) -> None:
        import torch
        import torch.distributed as dist

        _join(site, where, rank=1)
        answer = torch.zeros(len(SMALL), dtype=torch.uint8)
        data = torch.zeros(0, dtype=torch.uint8)

        def trips(count: int, nbytes: int) -> list[float]:
            nonlocal data
            if len(data) != nbytes:
                data = torch.ones(nbytes, dtype=torch.uint8)
            dist.send(torch.tensor([count, nbytes]), 0)
            times = []
            for _ in range(count):
                began = time.perf_counter()
                dist.send(data, 0)
                dist.recv(answer, 0)
                times.append(time.perf_counter() - began)
            return times

        obey(pipe, lambda count: trips(count, len(SMALL)), lambda nbytes: trips(1, nbytes)[0])


def _join(site: Site, where: tuple[str, int], *, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = site.interface
    host, port = where
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=2)
