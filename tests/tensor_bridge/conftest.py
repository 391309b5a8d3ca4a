"""What the tensor tests share."""

from __future__ import annotations

import torch

# The machine's cores are shared by everything that runs: the tests move bytes, they don't compute.
torch.set_num_threads(1)
