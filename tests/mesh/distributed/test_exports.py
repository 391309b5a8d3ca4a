"""The public names, pinned; and every error in its place."""

from __future__ import annotations

import torch.distributed as dist

import mesh.collective
import mesh.distributed
from auth import MeshError
from mesh.collective.errors import error_class


def test_distributed_names() -> None:
    names = ["BACKEND", "MeshNode", "MeshWork", "Options", "ProcessGroupMesh", "register", "use"]
    assert mesh.distributed.__all__ == names
    assert "mesh" in dist.Backend.backend_list
    mesh.distributed.register()  # again does no harm


def test_collective_names() -> None:
    assert sorted(mesh.collective.__all__) == [
        "COLLECTIVE", "CollectiveError", "CollectiveMismatch", "CollectiveTimeout", "Exchange",
        "GroupAborted", "Header", "Hosts", "Operation", "RankFailed", "RankLeft", "RankLost",
        "Reduction", "Signature", "Transfer", "UnsupportedCollective", "all_gather", "all_reduce",
        "all_reduce_sparse", "all_to_all", "apart", "barrier", "blank", "broadcast",
        "check_distinct", "check_readable", "check_writable", "expect",
        "gather", "gathered", "monitored_barrier", "raw", "reduce", "reduce_scatter",
        "refuse_unless_reducible", "refuse_unless_sparse_reducible", "scatter", "scatter_back",
    ]  # fmt: skip
    assert all(hasattr(mesh.collective, name) for name in mesh.collective.__all__)


def test_every_error_travels_as_itself() -> None:
    kinds = mesh.collective.CollectiveError.__subclasses__()
    assert len(kinds) == 6
    for kind in kinds:
        assert issubclass(kind, MeshError)
        assert issubclass(kind, RuntimeError)
        assert error_class(kind.code) is kind
