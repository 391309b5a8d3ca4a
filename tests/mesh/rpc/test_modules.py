"""Where remote modules are, as texts say it; what they do is in `remote_modules`."""

from __future__ import annotations

import pytest
import torch

from auth import SecretKey
from mesh import nn
from mesh.rpc import RpcError
from mesh.rpc.modules import remote_place

NODE = SecretKey.from_bytes(bytes(32)).node_id


@pytest.mark.parametrize(
    ("text", "worker", "device"),
    [
        ("trainer/cuda:0", "trainer", "cuda:0"),
        ("trainer", "trainer", "cpu"),
        ("rank:7/cpu", 7, "cpu"),
        ("rank:0", 0, "cpu"),
        (f"{NODE}/cuda:1", NODE, "cuda:1"),
        (str(NODE), NODE, "cpu"),
        ("cpu", None, "cpu"),
        ("cuda:1", None, "cuda:1"),
    ],
)
def test_places(text: str, worker: object, device: str) -> None:
    assert remote_place(text) == (worker, torch.device(device))


@pytest.mark.parametrize(
    "text", ["/", "/cuda:0", "a/cuda:0/cuda:1", "", "rank:x/cpu", "rank:-1/cpu", "a:b", "a:b:c/cpu"]
)
def test_what_is_no_place(text: str) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        remote_place(text)


@pytest.mark.parametrize("text", ["trainer/foo", "trainer/cpu2", "trainer/"])
def test_what_is_no_device(text: str) -> None:
    with pytest.raises(RuntimeError):
        remote_place(text)


def test_without_workers_there_is_no_module_elsewhere() -> None:
    with pytest.raises(RpcError, match=r"^RPC has not been initialized"):
        nn.RemoteModule("beta", torch.nn.Linear, (1, 1))
