"""Collective algorithms over an abstract exchange of messages. Knows ranks and tensors, not c10d.

The caller enters an `Operation` and runs one algorithm in it, on tensors that `gathered` made
contiguous, and writes results to tensors of other layouts with `scatter_back`.
"""

from __future__ import annotations

from mesh.collective.allreduce import all_reduce, reduce, reduce_scatter
from mesh.collective.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    RankFailed,
    RankLeft,
    RankLost,
    UnsupportedCollective,
)
from mesh.collective.exchange import COLLECTIVE, Exchange, Header, Signature, Transfer
from mesh.collective.layout import (
    apart,
    blank,
    check_distinct,
    check_readable,
    check_writable,
    gathered,
    raw,
    scatter_back,
)
from mesh.collective.levels import Hosts
from mesh.collective.monitored import monitored_barrier
from mesh.collective.movement import all_gather, all_to_all, barrier, broadcast, gather, scatter
from mesh.collective.operation import Operation, expect
from mesh.collective.reduction import Reduction, refuse_unless_reducible
from mesh.collective.sparse import all_reduce_sparse, refuse_unless_sparse_reducible

__all__ = [
    # algorithms
    "all_gather",
    "all_reduce",
    "all_reduce_sparse",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "scatter",
    # what they run on
    "COLLECTIVE",
    "Exchange",
    "Header",
    "Hosts",
    "Operation",
    "Reduction",
    "Signature",
    "Transfer",
    "expect",
    # tensors
    "apart",
    "blank",
    "check_distinct",
    "check_readable",
    "check_writable",
    "gathered",
    "raw",
    "refuse_unless_reducible",
    "refuse_unless_sparse_reducible",
    "scatter_back",
    # errors
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "GroupAborted",
    "RankFailed",
    "RankLeft",
    "RankLost",
    "UnsupportedCollective",
]
