"""DistributedDataParallel over the mesh: one rank of a training of the digits.

The program is plain PyTorch but for two things: it opens a node that acts under this machine's key,
and it names ``mesh`` as the backend. Run one per machine::

    python -m examples.train_ddp --rank 0 --world-size 2 --meet file:///shared/meeting-point
    python -m examples.train_ddp --rank 1 --world-size 2 --meet file:///shared/meeting-point

The meeting point only tells the ranks where the others are; whom a rank lets in is for its
machine's file of authorized keys to say (``mesh join``). Prints one JSON line an epoch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mesh.blocking
import mesh.distributed
from examples import digits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--home", help="state directory of this machine's node")
    parser.add_argument("--bind", default="[::]:0", help="UDP address to listen on")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--meet", required=True, help="init_method, such as file:///path")
    parser.add_argument("--epochs", type=int, default=digits.EPOCHS)
    parser.add_argument("--save", help="where to save the parameters")
    options = parser.parse_args()

    torch.set_num_threads(1)
    config = mesh.EndpointConfig(bind=options.bind)
    with mesh.blocking.Node.worker(options.home, config=config) as node:
        dist.init_process_group(
            "mesh",
            init_method=options.meet,
            rank=options.rank,
            world_size=options.world_size,
            timeout=timedelta(seconds=60),
            pg_options=mesh.distributed.Options(node=node),
        )
        try:
            train(options, node)
        finally:
            dist.destroy_process_group()
    return 0


def train(options: argparse.Namespace, node: mesh.blocking.Node) -> None:
    data = digits.load()
    model = digits.build_model()
    replica = DistributedDataParallel(model)
    optimizer = digits.build_optimizer(replica)
    began = time.monotonic()
    for epoch in range(options.epochs):
        loss = digits.train_epoch(
            replica, optimizer, data, epoch, rank=options.rank, world_size=options.world_size
        )
        mean = torch.tensor([loss], dtype=torch.float64)
        dist.all_reduce(mean)
        say(
            epoch=epoch + 1,
            loss=mean.item() / options.world_size,
            accuracy=digits.accuracy(model, data),
            seconds=time.monotonic() - began,
        )
    if options.save:
        torch.save(model.state_dict(), options.save)
    say(sent={str(peer.node_id): peer.bytes_sent for peer in node.peers() if peer.bytes_sent})


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    sys.exit(main())
