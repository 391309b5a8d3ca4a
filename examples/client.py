"""A client for threads, scripts and notebooks: joins with a ticket, keeps a tensor at the peer."""

import sys

import torch

import mesh.blocking


def main() -> None:
    ticket = mesh.Ticket.decode(sys.argv[1])
    with mesh.blocking.Node.client(ticket) as node:
        peer = node.connect(ticket.node_id)
        print(f"round trip {1e3 * peer.ping():.2f} ms")

        there = peer.put(torch.arange(6.0).reshape(2, 3).T, name="weights")
        print(there.get())
        there.delete()


if __name__ == "__main__":
    main()
