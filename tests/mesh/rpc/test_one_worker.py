"""What a worker on a node of the program's own does, whose peers are no workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from auth import NodeId, SecretKey, allow_any
from mesh import autograd, blocking, rpc
from mesh.rpc import MeshRpcBackendOptions, RpcTimeout
from mesh.rpc.refs.holding import Held
from tests.mesh import nodes
from tests.mesh.rpc import exposures


def node() -> blocking.Node:
    return blocking.Node.embedded(
        key=SecretKey.generate(), authorizer=allow_any(), config=nodes.LOOPBACK, tensors=False
    )


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[NodeId]:
    """A node that is called by a worker, which is this program."""
    with node() as here, node() as there:
        there.run(there.node.rpc)
        here.connect(there.ticket())
        options = MeshRpcBackendOptions(
            node=here, init_method=f"file://{tmp_path / 'store'}", rpc_timeout=0
        )
        rpc.init_rpc("one", rank=0, rpc_backend_options=options)
        try:
            yield there.node_id
        finally:
            exposures.let_go.set()
            if rpc.api._worker is not None:
                rpc.shutdown(graceful=False)


WAITS: list[Callable[[rpc.RRef[Any]], Any]] = [
    lambda ref: ref.to_here(),
    lambda ref: ref.rpc_sync().add(1),
    lambda ref: ref.remote().add(1),
    lambda ref: ref.backward(1),
    lambda ref: rpc.rpc_sync(ref.owner_id, exposures.hold),
]


@pytest.mark.parametrize("wait", WAITS)
def test_shutdown_ends_whatever_waits_without_a_limit(peer: NodeId, wait: Any) -> None:
    exposures.let_go.clear()
    ref = rpc.remote(peer, exposures.hold)
    assert exposures.running.acquire(timeout=5)
    assert rpc.rpc_sync(peer, exposures.echo, (ref.confirmed_by_owner(),)) in (True, False)
    raised: list[BaseException] = []

    def program() -> None:
        try:
            wait(ref)
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=program, daemon=True)
    worker: Any = rpc.api._worker
    thread.start()
    while not (worker._pending or worker.agent.activity._open):
        thread.join(0.001)
    rpc.shutdown(graceful=False)
    thread.join(5)
    assert not thread.is_alive()
    assert "has been shut down" in str(raised[0])


def test_a_reference_that_is_never_known_to_be_there_is_waited_for_as_long_as_told(
    peer: NodeId,
) -> None:
    ref = rpc.remote(peer, exposures.Counter)
    assert isinstance(ref.state, Held)
    ref.state.created.result(5)
    ref.state.created = type(ref.state.created)()
    with pytest.raises(RpcTimeout):
        ref.to_here(timeout=0.05)
    with pytest.raises(RpcTimeout):
        ref.rpc_sync(timeout=0.05).add(1)
    with pytest.raises(RpcTimeout):
        ref.remote(timeout=0.05).add(1)


def test_calls_without_gradients_are_not_recorded(peer: NodeId) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context():
        with torch.no_grad():
            assert not rpc.rpc_sync(peer, torch.mul, (x, 2)).requires_grad
            assert not rpc.rpc_async(peer, torch.mul, (x, 2)).wait().requires_grad
        assert rpc.rpc_sync(peer, torch.mul, (x, 2)).requires_grad


@pytest.mark.parametrize("one", [torch.zeros(2, 2), torch.zeros(1), "ab", b"ab"])
def test_one_argument_is_not_taken_for_several(peer: NodeId, one: Any) -> None:
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(TypeError, match="tuple of arguments"):
            call(peer, exposures.echo, one)


def end() -> None:
    rpc.shutdown()


async def end_in_the_loop() -> None:
    rpc.shutdown(graceful=False)


def test_a_function_that_is_called_can_not_wait_for_its_own_end(peer: NodeId) -> None:
    rpc.expose(__name__)
    for function in (end, end_in_the_loop):
        with pytest.raises(rpc.RpcError, match="the end of the function"):
            rpc.rpc_sync("one", function, timeout=5)
    assert rpc.rpc_sync(peer, exposures.echo, (1,)) == 1


def test_an_interrupted_wait_ends_its_call(peer: NodeId) -> None:
    worker: Any = rpc.api._worker
    real = worker.agent.bridge.wait

    def interrupted(future: Any) -> Any:
        began = time.monotonic()
        while not exposures.cancelling and time.monotonic() < began + 5:
            time.sleep(0.001)
        raise KeyboardInterrupt

    exposures.cancelling.clear()
    worker.agent.bridge.wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        rpc.rpc_sync(peer, exposures.wait_long, timeout=0)
    worker.agent.bridge.wait = real
    end = time.monotonic() + 5
    while exposures.cancelling != ["begun", "ended"]:
        assert time.monotonic() < end
        time.sleep(0.001)
