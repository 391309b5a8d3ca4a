"""torch's own suite for process groups, loaded from the installed torch and told of our backend.

Nothing of it lies in this repository. What is substituted, by monkeypatching, before its import:

* Decorators that leave a test out because the backend is not called ``gloo``, where the test needs
  nothing but CPU tensors, let it run.
* Standing in for gloo, the class that torch builds for backend ``gloo`` is a group of the mesh, and
  profiles are not searched for events whose names begin with ``gloo:``.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import types
import unittest
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mesh.distributed import Options, ProcessGroupMesh, forming
from mesh.distributed.options import options_in_use

__all__ = ["load", "names", "outcome", "reason"]

# Its base class of tests comes from a package that the tests here have no use for.
_expecttest: Any = types.ModuleType("expecttest")
_expecttest.TestCase = unittest.TestCase
sys.modules.setdefault("expecttest", _expecttest)
from torch.testing._internal import common_distributed, common_utils  # noqa: E402

MODULE = "torch.testing._internal.distributed.distributed_test"

_LIFTED = re.compile(
    r"only (the )?gloo|gloo batch send recv cpu|requires backend mesh to be one of \{.*'gloo'"
    r"|only mpi supports|(and|&) gloo|mesh backend does not support ddp communication hook",
    re.IGNORECASE,
)
"""Reasons for which a test is left out that name a backend where they mean the CPU."""

_NEEDS_NAME = dict.fromkeys(
    (
        "test_monitored_barrier_failure_order",
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_subgroup",
        "test_monitored_barrier_wait_all_ranks",
    ),
    "torch.distributed.monitored_barrier refuses backends that are not called gloo; runs in gloo 3",
) | dict.fromkeys(
    (
        "test_accumulate_gradients_no_sync",
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_accumulate_gradients_no_sync_grad_is_view",
    ),
    "makes a model only for backends called nccl or gloo; runs in gloo 3",
)
"""Tests that can't run under another backend's name, whatever it does."""

_Test = Callable[..., None]


class _StandIn(ProcessGroupMesh):
    """A group of the mesh with the constructor of gloo's."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = options_in_use()
        assert isinstance(options, Options)
        exchange = forming.form_group(
            options, store, group="gloo", rank=rank, size=size, timeout=timeout.total_seconds()
        )
        super().__init__(exchange, store, timeout, options)
        self.options: Any = types.SimpleNamespace()  # torch writes what it knows of the group there


def load(backend: str, size: int) -> type[Any]:
    """Return the class of all tests, for `size` ranks and a backend: ``mesh``, or ``gloo``."""
    os.environ |= {
        "BACKEND": backend,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "TEMP_DIR": "/nonexistent",
    }
    for name in ("skip_but_pass_in_sandcastle_if", "skip_but_pass_in_sandcastle"):
        setattr(common_utils, name, _lifting(getattr(common_utils, name)))
    common_distributed.skip_if_small_worldsize = lambda test: test  # for fewer than 8, it says
    if backend == "mesh":
        for feature in ("ddp", "subgroup", "plugin"):
            common_distributed.DistTestCases.backend_feature[feature].add(backend)
    else:
        distributed_c10d.ProcessGroupGloo = _StandIn  # type: ignore[misc, assignment]
    module = __import__(MODULE, fromlist=["DistributedTest"])
    for allowed in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
        setattr(module, allowed, [])
    bases = (module.TestDistBackend, module.DistributedTest._DistTestBase)
    return type("TestOnMesh", bases, {"module": module})


def names(suite: type[Any]) -> list[str]:
    """Return the names of all tests."""
    return sorted(name for name in dir(suite) if name.startswith("test"))


def outcome(suite: type[Any], name: str, rank: int, directory: str) -> str:
    """Run one test on this rank, in a group of its own; return why it was left out, or "".

    Raises:
        BaseException: it failed.
    """
    module = suite.module
    if module.BACKEND == "mesh" and name in _NEEDS_NAME:
        return _NEEDS_NAME[name]
    os.environ["TEMP_DIR"] = directory
    module.Barrier.barrier_id = 0
    seconds = module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)
    dist.init_process_group(
        module.BACKEND,
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=seconds),
    )
    try:
        module.Barrier.sync()
        common_utils.set_rng_seed()
        test = suite(name)
        test.rank, test.file_name = rank, f"{directory}/store"
        why = reason(getattr(test, name))
        module.Barrier.sync(timeout=30)
        return why
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def reason(test: _Test) -> str:
    """Run a test; return why it was left out, or ""."""
    if getattr(test, "__unittest_skip__", False):
        why = str(test.__unittest_skip_why__)  # type: ignore[attr-defined]
        # Sets of names are printed in any order.
        return re.sub(r"\{(.*)\}", _sorted, why)
    try:
        test()
    except unittest.SkipTest as skipped:
        return str(skipped)
    except SystemExit as ended:
        for skip in common_distributed.TEST_SKIPS.values():
            if skip.exit_code == ended.code:
                return skip.message
        raise
    return ""


def _sorted(match: re.Match[str]) -> str:
    return f"{{{', '.join(sorted(match[1].split(', ')))}}}"


def _lifting(decorator: Callable[..., Any]) -> Callable[..., Any]:
    def lifted(*arguments: Any) -> Any:
        reason = arguments[-1]
        return (lambda test: test) if _LIFTED.search(reason) else decorator(*arguments)

    return lifted
