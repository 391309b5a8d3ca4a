"""Backward of a Transformer encoder, whole and split over three processes, in one run.

python -m tests.benchmarks.split_encoder [--width 512] [--steps 20]
"""

from __future__ import annotations

import argparse
import itertools
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
WARM_UP = 4


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
    parser.add_argument("--steps", type=int, default=20)
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
    """Go backward in turn, whole and split; print medians, and that of the ratio.

    The machine's speed drifts, so each split backward is compared with the mean of the whole ones
    before and after it.
    """
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

    def whole_backward() -> float:
        y = x
        for each in alone:
            y = each.forward(y)
        loss = y.sum()
        began = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        seconds = time.perf_counter() - began
        for each in alone:
            each.layer.zero_grad()
        return seconds

    def split_backward() -> float:
        with autograd.context() as context_id:
            y = alone[0].forward(x)
            for ref in split:
                y = ref.rpc_sync().forward(y)
            loss = y.sum()
            began = time.perf_counter()
            autograd.backward(context_id, [loss])
            return time.perf_counter() - began

    for _ in range(WARM_UP):
        whole_backward()
        split_backward()
    wholes, splits = [whole_backward()], list[float]()
    for _ in range(steps):
        splits.append(split_backward())
        wholes.append(whole_backward())
    means = [(before + after) / 2 for before, after in itertools.pairwise(wholes)]
    ratios = [mine / mean for mine, mean in zip(splits, means, strict=True)]
    least, _, most = statistics.quantiles(ratios)
    print(
        f"width {width}: whole {statistics.median(wholes) * 1e3:.1f} ms, "
        f"split {statistics.median(splits) * 1e3:.1f} ms, ratio {statistics.median(ratios):.2f} "
        f"(half of them from {least:.2f} to {most:.2f}; least times "
        f"{min(splits) / min(wholes):.2f}); "
        f"marking {statistics.median(marking[WARM_UP:]) * 1e3:.2f} ms"
    )


if __name__ == "__main__":
    main()
