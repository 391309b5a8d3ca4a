"""torch's own suites for remote calls pass on the mesh: all behind ``--slow``, some without.

See `tests.conformance.rpc` for how they run, and how a suite is added.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conformance.rpc import left_out
from tests.conformance.rpc.runner import Server
from tests.conformance.rpc.suites import SUITES

pytestmark = pytest.mark.e2e

CHOSEN = [
    "DdpComparisonTest.test_ddp_comparison",
    "DdpUnderDistAutogradTest.test_backward_ddp_inside",
    "DistAutogradTest.test_autograd_context",
    "DistAutogradTest.test_backward_autograd_engine_error",
    "DistAutogradTest.test_backward_rref_multi",
    "DistAutogradTest.test_clean_context_during_backward",
    "DistAutogradTest.test_graph_for_py_nested_call_itself",
    "DistAutogradTest.test_trainer_ps",
    "DistOptimizerTest.test_dist_optim",
    "ParameterServerTest.test_batch_updating_parameter_server",
    "RemoteModuleTest.test_forward_async",
    "RpcTest.test_async_class_rref_proxy_remote",
    "RpcTest.test_async_function_nested",
    "RpcTest.test_custom_exception_throw_during_reconstruction",
    "RpcTest.test_multi_layer_nested_async_rpc",
    "RpcTest.test_nested_rref",
    "RpcTest.test_register_rpc_backend_and_set_and_start_rpc_backend",
    "RpcTest.test_rref_forward_chain",
    "RpcTest.test_use_rref_after_shutdown",
    "TensorPipeAgentDistAutogradTest.test_backward_simple_sparse",
    "TensorPipeAgentRpcTest.test_py_rref_args_user_share_sparse",
    "ThreeWorkersRemoteModuleTest.test_create_remote_module_from_module_rref",
]

LEAST = {
    "RpcTest": 167,
    "TensorPipeAgentRpcTest": 36,
    "RemoteModuleTest": 10,
    "ThreeWorkersRemoteModuleTest": 1,
    "ParameterServerTest": 1,
    "ReinforcementLearningRpcTest": 1,
    "DistAutogradTest": 60,
    "TensorPipeAgentDistAutogradTest": 30,
    "DistOptimizerTest": 4,
    "DdpUnderDistAutogradTest": 4,
    "DdpComparisonTest": 4,
}
"""How many pass."""


@pytest.mark.timeout(170)
def test_some_tests_of_each_suite_pass() -> None:
    with Server() as server:
        assert left_out.read().keys() <= set(server.names)
        outcomes = list(server.run(CHOSEN))
    found = {outcome.name: outcome.error or outcome.why for outcome in outcomes}
    assert found == dict.fromkeys(CHOSEN, "")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_pass_but_those_that_are_listed() -> None:
    listed = left_out.read()
    with Server() as server:
        outcomes = list(server.run(name for name in server.names if name not in listed))
    assert {one.name: one.error or one.why for one in outcomes if not one.passed} == {}
    passed = Counter(one.name.partition(".")[0] for one in outcomes)
    assert all(passed[suite] >= LEAST[suite] for suite in SUITES)


def test_every_reason_is_one() -> None:
    assert all(len(reason) > 20 for reason in left_out.read().values())
