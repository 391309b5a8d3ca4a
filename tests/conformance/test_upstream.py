"""torch's own suite for process groups passes on the mesh.

It runs in three forms (see `tests.conformance.left_out`), all of them in full behind ``--slow``.
Without, some of each kind run. A no-op all-reduce would pass most of that suite: values are checked
in ``tests/mesh/distributed``.
"""

from __future__ import annotations

import pytest

from tests.conformance import left_out
from tests.conformance.runner import Suite

pytestmark = pytest.mark.e2e

CHOSEN = [
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_all_gather_coalesced_complex",
    "test_all_gather_group",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_group_product",
    "test_all_reduce_sum_async",
    "test_all_to_all_complex",
    "test_all_to_all_single_unequal_split_group",
    "test_barrier_timeout_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_group",
    "test_ddp_logging_data_cpu",
    "test_gather_group",
    "test_get_future",
    "test_grads_same_across_ranks_with_no_sync",
    "test_isend_torch_profiler",
    "test_reduce_group_max",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]

FAILS = {"gloo 3": {"test_ddp_logging_data_cpu"}}
"""The test of the backend's name, which is another's."""

LEAST = {"mesh 3": 115, "mesh 4": 118, "gloo 3": 122}
"""How many pass."""


@pytest.mark.timeout(170)
def test_one_test_of_each_kind_passes() -> None:
    listed = left_out.read()["mesh 3"].keys()
    with Suite("mesh", 3) as suite:
        assert listed <= set(suite.names)
        outcomes = list(suite.run(CHOSEN))
    found = {outcome.name: outcome.error or outcome.why for outcome in outcomes}
    assert found == dict.fromkeys(CHOSEN, "")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", left_out.FORMS)
def test_all_pass_but_those_that_are_listed(form: str) -> None:
    backend, size = form.split()
    with Suite(backend, int(size)) as suite:
        outcomes = list(suite.run(suite.names))
    assert {one.name for one in outcomes if one.error} == FAILS.get(form, set())
    assert {one.name: one.why for one in outcomes if one.why} == left_out.read()[form]
    assert sum(one.passed for one in outcomes) >= LEAST[form]


def test_every_reason_is_one() -> None:
    for form, reasons in left_out.read().items():
        assert len(reasons) > 100, form
        assert all(len(reason) > 10 for reason in reasons.values())
