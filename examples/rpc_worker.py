"""What the programs of remote calls have in common: a worker of a job, from the command line.

Run each of them once per worker, on one machine or several::

    python -m examples.pipeline --rank 0 --world-size 4 --meet file:///shared/meeting-point
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import mesh.blocking
from mesh import rpc

__all__ = ["run"]


def run(description: str | None, names: list[str], master: Callable[[], None]) -> None:
    """Be one worker; the first is the master, the others answer its calls until it is done.

    Args:
        description: of the program.
        names: of the workers, by rank.
        master: what the first does.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--home", help="state directory of this machine's node")
    parser.add_argument("--bind", default="[::]:0", help="UDP address to listen on")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, default=len(names))
    parser.add_argument("--meet", required=True, help="init_method, such as file:///path")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(options.rank)
    config = mesh.EndpointConfig(bind=options.bind)
    with mesh.blocking.Node.worker(options.home, config=config) as node:
        rpc.init_rpc(
            names[options.rank],
            rank=options.rank,
            world_size=options.world_size,
            rpc_backend_options=rpc.MeshRpcBackendOptions(init_method=options.meet, node=node),
        )
        if options.rank == 0:
            master()
        rpc.shutdown()
