"""torch.distributed's gloo: unauthenticated and unencrypted TCP, for scale."""

from __future__ import annotations

import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import torch
import torch.distributed as dist

from tests.benchmarks.harness import child

SMALL = 64


def serve(pipe: Pipe, meet: str, count: int, nbytes: int) -> None:
    pipe.send("started")
    dist.init_process_group("gloo", init_method=meet, rank=1, world_size=2)
    tensor, answer = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(SMALL, dtype=torch.uint8)
    for _ in range(count):
        dist.recv(tensor, 0)
        dist.send(answer, 0)
    pipe.recv()


def _run(count: int, nbytes: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        meet = (Path(folder) / "meet").as_uri()
        with child(serve, meet, count, nbytes) as (_, pipe):
            dist.init_process_group("gloo", init_method=meet, rank=0, world_size=2)
            tensor = torch.zeros(nbytes, dtype=torch.uint8)
            answer = torch.zeros(SMALL, dtype=torch.uint8)
            times = []
            for _ in range(count):
                began = time.perf_counter()
                dist.send(tensor, 1)
                dist.recv(answer, 1)
                times.append(time.perf_counter() - began)
            dist.destroy_process_group()
            pipe.send("done")
            return times


def latencies(count: int) -> list[float]:
    return _run(count, SMALL)


def throughput(nbytes: int) -> float:
    return nbytes / _run(1, nbytes)[0]
