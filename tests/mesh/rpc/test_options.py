"""What ``init_rpc`` can be told: options, device maps, backends."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from mesh import rpc
from mesh.errors import PeerLost
from mesh.rpc import BackendType, MeshRpcBackendOptions, RpcBackendOptions, RpcError
from mesh.rpc.errors import as_runtime_error


def test_defaults_are_upstreams() -> None:
    options = MeshRpcBackendOptions()
    assert (options.num_worker_threads, options.rpc_timeout) == (16, 60)
    assert (options.init_method, options.device_maps, options.devices) == ("env://", {}, [])
    assert not options.pickles


def test_device_maps_grow_and_map_one_to_one() -> None:
    options = MeshRpcBackendOptions(device_maps={"b": {"cuda:0": "cuda:1"}})
    options.set_device_map("b", {"cuda:1": "cuda:0", "cuda:0": torch.device("cuda", 1)})
    options.set_device_map("c", {"cuda:0": "cpu"})
    first, second, cpu = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
    assert options.device_maps == {"b": {first: second, second: first}, "c": {first: cpu}}
    for wrong in (
        {"cuda:0": "cuda:2"},
        {"cuda:2": "cuda:0"},
        {"cuda:3": "cuda:4", "cpu": "cuda:4"},
    ):
        with pytest.raises(ValueError, match="1-to-1"):
            options.set_device_map("b", wrong)
    assert options.device_maps["b"] == {first: second, second: first}
    with pytest.raises(ValueError, match="1-to-1"):
        MeshRpcBackendOptions(device_maps={"b": {"cuda:0": "cpu", "cuda:1": "cpu"}})


def test_devices_are_cuda_devices() -> None:
    options = MeshRpcBackendOptions(devices=["cuda:1"])
    options.set_devices(["cuda:0", torch.device("cuda", 1)])
    assert options.devices == [torch.device("cuda:0"), torch.device("cuda:1")]
    with pytest.raises(ValueError, match="device type cpu"):
        options.set_devices(["cpu"])


@pytest.mark.parametrize("wrong", [{"rpc_timeout": -1}, {"num_worker_threads": 0}])
def test_values_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(RpcError, match=next(iter(wrong))):
        MeshRpcBackendOptions(**wrong)
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        MeshRpcBackendOptions(rpc_timeout=timedelta(1))  # type: ignore[arg-type]


class Other(RpcBackendOptions):
    """Options of a backend of one's own."""


def test_backends_are_known_by_name_and_by_their_options(tmp_path: Path) -> None:
    made: list[Any] = []

    class Stub:
        def begin(self) -> None:
            raise RuntimeError("as far as this goes")

        def close(self) -> None:
            made.append("closed")

    def init(**what: Any) -> Any:
        made.append(what)
        return Stub()

    def options(rpc_timeout: float, init_method: str, **_: Any) -> Other:
        return Other(rpc_timeout=rpc_timeout, init_method=init_method)

    assert rpc.backend_registered("MESH")
    assert not rpc.backend_registered("OTHER")
    with pytest.raises(TypeError, match="Could not infer backend"):
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=Other())
    backend = rpc.register_backend("OTHER", options, init)
    assert backend is BackendType.OTHER is BackendType["OTHER"]
    assert backend in set(BackendType)
    with pytest.raises(RpcError, match=r"^RPC backend OTHER: already registered$"):
        rpc.register_backend("OTHER", options, init)
    given = rpc.construct_rpc_backend_options(backend, init_method=f"file://{tmp_path}/store")
    for backend_given in (backend, None):  # by their type
        with pytest.raises(RuntimeError, match="as far as this goes"):
            rpc.init_rpc("a", backend_given, 0, 1, given)
        store = made[0].pop("store")
        assert made == [
            {"name": "a", "rank": 0, "world_size": 1, "rpc_backend_options": given},
            "closed",
        ]
        made.clear()
        del store
    with pytest.raises(AttributeError, match="no RPC backend"):
        BackendType.NOBODY  # noqa: B018


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"backend": "MESH"}, "Argument backend must be a member of BackendType"),
        ({"rpc_backend_options": {}}, "must be an instance of RpcBackendOptions"),
    ],
)
def test_wrong_types(given: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        rpc.init_rpc("a", rank=0, world_size=1, **given)


def test_what_programs_for_upstream_catch_is_raised_with_its_class() -> None:
    lost = PeerLost("a call", peer="beta", why="it is silent")
    for error in (as_runtime_error(lost), pickle.loads(pickle.dumps(as_runtime_error(lost)))):
        assert isinstance(error, RuntimeError)
        assert isinstance(error, PeerLost)
        assert type(error) is type(as_runtime_error(lost))
        assert (str(error), error.code) == (str(lost), lost.code)
    known = RpcError("a call")
    assert as_runtime_error(known) is known
