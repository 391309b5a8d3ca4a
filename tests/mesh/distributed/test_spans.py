"""What torch's profiler shows of a group's operations."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile
from torch.autograd.profiler_util import FunctionEvent

from mesh.collective import CollectiveError
from mesh.distributed import ProcessGroupMesh
from tests.mesh.collective.exchange_memory import MemoryNetwork

PAUSE = 0.05


@pytest.fixture
def pair() -> Iterator[list[ProcessGroupMesh]]:
    network = MemoryNetwork(2)
    limit = timedelta(seconds=5)
    groups = [ProcessGroupMesh(each, dist.HashStore(), limit) for each in network.ranks]
    yield groups
    for group in groups:
        group.shutdown()


def late(act: object) -> threading.Thread:
    def run() -> None:
        time.sleep(PAUSE)
        act()  # type: ignore[operator]

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def spans(prof: profile) -> dict[str, FunctionEvent]:
    return {
        event.name: event for event in prof.function_events or () if event.name.startswith("mesh:")
    }


@pytest.mark.parametrize("is_async", [True, False])
def test_a_span_lasts_as_long_as_its_operation(
    pair: list[ProcessGroupMesh], is_async: bool
) -> None:
    options = dist.AllreduceOptions()
    options.asyncOp = is_async
    with profile() as prof:
        other = late(lambda: pair[1].allreduce([torch.ones(4)]).wait())
        pair[0].allreduce([torch.ones(4)], options).wait()
        other.join()
    found = spans(prof)["mesh:all_reduce"]
    assert found.time_range.elapsed_us() >= PAUSE * 1e6 * 0.8


def test_messages_have_spans(pair: list[ProcessGroupMesh]) -> None:
    with profile() as prof:
        other = late(lambda: pair[1].recv([torch.ones(4)], 0).wait())
        pair[0].send([torch.ones(4)], 1).wait()
        other.join()
        other = late(lambda: pair[1].send([torch.ones(4)], 0).wait())
        pair[0].recv([torch.ones(4)], 1).wait()
        other.join()
    assert spans(prof).keys() == {"mesh:send", "mesh:recv"}


def test_what_fails_has_one(pair: list[ProcessGroupMesh]) -> None:
    with profile() as prof, pytest.raises(CollectiveError):
        pair[0].allreduce([torch.ones(4)], timeout=timedelta(seconds=PAUSE)).wait()
    assert "mesh:all_reduce" in spans(prof)
