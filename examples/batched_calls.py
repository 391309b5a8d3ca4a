"""One call for each image, one run of the model for many: `async_execution` answers calls together.

The server learns the digits, and prints a ticket; the client names each test image in a call of its
own, many at once. ``mesh init`` first, if this machine has no key yet::

    python -m examples.batched_calls
    python -m examples.batched_calls mesh1...
"""

from __future__ import annotations

import argparse
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import mesh.blocking
from examples import digits
from mesh import rpc

CALLS_AT_ONCE = 16
MOST, WAIT_SECONDS = 32, 0.005
"""A batch is run when it has so many images, or is so old."""


class Batcher:
    """Collects what calls ask for, runs the model on all of it, and answers each."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        self.lock = threading.Lock()
        self.waiting: list[tuple[torch.Tensor, torch.futures.Future[int]]] = []
        self.images = self.runs = 0

    def add(self, image: torch.Tensor) -> torch.futures.Future[int]:
        """Return what will be the answer for an image."""
        answer: torch.futures.Future[int] = torch.futures.Future()
        with self.lock:
            self.waiting.append((image, answer))
            count = len(self.waiting)
        if count == 1:
            threading.Timer(WAIT_SECONDS, self.run).start()
        elif count >= MOST:
            self.run()
        return answer

    def run(self) -> None:
        """Answer all that wait."""
        with self.lock:
            batch, self.waiting = self.waiting, []
            self.images, self.runs = self.images + len(batch), self.runs + bool(batch)
        if batch:
            with torch.no_grad():
                digits_seen = self.model(torch.stack([image for image, _ in batch])).argmax(1)
            for (_, answer), digit in zip(batch, digits_seen.tolist(), strict=True):
                answer.set_result(digit)


batcher: Batcher | None = None


@rpc.exposed
@rpc.functions.async_execution
def name_digit(image: torch.Tensor) -> torch.futures.Future[int]:
    """Return which digit an image shows: float64, ``(1, 8, 8)``. No thread waits for the batch."""
    assert batcher is not None
    return batcher.add(image)


@rpc.exposed
def batch_size() -> float:
    """Return how many images the model was run on at a time."""
    assert batcher is not None
    return batcher.images / max(1, batcher.runs)


def serve(epochs: int) -> None:
    global batcher
    data, model = digits.load(), digits.build_model()
    optimizer = digits.build_optimizer(model)
    for epoch in range(epochs):
        loss = digits.train_epoch(model, optimizer, data, epoch)
        print(f"epoch {epoch}: loss {loss:.3f}", flush=True)
    batcher = Batcher(model)
    with mesh.blocking.Node.worker() as node:
        node.run(node.node.rpc)
        ticket = node.ticket().encode()
        print("Ready. In another terminal, name digits in many calls, or offer them by HTTP:")
        print(f"  python -m examples.batched_calls {ticket}")
        print(f"  python -m examples.fastapi_calls {ticket}", flush=True)
        threading.Event().wait()


def ask(ticket: str) -> None:
    data = digits.load()
    with mesh.blocking.Node.worker() as node, ThreadPoolExecutor(CALLS_AT_ONCE) as threads:
        peer = node.connect(ticket)
        answers = list(threads.map(lambda image: peer.call(name_digit, image), data.test_images))
        right = (torch.tensor(answers) == data.test_labels).double().mean().item()
        print(f"{len(answers)} calls, {100 * right:.1f} % right")
        print(f"the model was run on {peer.call(batch_size):.1f} images at a time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ticket", nargs="?", help="the server's; without it, be the server")
    parser.add_argument("--epochs", type=int, default=8, help="how long the server learns")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        serve(options.epochs) if options.ticket is None else ask(options.ticket)
    except (mesh.MeshError, KeyboardInterrupt) as error:
        sys.exit(str(error) or 130)


if __name__ == "__main__":
    # As the module that peers know it by: what `__main__` is differs from program to program.
    from examples.batched_calls import main as run

    run()
