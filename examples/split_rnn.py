"""A recurrent network over peers: embedding and decoder at one, the recurrent layer here.

After the RNN of torch's tutorials on RPC. The large tables lie at a parameter server; a batch's
words go there, vectors come back, and so do their gradients, which are sparse. Run two workers, as
`examples.rpc_worker` says.
"""

from __future__ import annotations

import torch
from torch import nn

from examples import rpc_worker
from mesh import autograd, optim, rpc

WORDS, WIDTH, LENGTH, BATCH, STEPS = 50, 16, 6, 8, 40


class Tables:
    """The embedding and the decoder, at the server."""

    def __init__(self) -> None:
        self.embedding = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.decoder = nn.Linear(WIDTH, WORDS)

    def embed(self, words: torch.Tensor) -> torch.Tensor:
        """Return the vectors of words."""
        return self.embedding(words)

    def decode(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return how likely each word is."""
        return self.decoder(hidden)

    def parameter_refs(self, name: str) -> list[rpc.RRef]:
        """Return references to the parameters of one of the tables."""
        return [rpc.RRef(each) for each in getattr(self, name).parameters()]


def main() -> None:
    torch.manual_seed(0)
    tables = rpc.remote("server", Tables)
    recurrent = nn.LSTM(WIDTH, WIDTH)
    dense = [
        *tables.rpc_sync().parameter_refs("decoder"),
        *(rpc.RRef(each) for each in recurrent.parameters()),
    ]
    sparse = tables.rpc_sync().parameter_refs("embedding")
    optimizers = [
        optim.DistributedOptimizer(torch.optim.Adam, dense, lr=0.02),
        optim.DistributedOptimizer(torch.optim.SparseAdam, sparse, lr=0.02),
    ]
    # Each word is followed by the next one of the alphabet.
    starts = torch.randint(WORDS, (BATCH,))
    words = (starts + torch.arange(LENGTH + 1)[:, None]) % WORDS
    losses = []
    hidden = None
    for _ in range(STEPS):
        with autograd.context() as context_id:
            vectors = tables.rpc_sync().embed(words[:-1])
            output, hidden = recurrent(vectors, hidden)
            hidden = tuple(each.detach() for each in hidden)  # from one context to the next
            guesses = tables.rpc_sync().decode(output)
            loss = nn.functional.cross_entropy(guesses.flatten(0, 1), words[1:].flatten())
            autograd.backward(context_id, [loss])
            for optimizer in optimizers:
                optimizer.step(context_id)
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    assert losses[-1] < 0.7 * losses[0]


rpc.expose(__name__)

if __name__ == "__main__":
    rpc_worker.run(__doc__, ["trainer", "server"], main)
