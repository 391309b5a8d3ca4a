"""What ``import mesh`` offers, and what it does not cost."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mesh

PUBLIC = {
    "AccessDenied",
    "AuthorizedKeys",
    "DistributedContext",
    "ReduceOperation",
    "Authorizer",
    "EndpointConfig",
    "Grant",
    "Home",
    "Invite",
    "InviteBook",
    "MeshError",
    "Node",
    "NodeId",
    "Peer",
    "PeerState",
    "PeerStatus",
    "SecretKey",
    "TensorRef",
    "Ticket",
    "allow_any",
    "any_of",
    "autograd",
    "blocking",
    "deny_all",
    "describe",
    "device",
    "devices",
    "distributed",
    "errors",
    "nn",
    "optim",
    "rpc",
    "train",
}


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True
    )
    return done.stdout.strip()


def test_names_are_pinned() -> None:
    assert set(mesh.__all__) == PUBLIC
    assert len(mesh.__all__) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_name_resolves_and_shows(name: str) -> None:
    assert getattr(mesh, name) is getattr(mesh, name)
    assert name in dir(mesh)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'mesh' has no attribute 'Nodes'"):
        mesh.Nodes  # type: ignore[attr-defined] # noqa: B018


def test_submodules_that_are_not_public_stay_importable() -> None:
    assert run("import mesh.node, mesh; print(mesh.Node is mesh.node.Node)") == "True"


@pytest.mark.parametrize("module", ["mesh", "mesh.cli", "mesh.errors", "mesh.home"])
def test_import_is_light(module: str) -> None:
    heavy = ("torch", "numpy", "aioquic", "rich", "trio")
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    assert run(code) == "[]"


def test_a_program_that_only_dials_does_not_wait_for_torch() -> None:
    code = "import sys, mesh; mesh.Node, mesh.blocking; print('torch' in sys.modules)"
    assert run(code) == "False"
