"""How much memory a value keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mesh.rpc.sizes import nbytes_of

WHOLE = torch.zeros(100)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (3, 0),
        (torch.zeros(3), 12),
        ([WHOLE, {"part": WHOLE[:2]}], 400),  # one storage, and all of it
        (torch.nn.Linear(3, 2), 32),
        ([torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))], 32 + 16 + 16 + 8),
    ],
)
def test_of(value: Any, nbytes: int) -> None:
    assert nbytes_of(value) == nbytes
