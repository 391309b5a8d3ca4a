"""A look around on a peer's device, cell by cell, as in a notebook.

Run ``mesh up --device cpu`` on the peer, and here cell by cell in an editor that knows ``# %%``, or
all of it: ``python -m examples.explore_device mesh1...``
"""

from __future__ import annotations

# %% Who is there, and what does it offer?
import sys
import time

import torch

import mesh

ticket = sys.argv[1]
for offered in mesh.devices(ticket):
    print(f"{offered.peer} offers {offered.type}: {offered.name}, {offered.memory >> 30} GiB")
d = mesh.device(ticket)
print(f"{d} is open, by way of {mesh.describe(d).lane}")

# %% Tensors are made there. Nothing comes back until somebody looks.
torch.manual_seed(0)
x = torch.randn(1024, 256, device=d)
gram = x.T @ x / 1024
print("mean of the diagonal:", round(gram.diagonal().mean().item(), 4))

# %% A view is made here and shares memory there.
gram.fill_diagonal_(0)
row = gram[3]
row += 1
print("the row was written to through its view:", torch.equal(gram[3].cpu(), row.cpu()))

# %% A mistake is told where its result is looked at, with the line that made it.
wrong = x.index_select(0, torch.tensor([1024]).to(d))
try:
    wrong.cpu()
except mesh.MeshError as error:
    print("as it should be:", error)

# %% Gradients, as ever.
w = torch.zeros(256, device=d, requires_grad=True)
target = x @ torch.arange(256.0, device=d).div(256)
for _ in range(20):
    loss = (x @ w - target).square().mean()
    (gradient,) = torch.autograd.grad(loss, w)
    with torch.no_grad():
        w -= 0.2 * gradient
print("loss after 20 steps:", f"{loss.item():.2e}")

# %% The same step, captured: sent once, then one message each time.
with mesh.device.capture(d) as step, torch.no_grad():
    w -= 0.4 * (x.T @ (x @ w - target)) / 1024
mesh.device.synchronize(d)
began = time.perf_counter()
for _ in range(200):
    step.replay()
called = time.perf_counter() - began
mesh.device.synchronize(d)
took = time.perf_counter() - began
print(f"200 steps called in {1e3 * called:.1f} ms, done in {1e3 * took:.1f} ms")

# %% Take home what is wanted, and leave.
answer = w.detach().cpu()
print("found it:", torch.allclose(answer, torch.arange(256.0) / 256, atol=1e-3))
mesh.device.close(d)
