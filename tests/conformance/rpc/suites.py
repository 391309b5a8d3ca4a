"""Which of torch's suites run, and what in them is replaced by what."""

from __future__ import annotations

import dataclasses
import sys
import types
import unittest
from collections.abc import Mapping
from typing import Any

__all__ = ["REPLACED", "SUITES", "Suite"]

_TESTS = "torch.testing._internal.distributed"


@dataclasses.dataclass(frozen=True)
class Suite:
    """One class of tests: where torch has it."""

    module: str
    kind: str

    def load(self) -> type[Any]:
        """Return the class of its tests."""
        # Its base class of tests comes from a package that the tests here have no use for.
        expecttest: Any = types.ModuleType("expecttest")
        expecttest.TestCase = unittest.TestCase
        sys.modules.setdefault("expecttest", expecttest)
        module = __import__(f"{_TESTS}.{self.module}", fromlist=[self.kind])
        found: type[Any] = getattr(module, self.kind)
        return found


SUITES: Mapping[str, Suite] = {
    "RpcTest": Suite("rpc.rpc_test", "RpcTest"),
    "TensorPipeAgentRpcTest": Suite("rpc.rpc_test", "TensorPipeAgentRpcTest"),
    "RemoteModuleTest": Suite("nn.api.remote_module_test", "RemoteModuleTest"),
    "ThreeWorkersRemoteModuleTest": Suite(
        "nn.api.remote_module_test", "ThreeWorkersRemoteModuleTest"
    ),
    "ParameterServerTest": Suite("rpc.examples.parameter_server_test", "ParameterServerTest"),
    "ReinforcementLearningRpcTest": Suite(
        "rpc.examples.reinforcement_learning_rpc_test", "ReinforcementLearningRpcTest"
    ),
    "DistAutogradTest": Suite("rpc.dist_autograd_test", "DistAutogradTest"),
    "TensorPipeAgentDistAutogradTest": Suite(
        "rpc.dist_autograd_test", "TensorPipeAgentDistAutogradTest"
    ),
    "DistOptimizerTest": Suite("rpc.dist_optimizer_test", "DistOptimizerTest"),
    "DdpUnderDistAutogradTest": Suite("ddp_under_dist_autograd_test", "DdpUnderDistAutogradTest"),
    "DdpComparisonTest": Suite("ddp_under_dist_autograd_test", "DdpComparisonTest"),
}

_RPC = "torch.distributed.rpc"
_AUTOGRAD = "torch.distributed.autograd"
_REGISTRY = f"{_RPC}.backend_registry"
_HERE = "tests.conformance.rpc.stand_ins"

REPLACED: Mapping[str, str] = {
    # what mesh.rpc has by the same name
    **{
        f"{_RPC}.{name}": f"mesh.rpc:{name}"
        for name in (
            "RRef",
            "RpcBackendOptions",
            "get_rpc_timeout",
            "get_worker_info",
            "is_available",
            "remote",
            "rpc_sync",
            "shutdown",
        )
    },
    f"{_REGISTRY}.BackendType": "mesh.rpc:BackendType",
    f"{_REGISTRY}.backend_registered": "mesh.rpc:backend_registered",
    f"{_REGISTRY}.register_backend": "mesh.rpc:register_backend",
    f"{_RPC}.PyRRef": "mesh.rpc:RRef",
    # what does a little more there, or has another name
    f"{_RPC}.init_rpc": f"{_HERE}:init_rpc",
    f"{_RPC}._init_rpc_backend": f"{_HERE}:init_rpc_backend",
    f"{_RPC}.rpc_async": f"{_HERE}:rpc_async",
    f"{_RPC}.WorkerInfo": f"{_HERE}:worker_info",
    f"{_RPC}.TensorPipeRpcBackendOptions": f"{_HERE}:options",
    f"{_RPC}.TensorPipeAgent": f"{_HERE}:AgentView",
    f"{_RPC}._set_rpc_timeout": f"{_HERE}:set_rpc_timeout",
    # what shows the inside
    f"{_RPC}._get_current_rpc_agent": f"{_HERE}:current_agent",
    f"{_RPC}._is_current_rpc_agent_set": f"{_HERE}:is_agent_set",
    f"{_RPC}._rref_context_get_debug_info": f"{_HERE}:reference_counts",
    **{
        f"{_AUTOGRAD}.{old}": f"tests.conformance.rpc.autograd_views:{new}"
        for old, new in {
            "_current_context": "current",
            "_get_debug_info": "autograd_counts",
            "_get_max_id": "max_id",
            "_is_valid_context": "is_valid",
            "_new_context": "new",
            "_release_context": "release",
            "_retrieve_context": "retrieve",
            "backward": "backward",
        }.items()
    },
    # mesh.autograd, mesh.optim
    **{f"{_AUTOGRAD}.{name}": f"mesh.autograd:{name}" for name in ("context", "get_gradients")},
    "torch.distributed.optim.DistributedOptimizer": "mesh.optim:DistributedOptimizer",
    # mesh.nn
    "torch.distributed.nn.RemoteModule": "mesh.nn:RemoteModule",
}
"""Upstream's names, and what stands in for each."""
