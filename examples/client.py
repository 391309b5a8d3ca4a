"""A client for threads, scripts and notebooks: joins with a ticket, keeps a tensor at the peer."""

import argparse
import sys

import torch

import mesh.blocking


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ticket", help="what the peer printed: mesh1...")
    try:
        use(mesh.Ticket.decode(parser.parse_args().ticket))
    except mesh.MeshError as error:
        sys.exit(str(error))


def use(ticket: mesh.Ticket) -> None:
    with mesh.blocking.Node.client(ticket) as node:
        peer = node.connect(ticket.node_id)
        print(f"round trip {1e3 * peer.ping():.2f} ms")

        there = peer.put(torch.arange(6.0).reshape(2, 3).T, name="weights")
        print(there.get())
        there.delete()


if __name__ == "__main__":
    main()
