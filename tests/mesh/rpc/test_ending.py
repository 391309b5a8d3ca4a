"""The end of a worker: what it waits for, and what it says to those for whom it was too soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from auth import SecretKey, allow_any
from mesh import blocking, rpc
from mesh.rpc import MeshRpcBackendOptions, RpcError, RpcTimeout
from mesh.rpc.activity import Activity
from mesh.rpc.job import ending
from tests.mesh import nodes
from tests.mesh.rpc import exposures
from tests.mesh.rpc.nodes import agents


def node() -> blocking.Node:
    return blocking.Node.embedded(
        key=SecretKey.generate(), authorizer=allow_any(), config=nodes.LOOPBACK, tensors=False
    )


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Any]:
    """A worker, which is this program, as a peer of it has it."""
    with node() as here, node() as there:
        options = MeshRpcBackendOptions(node=here, init_method=f"file://{tmp_path / 'store'}")
        rpc.init_rpc("one", rank=0, rpc_backend_options=options)
        try:
            yield there.connect(here.ticket())
        finally:
            if rpc.api._worker is not None:
                rpc.shutdown(graceful=False)


def test_a_worker_waits_for_streams_that_peers_read(worker: Any) -> None:
    items = iter(worker.stream(exposures.items, 7, 100))
    assert next(items) == 7
    read: list[int] = []

    def read_on() -> None:
        time.sleep(0.2)
        read.extend(items)

    reader = threading.Thread(target=read_on)
    reader.start()
    rpc.shutdown()
    reader.join(5)
    assert read == [7] * 99


def test_a_stream_that_is_not_read_to_its_end_in_time_ends_with_the_reason(
    worker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ending, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(rpc.api._worker, "_owns_node", True)
    items = iter(worker.stream(exposures.items, 7, 1 << 40, timeout=5))
    assert next(items) == 7
    with pytest.raises(RpcTimeout, match=r"busy: the stream of 'tests.*items' to "):
        rpc.shutdown(timeout=0.3)
    assert "shutdown waits for the stream of" in caplog.text
    with pytest.raises(RpcError, match="shut down before its end"):
        list(items)


def test_who_reads_a_stream_is_waited_for_too(worker: Any) -> None:
    mine = rpc.api._worker
    assert mine is not None
    peer = worker._node  # whose node answers, and is read from
    peer.run(peer.node.rpc)
    there = mine.node.connect(peer.ticket())
    items = iter(there.stream(exposures.items, 7, 3))
    assert next(items) == 7
    assert mine.agent.activity.described()[0].startswith("the stream of 'tests")
    with pytest.raises(RpcTimeout, match=r"busy: the stream of 'tests.*items' from "):
        rpc.shutdown(timeout=0.1)
    assert list(items) == [7, 7]  # of a node of the program's own, which goes on


@pytest.mark.anyio
@pytest.mark.parametrize("function", [exposures.items, exposures.items_async])
async def test_readers_are_told_why_their_stream_ends(function: Any) -> None:
    async with agents(2) as (a, b):
        async with a.stream(b.node_id, function, (1, 1 << 40)) as items:
            assert await anext(items) == 1
            left = a.stream(b.node_id, function, (2, 1 << 40))
            assert await anext(left) == 2
            assert a.activity._open == b.activity._open == 2
            del left  # given up, soon
            await nodes.eventually(lambda: a.activity._open == 1)
            await b.service.streams.end()
            assert not b.service.streams._readings
            with anyio.fail_after(5), pytest.raises(RpcError, match="shut down before its end"):
                assert [item async for item in items]
        await nodes.eventually(lambda: not a.activity._open + b.activity._open)


def test_what_is_under_way_is_told_by_name() -> None:
    activity = Activity()
    activity.begin()
    activity.begin("the stream of 'f' from beta")
    with activity.answering("the stream of 'g' to beta"), activity.calling():
        assert activity.described() == [
            "2 calls of this worker's own",
            "the stream of 'f' from beta",
            "the stream of 'g' to beta",
        ]
    activity.end()
    activity.end("the stream of 'f' from beta")
    assert activity.described() == []
    assert activity.until_quiet(0.0)
    assert activity.begun == 3
