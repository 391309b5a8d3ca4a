"""Backward of a Transformer encoder, whole and split over three processes, in one run.

python -m tests.benchmarks.split_encoder [--width 512] [--steps 10]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

from auth import SecretKey, allow_any
from mesh import autograd, blocking, rpc
from mesh.autograd.marker import Marker
from mesh.rpc import MeshRpcBackendOptions
from tests.programs import Program
from transport import EndpointConfig

LAYERS = 3
BATCH, LENGTH = 8, 64


@rpc.exposed
class Layer:
    """One layer of the encoder."""

    def __init__(self, width: int, number: int) -> None:
        torch.manual_seed(number)
        self.layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        store = options.store or f"{directory}/store"
        others = [
            Program(
                [
                    *("-m", "tests.benchmarks.split_encoder", "--rank", str(rank)),
                    *("--store", store, "--width", str(options.width)),
                ]
            )
            for rank in range(1, LAYERS)
            if not options.rank
        ]
        key, config = SecretKey.generate(), EndpointConfig(bind="127.0.0.1:0", liveness=15.0)
        with blocking.Node.embedded(key=key, authorizer=allow_any(), config=config) as node:
            rpc.init_rpc(
                f"layer{options.rank}",
                rank=options.rank,
                world_size=LAYERS,
                rpc_backend_options=MeshRpcBackendOptions(init_method=f"file://{store}", node=node),
            )
            if not options.rank:
                measure(options.width, options.steps)
            rpc.shutdown()
        for other in others:
            sys.stderr.write(other.communicate(timeout=30)[1])


def measure(width: int, steps: int) -> None:
    """Print medians of both in turn, and of their ratio."""
    marking: list[float] = []
    real = Marker.marked

    def timed(self: Marker, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return real(self, *args, **kwargs)
        finally:
            marking.append(time.perf_counter() - began)

    Marker.marked = timed  # type: ignore[method-assign]
    alone = [Layer(width, number) for number in range(LAYERS)]
    split = [rpc.remote(number, Layer, (width, number)) for number in range(1, LAYERS)]
    x = torch.randn(BATCH, LENGTH, width)
    locals_, remotes = [], []
    for step in range(steps + 2):
        y = x
        for each in alone:
            y = each.forward(y)
        began = time.perf_counter()
        y.sum().backward()  # type: ignore[no-untyped-call]
        middle = time.perf_counter()
        for each in alone:
            each.layer.zero_grad()
        with autograd.context() as context_id:
            y = alone[0].forward(x)
            for ref in split:
                y = ref.rpc_sync().forward(y)
            loss = y.sum()
            start = time.perf_counter()
            autograd.backward(context_id, [loss])
            end = time.perf_counter()
        if step >= 2:
            locals_.append(middle - began)
            remotes.append(end - start)
    ratio = statistics.median(b / a for a, b in zip(locals_, remotes, strict=True))
    print(
        f"width {width}: local {statistics.median(locals_) * 1e3:.1f} ms, "
        f"split {statistics.median(remotes) * 1e3:.1f} ms, ratio {ratio:.2f} "
        f"(least {min(remotes) / min(locals_):.2f}); "
        f"marking {statistics.median(marking[2:]) * 1e3:.2f} ms, least {min(marking) * 1e3:.2f} ms"
    )


if __name__ == "__main__":
    main()
