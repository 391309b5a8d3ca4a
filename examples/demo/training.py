"""The training of the tour: two processes over the mesh, checked against one."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from examples import digits
from examples.demo.peers import PeerProcess, process

TRAIN_SECONDS = 120.0


def train_on(
    peers: list[PeerProcess], folder: Path, on_epoch: Callable[[dict[str, Any]], None]
) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, int]]]:
    """Train with one rank per peer; return each rank's parameters and the bytes it sent.

    Each rank is a program of its own key under its machine's, so that the ranks let each other in
    because their machines did. `on_epoch` is called with what rank 0 says of each epoch.
    """
    saved = [folder / f"rank{rank}.pt" for rank in range(len(peers))]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                process(
                    "examples.train_ddp",
                    *("--home", str(peer.home), "--bind", "127.0.0.1:0"),
                    *("--rank", str(rank), "--world-size", str(len(peers))),
                    *("--meet", (folder / "meeting-point").as_uri(), "--save", str(saved[rank])),
                )
            )
            for rank, peer in enumerate(peers)
        ]
        sent = [_listen(rank.stdout, on_epoch if rank is ranks[0] else None) for rank in ranks]
        for number, rank in enumerate(ranks):
            if rank.wait(TRAIN_SECONDS):
                raise SystemExit(f"rank {number} failed with exit code {rank.returncode}")
    return [torch.load(path, weights_only=True) for path in saved], sent


def train_alone(on_epoch: Callable[[], None]) -> dict[str, torch.Tensor]:
    """Train the same model on the same data in the same order in this process."""
    data, model = digits.load(), digits.build_model()
    optimizer = digits.build_optimizer(model)
    for epoch in range(digits.EPOCHS):
        digits.train_epoch(model, optimizer, data, epoch)
        on_epoch()
    return model.state_dict()


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between two sets of parameters."""
    return max((one[name] - other[name]).abs().max().item() for name in one)


def _listen(output: Any, on_epoch: Callable[[dict[str, Any]], None] | None) -> dict[str, int]:
    sent: dict[str, int] = {}
    for line in output:
        said = json.loads(line)
        if "sent" in said:
            sent = said["sent"]
        elif on_epoch is not None:
            on_epoch(said)
    return sent
