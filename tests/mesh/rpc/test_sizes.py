"""How much memory a value keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mesh.rpc.tensors.sizes import nbytes_of

WHOLE = torch.zeros(100)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (3, 0),
        (torch.zeros(3), 12),
        ([WHOLE, {"part": WHOLE[:2]}], 400),  # one storage, and all of it
        (torch.nn.Linear(3, 2), 32),
        (torch.eye(3).to_sparse(), 3 * (16 + 4)),
        (torch.nn.LazyLinear(3), 0),
        ((b"four", {"text": "fives"}), 9),
        ([torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))], 32 + 16 + 16 + 8),
    ],
)
def test_of(value: Any, nbytes: int) -> None:
    assert nbytes_of(value) == nbytes


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("make", [torch.sparse_csr_tensor, torch.sparse_csc_tensor])
def test_of_compressed_tensors(make: Any) -> None:
    value = make(torch.arange(4), torch.arange(3), torch.ones(3), (3, 3))
    assert nbytes_of(value) == 4 * 8 + 3 * 8 + 3 * 4
