"""The drawing of the exception tree is the tree."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import mesh.errors
from auth import MeshError

PACKAGES = (
    "auth",
    "transport",
    "tensor_bridge",
    "mesh.collective",
    "mesh.device",
    "mesh.rpc",
    "mesh.autograd",
    "mesh.train",
    "mesh",
)
ROOT = Path(__file__).parents[2]
ROOMS = ("auth", "transport", "tensor_bridge", "mesh")
LINE = re.compile(r"^    (?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+) +(?P<code>\d+)(  \S.*)?$")
WIDTH = len("├── ")


def drawn() -> dict[str, tuple[str | None, int]]:
    """Each class in the drawing, with the class it hangs on and its exit code."""
    tree: dict[str, tuple[str | None, int]] = {}
    above: list[str] = []
    for line in (mesh.errors.__doc__ or "").splitlines():
        match = LINE.match(line)
        if match is None:
            continue
        depth = len(match["branch"]) // WIDTH
        del above[depth:]
        tree[match["name"]] = (above[-1] if above else None, int(match["code"]))
        above.append(match["name"])
    return tree


def defined() -> dict[str, tuple[str | None, int]]:
    """The same of every class that the packages define, under the first of its bases."""
    for package in PACKAGES:
        importlib.import_module(f"{package}.errors")
    tree: dict[str, tuple[str | None, int]] = {}
    pending: list[tuple[type[MeshError], str | None]] = [(MeshError, None)]
    while pending:
        kind, base = pending.pop()
        # One of a class's own name is that class for who catches RuntimeError.
        if kind.__module__.removesuffix(".errors") in PACKAGES and kind.__name__ != base:
            first = kind.__bases__[0].__name__ if base else None
            tree[kind.__name__] = (first, kind.exit_code)
        pending += [(each, kind.__name__) for each in kind.__subclasses__()]
    return tree


def test_drawing_is_the_tree() -> None:
    assert drawn() == defined()


def test_every_class_is_here_by_name() -> None:
    for name in defined():
        assert name in mesh.errors.__all__
        assert issubclass(getattr(mesh.errors, name), MeshError)
    assert set(mesh.errors.__all__) == set(defined())


def test_no_module_has_an_error_beside_the_tree() -> None:
    tree = set(drawn())
    for package in ROOMS:
        for path in (ROOT / package).rglob("*.py"):
            for part in ast.walk(ast.parse(path.read_text())):
                if isinstance(part, ast.ClassDef):
                    bases = {base.id for base in part.bases if isinstance(base, ast.Name)}
                    assert not bases & tree or part.name in tree, f"{part.name} in {path}"


def test_codes_are_unique() -> None:
    codes = [getattr(mesh.errors, name).code for name in mesh.errors.__all__]
    assert len(set(codes)) == len(codes)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"module 'mesh.errors' has no attribute 'Nope'"):
        mesh.errors.Nope  # type: ignore[attr-defined] # noqa: B018
