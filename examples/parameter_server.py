"""A parameter server: it has a model's weights, and workers send it gradients when they have some.

Start it, and then as many workers as you like, each with the ticket that it prints; ``mesh init``
first, if this machine has no key yet. Workers on other machines need one that this one lets in::

    python -m examples.parameter_server
    python -m examples.parameter_server mesh1...
"""

from __future__ import annotations

import argparse
import sys
import threading

import torch
from torch import nn

import mesh.blocking
from examples import digits
from mesh import rpc

LEARNING_RATE = 3e-3

Weights = dict[str, torch.Tensor]


class Server:
    """The weights, and the optimizer that alone changes them. Calls come in threads."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.data = digits.load()
        self.model = digits.build_model()
        # Gradients come late: what takes its steps by momentum alone would overshoot.
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)
        self.lock = threading.Lock()
        self.done = threading.Event()
        self.count = 0

    def weights(self) -> Weights | None:
        """Return a copy of the weights, None once the training is over."""
        with self.lock:
            if self.done.is_set():
                return None
            return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def update(self, gradients: Weights) -> None:
        """Take a step along gradients, which may be of weights from a few steps ago."""
        with self.lock:
            if self.done.is_set():
                return
            for name, parameter in self.model.named_parameters():
                parameter.grad = gradients[name]
            self.optimizer.step()
            self.count += 1
            if self.count % 40 == 0:
                right = 100 * digits.accuracy(self.model, self.data)
                print(f"{self.count} updates: {right:.1f} % right", flush=True)
            if self.count >= self.updates:
                self.done.set()


server: Server | None = None


@rpc.exposed
def pull() -> Weights | None:
    """Give a worker the weights."""
    assert server is not None
    return server.weights()


@rpc.exposed
def push(gradients: Weights) -> None:
    """Take a worker's gradients."""
    assert server is not None
    server.update(gradients)


def serve(updates: int) -> None:
    global server
    server = Server(updates)
    with mesh.blocking.Node.worker() as node:
        node.run(node.node.rpc)
        print("Start workers, as many as you like, in other terminals:")
        print(f"  python -m examples.parameter_server {node.ticket().encode()}", flush=True)
        server.done.wait()
        print(f"done after {updates} updates", flush=True)
        threading.Event().wait(1)  # for workers to hear that it is over


def work(ticket: str) -> None:
    data, model = digits.load(), digits.build_model()
    with mesh.blocking.Node.worker() as node:
        peer = node.connect(ticket)
        print(f"working for {peer.label}", flush=True)
        sent = 0
        while (weights := peer.call(pull)) is not None:
            chosen = torch.randint(len(data.labels), (digits.BATCH,))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(weights[name])
            loss = nn.functional.cross_entropy(model(data.images[chosen]), data.labels[chosen])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            peer.call(push, dict(zip(weights, gradients, strict=True)))
            sent += 1
        print(f"sent {sent} gradients, the last of a loss of {loss.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ticket", nargs="?", help="the server's; without it, be the server")
    parser.add_argument("--updates", type=int, default=400, help="how long the server trains")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        serve(options.updates) if options.ticket is None else work(options.ticket)
    except (mesh.MeshError, KeyboardInterrupt) as error:
        sys.exit(str(error) or 130)


if __name__ == "__main__":
    # As the module that peers know it by: what `__main__` is differs from program to program.
    from examples.parameter_server import main as run

    run()
